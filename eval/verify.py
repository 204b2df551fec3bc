"""Acceptance rules as pure functions of tensors: which draft tokens stay, and what follows them.

Batched, rows independent. Each row drafted its first `drafted[b]` <= γ tokens; the rest of the
row is padding of any content. `log_q[b, i]` is the law that draft token i was *really drawn from*
(a deterministic choice is one-hot), `log_p[b, i]` the target's serving law at the same place,
`log_p[b, drafted[b]]` its law after the whole draft. The output is distributed as the target alone,
whatever q is; a token with p = 0 is never emitted. Uniforms lie in [0, 1), best in float64.

Every rule returns (accepted [B], next_token [B]): the round emits draft[b, :accepted[b]], then
next_token[b]. Cutting at end tokens is left to the caller. A drafter that decided to stop *after
seeing* a token must still submit it: dropping it here biases the output.
"""

import math

import torch
from torch import Tensor

from ..data.warp import pick


def _valid(draft: Tensor, drafted: Tensor) -> Tensor:
    """True where the row really drafted, `[B, γ]`."""
    return torch.arange(draft.shape[1], device=draft.device) < drafted[:, None]


def _log_ratio(draft: Tensor, log_q: Tensor, log_p: Tensor, valid: Tensor) -> Tensor:
    """log p(x)/q(x) of the draft tokens, `[B, γ]`; -inf wherever p(x) = 0."""
    ids = draft.masked_fill(~valid, 0)[..., None]  # [B, γ, 1]
    log_q_x = log_q.gather(2, ids).squeeze(2)
    log_p_x = log_p[:, : draft.shape[1]].gather(2, ids).squeeze(2)
    return torch.where(log_p_x == -math.inf, log_p_x, log_p_x - log_q_x)


def _next(
    log_q: Tensor,
    log_p: Tensor,
    scale: Tensor,
    accepted: Tensor,
    drafted: Tensor,
    u_final: Tensor,
) -> Tensor:
    """Draw from norm(max(scale·p - q, 0)) after a rejection, from p after none: `[B]`.

    Where the residual is numerically zero (p = q, so a rejection had probability 0) p stands in.
    """
    rows = torch.arange(len(accepted), device=accepted.device)
    p = log_p[rows, accepted].double().exp()  # [B, V]
    if log_q.shape[1] == 0:
        return pick(p, u_final)
    q = log_q[rows, accepted.clamp_max(log_q.shape[1] - 1)].double().exp()  # [B, V]
    residual = (scale[:, None] * p - q).clamp_min(0.0)
    use_p = (accepted == drafted) | ~(residual.sum(1) > 0)  # [B]
    return pick(torch.where(use_p[:, None], p, residual), u_final)


def greedy(draft: Tensor, target_argmax: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """T = 0: accept while the draft is the target's argmax, then emit the argmax.

    `draft` [B, γ], `target_argmax` [B, γ+1], `drafted` [B].
    """
    match = (draft == target_argmax[:, : draft.shape[1]]) & _valid(draft, drafted)  # [B, γ]
    accepted = match.long().cumprod(1).sum(1)
    return accepted, target_argmax.gather(1, accepted[:, None]).squeeze(1)


def token(
    draft: Tensor,
    log_q: Tensor,
    log_p: Tensor,
    u_accept: Tensor,
    u_final: Tensor,
    drafted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept x_i with probability min(1, p/q); at the first rejection draw from max(p - q, 0).

    `draft` [B, γ], `log_q` [B, γ, V], `log_p` [B, γ+1, V], `u_accept` [B, γ], `u_final` [B],
    `drafted` [B].
    """
    valid = _valid(draft, drafted)
    ratio = _log_ratio(draft, log_q, log_p, valid)  # [B, γ]
    passed = (u_accept.double().log() < ratio) & valid
    accepted = passed.long().cumprod(1).sum(1)
    scale = torch.ones_like(u_final, dtype=torch.float64)
    return accepted, _next(log_q, log_p, scale, accepted, drafted, u_final)


def block(
    draft: Tensor,
    log_q: Tensor,
    log_p: Tensor,
    u_accept: Tensor,
    u_final: Tensor,
    drafted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Block verification: the longest prefix that passes its own test, earlier failures or not.

    Same arguments as `token`. Accepts at least as much on average, the same for one-hot drafts.
    """
    batch, gamma = draft.shape
    valid = _valid(draft, drafted)
    ratio = _log_ratio(draft, log_q, log_p, valid).double()  # [B, γ]
    log_joint = ratio.new_zeros(batch)  # log P_0
    joints = [log_joint.exp()]
    accepted = torch.zeros_like(drafted)
    for i in range(1, gamma + 1):
        log_joint = (log_joint + ratio[:, i - 1]).clamp_max(0.0)  # [B], log P_i
        joint = log_joint.exp()
        joints.append(joint)
        threshold = joint  # [B], h_i of the last drafted token
        if i < gamma:
            p, q = log_p[:, i].double().exp(), log_q[:, i].double().exp()  # [B, V] after x_i
            excess = (joint[:, None] * p - q).clamp_min(0.0).sum(1)  # [B], Z_i
            whole = excess + 1.0 - joint
            inner = torch.where(whole > 0, excess / whole, 1.0)
            threshold = torch.where(drafted == i, joint, inner)
        passed = (u_accept[:, i - 1] < threshold) & valid[:, i - 1]
        accepted = torch.where(passed, i, accepted)
    scale = torch.stack(joints, 1).gather(1, accepted[:, None]).squeeze(1)
    return accepted, _next(log_q, log_p, scale, accepted, drafted, u_final)
