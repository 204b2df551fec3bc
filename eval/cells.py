"""The rows of a report: what one domain under one law comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.records import Record, held_out
from ..data.warp import Law, law_of
from ..train.score import Conversation, expected
from .estimate import Estimate, captured_mass, estimate, overlap_interval
from .intervals import ratio_interval
from .rows import Output
from .speed import Cost, Timing, TreeCost


@dataclass(frozen=True)
class Cell:
    """One domain under one law, with its held-out records."""

    domain: str
    law: Law
    records: list[Record]

    @property
    def name(self) -> str:
        return f"{self.domain} {self.law.label}"


def cells_of(recipe: Recipe, records: Sequence[Record]) -> list[Cell]:
    """Every held-out domain under every served law, where anything can be drafted.

    Raises `UserError` if there is nothing.
    """
    domains = list(dict.fromkeys(r.domain for r in records if r.split == "heldout"))
    laws = [law_of(section) for section in recipe.serving.laws]
    cells = [Cell(d, law, held_out(records, law, d)) for d in sorted(domains) for law in laws]
    found = [c for c in cells if _can_be_drafted(c)]
    if not found:
        raise UserError(
            "no held-out record was answered under a served law "
            f"({', '.join(law.label for law in laws)}); raise domains.*.holdout or collect again"
        )
    return found


def _can_be_drafted(cell: Cell) -> bool:
    """Whether any reply goes on after its first token, which comes from prefill."""
    return any(len(r.reply) > 1 for r in cell.records)


def cell_row(
    recipe: Recipe,
    cell: Cell,
    scores: Sequence[Conversation],
    by_serving: dict[str, Any],
    outputs: dict[str, Output],
    cost: Cost | TreeCost | None,
    timing: Timing | None,
) -> dict[str, Any]:
    """A cell's figures: estimated, decoded and timed.

    Estimates are of chains of a fixed length; where a policy ends them, or trees are drafted, there
    is none, and the speed is predicted from the rounds that were decoded.
    """
    section = recipe.eval
    gamma = recipe.serving.num_draft_tokens
    found = [r for r in cell.records if r.key in outputs]
    decoded, ids = [outputs[r.key] for r in found], [r.prompt_id for r in found]
    fixed = recipe.serving.policy is None and recipe.serving.tree is None
    known = estimate(scores, gamma, recipe.serving.verifier, section.bootstrap)
    produced = np.array([len(o.ids) - 1.0 for o in decoded])
    rounds = np.array([float(len(o.rounds)) for o in decoded])
    every = [r for o in decoded for r in o.rounds]
    drafted, accepted = sum(d for d, _ in every), sum(a for _, a in every)
    speed = None
    if cost is not None and timing is not None:
        speed = {
            "prompts": timing.prompts,
            "plain_tokens_per_s": timing.plain_tokens_per_s,
            "speculative_tokens_per_s": timing.fast_tokens_per_s[gamma],
            "speedup": timing.speedup[gamma].to_dict(),
            "predicted": _predicted(cost, known if fixed else None, every, gamma),
        }
    return {
        "domain": cell.domain,
        "law": cell.law.label,
        "prompts": len(set(ids)),
        "replies": len(decoded),
        "tokens": int(produced.sum()),
        "overlap": overlap_interval(scores, section.bootstrap).to_dict(),
        "captured_mass": captured_mass(scores),
        "acceptance_by_position": [_position(every, k) for k in range(1, gamma + 1)],
        "uncaptured_tokens": sum(c.uncaptured for c in scores),
        "excluded_samples": sum(c.excluded for c in scores),
        "survival_estimated": [s.to_dict() for s in known.survival] if fixed else [],
        "tokens_per_round": ratio_interval(produced, rounds, section.bootstrap, ids).to_dict(),
        "tokens_per_round_estimated": known.tokens_per_round.to_dict() if fixed else None,
        "tokens_per_round_by_serving": by_serving,
        "mean_accepted": accepted / max(1, len(every)),
        "draft_acceptance_rate": accepted / max(1, drafted),
        "rounds": len(every),
        "undrafted_rounds": sum(d == 0 for d, _ in every),
        "speed": speed,
    }


def _predicted(
    cost: Cost | TreeCost, known: Estimate | None, rounds: Sequence[tuple[int, int]], depth: int
) -> float:
    if isinstance(cost, TreeCost):
        return cost.speedup([_position(rounds, d)["survival"] for d in range(1, depth + 1)])
    if known is None:
        return cost.speedup_of(rounds)
    return cost.speedup([s.value for s in known.survival])


def _position(rounds: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    """Position k: rounds that drafted it, that accepted it, and given acceptance before it."""
    attempts = sum(d >= k for d, _ in rounds)
    before = sum(d >= k and a >= k - 1 for d, a in rounds)
    accepted = sum(a >= k for _, a in rounds)
    return {
        "position": k,
        "attempts": attempts,
        "accepted": accepted,
        "conditional": accepted / max(1, before),
        "survival": accepted / max(1, attempts),
    }


def sweep_row(
    recipe: Recipe,
    cell: Cell,
    scores: Sequence[Conversation],
    cost: Cost,
    timing: Timing,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Expected and predicted figures of chains of every length, and the speedups measured."""
    courses = [expected(scores, g, recipe.serving.verifier) for g in lengths]
    return {
        "domain": cell.domain,
        "law": cell.law.label,
        "num_draft_tokens": list(lengths),
        "tokens_per_round_estimated": [c.tokens_per_round for c in courses],
        "predicted": [cost.speedup(c.survival) for c in courses],
        "measured": [
            {"num_draft_tokens": g, **interval.to_dict()}
            for g, interval in sorted(timing.speedup.items())
        ],
    }


def cost_rows(
    costs: dict[str, Cost], trees: dict[str, TreeCost], ratio: dict[str, Any] | None
) -> dict[str, Any] | None:
    """What passes and steps cost, as the report has it."""
    if not costs or ratio is None:
        return None
    first = next(iter(costs.values()))
    return {
        "plain_seconds_per_token": first.seconds * (1 + first.o_plain),
        "rows": sorted(first.v),
        "v": [first.v[n] for n in sorted(first.v)],
        "by_law": {
            label: {
                "o": c.o,
                "o_plain": c.o_plain,
                "c": c.c,
                "c_first": c.c_first,
                "v": [c.v[n] for n in sorted(c.v)],
            }
            for label, c in costs.items()
        },
        "tree_by_law": {
            label: {"draft": t.draft, "v": t.v, "o": t.o, "o_plain": t.o_plain}
            for label, t in trees.items()
        },
        "context": ratio["context"],
        "generate_ratio": {k: ratio[k] for k in ("value", "low", "high")},
    }
