"""The acceptance of a folder as an engine serves it, beside that of the trained drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...configs.recipe import ServingSection
from ...data.gather import recompute_states
from ...data.records import Record
from ...data.target import Target
from ...drafters.base import Drafter
from ...train.score import score
from ..cells import Cell
from ..estimate import estimate, overlap_interval
from ..parity import parity
from ..sides import TOGETHER
from .preflight import Preflight
from .rules import ENGINES

_TOLD = 4  # lines of parity's that are repeated


@dataclass(frozen=True)
class Rows:
    """What is measured on: held-out replies, collected with max_new_tokens `limit`.

    Their states are recomputed for what each drafter reads.
    """

    cells: Sequence[Cell]
    serving: ServingSection
    limit: int
    bootstrap: int


def measured(found: Preflight, target: Target, rows: Rows) -> Preflight:
    """`found` with the acceptance of both drafters, and what parity finds between them."""
    trained, served = found.trained, found.served
    if served is None:
        return found
    sides = {"trained": trained, "served": served}
    by: dict[str, list[dict[str, Any]]] = {name: [] for name, d in sides.items() if d is not None}
    for cell in rows.cells:
        for name, figures in _figures(target, sides, cell, rows).items():
            by[name].append(figures)
    table = tuple(
        {
            "domain": cell.domain,
            "law": cell.law.label,
            "replies": len(cell.records),
            **{name: figures[i] for name, figures in by.items()},
        }
        for i, cell in enumerate(rows.cells)
    )
    found = replace(found, acceptance=table)
    if trained is None or not found.ok:
        return found
    records = [r for cell in rows.cells for r in cell.records]
    seen = parity(target, served, records, rows.serving, rows.limit, trained)
    if seen.ok or not seen.checked:
        return found
    lines = [line for part in seen.parts if part.verdict == "different" for line in part.lines]
    name = ENGINES[found.engine]
    return found.told(*(f"{name} would decode otherwise: {line}" for line in lines[:_TOLD]))


def _figures(
    target: Target, sides: Mapping[str, Drafter | None], cell: Cell, rows: Rows
) -> dict[str, dict[str, Any]]:
    """α and τ of both with their intervals; the target runs once for those that read the same."""
    parts = [cell.records[i : i + TOGETHER] for i in range(0, len(cell.records), TOGETHER)]
    known: dict[tuple[int, ...], list[Record]] = {}
    told = {}
    serving = rows.serving
    gamma, drafting = serving.num_draft_tokens, serving.drafting
    for name, drafter in sides.items():
        if drafter is None:
            continue
        if drafter.taps not in known:
            states = [recompute_states(target, part, drafter.taps) for part in parts]
            known[drafter.taps] = [record for part in states for record in part]
        records = known[drafter.taps]
        found = score(target, drafter, records, cell.law, gamma, rows.limit, drafting)
        expected = estimate(found, gamma, serving.verifier, rows.bootstrap)
        told[name] = {
            "overlap": overlap_interval(found, rows.bootstrap).to_dict(),
            "tokens_per_round": expected.tokens_per_round.to_dict(),
        }
    return told
