"""`draftsmith size`: what drafters cost on this machine, and how good they would have to be."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.files import write_json
from ..data.target import Target
from ..data.warp import Law, law_of
from ..eval.candidates import (
    Candidate,
    Weights,
    asked_for,
    built,
    different,
    other_families,
    own_grid,
    weights,
)
from ..eval.page import Table
from ..eval.report import print_table
from ..eval.sizing import Need, StepCost, check_room, evenly, needed, step_costs
from ..eval.speed import limit_of, measure_rows
from .pipeline import Run

_TOGETHER = 4
"""Drafters that are held, and take turns, at a time."""
_DRAFTED = 3
"""Tokens drafted in a round while steps are timed."""
_CONTEXT, _TOKENS = 96, 25
_MEANINGS = (
    "weights, MB: what stands beside the target's own parameters, as it runs.",
    "c_first, c: the first and each later draft step; floor: matrix products and attention of the "
    "step before it, called by themselves.",
)
_ASSUMED = (
    "α 1×, α 2×: the overlap that breaks even, or doubles the speed of plain decoding, with drafts "
    "of γ tokens, if every drafted token is accepted with the same chance α (S_k = α^k); "
    "real drafts are less sure further on. A recipe that serves T = 0 alone is timed at T = 1, "
    "where rounds draw tokens, too."
)


@dataclass(frozen=True)
class Sized:
    """What was found of one candidate; draft lengths up to `most` were thought of.

    break_even, twice: what reaches 1 and 2 times plain decoding, None if nothing does; limit: the
    speedup if every token were accepted.
    """

    name: str
    family: str
    most: int
    weights: Weights
    cost: StepCost
    break_even: Need | None
    twice: Need | None
    limit: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values; costs in units of one plain target pass."""
        return {
            **asdict(self),
            "cost": {
                **asdict(self.cost.cost),
                "floor_first": self.cost.floor_first,
                "floor": self.cost.floor,
                "outside_first": self.cost.outside_first,
                "outside": self.cost.outside,
            },
        }


def size(
    run: Run,
    candidates: Sequence[str],
    every: bool,
    most: int,
    turns: int,
    out: Path | None = None,
) -> list[Sized]:
    """Measure the recipe's drafter and its alternatives, print a table; `out` takes it as JSON.

    The alternatives are `candidates` as `asked_for` reads them, or else others of the recipe's
    family; with `every` all families besides. Raises `UserError` for what was asked for and cannot
    be; others that do not fit the target are left out with a line.
    """
    asked = [asked_for(text) for text in candidates]  # faults show before the target is loaded
    for one in asked:
        _ = one.config
    target, recipe = run.target, run.recipe
    chosen = own_grid(recipe.drafter, target)
    chosen = [chosen[0], *asked] if asked else chosen
    if every:
        chosen += other_families(recipe.drafter)
    chosen = different(chosen)
    context = _context(target, most)
    law = next((law_of(law) for law in recipe.serving.laws if law.temperature), Law(1.0))
    rows = measure_rows(target, context, range(1, max(most, _DRAFTED) + 2))
    found: list[Sized] = []
    for at in range(0, len(chosen), _TOGETHER):
        found += _measured(run, chosen[at : at + _TOGETHER], rows, law, context, most, turns)
        gc.collect()
    _print(run.console, target, law, context, found, most)
    if out is not None:
        write_json(out, _report(recipe, target, law, context, turns, found))
    return found


def _context(target: Target, most: int) -> int:
    """Tokens that stand before what is decoded; fewer where the target takes few."""
    limit = target.max_positions
    context = _CONTEXT if limit is None else min(_CONTEXT, limit - _TOKENS - most - 2)
    if context < 1:
        raise UserError(f"a target of {limit} positions leaves no room to decode {_TOKENS} tokens")
    return context


def _measured(
    run: Run,
    candidates: Sequence[Candidate],
    rows: dict[int, float],
    law: Law,
    context: int,
    most: int,
    turns: int,
) -> list[Sized]:
    """Candidates that take turns with each other."""
    drafters = {}
    for one in candidates:
        try:
            drafter = built(one.config, run.target)
            check_room(drafter, context)
        except UserError as error:
            if one.asked:
                raise
            run.console.print(f"left out: {one.name}: {error}", soft_wrap=True)
        else:
            drafters[one.name] = drafter
    if not drafters:
        return []
    run.console.print(f"timing {', '.join(drafters)}", soft_wrap=True)
    costs = step_costs(
        run.target, drafters, rows, law=law, num_draft_tokens=_DRAFTED, context=context,
        tokens=_TOKENS, turns=turns,
    )  # fmt: skip
    found = []
    for name, drafter in drafters.items():
        own, cost = limit_of(drafter, most), costs[name].cost
        found.append(
            Sized(
                name=name,
                family=drafter.family,
                most=own,
                weights=weights(drafter),
                cost=costs[name],
                break_even=needed(cost, 1.0, own),
                twice=needed(cost, 2.0, own),
                limit=max(cost.speedup(evenly(1.0, n)) for n in range(1, own + 1)),
            )
        )
    return found


# ---- said


def _print(
    console: Console, target: Target, law: Law, context: int, found: Sequence[Sized], most: int
) -> None:
    first = found[0].cost.cost
    passes = ", ".join(f"{n}: {first.v[n]:.2f}" for n in sorted(first.v))
    console.print(
        f"one plain target pass takes {1e3 * first.seconds:.1f} ms at batch 1 behind {context} "
        f"tokens, {law.label}; all figures below are in this unit",
        soft_wrap=True,
    )
    console.print(f"v(n), a pass over n rows in a round: {passes}", soft_wrap=True)
    headers = (
        "drafter", "weights", "MB", "c_first", "floor", "c", "floor", "α 1×", "γ", "α 2×", "γ",
    )  # fmt: skip
    rows = [
        (
            one.name,
            f"{one.weights.parameters / 1e6:.1f}M",
            f"{one.weights.bytes / 1e6:.0f}",
            *(f"{x:.3f}" for x in _steps(one.cost)),
            *_need(one.break_even),
            *_need(one.twice),
        )
        for one in found
    ]
    print_table(Table("Drafters before training", headers, tuple(rows)), console)
    never = f"never: not even with α = 1 and drafts of up to {most} tokens."
    for line in (*_MEANINGS, _ASSUMED, never):
        console.print(line, style="dim", soft_wrap=True)


def _steps(cost: StepCost) -> tuple[float, float, float, float]:
    return cost.c_first, cost.floor_first, cost.c, cost.floor


def _need(need: Need | None) -> tuple[str, str]:
    """Overlap and draft length."""
    return ("never", "") if need is None else (f"{need.overlap:.2f}", f"{need.num_draft_tokens}")


def _report(
    recipe: Recipe, target: Target, law: Law, context: int, turns: int, found: Sequence[Sized]
) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "target": {k: target.provenance[k] for k in ("name", "parameters", "dtype", "weights")},
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "law": law.label,
        "context": context,
        "turns": turns,
        "assumed": _ASSUMED,
        "candidates": [one.to_dict() for one in found],
    }
