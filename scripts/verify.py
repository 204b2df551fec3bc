"""`draftsmith verify`: is decoding lossless here? Proofs, tests and a comparison, with a verdict.

Four parts, from certain to practical: every branch of chance of the real loop on tiny models; the
kernels of chance on their real streams; faults planted to see that the first part finds them; and
greedy replies of the recipe's own target, token by token against transformers' `generate`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.files import write_json
from ..data.gather import GatherSettings, Request, answer
from ..data.linear import speed_up_few_rows
from ..data.target import Target, load_target
from ..data.warp import Law
from ..drafters.base import Drafter
from ..drafters.checkpoint import load_drafter, weights_hash
from ..drafters.registry import UntrainedConfig, family_config, untrained_drafter
from ..drafters.start import new_drafter
from ..eval import lossless
from ..eval.branches import branches
from ..eval.conformance import TOLERANCE, Bench, Case, covering, cross
from ..eval.equality import compared, references, ways
from ..eval.kernels import LEAST, bonferroni, kernel_p_values, loop_p_values
from ..eval.planted import PLANTED, VISIBLE, caught
from ..eval.provenance import processor
from .pipeline import prepare_recipe

NEW_TOKENS = 32
"""Length of the compared replies."""
_PAIRS, _ALL = "all pairs", "all combinations"


def verify(
    recipe: Recipe,
    drafter_folder: Path | None,
    prompts_per_domain: int,
    everything: bool,
    out: Path | None,
    console: Console,
) -> bool:
    """Run all parts, print them and their verdict; whether nothing failed.

    `everything` decodes the full cross of options instead of every pair. `out` takes the verdict as
    JSON. Raises `UserError` for a recipe, target or drafter that cannot be used.
    """
    start = time.perf_counter()
    # First what can be refused.
    target, requests = _questions(recipe, prompts_per_domain, console)
    greedy = _greedy(recipe, target, requests, drafter_folder, console)
    with _one_thread():
        bench = Bench()
        exact = _exact(bench, list(cross() if everything else covering()), everything, console)
        planted = _planted(bench, console)
        kernels = _kernels(bench, console)
    parts = {"exact": exact, "planted": planted, "kernels": kernels, "greedy": greedy}
    passed = all(part["passed"] for part in parts.values())
    found = {
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - start,
        "machine": {"processor": processor(), "device": str(target.device)},
        "versions": {"torch": torch.__version__},
        **parts,
        "passed": passed,
        "verdict": _verdict(parts),
    }
    _show(found, console)
    if out is not None:
        write_json(out, found)
        console.print(f"verdict: {out}", soft_wrap=True)
    return passed


# ---- on tiny models


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of tiny operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _counting() -> Iterator[list[int]]:
    """How many branches of chance are played meanwhile."""
    played = [0]

    def counted(*arguments: Any) -> Iterator[Any]:
        for found, case, chance in branches(*arguments):
            played[0] += len(case)
            yield found, case, chance

    with patch.object(lossless, "branches", counted):
        yield played


def _exact(
    bench: Bench, cases: Sequence[Case], everything: bool, console: Console
) -> dict[str, Any]:
    distances = {}
    with _counting() as played:
        for case in track(cases, "exact     every branch of chance", console=console):
            distances[str(case)] = bench.distance(case)
    wrong = {name: d for name, d in distances.items() if not d < TOLERANCE}
    return {
        "cases": len(distances),
        "covers": _ALL if everything else _PAIRS,
        "branches": played[0],
        "largest_distance": max(distances.values()),
        "tolerance": TOLERANCE,
        "wrong": wrong,
        "passed": not wrong,
    }


def _planted(bench: Bench, console: Console) -> dict[str, Any]:
    console.print(f"planted   {len(PLANTED)} wrong rules")
    distances = caught(bench)
    right = {name: bench.distance(fault.case) for name, fault in PLANTED.items()}
    missed = [name for name, d in distances.items() if not (d > VISIBLE > TOLERANCE > right[name])]
    return {
        "faults": len(distances),
        "caught": len(distances) - len(missed),
        "least": VISIBLE,
        "distances": distances,
        "without_fault": right,
        "missed": missed,
        "passed": not missed,
    }


def _kernels(bench: Bench, console: Console) -> dict[str, Any]:
    console.print("kernels   chi-square on real streams")
    p_values = kernel_p_values() | loop_p_values(bench)
    corrected = bonferroni(p_values)
    return {
        "p_values": p_values,
        "smallest": min(p_values.values()),
        "bonferroni": corrected,
        "least": LEAST,
        "passed": corrected > LEAST,
    }


# ---- on the recipe's target


def _questions(
    recipe: Recipe, prompts_per_domain: int, console: Console
) -> tuple[Target, list[Request]]:
    """The target in float32, and the first held-out prompts of every domain that fit into it."""
    if prompts_per_domain < 1:
        raise UserError(f"--prompts-per-domain is {prompts_per_domain}, but must be 1 or more")
    asked = replace(recipe.collect, replies="target", max_new_tokens=NEW_TOKENS)
    recipe = replace(recipe, collect=asked, target=replace(recipe.target, dtype="float32"))
    target = load_target(recipe.target, few_rows=False)
    prepared = prepare_recipe(recipe, target, console)
    requests: list[Request] = []
    places = range(len(prepared))
    domains, splits, ids = (prepared.rows[name] for name in ("domain", "split", "id"))
    for domain in dict.fromkeys(domains):
        own = [i for i in places if domains[i] == domain]
        held_out = [i for i in own if splits[i] == "heldout"] or own  # nothing is trained here
        requests += [
            Request(ids[i], domain, "heldout", prepared.ids(i), Law(0.0), 0)
            for i in held_out[:prompts_per_domain]
        ]
    if not requests:
        raise UserError(
            f"no prompt of recipe '{recipe.name}' leaves room for {NEW_TOKENS} tokens in the "
            f"target's {target.max_positions}; name shorter ones under domains"
        )
    return target, requests


def _greedy(
    recipe: Recipe,
    target: Target,
    requests: Sequence[Request],
    folder: Path | None,
    console: Console,
) -> dict[str, Any]:
    name = target.provenance["name"]
    drafter = load_drafter(folder, target) if folder else _untrained(recipe, target, requests)
    console.print(f"greedy    {len(requests)} prompts by transformers' generate, {name} in float32")
    reference = references(target, requests, NEW_TOKENS)
    speed_up_few_rows(target.model)  # only now: what decodes from here on is what serves
    assert isinstance(drafter, torch.nn.Module)
    speed_up_few_rows(drafter)
    settings = ways(NEW_TOKENS, recipe.serving.num_draft_tokens)
    margin, batch = recipe.eval.near_tie_margin, recipe.eval.decode_batch
    streams = []
    for found in compared(target, drafter, requests, reference, settings, batch, margin):
        console.print(f"greedy    {found['way']}, {_rows(found['rows'])}: {found['verdict']}")
        streams.append(found)
    return {
        "target": dict(target.provenance),
        "drafter": {
            "family": drafter.family,
            "trained": folder is not None,
            "weights_sha256": weights_hash(folder) if folder else None,
        },
        "prompts": len(requests),
        "tokens": sum(map(len, reference.ids.values())),
        "num_draft_tokens": recipe.serving.num_draft_tokens,
        "near_tie_margin": margin,
        "streams": streams,
        "passed": not any(found["different"] for found in streams),
    }


def _untrained(recipe: Recipe, target: Target, requests: Sequence[Request]) -> Drafter:
    """The recipe's family; a reduced vocabulary holds what the target says to these prompts."""
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    if isinstance(config, UntrainedConfig):
        return untrained_drafter(config, target)
    words = answer(target, requests, GatherSettings(NEW_TOKENS, len(requests), (), "none"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        drafter = new_drafter(config, target, words)
    assert isinstance(drafter, torch.nn.Module)
    return drafter.to(target.device).eval()


# ---- what is said about it


def _rows(rows: int) -> str:
    return "one at a time" if rows == 1 else f"{rows} ragged rows"


def _show(found: dict[str, Any], console: Console) -> None:
    exact, planted, kernels = found["exact"], found["planted"], found["kernels"]
    table = Table("planted fault", "TV with it", "without")
    for name, distance in planted["distances"].items():
        mark = " missed" if name in planted["missed"] else ""
        table.add_row(name, f"{distance:.3f}{mark}", f"{planted['without_fault'][name]:.0e}")
    console.print(table)
    table = Table("chi-square on real streams", "p")
    for name, p in kernels["p_values"].items():
        table.add_row(name, f"{p:.3f}" if p >= 0.001 else f"{p:.1e}")
    console.print(table)
    table = Table("greedy against generate", "rows", "verdict", "accepted of drafted", "near ties")
    for s in found["greedy"]["streams"]:
        share = f"{s['accepted']} of {s['drafted']}"
        table.add_row(s["way"], _rows(s["rows"]), s["verdict"], share, str(len(s["near_ties"])))
    console.print(table)
    for s in found["greedy"]["streams"]:
        for kind in ("near_ties", "different"):
            for e in s[kind]:
                margin = "none" if e["margin"] is None else f"{e['margin']:.1e}"
                console.print(
                    f"{kind.replace('_', ' ')}: {s['way']}, {_rows(s['rows'])}, prompt "
                    f"{e['prompt_id']}, token {e['position']}, the target's margin {margin}",
                    soft_wrap=True,
                )
    for name, distance in exact["wrong"].items():
        console.print(f"wrong: {name}: total variation {distance:.2e}", style="red", soft_wrap=True)
    for line in found["verdict"]:
        console.print(line, style=None if found["passed"] else "red", soft_wrap=True)


def _verdict(parts: dict[str, dict[str, Any]]) -> list[str]:
    """What was shown and how, what was not, and one last line."""
    exact, planted, kernels, greedy = (parts[k] for k in ("exact", "planted", "kernels", "greedy"))
    failed = [name for name, part in parts.items() if not part["passed"]]
    ties = sum(len(s["near_ties"]) for s in greedy["streams"])
    accepted = sum(s["accepted"] for s in greedy["streams"])
    drafted = sum(s["drafted"] for s in greedy["streams"])
    kind = f"{'a trained' if greedy['drafter']['trained'] else 'an untrained'} "
    kind += greedy["drafter"]["family"]
    pairs = exact["covers"] == _PAIRS
    unplayed = "three and more options at once, save those played (--all); " if pairs else ""
    last = f"NOT LOSSLESS: {', '.join(failed)} failed" if failed else "LOSSLESS as far as shown"
    return [
        f"Exactly: {exact['cases']} ways of decoding, {exact['covers']} of options, on tiny "
        f"float64 models. All {exact['branches']} branches of chance of the real loop were played; "
        f"outputs are off the target's law by {exact['largest_distance']:.1e} at most (allowed "
        f"{exact['tolerance']:.0e}). {planted['caught']} of {planted['faults']} planted faults "
        f"were seen, from {min(planted['distances'].values()):.3f} up.",
        f"Statistically: {len(kernels['p_values'])} chi-square tests of real random streams, the "
        f"smallest p {kernels['smallest']:.2g}, corrected for their number "
        f"{kernels['bonferroni']:.2g} (least {kernels['least']:g}).",
        f"By comparison: {greedy['prompts']} greedy replies, {greedy['tokens']} tokens, of "
        f"{greedy['target']['name']} in float32 against transformers' generate: "
        f"{'different' if 'greedy' in failed else 'equal'} in {len(greedy['streams'])} ways of "
        f"decoding, {ties} near ties (logits within {greedy['near_tie_margin']:g}). Of {kind} "
        f"drafter's {drafted} tokens {accepted} were accepted."
        f"{'' if accepted else ' None was: name a trained one with --drafter.'}",
        f"Not shown: {unplayed}sampling on the target itself (the same code, but no enumeration), "
        "precisions below float32, models and options beyond these, stop strings and grammars.",
        last,
    ]
