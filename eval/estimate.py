"""Engine-free estimates from held-out records: overlap, S_k and tokens per round, with intervals.

The scores themselves, and what decoding is expected to do with them, are `train.score`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..train.score import Conversation, expected
from .intervals import Interval, ratio_interval


@dataclass(frozen=True)
class Estimate:
    """Expected figures of one cell at one draft length."""

    tokens_per_round: Interval
    survival: tuple[Interval, ...]


def estimate(
    conversations: Sequence[Conversation], num_draft_tokens: int, verifier: str, bootstrap: int
) -> Estimate:
    """τ and S_k of decoding with `num_draft_tokens`, expected over the drafts."""
    found = expected(conversations, num_draft_tokens, verifier)
    ids = [c.prompt_id for c in conversations]
    tau = ratio_interval(found.tokens.numpy(), found.rounds.numpy(), bootstrap, ids)
    pairs = zip(found.accepted.T.numpy(), found.attempts.T.numpy(), strict=True)
    return Estimate(tau, tuple(ratio_interval(a, n, bootstrap, ids) for a, n in pairs))


def overlap_interval(conversations: Sequence[Conversation], bootstrap: int) -> Interval:
    """α pooled over tokens, resampled over conversations."""
    shared = np.array([c.overlap[0][0] for c in conversations])
    tokens = np.array([float(c.tokens) for c in conversations])
    return ratio_interval(shared, tokens, bootstrap, [c.prompt_id for c in conversations])


def captured_mass(conversations: Sequence[Conversation]) -> float:
    """P(V_d) pooled over tokens: the ceiling of α."""
    return sum(c.mass for c in conversations) / sum(c.tokens for c in conversations)


def overlap_bounds(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Certain bounds of Σ min(p, q) where only K entries of each law are known.

    `log_p`, `log_q` `[..., K]` are normalised log-probabilities of the *same* K ids, as servers
    return them: not renormalised over the K, both at the temperature they were served at. Returns
    (low, high) `[...]`: L = Σ_K min(p, q) and L + min(1 - P_K, 1 - Q_K).
    """
    p, q = log_p.double().exp(), log_q.double().exp()
    low = p.minimum(q).sum(-1)
    rest = (1.0 - p.sum(-1)).minimum(1.0 - q.sum(-1)).clamp_min(0.0)
    return low, low + rest
