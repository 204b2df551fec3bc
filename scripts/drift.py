"""`draftsmith drift`: what a drafter loses with a changed target, and what to do about it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.collection import collect, collect_settings
from ..data.devices import pick_device
from ..data.files import write_json
from ..data.prepare import Prepared
from ..data.store import RecordStore, settings_hash
from ..data.target import Target, load_target
from ..data.work import Work, start_processes
from ..drafters.base import Drafter
from ..drafters.batch import records_with_states
from ..drafters.checkpoint import weights_hash
from ..eval.cells import Cell, cells_of
from ..eval.compare import Evaluation
from ..eval.drift import HALVED, KEPT, After, CellKey, accepted_after, by_domain, drift_rows, moved
from ..eval.evaluate import DRAFTING
from ..eval.lengths import by_length
from ..eval.page import Table
from ..eval.report import print_table
from ..eval.tables import MIN_CONVERSATIONS, MISSING, interval_text
from .pipeline import Run

_KNOWN = ("name", "revision", "quantisation", "adapter", "dtype", "weights")


def measure_drift(
    run: Run, before: Recipe, drafter_folder: Path, report_folder: Path, out: Path | None
) -> dict[str, Any]:
    """Evaluate the drafter of a report against the recipe's target, which has changed since.

    before: the recipe with the target as it was, to tell how far that has moved. Prints what is
    lost and what to do, and returns it; `out` takes it as JSON. Raises `UserError` for a report of
    another drafter or other serving, a target with another tokenizer, and prompts that the report
    knows none of.
    """
    evaluation = Evaluation.read(report_folder)
    _check_serving(evaluation, run.recipe, drafter_folder)
    start_processes(pick_device(run.recipe.target.device))
    target = run.target
    _check_tokens(evaluation, target)
    drafter = run.drafter(drafter_folder)
    store = _replies(run, evaluation, drafter)
    records = records_with_states(store, target, drafter.taps, "heldout")
    cells = cells_of(run.recipe, by_length(records, run.recipe.eval.length_splits))
    limit = int(store.settings["max_new_tokens"])
    after = accepted_after(run.recipe, target, drafter, cells, limit)
    after, told = _with_movement(run, before, evaluation, cells, after)
    rows = drift_rows(evaluation.rows, after, evaluation.report)
    if not rows:
        raise UserError(f"{evaluation.name} and the changed target's replies share no request")
    was = evaluation.report["provenance"]["target"]
    result = {
        "format": 1,
        "evaluation": evaluation.name,
        "target_before": {name: was.get(name) for name in _KNOWN},
        "target_after": {name: target.provenance.get(name) for name in _KNOWN},
        "thresholds": {"kept": KEPT, "halved": HALVED},
        "unpaired": len(evaluation.rows) - sum(row["replies"] for row in rows),
        "rows": rows,
        "advice": by_domain(rows),
    }
    if out is not None:
        write_json(out, result)
    _tell(run, result, told)
    return result


# ---- what must be the same


def _check_serving(evaluation: Evaluation, recipe: Recipe, drafter_folder: Path) -> None:
    drafted = evaluation.report["provenance"]["drafter"]["weights_sha256"]
    if drafted != weights_hash(drafter_folder):
        raise UserError(
            f"{evaluation.name} is of another drafter than {drafter_folder}; evaluate this one "
            "with the target as it was first"
        )
    settings, served = evaluation.report["settings"], recipe.serving
    if settings.get("tree") or settings.get("policy") or served.tree or served.policy:
        raise UserError("drift is told of chains of a fixed length: no serving.tree, no policy")
    asked = {
        "serving.num_draft_tokens": ("num_draft_tokens", served.num_draft_tokens),
        "serving.verifier": ("verifier", served.verifier),
        "serving.drafting": ("draft_sampling", DRAFTING[served.drafting]),
        "collect.max_new_tokens": ("max_new_tokens", recipe.collect.max_new_tokens),
    }
    for option, (name, value) in asked.items():
        if settings[name] != value:
            raise UserError(
                f"{evaluation.name} was measured with {option}={settings[name]}, this recipe has "
                f"{value}; nothing but the target may differ"
            )


def _check_tokens(evaluation: Evaluation, target: Target) -> None:
    was = evaluation.report["provenance"]["target"]
    for name in ("tokenizer", "vocab_size"):
        if was[name] != target.provenance[name]:
            raise UserError(
                f"the changed target has another {name} ({target.provenance[name]}) than that of "
                f"{evaluation.name} ({was[name]}): the drafter's tokens are not its own; train a "
                "drafter from scratch"
            )


# ---- the changed target's replies


def _replies(run: Run, evaluation: Evaluation, drafter: Drafter) -> RecordStore:
    """Its answers to the evaluation's prompts, kept beside the run's own records."""
    kept = replace(run.recipe.collect, server=None, distributions="hidden")
    recipe = replace(run.recipe, collect=kept)
    settings = collect_settings(recipe, run.target, drafter.taps)
    chosen = _same_prompts(run.prepared, evaluation)
    folder = run.root / f"drift-{settings_hash({**settings, 'of': evaluation.name})}"
    return collect(Work(recipe, run.target, drafter.taps, chosen, folder, run.console))


def _same_prompts(prepared: Prepared, evaluation: Evaluation) -> Prepared:
    wanted = {row.prompt_id for row in evaluation.rows}
    rows = prepared.rows
    places = [
        place
        for place, (name, split) in enumerate(zip(rows["id"], rows["split"], strict=True))
        if split == "heldout" and name in wanted
    ]
    if not places:
        raise UserError(
            f"none of the {len(wanted)} prompts of {evaluation.name} is held out by this recipe; "
            "take the recipe it was made with, or the same --prompts"
        )
    return replace(prepared, rows=rows.select(places))


def _with_movement(
    run: Run,
    before: Recipe,
    evaluation: Evaluation,
    cells: Sequence[Cell],
    after: dict[CellKey, After],
) -> tuple[dict[CellKey, After], str]:
    """How far the target has moved in every cell, if it is at hand as it was; and what to say."""
    known = evaluation.report["provenance"]["target"]["weights"]
    if known == run.target.provenance["weights"]:
        return after, "the target is the one that was evaluated: nothing has changed"
    if before.target == run.recipe.target:
        return after, (
            "how far the target itself has moved is not known: leave it in the recipe as it was, "
            "and name the change as target.* on the command line"
        )
    old = load_target(before.target)
    if old.provenance["weights"] != known:
        return after, (
            f"how far the target itself has moved is not known: {old.provenance['name']} of the "
            "recipe is not the one that was evaluated"
        )
    found = {
        (c.domain, c.law.label): moved(old, run.target, c, run.recipe.eval.bootstrap) for c in cells
    }
    return {key: replace(a, moved=found[key]) for key, a in after.items()}, (
        "target moved: Σ |p − p′| / 2 between both targets over the new one's replies; 1 − it is α "
        "of the old target as a draft"
    )


# ---- words


def _tell(run: Run, result: dict[str, Any], told: str) -> None:
    console = run.console
    for key, whose in (("target_before", "was"), ("target_after", "is")):
        about = ", ".join(f"{k} {v}" for k, v in result[key].items() if v is not None)
        console.print(Text(f"the target {whose:<4} {about}"), soft_wrap=True)
    if result["unpaired"]:
        console.print(f"{result['unpaired']} requests have no counterpart, and are left out")
    table = _table(result["rows"])
    print_table(table, console)
    for note in filter(None, (table.note, told)):
        console.print(Text(note, style="dim"))
    console.print(
        Text(
            f"reuse: under {KEPT:.0%} of τ lost, or no more than chance, and it pays; retrain: α "
            f"below {HALVED:.0%} of what it was; warm start: all between. Speedups are predicted "
            "with the costs of the evaluation before.",
            style="dim",
        )
    )
    for domain, found in result["advice"].items():
        console.print(Text(f"{domain}: {found['advice']} ({found['why']})", style="bold"))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    lines = []
    for row in rows:
        count = row["conversations"]
        alpha, tau = row["overlap"], row["tokens_per_round_estimated"]
        speedup = row["speedup_predicted"]
        lines.append(
            (
                *(row["domain"], row["law"]),
                f"{count}{'' if count >= MIN_CONVERSATIONS else '*'}",
                *(f"{alpha['one']:.3f}", f"{alpha['other']:.3f}"),
                interval_text(alpha["change"], 3),
                *(f"{tau['one']:.2f}", f"{tau['other']:.2f}", f"{row['lost']:.1%}"),
                interval_text(row["target_moved"], 3),
                MISSING if speedup is None else f"{speedup:.2f}",
                row["advice"],
            )
        )
    headers = (
        *("domain", "law", "n", "α was", "α is", "change"),
        *("τ was", "τ is", "τ lost", "target moved", "speedup", "advice"),
    )
    few = any(row["conversations"] < MIN_CONVERSATIONS for row in rows)
    note = f"* fewer than {MIN_CONVERSATIONS} conversations" if few else ""
    return Table("Drift", headers, tuple(lines), 2, note)
