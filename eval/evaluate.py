"""The evaluation: estimates, decoded acceptance, losslessness and speed, one report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..configs.recipe import Recipe
from ..data.gather import Request, request_of
from ..data.records import Record, held_out
from ..data.store import RecordStore
from ..data.target import Target
from ..data.warp import law_of
from ..drafters.base import Drafter
from ..drafters.batch import records_with_states
from ..train.score import Conversation
from .batches import AtBatch, batch_rows
from .cells import (
    Cell,
    Found,
    cell_row,
    cells_of,
    cost_rows,
    survival_of,
    sweep_row,
    total_rows,
)
from .footprint import footprint
from .lengths import by_length, in_order
from .listing import request_rows, shown_replies
from .lossless import greedy_equality
from .measuring import Measuring, Speeds, ranked
from .provenance import provenance
from .report import FORMAT
from .request_rows import RequestRow
from .rows import Output
from .serving import check_length

DRAFTING = {
    "sampled": "warped by the serving law, like the target; argmax at T=0",
    "greedy": "always the draft's most probable token",
}
"""How drafts are drawn, in a report's words."""


@dataclass(frozen=True)
class Measured:
    """A report, and what stands beside it.

    requests: a row of every held-out reply, without text; replies: some of those decoded, as
    `shown_replies` tells them.
    """

    report: dict[str, Any]
    requests: list[RequestRow]
    replies: list[dict[str, Any]]


def evaluate(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    drafter_folder: Path,
    store: RecordStore,
    folder: Path,
    console: Console,
    accept: bool = False,
) -> Measured:
    """Run the recipe's evaluation on `store`'s held-out records; parts are kept in `folder`.

    `accept` takes records of another target, with a warning.
    """
    check_length(drafter.family, drafter.max_draft_tokens, recipe.serving.num_draft_tokens)
    records = records_with_states(store, target, drafter.taps, "heldout", accept)
    records = by_length(records, recipe.eval.length_splits)
    cells = cells_of(recipe, records)
    limit = int(store.settings["max_new_tokens"])
    run = Measuring(recipe, target, drafter, folder, console, limit)
    lengths = run.possible(sorted({*recipe.eval.sweep, recipe.serving.num_draft_tokens}))
    scores = {c.name: run.scores(c, max(lengths)) for c in cells}
    calibration = _calibration(recipe, store, cells)
    run.set_policies(cells, calibration, lengths)
    outputs = run.outputs(cells)
    parity = run.parity(cells)
    speeds = run.speeds(cells, calibration, lengths)
    batches = None if speeds is None else run.at_batches(cells, calibration, lengths, speeds)
    found = [_found(c, scores[c.name], outputs, speeds) for c in cells]
    report = {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "provenance": provenance(recipe, target, drafter, drafter_folder, store),
        "settings": {
            "num_draft_tokens": recipe.serving.num_draft_tokens,
            "verifier": recipe.serving.verifier,
            "draft_sampling": DRAFTING[recipe.serving.drafting],
            "policy": run.policy_names(),
            "tree": None if recipe.serving.tree is None else asdict(recipe.serving.tree),
            "max_new_tokens": limit,
            "timing_prompts": recipe.eval.timing_prompts,
            "timing_tokens": recipe.eval.timing_tokens,
        },
        "cells": [cell_row(recipe, f, run.servings(f.cell, scores[f.cell.name])) for f in found],
        "totals": total_rows(recipe, found),
        "sweep": [sweep_row(recipe, f, lengths) for f in found],
        "cost": _costs(speeds),
        "batches": _batches(recipe, found, batches or {}),
        "memory": asdict(footprint(target, drafter)),
        "lossless": _lossless(recipe, target, cells, outputs),
        "parity": parity,
        "alarms": [*_left_out(recipe, records, cells), *_off_policy(store)],
        "stages": [],
    }
    shown = [
        reply
        for c in cells
        for reply in shown_replies(c, outputs, recipe.eval.shown_replies, target.tokenizer)
    ]
    return Measured(report, [row for f in found for row in request_rows(recipe, f)], shown)


def _found(
    cell: Cell, scores: list[Conversation], outputs: dict[str, Output], speeds: Speeds | None
) -> Found:
    if speeds is None:
        return Found(cell, scores, outputs)
    law = cell.law.label
    return Found(
        cell, scores, outputs, speeds.costs[law], speeds.trees.get(law), speeds.timings[cell.name]
    )


def _costs(speeds: Speeds | None) -> dict[str, Any] | None:
    if speeds is None:
        return None
    return cost_rows(speeds.costs, speeds.trees, speeds.generate, speeds.context)


def _batches(
    recipe: Recipe, found: Sequence[Found], batches: Mapping[str, Sequence[AtBatch]]
) -> list[dict[str, Any]]:
    """By law and batch size; the S_k that speeds are predicted from are those estimated."""
    rows = []
    for law, sizes in batches.items():
        own = [f for f in found if f.cell.law.label == law]
        survival = {f.cell.domain: survival_of(recipe, f) for f in own}
        rows += batch_rows(sizes, law, survival)
    return rows


def _left_out(recipe: Recipe, records: Sequence[Record], cells: Sequence[Cell]) -> list[str]:
    """What has no row in the tables, and why."""
    measured = {c.name for c in cells}
    lines = []
    for domain in sorted({r.domain for r in records if r.split == "heldout"}, key=in_order):
        for law in map(law_of, recipe.serving.laws):
            cell = Cell(domain, law, held_out(records, law, domain))
            if cell.name not in measured:
                count = len(cell.records)
                reason = (
                    f"none of its {count} replies has a second token" if count else "no replies"
                )
                lines.append(f"{cell.name} is left out: {reason}")
    return lines


def _off_policy(store: RecordStore) -> list[str]:
    """A drafter learns best from what the target itself says."""
    given = sum(r.split == "train" and r.origin == "given" for r in store.index())
    return [f"{given} training replies are the data's, not the target's own"] if given else []


def _calibration(recipe: Recipe, store: RecordStore, cells: Sequence[Cell]) -> list[Request]:
    """Prompts to measure costs on: training ones, or held-out ones that are not timed."""
    most = recipe.eval.timing_prompts * max(recipe.eval.batch_sizes)
    used = {r.prompt_id for c in cells for r in ranked(c, recipe.eval)[:most]}
    measured = [r for c in cells for r in c.records]
    pool = list(store.records("train")) or [r for r in measured if r.prompt_id not in used]
    chosen: dict[str, Record] = {}
    for record in sorted(pool or measured, key=lambda r: r.key):
        chosen.setdefault(record.prompt_id, record)
    return [request_of(r) for r in list(chosen.values())[: recipe.eval.calibration_prompts]]


def _lossless(
    recipe: Recipe, target: Target, cells: Sequence[Cell], outputs: dict[str, Output]
) -> dict[str, Any]:
    """Greedy outputs against the target's own, collected without any draft."""
    records = [r for c in cells if c.law.temperature == 0 for r in c.records if r.key in outputs]
    theirs = {r.name: r.reply.tolist() for r in records}
    ours = {r.name: outputs[r.key].ids for r in records}
    margins = {r.name: _margins(target, r) for r in records if ours[r.name] != theirs[r.name]}
    return greedy_equality(ours, theirs, margins, recipe.eval.near_tie_margin)


@torch.inference_mode()
def _margins(target: Target, record: Record) -> list[float]:
    """The target's top-2 logit margin at every reply position."""
    assert record.states is not None
    top = target.logits(record.states.hidden.to(target.device)).topk(2).values  # [R, 2]
    return (top[:, 0] - top[:, 1]).tolist()
