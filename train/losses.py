"""Per-token objectives: one function each, `[..., V] -> [...]`, in plain eager torch.

Every divergence takes `log_p` [..., V_d], the target's log-probabilities under the serving law,
gathered on the draft vocabulary and *not* renormalised (its mass may be below 1, entries may be
-inf), and `logits_q` [..., V_d], the draft's logits, already divided by the temperature. `p` is a
constant: no gradient flows to it. Arithmetic is float32 whatever the inputs (float64 stays).

Common conventions:
* the mass P = sum of p on the draft vocabulary is below 1 when tokens are missing; where P = 0
  loss and gradient are 0 in every objective;
* ties p(x) = q(x) belong to p: the derivative of min(p, q) is taken as 0 there;
* where an objective is infinite (`rkl` on a truncated p, `nla` and `greedy_mass` on disjoint
  supports) its value says so, and its gradient is finite.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..configs.errors import UserError


def _float_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _inputs(log_p: Tensor, logits_q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log p, p, mass of p, log q): shapes [..., V], [..., V], [...], [..., V]."""
    dtype = _float_dtype(logits_q)
    log_p = log_p.detach().to(dtype)
    p = log_p.exp()
    return log_p, p, p.sum(-1), logits_q.log_softmax(-1, dtype=dtype)


def _log_sum_exp(x: Tensor) -> Tensor:
    """logsumexp over the last axis whose gradient is 0, not NaN, where all entries are -inf."""
    empty = x.detach().amax(-1) == -math.inf  # [...]
    total = x.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    return total.masked_fill(empty, -math.inf)


def _forward_kl(log_p: Tensor, p: Tensor, mass: Tensor, log_q: Tensor) -> Tensor:
    gap = (log_p - log_q).masked_fill(p == 0, 0.0)  # [..., V], inf where only q is 0
    return (p * gap).sum(-1) + torch.special.entr(mass)  # entr(P) = -P log P, 0 at P = 0


def _variation(p: Tensor, mass: Tensor, log_q: Tensor) -> Tensor:
    """1 - overlap, as a sum of positive parts: never negative, and exact near 0."""
    missing = torch.relu(1.0 - mass)
    return torch.relu(p - log_q.exp()).sum(-1) + missing


def overlap(log_p: Tensor, logits_q: Tensor) -> Tensor:
    """Σ min(p, q), the probability that a draft token is accepted; at most P(V_d)."""
    _, p, _, log_q = _inputs(log_p, logits_q)
    q = log_q.exp()  # [..., V]
    return torch.where(q >= p, p, q).sum(-1)  # NaN in q stays visible


def ce(logits_q: Tensor, token: Tensor) -> Tensor:
    """-log q(x*) for the token the target sampled.

    `logits_q` [..., V_d], `token` [...] as an index into the draft vocabulary, negative where the
    token is outside of it: loss and gradient are 0 there.
    """
    log_q = logits_q.log_softmax(-1, dtype=_float_dtype(logits_q))
    chosen = log_q.gather(-1, token.clamp_min(0)[..., None]).squeeze(-1)
    return -chosen.masked_fill(token < 0, 0.0)


def fkl(log_p: Tensor, logits_q: Tensor) -> Tensor:
    """Forward KL, target first: P(V_d)·KL(p̃‖q) with p̃ = p/P(V_d). Gradient P·q - p."""
    return _forward_kl(*_inputs(log_p, logits_q))


def rkl(log_p: Tensor, logits_q: Tensor) -> Tensor:
    """Reverse KL, draft first: Σ q log(q/p). Infinite, with gradient 0, where q leaves p's support.

    On a reduced vocabulary this is KL(q‖p) over the whole of it, as q is 0 on the rest.
    """
    log_p, _, mass, log_q = _inputs(log_p, logits_q)
    q = log_q.exp()
    outside = ((q > 0) & (log_p == -math.inf)).any(-1)  # [...]
    skip = (q == 0) | outside[..., None]
    loss = (q * (log_q - log_p).masked_fill(skip, 0.0)).sum(-1)
    return loss.masked_fill(outside & (mass > 0), math.inf)


def jsd(log_p: Tensor, logits_q: Tensor, beta: float = 0.5) -> Tensor:
    """β·KL(p‖m) + (1-β)·KL(q‖m), m = βp + (1-β)q; β = 0 is `fkl`, β = 1 is `rkl`.

    On a reduced vocabulary the sums run over V_d: a constant β·log(1/β)·(1-P) below the value
    over the whole vocabulary.
    """
    if not 0.0 <= beta <= 1.0:
        raise UserError(f"beta of jsd is {beta}, but must lie between 0 (fkl) and 1 (rkl)")
    if beta == 0.0:
        return fkl(log_p, logits_q)
    if beta == 1.0:
        return rkl(log_p, logits_q)
    log_p, p, mass, log_q = _inputs(log_p, logits_q)
    q = log_q.exp()
    mix = beta * p + (1.0 - beta) * q  # [..., V]
    log_m = mix.masked_fill(mix == 0, 1.0).log()
    from_p = p * (log_p - log_m).masked_fill(p == 0, 0.0)
    from_q = q * (log_q - log_m).masked_fill(q == 0, 0.0)
    loss = (beta * from_p + (1.0 - beta) * from_q).sum(-1)
    return loss.masked_fill(mass == 0, 0.0)


def tv(log_p: Tensor, logits_q: Tensor) -> Tensor:
    """Total variation 1 - overlap. Its gradient vanishes when the draft is cold."""
    _, p, mass, log_q = _inputs(log_p, logits_q)
    return _variation(p, mass, log_q).masked_fill(mass == 0, 0.0)


def nla(log_p: Tensor, logits_q: Tensor) -> Tensor:
    """-log overlap, in log space: alive from a cold start; equal to `ce` on a one-hot p."""
    log_p, _, mass, log_q = _inputs(log_p, logits_q)
    log_min = torch.where(log_q >= log_p, log_p, log_q)  # [..., V], NaN in q stays visible
    return -_log_sum_exp(log_min).masked_fill(mass == 0, 0.0)


def lk_hybrid(log_p: Tensor, logits_q: Tensor, eta: float = 3.0) -> Tensor:
    """λ·fkl + (1-λ)·tv with λ = exp(-η·overlap), per token and without gradient through λ."""
    log_p, p, mass, log_q = _inputs(log_p, logits_q)
    variation = _variation(p, mass, log_q)
    weight = torch.exp(-eta * (1.0 - variation.detach()))  # [...]
    loss = weight * _forward_kl(log_p, p, mass, log_q) + (1.0 - weight) * variation
    return loss.masked_fill(mass == 0, 0.0)


def greedy_mass(log_p: Tensor, logits_q: Tensor, b: float = 1.0) -> Tensor:
    """-log Σ p·softmax(b·z): for engines that draft greedily, where acceptance is p(argmax q)."""
    if not b >= 1.0:
        raise UserError(f"b of greedy_mass is {b}, but must be at least 1")
    log_p, _, mass, log_s = _inputs(log_p, b * logits_q.to(_float_dtype(logits_q)))
    return -_log_sum_exp(log_p + log_s).masked_fill(mass == 0, 0.0)


OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "ce": ce,
    "fkl": fkl,
    "rkl": rkl,
    "jsd": jsd,
    "tv": tv,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
    "greedy_mass": greedy_mass,
}
"""Name -> function. All take (log_p, logits_q) except `ce`, which takes (logits_q, token)."""


def objective(name: str) -> Callable[..., Tensor]:
    """The objective of that name; UserError with the known names otherwise."""
    if name not in OBJECTIVES:
        raise UserError(f"no objective is called {name!r}; there are {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
