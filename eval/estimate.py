"""Engine-free estimates from held-out records: overlap, S_k and tokens per round, with intervals.

Valid on samples of exactly the law in question: callers pass records of one law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.records import Record
from ..data.target import Target
from ..data.warp import Law, log_probs
from ..drafters.base import Drafter, Step, TrainBatch
from ..drafters.batch import collate
from ..drafters.distribution import DraftVocabularyP, reply_columns
from ..train.accepted_length import (
    drafted_tokens,
    expected_rounds,
    survival,
    survival_greedy,
    survival_token,
    windows,
)
from ..train.losses import overlap
from .intervals import Interval, ratio_interval

_ROWS = 8


@dataclass(frozen=True)
class Conversation:
    """What one record says about the drafter, N = reply tokens after the first.

    overlap, mass: sums over those tokens of Σ min(p, q) and of P(V_d); chance: `[N, γ]` factor by
    which survival shrinks at each position, log r above T = 0 and a match at 0; limit: tokens that
    decoding was allowed after the first.
    """

    tokens: int
    overlap: float
    mass: float
    chance: Tensor
    limit: int


@torch.inference_mode()
def score(
    target: Target, drafter: Drafter, records: Sequence[Record], law: Law, steps: int, limit: int
) -> list[Conversation]:
    """Teacher-forced scores of `records`, all sampled under `law`; `limit` = max_new_tokens."""
    found: dict[str, Conversation] = {}
    longer = sorted((r for r in records if len(r.reply) > 1), key=lambda r: len(r.ids))
    for start in range(0, len(longer), _ROWS):
        part = longer[start : start + _ROWS]
        batch = collate(part, sorted({r.domain for r in part})).to(target.device)
        for record, scored in zip(part, _score(target, drafter, batch, law, steps), strict=True):
            shared, mass, chance = scored
            found[record.key] = Conversation(len(chance), shared, mass, chance, limit - 1)
    return [found[r.key] for r in records if r.key in found]


def _score(
    target: Target, drafter: Drafter, batch: TrainBatch, law: Law, steps: int
) -> list[tuple[float, float, Tensor]]:
    table = DraftVocabularyP(target, drafter.draft_ids, law)(batch.hidden, batch.log_z)  # [R, V_d]
    rows = batch.ids.shape[0]
    replies = batch.reply_lens.tolist()
    column = reply_columns(batch, drafter.draft_ids, table.shape[-1])  # [R]
    unrolled = drafter.unroll(batch, steps)
    chances = [
        _chance(drafter, step, table, column, law, float("-inf") if law.temperature else 0.0)
        for step in unrolled
    ]  # K x [R]
    shared = _shared(drafter, unrolled[0], table, law)  # [R]
    mass = table.exp().sum(-1)  # [R]
    out = []
    for b in range(rows):
        first = int(batch.first[b]) + 1
        own = slice(first, first + replies[b] - 1)
        if drafter.one_pass:
            chance = windows(chances[0][own][None], steps)[0]  # [N, γ]
        else:
            # Step k's value at token i belongs to the round that began at token i - k.
            chance = torch.stack([_shift(c[own], k) for k, c in enumerate(chances)], 1)
        out.append((float(shared[own].sum()), float(mass[own].sum()), chance.cpu()))
    return out


def _shift(values: Tensor, k: int) -> Tensor:
    return torch.cat([values[k:], values.new_zeros(min(k, len(values)))])


def _chance(
    drafter: Drafter, step: Step, table: Tensor, column: Tensor, law: Law, outside: float
) -> Tensor:
    """log r (or, at T = 0, 1.0 for a match) per reply token `[R]`; unscored tokens hold 0."""
    out = table.new_zeros(table.shape[0])
    logits = drafter.head(step.hidden).float()[..., : table.shape[-1]]  # [N, V_d]
    at = column[step.token]  # [N]
    if law.temperature == 0:
        value = (logits.argmax(-1) == at).to(out.dtype)
    else:
        index = at.clamp_min(0)[:, None]
        log_q = log_probs(logits, law).gather(1, index)[:, 0]
        value = log_q - table[step.token].gather(1, index)[:, 0]
    out[step.token] = value.masked_fill(at < 0, outside)
    return out


def _shared(drafter: Drafter, step: Step, table: Tensor, law: Law) -> Tensor:
    out = table.new_zeros(table.shape[0])
    logits = drafter.head(step.hidden).float()[..., : table.shape[-1]]
    out[step.token] = overlap(table[step.token], log_probs(logits, law))
    return out


@dataclass(frozen=True)
class Estimate:
    """Expected figures of one cell at one draft length."""

    tokens_per_round: Interval
    survival: tuple[float, ...]


def estimate(
    conversations: Sequence[Conversation], law: Law, num_draft_tokens: int, bootstrap: int
) -> Estimate:
    """τ and S_k of decoding with `num_draft_tokens`, expected over the drafts."""
    length = torch.tensor([c.tokens for c in conversations])  # [B]
    longest = int(length.max())
    chance = torch.zeros(len(conversations), longest, num_draft_tokens, dtype=torch.float64)
    for b, c in enumerate(conversations):
        chance[b, : c.tokens] = c.chance[:, :num_draft_tokens].double()
    m = survival_greedy(chance > 0.5).double() if law.temperature == 0 else survival_token(chance)
    rounds, weights = expected_rounds(m, length)
    budget = torch.tensor([c.limit for c in conversations])
    drafted = drafted_tokens(length, budget, longest, num_draft_tokens)
    accepted, attempts = survival(m, weights, length, drafted)
    return Estimate(
        ratio_interval(length.double().numpy(), rounds.numpy(), bootstrap),
        tuple((accepted / attempts.clamp_min(1e-12)).tolist()),
    )


def overlap_interval(conversations: Sequence[Conversation], bootstrap: int) -> Interval:
    """α pooled over tokens, resampled over conversations."""
    shared = np.array([c.overlap for c in conversations])
    return ratio_interval(shared, np.array([float(c.tokens) for c in conversations]), bootstrap)


def captured_mass(conversations: Sequence[Conversation]) -> float:
    """P(V_d) pooled over tokens: the ceiling of α."""
    return sum(c.mass for c in conversations) / sum(c.tokens for c in conversations)
