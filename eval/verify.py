"""Acceptance rules for chains: which draft tokens stay, and what follows them.

Batched, rows independent. Each row drafted its first `drafted[b]` <= γ tokens; the rest of the
row is padding of any content. `log_q[b, i]` is the law that draft token i was *really drawn from*
(a deterministic choice is one-hot), `log_p[b, i]` the target's serving law at the same place,
`log_p[b, drafted[b]]` its law after the whole draft. The output is distributed as the target alone,
whatever q is; a token with p = 0 is never emitted. Ratios and joint ratios are float64; laws over
the vocabulary keep the dtype they come in, float32 or better, and are summed in float64.

Every rule returns (accepted [B], next_token [B]): the round emits draft[b, :accepted[b]], then
next_token[b]. Cutting at end tokens is left to the caller. A drafter that decided to stop *after
seeing* a token must still submit it: dropping it here biases the output.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .draws import Draws

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Draws], tuple[Tensor, Tensor]]
"""(draft [B, γ], log_q [B, γ, V], log_p [B, γ+1, V], drafted [B], draws), as `token`."""


def _valid(draft: Tensor, drafted: Tensor) -> Tensor:
    """True where the row really drafted, `[B, γ]`."""
    return torch.arange(draft.shape[1], device=draft.device) < drafted[:, None]


def _log_ratio(draft: Tensor, log_q: Tensor, log_p: Tensor, valid: Tensor) -> Tensor:
    """log p(x)/q(x) of the draft tokens, `[B, γ]` float64; -inf wherever p(x) = 0."""
    ids = draft.masked_fill(~valid, 0)[..., None]  # [B, γ, 1]
    log_q_x = log_q.gather(2, ids).squeeze(2).double()
    log_p_x = log_p[:, : draft.shape[1]].gather(2, ids).squeeze(2).double()
    return torch.where(log_p_x == -math.inf, log_p_x, log_p_x - log_q_x)


def residual(p: Tensor, q: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """max(scale·p - q, 0), `[B, V]`; p itself where that is numerically zero.

    It can be zero only where p = q, so that a rejection had probability 0.
    """
    left = (scale * p - q).clamp_min(0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _next(
    log_q: Tensor, log_p: Tensor, scale: Tensor, accepted: Tensor, drafted: Tensor, draws: Draws
) -> Tensor:
    """Draw from norm(max(scale·p - q, 0)) after a rejection, from p after none: `[B]`."""
    rows = torch.arange(len(accepted), device=accepted.device)
    p = log_p[rows, accepted].exp()  # [B, V]
    refused = accepted < drafted  # [B]
    if bool(refused.any()):
        q = log_q[rows, accepted.clamp_max(log_q.shape[1] - 1)].exp()  # [B, V]
        p = torch.where(refused[:, None], residual(p, q, scale[:, None].to(p.dtype)), p)
    return draws.categorical(p, torch.ones_like(accepted, dtype=torch.bool))


def greedy(draft: Tensor, target_argmax: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """T = 0: accept while the draft is the target's argmax, then emit the argmax.

    `draft` [B, γ], `target_argmax` [B, γ+1], `drafted` [B].
    """
    match = (draft == target_argmax[:, : draft.shape[1]]) & _valid(draft, drafted)  # [B, γ]
    accepted = match.long().cumprod(1).sum(1)
    return accepted, target_argmax.gather(1, accepted[:, None]).squeeze(1)


def token(
    draft: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Accept x_i with probability min(1, p/q); at the first rejection draw from max(p - q, 0).

    `draft` [B, γ], `log_q` [B, γ, V], `log_p` [B, γ+1, V], `drafted` [B].
    """
    valid = _valid(draft, drafted)
    chance = _log_ratio(draft, log_q, log_p, valid).exp().clamp_max(1.0)  # [B, γ]
    accepted = draws.bernoulli(chance, valid).long().cumprod(1).sum(1)
    scale = torch.ones(len(draft), dtype=torch.float64, device=draft.device)
    return accepted, _next(log_q, log_p, scale, accepted, drafted, draws)


def block(
    draft: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Block verification: the longest prefix that passes its own test, earlier failures or not.

    Same arguments as `token`. Accepts at least as much on average, the same for one-hot drafts.
    """
    batch, gamma = draft.shape
    valid = _valid(draft, drafted)
    ratio = _log_ratio(draft, log_q, log_p, valid)  # [B, γ]
    log_joint = ratio.new_zeros(batch)  # log P_0
    joints, chances = [log_joint.exp()], []
    for i in range(1, gamma + 1):
        log_joint = (log_joint + ratio[:, i - 1]).clamp_max(0.0)  # [B], log P_i
        joint = log_joint.exp()
        joints.append(joint)
        chance = joint  # [B], h_i of the last drafted token
        if i < gamma:
            p, q = log_p[:, i].exp(), log_q[:, i].exp()  # [B, V] after x_i
            left = p.mul_(joint[:, None].to(p.dtype)).sub_(q).clamp_min_(0.0)
            excess = left.sum(1, dtype=torch.float64)  # [B], Z_i
            whole = excess + 1.0 - joint
            inner = torch.where(whole > 0, excess / whole, 1.0)
            chance = torch.where(drafted == i, joint, inner)
        chances.append(chance)
    accepted = torch.zeros_like(drafted)
    if gamma:
        passed = draws.bernoulli(torch.stack(chances, 1), valid).long()  # [B, γ]
        places = torch.arange(1, gamma + 1, device=draft.device)
        accepted = (passed * places).amax(1)
    scale = torch.stack(joints, 1).gather(1, accepted[:, None]).squeeze(1)
    return accepted, _next(log_q, log_p, scale, accepted, drafted, draws)
