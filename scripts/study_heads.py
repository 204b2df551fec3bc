"""A reduced vocabulary or a low-rank head over all of it? EAGLE-3 heads, trained for equal times.

    python scripts/study_heads.py [--runs runs/study] [--only ...]

It reads the records that study_families.py collects. Parts, in this order: train, cost, accept,
bounds (what α could be at best, before training), speed (of the best head of each kind alone) and
table, which prints what is finished and saves it as scripts/results/heads.json. Training, costs and
speed are worth nothing unless the machine does nothing else meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftsmith.data.dense import dense_weight
from draftsmith.data.warp import Law, log_probs
from draftsmith.drafters.batch import StateReader, records_with_states
from draftsmith.drafters.lowrank import factors, second_moment
from draftsmith.scripts.study import LAWS, Run, Study, parser_of
from draftsmith.scripts.study_tables import (
    NONE,
    Row,
    gain_cells,
    markdown,
    measure_all,
    millions,
    row_of,
    save,
    time_all,
    train_all,
)

PARTS = ("train", "cost", "accept", "bounds", "speed", "table")
REDUCED, LOW_RANK = "draft_vocab_size", "head_rank"
_ROWS = 256  # states turned into full distributions at a time


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(str(__doc__), "runs/study", PARTS)
    add = parser.add_argument
    sizes, ranks = [2048, 4096, 8192, 16384, 49152], [64, 128, 256]
    add("--sizes", type=int, nargs="*", default=sizes, help="of draft vocabularies")
    add("--ranks", type=int, nargs="*", default=ranks, help="of heads over all tokens")
    args = parser.parse_args(argv)
    study = Study(args, runs_of(args.sizes, args.ranks), Console())
    names = study.possible(list(study.runs))
    if "train" in args.only:
        train_all(study, names)
    measure_all(study, names, args.only)
    for name in names if "bounds" in args.only else ():
        study.part(name, "bounds", {}, partial(bounds, study, name))
    if "speed" in args.only:
        time_all(study, best_of_each(study, names))
    if "table" in args.only:
        rows = [with_bounds(study, row_of(study, name)) for name in names]
        save(study, "heads", rows)
        print(table(rows))


def runs_of(sizes: Sequence[int], ranks: Sequence[int]) -> dict[str, Run]:
    """A run for each reduced vocabulary and each rank, named by option and value."""
    options = [(REDUCED, n) for n in sizes] + [(LOW_RANK, n) for n in ranks]
    return {f"{name}-{n}": Run("demo", (f"drafter.{name}={n}",)) for name, n in options}


# ---- what α could be


def bounds(study: Study, name: str) -> dict[str, Any]:
    """By law: the largest α that the head's support allows, and α of the target's head cut down.

    A reduced vocabulary bounds α by the target's mass on it, which the target's own law on those
    tokens reaches. A low-rank head has every token; the target's own head at that rank, on the
    target's true states and before any training, has the overlap given.
    """
    drafter = study.drafter(name)
    if drafter.draft_ids is None:
        untrained = pooled(study, cut_down(study, int(drafter.options[LOW_RANK])))
        return {law: {"support": 1.0, "untrained": value} for law, value in untrained.items()}
    held = drafter.draft_ids
    masses = pooled(study, lambda hidden, p, law: p[:, held].sum(-1))
    return {law: {"support": value, "untrained": value} for law, value in masses.items()}


Overlap = Callable[[Tensor, Tensor, Law], Tensor]
"""Overlaps `[n]` at head inputs `[n, h]`, where the target's law is p `[n, V]`."""


def cut_down(study: Study, rank: int) -> Overlap:
    """The overlap of the target's head at that rank, fitted to training states."""
    target = study.target
    rows = [r for r in study.store.index() if r.split == "train"]
    moment = second_moment(StateReader(study.store, target, (), rows))
    weight = dense_weight(target.head)[: target.vocab_size]  # [V, h]
    up, down = factors(weight, rank, moment)  # [V, r], [r, h]

    def overlap(hidden: Tensor, p: Tensor, law: Law) -> Tensor:
        logits = target.finish_logits(hidden @ down.T @ up.T)  # [n, V]
        return torch.minimum(p, log_probs(logits, law).exp()).sum(-1)

    return overlap


@torch.inference_mode()
def pooled(study: Study, overlap: Overlap) -> dict[str, float]:
    """Its mean over all held-out positions that are drafted, by law."""
    target, found = study.target, {}
    records = records_with_states(study.store, target, (), "heldout")
    for law in LAWS:
        total, count = 0.0, 0
        for record in (r for r in records if r.drawn_from(law)):
            assert record.states is not None
            for part in record.states.hidden[1:].to(target.device).split(_ROWS):  # [n, h]
                p = log_probs(target.logits(part), law).exp()  # [n, V]
                total += float(overlap(part, p, law).sum(dtype=torch.float64))
                count += len(part)
        found[law.label] = round(total / count, 4)
    return found


# ---- results


def best_of_each(study: Study, names: Sequence[str]) -> list[str]:
    """Of reduced vocabularies and of low ranks, the run of highest predicted speedup each."""
    best: dict[str, tuple[float, str]] = {}
    for name in names:
        row = row_of(study, name)
        if "predicted" in row:
            speedups = [max(row["predicted"][law.label].values()) for law in LAWS]
            kind = name.rpartition("-")[0]
            best[kind] = max(best.get(kind, (0.0, "")), (sum(speedups), name))
    return [name for _, name in best.values()]


def with_bounds(study: Study, row: dict[str, Any]) -> dict[str, Any]:
    return row | {"bounds": study.known(row["name"], "bounds", {})}


def table(rows: Sequence[Row]) -> str:
    """One line a head, over all domains; speedups that are predicted alone stand in brackets."""
    heads = ["head", "read by a step", "c"]
    for law in LAWS:
        heads += [f"{what} {law.label}" for what in ("α at most", "α before", "α", "τ", "speedup")]
    lines = []
    for row in rows:
        costs = row["cost"]
        line = [row["name"], *([NONE] * 2 if costs is None else
                               [millions(costs["weights_read"]), f"{costs['c']:.3f}"])]  # fmt: skip
        for law in LAWS:
            known = None if row["bounds"] is None else row["bounds"][law.label]
            line += [NONE] * 2 if known is None else [
                f"{known['support']:.3f}", f"{known['untrained']:.3f}"
            ]  # fmt: skip
            line += gain_cells(row, law.label)
        lines.append(line)
    return markdown(heads, lines)


if __name__ == "__main__":
    main()
