"""The rows of a report: what one domain under one law comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.records import Record, held_out
from ..data.warp import Law, law_of
from ..train.score import Conversation, expected
from .estimate import Estimate, captured_mass, estimate, overlap_interval
from .intervals import Interval, ratio_interval
from .lengths import in_order
from .rows import Output
from .speed import Cost, TreeCost
from .timing import Timing


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
    domains.sort(key=in_order)
    cells = [Cell(d, law, held_out(records, law, d)) for d in domains for law in laws]
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


@dataclass(frozen=True)
class Found:
    """All that an evaluation found out about a cell.

    scores: of its replies that can be drafted; outputs: what was decoded, by record key, of all
    cells; cost, tree: of chains and of the recipe's tree; timing: of some of its prompts.
    """

    cell: Cell
    scores: list[Conversation]
    outputs: dict[str, Output]
    cost: Cost | None = None
    tree: TreeCost | None = None
    timing: Timing | None = None

    @property
    def decoded(self) -> list[tuple[Record, Output]]:
        records = self.cell.records
        return [(r, self.outputs[r.key]) for r in records if r.key in self.outputs]


def cell_row(recipe: Recipe, found: Found, by_serving: dict[str, Any]) -> dict[str, Any]:
    """A cell's figures: estimated, decoded and timed.

    Estimates are of chains of a fixed length; where a policy ends them, or trees are drafted, there
    is none, and the speed is predicted from the rounds that were decoded.
    """
    section = recipe.eval
    gamma = recipe.serving.num_draft_tokens
    fixed = recipe.serving.policy is None and recipe.serving.tree is None
    known = estimate(found.scores, gamma, recipe.serving.verifier, section.bootstrap)
    every = [r for _, o in found.decoded for r in o.rounds]
    return {
        "domain": found.cell.domain,
        "law": found.cell.law.label,
        **_pooled(found.scores, found.decoded, section.bootstrap),
        "acceptance_by_position": [_position(every, k) for k in range(1, gamma + 1)],
        "uncaptured_tokens": sum(c.uncaptured for c in found.scores),
        "excluded_samples": sum(c.excluded for c in found.scores),
        "survival_estimated": [s.to_dict() for s in known.survival] if fixed else [],
        "tokens_per_round_estimated": known.tokens_per_round.to_dict() if fixed else None,
        "tokens_per_round_by_serving": by_serving,
        "speed": _speed(found, known if fixed else None, every, gamma),
    }


def total_rows(recipe: Recipe, found: Sequence[Found]) -> list[dict[str, Any]]:
    """By law, the counts of all domains together: sums, in which long replies weigh more."""
    rows = []
    for law in dict.fromkeys(f.cell.law for f in found):
        own = [f for f in found if f.cell.law == law]
        scores = [c for f in own for c in f.scores]
        decoded = [pair for f in own for pair in f.decoded]
        rows.append({"law": law.label, **_pooled(scores, decoded, recipe.eval.bootstrap)})
    return rows


def _pooled(
    scores: Sequence[Conversation], decoded: Sequence[tuple[Record, Output]], bootstrap: int
) -> dict[str, Any]:
    """Ratios of pooled counts. Verification looks at drafted tokens up to the first it refuses:
    `tested` are those."""
    ids = [r.prompt_id for r, _ in decoded]
    produced = np.array([len(o.ids) - 1.0 for _, o in decoded])
    rounds = np.array([float(len(o.rounds)) for _, o in decoded])
    every = [r for _, o in decoded for r in o.rounds]
    drafted, accepted = sum(d for d, _ in every), sum(a for _, a in every)
    return {
        "prompts": len(set(ids)),
        "replies": len(decoded),
        "tokens": int(produced.sum()),
        "overlap": overlap_interval(scores, bootstrap).to_dict(),
        "captured_mass": captured_mass(scores),
        "rounds": len(every),
        "undrafted_rounds": sum(d == 0 for d, _ in every),
        "drafted": drafted,
        "tested": sum(min(d, a + 1) for d, a in every),
        "accepted": accepted,
        "draft_acceptance_rate": accepted / max(1, drafted),
        "mean_accepted": accepted / max(1, len(every)),
        "tokens_per_round": ratio_interval(produced, rounds, bootstrap, ids).to_dict(),
        "tokens_per_round_by_reply": _by_reply(produced, rounds, bootstrap, ids).to_dict(),
    }


def _by_reply(
    produced: NDArray[np.float64], rounds: NDArray[np.float64], bootstrap: int, ids: list[str]
) -> Interval:
    """Mean of each reply's own tokens per round, in which short replies weigh as much as long."""
    some = rounds > 0
    own = produced[some] / rounds[some]
    names = [name for name, kept in zip(ids, some, strict=True) if kept]
    return ratio_interval(own, np.ones_like(own), bootstrap, names)


def _speed(
    found: Found, known: Estimate | None, rounds: Sequence[tuple[int, int]], gamma: int
) -> dict[str, Any] | None:
    timing, cost = found.timing, found.tree or found.cost
    if timing is None or cost is None:
        return None
    return {
        "prompts": timing.prompts,
        "plain_tokens_per_s": timing.tokens_per_s(0),
        "speculative_tokens_per_s": timing.tokens_per_s(gamma),
        "plain_prefill_seconds": timing.prefill(0),
        "speculative_prefill_seconds": timing.prefill(gamma),
        "speedup": timing.speedup(gamma).to_dict(),
        "predicted": _predicted(cost, known, rounds, gamma),
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


def sweep_row(recipe: Recipe, found: Found, lengths: Sequence[int]) -> dict[str, Any]:
    """Expected and predicted figures of chains of every length, and the speedups measured."""
    section, timing, cost = recipe.eval, found.timing, found.cost
    known = [estimate(found.scores, g, recipe.serving.verifier, section.bootstrap) for g in lengths]
    survivals = [[s.value for s in one.survival] for one in known]
    return {
        "domain": found.cell.domain,
        "law": found.cell.law.label,
        "num_draft_tokens": list(lengths),
        "tokens_per_round_estimated": [one.tokens_per_round.to_dict() for one in known],
        "survival_estimated": survivals,
        "predicted": None if cost is None else [cost.speedup(s) for s in survivals],
        "measured": [] if timing is None else [
            {"num_draft_tokens": g, **timing.speedup(g).to_dict()} for g in sorted(timing.lengths)
        ],
    }  # fmt: skip


def survival_of(recipe: Recipe, found: Found) -> list[float]:
    """S_k estimated for chains of the served length."""
    served = recipe.serving
    known = expected(found.scores, served.num_draft_tokens, served.verifier)
    return list(known.survival)


def cost_rows(
    costs: dict[str, Cost], trees: dict[str, TreeCost], generate: Interval, context: int
) -> dict[str, Any]:
    """What passes and steps cost, as the report has it."""
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
        "context": context,
        "generate_ratio": generate.to_dict(),
    }
