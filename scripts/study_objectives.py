"""Which objective gives the longest accepted length? The same head, records, steps and seeds.

    python scripts/study_objectives.py --records runs/demo/records-HASH [--runs runs/study]

One cell is one objective, family and seed: trained, scored by the estimator and, for the first
seed, decoded. A cell that is done is never repeated. Results go to scripts/results/objectives.json
and objectives.svg; differences are paired by conversation and seed.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from draftsmith.configs.load import load_recipe, recipe_hash
from draftsmith.configs.recipe import ObjectiveSection, Recipe
from draftsmith.data.files import write_json
from draftsmith.data.gather import request_of
from draftsmith.data.records import Record, held_out
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import records_with_states
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import FOLDER, save_result
from draftsmith.train.loop import train
from draftsmith.train.score import expected, score

HYBRID = "lk_hybrid"
OBJECTIVES: dict[str, tuple[dict[str, Any], Literal["token", "block"]]] = {
    "ce": ({"loss": "ce"}, "token"),
    "fkl": ({"loss": "fkl"}, "token"),
    "tv": ({"loss": "tv"}, "token"),
    "nla": ({"loss": "nla"}, "token"),
    "lk_hybrid": ({"loss": HYBRID}, "token"),
    # What takes over sees replies of the served law only: this row is the control for that.
    "lk_hybrid → lk_hybrid": ({"loss": HYBRID, "then": HYBRID}, "token"),
    "lk_hybrid → accepted_length (block)": ({"loss": HYBRID, "then": "accepted_length"}, "block"),
    "lk_hybrid → rounds (token)": ({"loss": HYBRID, "then": "rounds"}, "token"),
    "lk_hybrid → rounds (block)": ({"loss": HYBRID, "then": "rounds"}, "block"),
    "nla → accepted_length (block)": ({"loss": "nla", "then": "accepted_length"}, "block"),
    "nla → rounds (block)": ({"loss": "nla", "then": "rounds"}, "block"),
}
BASES = ("fkl", "lk_hybrid → lk_hybrid")
"""What all are compared with: the usual loss, and the control of those that take over."""
GREEDY_DECODED = ("nla", "lk_hybrid → rounds (block)")
"""Decoded at T = 0 too, where the estimate is known to equal decoding reply by reply."""
CAUSAL = ("fkl", "lk_hybrid", "nla")
LAWS = (Law(0.0), Law(1.0))
VERIFIERS: tuple[Literal["token"], Literal["block"]] = ("token", "block")
GAMMA = 3
RESAMPLES = 4000
MOST_SEEDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the heads")
    parser.add_argument("--causal", nargs="*", default=list(CAUSAL), help="objectives for the LM")
    args = parser.parse_args()
    console = Console()
    store = RecordStore.open(args.records)
    target = load_target(load_recipe("demo").target)
    # Several processes may share a runs folder, each with seeds of its own.
    cells = [("eagle3", name, seed) for seed in args.seeds for name in OBJECTIVES]
    cells += [("causal", name, 0) for name in args.causal]
    for number, (family, name, seed) in enumerate(cells):
        recipe = recipe_of(family, name, seed, args.steps)
        path = cell_path(args.runs, family, recipe)
        if not path.exists():
            console.print(f"cell {number + 1} of {len(cells)}: {family}, {name}, seed {seed}")
            ways = decoded_ways(family, name, seed)
            cell = run_cell(recipe, target, store, path.parent, console, ways)
            write_json(path, {"family": family, "objective": name, "seed": seed, **cell})
        summarise(finished(args.runs, args.steps), args.steps, target)


def decoded_ways(family: str, name: str, seed: int) -> list[tuple[Law, Literal["token", "block"]]]:
    """Laws and verifiers that a cell is really decoded under, beside its estimates."""
    if seed:
        return []
    greedy, sampled = LAWS
    if family == "causal" and name == CAUSAL[-1]:
        return [(greedy, "token"), (sampled, "token"), (sampled, "block")]
    first = [(greedy, VERIFIERS[0])] if name in GREEDY_DECODED else []
    return [*first, (sampled, OBJECTIVES[name][1])]


def cell_path(runs: Path, family: str, recipe: Recipe) -> Path:
    return runs / f"{family}-{recipe_hash(recipe)}" / "cell.json"


def finished(runs: Path, steps: int) -> list[dict[str, Any]]:
    """All cells of these many steps that any process has finished, in the order of the tables."""
    found = []
    for family in ("eagle3", "causal"):
        for name in OBJECTIVES:
            for seed in range(MOST_SEEDS):
                path = cell_path(runs, family, recipe_of(family, name, seed, steps))
                if path.exists():
                    found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def recipe_of(family: str, name: str, seed: int, steps: int) -> Recipe:
    """The shipped recipe of the family with this objective, and as many steps as the others.

    The LM takes half the steps of the heads: each is several times as long.
    """
    objective, verifier = OBJECTIVES[name]
    steps = steps if family == "eagle3" else steps // 2
    base = load_recipe("demo" if family == "eagle3" else "causal")
    return replace(
        base,
        name="study",
        seed=seed,
        serving=replace(base.serving, num_draft_tokens=GAMMA, verifier=verifier),
        objective=ObjectiveSection(**objective),
        train=replace(base.train, steps=steps, eval_every=steps, save_every=max(1, steps // 2)),
    )


def run_cell(
    recipe: Recipe,
    target: Target,
    store: RecordStore,
    folder: Path,
    console: Console,
    ways: Sequence[tuple[Law, Literal["token", "block"]]],
) -> dict[str, Any]:
    """Train, score and perhaps decode one cell; everything by conversation."""
    saved = train(recipe, target, store, folder, console)
    drafter = load_drafter(saved, target)
    records = records_with_states(store, target, drafter.taps, "heldout")
    limit = int(store.settings["max_new_tokens"])
    result: dict[str, Any] = {"estimated": {}, "decoded": {}}
    for law in LAWS:
        own = [r for d in sorted({r.domain for r in records}) for r in held_out(records, law, d)]
        own = [r for r in own if len(r.reply) > 1]
        result["estimated"][law.label] = estimated(target, drafter, own, law, limit)
        result["decoded"][law.label] = {
            rule: decode_all(target, drafter, own, limit, rule)
            for other, rule in ways
            if other == law
        }
    return result


def estimated(
    target: Target, drafter: Drafter, records: Sequence[Record], law: Law, limit: int
) -> dict[str, Any]:
    scores = score(target, drafter, records, law, GAMMA, limit)
    table: dict[str, Any] = {
        "prompt": [r.prompt_id for r in records],
        "domain": [c.domain for c in scores],
        "tokens": [c.tokens for c in scores],
        "overlap": [round(c.overlap[0][0], 4) for c in scores],
    }
    for rule in VERIFIERS:
        course = expected(scores, GAMMA, rule)
        table[f"rounds {rule}"] = [round(x, 4) for x in course.rounds.tolist()]
        table[f"survival {rule}"] = [round(s, 4) for s in course.survival]
    return table


def decode_all(
    target: Target, drafter: Drafter, records: Sequence[Record], limit: int, rule: str
) -> dict[str, list[int]]:
    """Tokens after the first, and rounds, of every prompt decoded with fresh randomness."""
    tokens, rounds = [0] * len(records), [0] * len(records)
    order = sorted(range(len(records)), key=lambda i: len(records[i].ids))
    for start in range(0, len(order), 32):
        part = order[start : start + 32]
        requests = [replace(request_of(records[i]), seed=records[i].seed + 1) for i in part]
        outputs = decode(target, requests, DecodeSettings(limit, GAMMA, rule), drafter)
        for i, out in zip(part, outputs, strict=True):
            tokens[i], rounds[i] = len(out.ids) - 1, len(out.rounds)
    return {"tokens": tokens, "rounds": rounds}


# ---- tables


def summarise(cells: Sequence[dict[str, Any]], steps: int, target: Target) -> None:
    """Pool over seeds, compare with the bases, save; saved rows of other cells stay."""
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        by_name.setdefault((cell["family"], cell["objective"]), []).append(cell)
    rows = [
        row_of(family, name, mine, {base: by_name.get((family, base), []) for base in BASES})
        for (family, name), mine in by_name.items()
    ]
    rows = with_saved(rows, steps)
    result = {
        "target": target.provenance["name"],
        "quantisation": target.provenance["quantisation"],
        "machine": processor(),
        "steps": steps,
        "num_draft_tokens": GAMMA,
        "intervals": "95 %, bootstrap over conversations and seeds; differences are paired by both",
        "rows": rows,
    }
    save_result("objectives", result, quiet=True)
    plot(rows)


def with_saved(rows: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """These rows behind the saved ones of as many steps that they do not replace."""
    path = FOLDER / "objectives.json"
    kept: list[dict[str, Any]] = []
    if path.exists():
        saved = json.loads(path.read_text(encoding="utf-8"))
        kept = saved["rows"] if saved["steps"] == steps else []
    own = {(r["family"], r["objective"]) for r in rows}
    return [r for r in kept if (r["family"], r["objective"]) not in own] + list(rows)


def row_of(
    family: str,
    name: str,
    mine: Sequence[dict[str, Any]],
    bases: dict[str, Sequence[dict[str, Any]]],
) -> dict[str, Any]:
    row: dict[str, Any] = {"family": family, "objective": name, "seeds": [c["seed"] for c in mine]}
    for law in (x.label for x in LAWS):
        tables = [c["estimated"][law] for c in mine]
        own: dict[str, Any] = {"overlap": pooled(tables, "overlap", "tokens")}
        for rule in VERIFIERS if law != LAWS[0].label else VERIFIERS[:1]:
            key = f"rounds {rule}"
            own[f"τ {rule}"] = pooled(tables, "tokens", key)
            own[f"τ {rule} by seed"] = [round(sum(t["tokens"]) / sum(t[key]), 4) for t in tables]
            own[f"S_k {rule} by seed"] = [t[f"survival {rule}"] for t in tables]
            for base, cells in bases.items():
                shared = sorted({c["seed"] for c in mine} & {c["seed"] for c in cells})
                pairs = [
                    (by_seed(mine, seed)["estimated"][law], by_seed(cells, seed)["estimated"][law])
                    for seed in shared
                ]
                if pairs and base != name:
                    own[f"τ {rule} − {base}"] = difference(pairs, "tokens", key)
            decoded = [c for c in mine if rule in c["decoded"].get(law, {})]
            if decoded:
                tau = [c["decoded"][law][rule] for c in decoded]
                own[f"τ {rule} decoded"] = pooled(tau, "tokens", "rounds")
                own[f"z {rule}"] = z_score([c["estimated"][law] for c in decoded], tau, key)
        row[law] = own
    return row


def by_seed(cells: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    return next(c for c in cells if c["seed"] == seed)


def _table(tables: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([t[key] for t in tables], dtype=float)  # [seeds, conversations]


def _resampled(values: np.ndarray) -> np.ndarray:
    """Sums over resampled seeds and conversations, the same ones for every call: `[draws]`."""
    seeds, count = values.shape
    rng = np.random.default_rng(0)
    of_seeds = rng.integers(0, seeds, (RESAMPLES, seeds))
    of_rows = rng.integers(0, count, (RESAMPLES, count))
    return np.array([
        values[np.ix_(s, r)].sum() for s, r in zip(of_seeds, of_rows, strict=True)
    ])  # fmt: skip


def _interval(value: float, draws: np.ndarray) -> list[float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return [round(float(x), 4) for x in (value, low, high)]


def pooled(tables: Sequence[dict[str, Any]], above: str, below: str) -> list[float]:
    """[value, low, high] of a pooled ratio."""
    a, b = _table(tables, above), _table(tables, below)
    return _interval(a.sum() / b.sum(), _resampled(a) / _resampled(b))


def difference(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], above: str, below: str
) -> dict[str, Any]:
    """Difference of two pooled ratios over the same conversations and seeds.

    real: every seed has the sign of the whole, and the interval leaves out 0.
    """
    mine, base = [m for m, _ in pairs], [b for _, b in pairs]
    a, b, c, d = (_table(t, key) for t in (mine, base) for key in (above, below))
    each = a.sum(1) / b.sum(1) - c.sum(1) / d.sum(1)  # [seeds]
    draws = _resampled(a) / _resampled(b) - _resampled(c) / _resampled(d)
    interval = _interval(a.sum() / b.sum() - c.sum() / d.sum(), draws)
    agree = bool((each > 0).all() or (each < 0).all())
    return {
        "interval": interval,
        "by_seed": each.round(4).tolist(),
        "real": agree and len(pairs) > 1 and not interval[1] <= 0 <= interval[2],
    }


def z_score(
    estimated: Sequence[dict[str, Any]], decoded: Sequence[dict[str, Any]], key: str
) -> dict[str, float]:
    """How far estimated and decoded τ are apart in standard errors, paired by conversation.

    half_width: the wider of both τ's 95 % half-widths, relative; wide intervals prove nothing.
    """
    n, r = _table(estimated, "tokens"), _table(estimated, key)
    m, s = _table(decoded, "tokens"), _table(decoded, "rounds")
    one, two = _resampled(n) / _resampled(r), _resampled(m) / _resampled(s)
    gap = n.sum() / r.sum() - m.sum() / s.sum()
    spread = float((one - two).std())
    wide = max(
        float(np.ptp(np.quantile(x, [0.025, 0.975]))) / 2 / float(x.mean()) for x in (one, two)
    )
    return {"z": round(gap / spread, 2) if spread > 0 else 0.0, "half_width": round(wide, 4)}


def plot(rows: Sequence[dict[str, Any]]) -> None:
    """τ of every objective at T = 1 for both verifiers, with intervals: an SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    heads = [r for r in rows if r["family"] == "eagle3"]
    figure, axis = plt.subplots(figsize=(7, 0.5 * len(heads) + 1))
    for offset, rule in zip((0.12, -0.12), VERIFIERS, strict=True):
        values = np.array([r["T=1"][f"τ {rule}"] for r in heads])  # [objectives, 3]
        at = np.arange(len(heads))[::-1] + offset
        errors = np.abs(values[:, 1:].T - values[:, 0])
        axis.errorbar(values[:, 0], at, xerr=errors, fmt="o", label=f"{rule} verification")
    axis.set_yticks(np.arange(len(heads))[::-1], [r["objective"] for r in heads])
    axis.set_xlabel(f"expected tokens per round τ at T = 1, γ = {GAMMA}")
    axis.legend()
    figure.tight_layout()
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / "objectives.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
