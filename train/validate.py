"""Held-out figures while training: α per domain and per unrolled step, expected tokens a round."""

from collections.abc import Sequence

from ..data.records import Record
from ..data.target import Target
from ..drafters.base import Drafter
from .objective import Objective
from .score import Conversation, expected, score

TAU = "tokens_per_round"


def held_out_figures(
    target: Target,
    drafter: Drafter,
    records: Sequence[Record],
    objective: Objective,
    steps: int,
    limit: int,
) -> dict[str, float]:
    """Pooled over conversations, of records sampled under the objective's law.

    `overlap_step_k` over all domains, `overlap/DOMAIN` of the first step; in all and by domain
    `captured_mass` (the ceiling of α), expected τ, and `survival_k`: S_k, the share of the rounds
    that draft position k which accept it.
    """
    steps = max(steps, objective.num_draft_tokens)
    found = score(
        target, drafter, records, objective.law, steps, limit, objective.drafting
    )  # fmt: skip
    if not found:
        return {}
    values = {}
    for k in range(len(found[0].overlap)):
        if any(c.overlap[k][1] for c in found):
            values[f"overlap_step_{k + 1}"] = _overlap(found, k)
    values |= _figures(found, objective, "")
    for domain in sorted({c.domain for c in found}):
        own = [c for c in found if c.domain == domain]
        values[f"overlap/{domain}"] = _overlap(own, 0)
        values |= _figures(own, objective, f"/{domain}")
    return values


def _overlap(found: Sequence[Conversation], step: int) -> float:
    count = sum(c.overlap[step][1] for c in found)
    return sum(c.overlap[step][0] for c in found) / max(1, count)


def _figures(found: Sequence[Conversation], objective: Objective, suffix: str) -> dict[str, float]:
    rounds = expected(found, objective.num_draft_tokens, objective.verifier)
    mass = sum(c.mass for c in found) / sum(c.tokens for c in found)
    values = {f"{TAU}{suffix}": rounds.tokens_per_round, f"captured_mass{suffix}": mass}
    for k, share in enumerate(rounds.survival):
        if rounds.attempts[:, k].any():  # else no reply is long enough
            values[f"survival_{k + 1}{suffix}"] = share
    return values
