"""The evaluation: estimates, decoded acceptance, losslessness and speed, one report.

Work that takes long is kept part by part in the run's folder and not repeated after a kill.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..configs.recipe import EvalSection, Recipe
from ..data.files import write_json
from ..data.gather import Request, request_of
from ..data.records import Record, held_out
from ..data.store import RecordStore
from ..data.target import Target
from ..data.warp import Law, law_of
from ..drafters.base import Drafter
from ..drafters.batch import records_with_states
from ..train.score import Conversation, Drafting, score
from .cells import Cell, cell_row, cells_of, cost_rows, sweep_row
from .decode import DecodeSettings, decode
from .estimate import estimate
from .gamma import AnyPolicy, as_mapping, make_policy
from .lossless import greedy_equality
from .provenance import provenance
from .rows import Output
from .serving import CALIBRATED, check_length, policy_of, settings
from .speed import (
    Cost,
    Timing,
    TreeCost,
    calibrate,
    calibrate_tree,
    generate_ratio,
    measure_rows,
    measure_tree,
    time_cell,
)

_DRAFTING = {
    "sampled": "warped by the serving law, like the target; argmax at T=0",
    "greedy": "always the draft's most probable token",
}


def evaluate(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    drafter_folder: Path,
    store: RecordStore,
    folder: Path,
    console: Console,
    accept: bool = False,
) -> dict[str, Any]:
    """Run the recipe's evaluation on `store`'s held-out records; returns the report.

    `accept` takes records of another target, with a warning.
    """
    check_length(drafter.family, drafter.max_draft_tokens, recipe.serving.num_draft_tokens)
    records = records_with_states(store, target, drafter.taps, "heldout", accept)
    cells = cells_of(recipe, records)
    limit = int(store.settings["max_new_tokens"])
    run = _Run(recipe, target, drafter, folder, console, limit)
    lengths = _possible(drafter, sorted({*recipe.eval.sweep, recipe.serving.num_draft_tokens}))
    scores = {c.name: run.scores(c, max(lengths)) for c in cells}
    calibration = _calibration(recipe, store, cells)
    costs, trees = run.costs(cells, calibration, lengths)
    run.set_policies(cells, calibration, costs)
    outputs = run.outputs(cells)
    timings, ratio = run.speed(cells, calibration)
    rows = []
    sweep = []
    for cell in cells:
        cost, timing = costs.get(cell.law.label), timings.get(cell.name)
        servings = run.servings(cell, scores[cell.name])
        served = trees.get(cell.law.label, cost)
        rows.append(cell_row(recipe, cell, scores[cell.name], servings, outputs, served, timing))
        if cost is not None and timing is not None:
            sweep.append(sweep_row(recipe, cell, scores[cell.name], cost, timing, lengths))
    return {
        "format": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "provenance": provenance(recipe, target, drafter, drafter_folder, store),
        "settings": {
            "num_draft_tokens": recipe.serving.num_draft_tokens,
            "verifier": recipe.serving.verifier,
            "draft_sampling": _DRAFTING[recipe.serving.drafting],
            "policy": run.policy_names(),
            "tree": None if recipe.serving.tree is None else asdict(recipe.serving.tree),
            "max_new_tokens": limit,
            "timing_prompts": recipe.eval.timing_prompts,
            "timing_tokens": recipe.eval.timing_tokens,
        },
        "cells": rows,
        "sweep": sweep,
        "cost": cost_rows(costs, trees, ratio),
        "lossless": _lossless(recipe, target, cells, outputs),
        "alarms": [*_left_out(recipe, records, cells), *_off_policy(store)],
        "stages": [],
    }


def _possible(drafter: Drafter, lengths: Sequence[int]) -> list[int]:
    """Those of the draft lengths that the drafter was made for."""
    most = drafter.max_draft_tokens
    return [length for length in lengths if most is None or length <= most]


def _left_out(recipe: Recipe, records: Sequence[Record], cells: Sequence[Cell]) -> list[str]:
    """What has no row in the tables, and why."""
    measured = {c.name for c in cells}
    lines = []
    for domain in sorted({r.domain for r in records if r.split == "heldout"}):
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
    timed = {r.prompt_id for c in cells for r in _timed(c, recipe.eval)}
    measured = [r for c in cells for r in c.records]
    pool = list(store.records("train")) or [r for r in measured if r.prompt_id not in timed]
    chosen: dict[str, Record] = {}
    for record in sorted(pool or measured, key=lambda r: r.key):
        chosen.setdefault(record.prompt_id, record)
    return [request_of(r) for r in list(chosen.values())[: recipe.eval.calibration_prompts]]


class _Run:
    """Runs or recalls the parts of one evaluation, each a JSON file in its folder."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        drafter: Drafter,
        folder: Path,
        console: Console,
        limit: int,
    ):
        self.recipe, self.target, self.drafter = recipe, target, drafter
        self.folder, self.console, self.limit = folder, console, limit
        self.policies: dict[Law, AnyPolicy] = {}

    def _part(self, name: str, make: Callable[[], Any]) -> Any:
        path = self.folder / "parts" / f"{name.replace('/', '_')}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        made = make()
        write_json(path, made)
        return json.loads(path.read_text(encoding="utf-8"))

    def scores(self, cell: Cell, steps: int) -> list[Conversation]:
        self.console.print(f"estimate  {cell.name}")
        return self._score(cell, steps, self.recipe.serving.drafting)

    def _score(self, cell: Cell, steps: int, drafting: Drafting) -> list[Conversation]:
        return score(self.target, self.drafter, cell.records, cell.law, steps, self.limit, drafting)

    def servings(self, cell: Cell, scores: list[Conversation]) -> dict[str, Any]:
        """Expected τ of chains for every way of drawing and verifying; they differ above T = 0."""
        if cell.law.temperature == 0:
            return {}
        gamma, own = self.recipe.serving.num_draft_tokens, self.recipe.serving.drafting
        found = {}
        ways: tuple[tuple[Drafting, str], ...]
        ways = (("sampled", "token"), ("sampled", "block"), ("greedy", "token"))
        for drafting, rule in ways:
            used = scores if drafting == own else self._score(cell, gamma, drafting)
            name = f"{drafting}, {rule}" if drafting == "sampled" else drafting
            tau = estimate(used, gamma, rule, self.recipe.eval.bootstrap).tokens_per_round
            found[name] = tau.to_dict()
        return found

    def _settings(self, tokens: int, law: Law) -> DecodeSettings:
        return replace(settings(self.recipe.serving, tokens), policy=self.policies.get(law))

    def set_policies(
        self, cells: Sequence[Cell], calibration: Sequence[Request], costs: dict[str, Cost]
    ) -> None:
        """What ends drafts under each law; a calibrated policy is kept, as timings are not."""
        if self.recipe.serving.policy is None:
            return
        for law in dict.fromkeys(c.law for c in cells):
            make = partial(self._policy, calibration, law, costs.get(law.label))
            made = self._part(f"policy-{law.label}", make)
            self.policies[law] = make_policy(made, str(self.folder / "parts"))

    def _policy(
        self, calibration: Sequence[Request], law: Law, cost: Cost | None
    ) -> dict[str, Any]:
        found = policy_of(self.recipe, self.target, self.drafter, calibration, law, cost)
        return as_mapping(found)

    def policy_names(self) -> dict[str, Any] | None:
        """Each law's policy, with the figures it was given or calibrated to."""
        found = {law.label: as_mapping(p) for law, p in self.policies.items()}
        return found or None

    def outputs(self, cells: Sequence[Cell]) -> dict[str, Output]:
        """Speculative outputs of all held-out requests by record key, decoded in batches."""
        found: dict[str, Output] = {}
        size = self.recipe.eval.decode_batch
        for law in dict.fromkeys(c.law for c in cells):
            records = [r for c in cells if c.law == law for r in c.records]
            records.sort(key=lambda r: (len(r.ids), r.key))
            for start in range(0, len(records), size):
                part = records[start : start + size]
                self.console.print(f"decode    {law.label}: {start} of {len(records)} prompts")
                name = f"decode-{law.label}-{start:04d}"
                rows = self._part(name, partial(self._decode, part))
                found |= {key: Output(**fields) for key, fields in rows.items()}
        return found

    def _decode(self, records: Sequence[Record]) -> dict[str, Any]:
        requests = [request_of(r) for r in records]
        how = self._settings(self.limit, records[0].law)
        outputs = decode(self.target, requests, how, self.drafter)
        return {r.key: o.__dict__ for r, o in zip(records, outputs, strict=True)}

    def costs(
        self, cells: Sequence[Cell], calibration: Sequence[Request], lengths: Sequence[int]
    ) -> tuple[dict[str, Cost], dict[str, TreeCost]]:
        """Costs of chains by law, and of the recipe's tree if it drafts one."""
        section, served = self.recipe.eval, self.recipe.serving
        if section.timing_prompts == 0 and (served.policy or {}).get("name") != CALIBRATED:
            return {}, {}
        self.console.print("calibrate costs")
        context = self._context(calibration)
        rows = measure_rows(self.target, context, range(1, max(lengths) + 2))
        how = settings(served, section.timing_tokens // 2)
        laws = list(dict.fromkeys(c.law for c in cells))
        chain = replace(how, tree=None)
        found = {
            law.label: calibrate(self.target, self.drafter, calibration, law, rows, chain)
            for law in laws
        }
        if how.tree is None:
            return found, {}
        v = measure_tree(self.target, context, how.nodes)
        return found, {
            law.label: calibrate_tree(self.target, self.drafter, calibration, law, v, how)
            for law in laws
        }

    def _context(self, calibration: Sequence[Request]) -> int:
        return len(calibration[0].ids) + self.recipe.eval.timing_tokens // 2

    def speed(
        self, cells: Sequence[Cell], calibration: Sequence[Request]
    ) -> tuple[dict[str, Timing], dict[str, Any] | None]:
        """Timings per cell, our plain loop against `generate`."""
        section = self.recipe.eval
        if section.timing_prompts == 0:
            return {}, None
        ratio = generate_ratio(self.target, calibration, section.timing_tokens)
        timings = {}
        for cell in cells:
            self.console.print(f"time      {cell.name}")
            requests = [request_of(r) for r in _timed(cell, section)]
            timings[cell.name] = time_cell(
                self.target, self.drafter, requests,
                self._settings(section.timing_tokens, cell.law),
                _possible(self.drafter, section.timed_lengths),
            )  # fmt: skip
        return timings, {**ratio.to_dict(), "context": self._context(calibration)}


def _timed(cell: Cell, section: EvalSection) -> list[Record]:
    """The prompts to time: first those whose reply is long enough, in the order of their ids.

    Ids are hashes, so the choice favours no kind of prompt (the longest replies tend to be loops,
    which are easy to draft).
    """
    enough = section.timing_tokens
    ranked = sorted(cell.records, key=lambda r: (-min(len(r.reply), enough), r.key))
    return ranked[: section.timing_prompts]


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
