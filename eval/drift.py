"""One drafter before and after its target changed: what acceptance is lost, and what to do then.

Before: the requests of an evaluation. After: the changed target's own replies to the same prompts,
scored without decoding. Replies are others, as the target is, so that conversations are paired and
tokens are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..configs.recipe import Recipe
from ..data.gather import recompute_states
from ..data.records import Record
from ..data.target import Target
from ..data.warp import log_probs
from ..drafters.base import Drafter
from ..train.score import expected, score
from .cells import Cell
from .compare import LEVEL, RESAMPLES, pairs_by_cell
from .intervals import Interval, ratio_interval
from .paired import Difference, Pairs, ratio_difference
from .request_rows import Expected, Overlap, RequestRow
from .speed import Cost
from .tables import MIN_CONVERSATIONS

KEPT = 0.02
"""A smaller share of τ that is lost is worth no training: other settings move it as much."""
HALVED = 0.5
"""Where less than this share of α is left, the drafter's weights are no better a beginning than new
ones: what it knew of the target is mostly gone."""
BREAK_EVEN = 1.0
"""A predicted speedup of no more does not pay, whatever was lost."""
ADVICE = ("reuse", "warm start", "retrain")
"""From the least work to the most. A warm start trains on from the drafter (`drafter.start`) on
replies of the changed target; retraining begins anew."""

_TOGETHER = 8  # records the old target reads in one pass

CellKey = tuple[str, str]
"""Domain and law."""


@dataclass(frozen=True)
class Scored:
    """A reply of the changed target, and how the drafter is expected to draft it."""

    domain: str
    law: str
    prompt_id: str
    turn: int
    seed: int
    overlap: Overlap
    expected: Expected

    @property
    def pair(self) -> tuple[str, str, str, int, int]:
        return self.domain, self.law, self.prompt_id, self.turn, self.seed


@dataclass(frozen=True)
class After:
    """One domain under one law with the changed target.

    survival: S_k expected of it; moved: total variation between old and new target, pooled over
    reply tokens, None where the old one is not at hand.
    """

    scored: list[Scored]
    survival: tuple[float, ...]
    moved: Interval | None = None


def accepted_after(
    recipe: Recipe, target: Target, drafter: Drafter, cells: Sequence[Cell], limit: int
) -> dict[CellKey, After]:
    """Every cell's replies, scored as the recipe serves them; `limit` as in `score`."""
    served, found = recipe.serving, {}
    for cell in cells:
        said = [r for r in cell.records if len(r.reply) > 1]
        scores = score(
            target, drafter, said, cell.law, served.num_draft_tokens, limit, served.drafting
        )
        course = expected(scores, served.num_draft_tokens, served.verifier)
        figures = zip(said, scores, course.tokens.tolist(), course.rounds.tolist(), strict=True)
        scored = [
            Scored(
                *(cell.domain, cell.law.label, r.prompt_id, r.turn, r.seed),
                Overlap(*conversation.overlap[0]),
                Expected(tokens, rounds),
            )
            for r, conversation, tokens, rounds in figures
        ]
        found[cell.domain, cell.law.label] = After(scored, course.survival)
    return found


@torch.inference_mode()
def moved(old: Target, new: Target, cell: Cell, bootstrap: int) -> Interval:
    """Total variation between two targets' laws, Σ |p - p'| / 2, over the tokens of the new one's
    replies; one minus it is the overlap that the old target itself would have as a draft.

    The records have the new target's states. At T=0 it is the share of tokens where the most
    probable one is another.
    """
    sums, counts, names = [], [], []
    for start in range(0, len(cell.records), _TOGETHER):
        part = cell.records[start : start + _TOGETHER]
        for record, before in zip(part, recompute_states(old, part, ()), strict=True):
            apart = _law(new, record, cell).sub_(_law(old, before, cell)).abs_().sum(-1) / 2  # [R]
            sums.append(float(apart.sum()))
            counts.append(float(len(apart)))
            names.append(record.prompt_id)
    return ratio_interval(np.array(sums), np.array(counts), bootstrap, names)


def _law(target: Target, record: Record, cell: Cell) -> torch.Tensor:
    """What the record's reply was drawn from, by this target: probabilities `[R, V]`."""
    assert record.states is not None
    logits = target.logits(record.states.hidden.to(target.device))
    return log_probs(logits, cell.law).exp().double().cpu()


# ---- before and after


def drift_rows(
    before: Sequence[RequestRow], after: Mapping[CellKey, After], report: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each domain and law that both have; changes are after - before.

    report: of the evaluation before, whose costs say what the acceptance after is worth.
    """
    scored = [row for found in after.values() for row in found.scored]
    drafted = [row for row in before if row.expected is not None]
    rows = []
    for (domain, law), pairs in pairs_by_cell(drafted, scored).items():
        names = [a.prompt_id for a, _ in pairs]
        overlap = ratio_difference(
            _sums([a.overlap for a, _ in pairs]), _sums([b.overlap for _, b in pairs]), names,
            RESAMPLES,
        )  # fmt: skip
        tau = ratio_difference(
            _sums([a.expected for a, _ in pairs]), _sums([b.expected for _, b in pairs]), names,
            RESAMPLES,
        )  # fmt: skip
        if overlap is None or tau is None:
            continue
        found = after[domain, law]
        cost = cost_of(report, law)
        speedup = None if cost is None else cost.speedup(found.survival)
        advice, why = advise(overlap, tau, len(set(names)), speedup)
        rows.append(
            {
                "domain": domain,
                "law": law,
                "conversations": len(set(names)),
                "replies": len(pairs),
                "overlap": overlap.to_dict(),
                "tokens_per_round_estimated": tau.to_dict(),
                "lost": 1 - tau.other / tau.one,
                "speedup_predicted": speedup,
                "target_moved": None if found.moved is None else found.moved.to_dict(),
                "advice": advice,
                "why": why,
            }
        )
    return rows


def _sums(figures: Sequence[Overlap | Expected | None]) -> Pairs:
    """Numerators and denominators, `[N, 2]`."""
    rows = [
        (f.sum, float(f.count)) if isinstance(f, Overlap) else (f.tokens, f.rounds)
        for f in figures
        if f is not None
    ]
    return np.array(rows, np.float64)


def cost_of(report: Mapping[str, Any], law: str) -> Cost | None:
    """The costs of chains that a report holds; None where nothing was timed under that law."""
    found = report.get("cost") or {}
    own = (found.get("by_law") or {}).get(law)
    if own is None:
        return None
    v = dict(zip(found["rows"], own["v"], strict=True))
    seconds = found["plain_seconds_per_token"] / (1 + own["o_plain"])
    return Cost(seconds, v, own["c_first"], own["c"], own["o"], own["o_plain"])


def advise(
    overlap: Difference, tau: Difference, conversations: int, speedup: float | None
) -> tuple[str, str]:
    """One of `ADVICE` and why, from α and τ before (one) and after (other).

    retrain: less than `HALVED` of α is left; warm start: a share of `KEPT` of τ or more is lost, or
    the predicted speedup is not above `BREAK_EVEN`; else reuse. A loss counts for chance where
    drafters that accept alike would differ as much in more than `LEVEL` of cases, for τ in α, too,
    which shows a loss from fewer replies; with fewer than `MIN_CONVERSATIONS` conversations nothing
    does, for they would hide any loss.
    """

    def chance(difference: Difference) -> bool:
        p = difference.p
        return conversations >= MIN_CONVERSATIONS and p is not None and p > LEVEL

    lost = 1 - tau.other / tau.one
    few = "" if conversations >= MIN_CONVERSATIONS else f", from {conversations} conversations only"
    if overlap.other < HALVED * overlap.one and not chance(overlap):
        return "retrain", f"α fell from {overlap.one:.3f} to {overlap.other:.3f}, below half{few}"
    if lost >= KEPT and not (chance(tau) and chance(overlap)):
        return "warm start", f"τ fell by {lost:.1%}{few}"
    if lost >= KEPT:
        kept = f"τ fell by {lost:.1%}, no more than chance may"
    elif lost > 0:
        kept = f"τ fell by {lost:.1%}, less than {KEPT:.0%}{few}"
    else:
        kept = f"τ did not fall{few}"
    if speedup is None:
        return "reuse", f"{kept}; whether it pays was not measured"
    if speedup <= BREAK_EVEN:
        return "warm start", f"{kept}, but a predicted speedup of {speedup:.2f} does not pay"
    return "reuse", f"{kept}; predicted speedup {speedup:.2f}"


def by_domain(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Each domain's advice, the one that asks most of any of its laws, with what says so."""
    found: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda r: -ADVICE.index(r["advice"])):
        why = f"{row['law']}: {row['why']}"
        found.setdefault(row["domain"], {"advice": row["advice"], "why": why})
    return dict(sorted(found.items()))
