"""Objectives straight from hidden states and head weights, in chunks: no [tokens, V] is ever held.

Values and gradients are those of the eager functions in `losses.py` and `accepted_length.py`. Both
are computed together, chunk by chunk, before autograd sees anything: the result is one scalar that
carries the gradients of hidden states and head weights with it. A per-token objective needs one
sweep over the tokens. Objectives on accepted length weigh a token by what happens to its
neighbours, so a first sweep gathers a few numbers a token and a second one forms the gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import accepted_length as al
from .chunks import Block, Gradients, Heads, Unrolled, blocks, wanted

_MOST = 60.0  # largest log R that is told apart: e^60·q exceeds any p that float32 knows

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`f(log_p [n, V_d], logits [n, V_d], column [n]) -> [n]`; column is the sampled token's or -1."""


@dataclass(frozen=True)
class Measured:
    """What a sweep found out, without gradient.

    overlap: K x `[N_k]` Σ min(p, q); mass: `[N_0]` P(V_d); log_ratio, log_q: `[K, R]` of the
    sampled tokens at each step, -inf outside of the draft vocabulary, 0 where a step scores none;
    excluded: `[R]` sampled tokens to which p, as rebuilt here, gives no probability: rounding does
    that at ties (of the argmax, or where a law truncates), and their p is taken as 1.
    """

    overlap: list[Tensor]
    mass: Tensor
    log_ratio: Tensor
    log_q: Tensor
    excluded: Tensor


class _Sweep:
    """Collects `Measured` while blocks pass by."""

    def __init__(self, x: Unrolled):
        dtype = torch.float64 if x.hidden[0].dtype == torch.float64 else torch.float32
        device = x.column.device
        self._x = x
        self._overlap = [torch.zeros(len(t), dtype=dtype, device=device) for t in x.token]
        self._mass = torch.zeros(len(x.token[0]), dtype=dtype, device=device)
        shape = (len(x.token), len(x.column))
        self.log_ratio = torch.zeros(shape, dtype=torch.float64, device=device)
        self.log_q = torch.zeros(shape, dtype=torch.float64, device=device)
        self._excluded = torch.zeros(shape[1], dtype=torch.bool, device=device)

    def add(self, block: Block, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a block; returns its p and q, `[n, V_d]` each."""
        log_z = logits.logsumexp(-1, keepdim=True)  # [n, 1]
        log_z = log_z.masked_fill(log_z == -torch.inf, 0.0)  # nothing is proposed: q = 0
        p, q = block.log_p.exp(), (logits - log_z).exp()  # [n, V_d]
        if block.step == 0:
            self._mass[block.rows] = p.sum(-1).to(self._mass.dtype)
        # `losses.overlap` in place: NaN in q stays visible.
        self._overlap[block.step][block.rows] = torch.where(q >= p, p, q).sum(-1)
        column = self._x.column[block.token]
        at = column.clamp_min(0)[:, None]
        said = (logits.gather(1, at) - log_z)[:, 0].double()
        said = said.masked_fill(column < 0, -torch.inf)  # [n]
        log_p = block.log_p.gather(1, at)[:, 0].double().masked_fill(column < 0, 0.0)
        excluded = log_p == -torch.inf
        log_p = log_p.masked_fill(excluded, 0.0)
        self._excluded[block.token] = excluded
        self.log_q[block.step, block.token] = said
        self.log_ratio[block.step, block.token] = said - log_p
        return p, q

    def result(self) -> Measured:
        return Measured(self._overlap, self._mass, self.log_ratio, self.log_q, self._excluded)


@torch.no_grad()
def measure(x: Unrolled, heads: Heads) -> Measured:
    """Overlap, captured mass and ratios on the sampled tokens, no loss."""
    sweep = _Sweep(x)
    for block in blocks(x, heads):
        sweep.add(block, block.logits)
    return sweep.result()


def weighted_loss(
    x: Unrolled, heads: Heads, loss: TokenLoss, weight: Sequence[Tensor]
) -> tuple[Tensor, Measured]:
    """Σ weight·loss over all steps' tokens, scalar; `weight` K x `[N_k]`, constants.

    A weight of 0 drops a token even if its loss is not finite.
    """
    grads = Gradients(x, heads) if wanted(x, heads) else None
    sweep = _Sweep(x)
    total = torch.zeros((), dtype=torch.float64, device=x.column.device)
    with torch.no_grad():
        for block in blocks(x, heads):
            own = weight[block.step][block.rows]
            with torch.set_grad_enabled(grads is not None):
                raw = block.raw.requires_grad_(grads is not None)
                logits = block.logits
                value = loss(block.log_p, logits, x.column[block.token])  # [n]
                if grads is not None:
                    (slope,) = torch.autograd.grad(value, raw, own.to(value.dtype))
                    grads.add(block, slope)
            total += (value.detach().masked_fill(own == 0, 0.0) * own).sum().double()
            sweep.add(block, logits.detach())
    value = total.to(sweep.result().mass.dtype)
    return (value if grads is None else grads.carry(value)), sweep.result()


@dataclass(frozen=True)
class Rounds:
    """Which starts a batch has, and how its drafts will be drafted and verified.

    index, inside: `[B, N, γ]` of `accepted_length.start_index`; length: `[B]`; one_pass: all
    positions are predicted by step 0 (a draft LM); block: block verification, else token.
    """

    index: Tensor
    inside: Tensor
    length: Tensor
    one_pass: bool
    block: bool

    @property
    def gamma(self) -> int:
        return self.index.shape[-1]

    def positions(self, step: int) -> list[int]:
        """Draft positions (from 0) that an unrolled step predicts."""
        if self.one_pass:
            return list(range(self.gamma))
        return [step] if step < self.gamma else []

    def by_position(self, values: Tensor) -> Tensor:
        """Values of unrolled steps `[K, R]` as those of draft positions `[γ, R]`."""
        return al.by_position(values, self.gamma, self.one_pass)

    def survival(self, log_ratio: Tensor) -> Tensor:
        return (al.survival_block if self.block else al.survival_token)(log_ratio)


def rounds_loss(x: Unrolled, heads: Heads, rounds: Rounds) -> tuple[Tensor, Measured]:
    """Σ E[rounds] of the batch's replies, scalar: over Σ N it is 1/τ. Source: objectives, §3.

    The replies must be samples of the law that `x.log_p` is of.
    """
    measured = measure(x, heads)
    by_position = rounds.by_position(measured.log_ratio)
    ratio = al.from_tokens(by_position, rounds.index, rounds.inside)  # [B, N, γ]
    with torch.enable_grad():
        ratio.requires_grad_()
        count, _ = al.expected_rounds(rounds.survival(ratio), rounds.length)
        slope = torch.zeros_like(ratio)
        if count.requires_grad:  # replies of one further token take one round, whatever q is
            (slope,) = torch.autograd.grad(count.sum(), ratio)
    value = count.detach().sum().to(measured.mass.dtype)
    if not wanted(x, heads):
        return value, measured
    return _second_sweep(x, heads, rounds, slope, None, None).carry(value), measured


def accepted_loss(x: Unrolled, heads: Heads, rounds: Rounds) -> tuple[Tensor, Measured]:
    """-Σ E[A] over all starts of the batch, scalar, the last factor summed over the vocabulary.

    The replies must be samples of the law that `x.log_p` is of.
    """
    measured, last = _last_factors(x, heads, rounds)
    index, inside = rounds.index, rounds.inside
    ratio = al.from_tokens(rounds.by_position(measured.log_ratio), index, inside)  # [B, N, γ]
    total, from_p, from_q = (al.from_tokens(t, index, inside) for t in last)
    scales = None
    with torch.enable_grad():
        ratio.requires_grad_()
        if rounds.block:
            scale_p, scale_q = al.before_block(ratio)
            outer: tuple[Tensor, ...] = (-from_p, -from_q)
            (slope,) = torch.autograd.grad((scale_p, scale_q), ratio, outer)
            scales = [
                al.to_tokens(s.detach().clamp_max(_MOST), index, inside, len(x.column))
                for s in (scale_p, scale_q)
            ]
            reach = inside.to(ratio.dtype)
        else:
            before = al.before_token(ratio)
            (slope,) = torch.autograd.grad(before, ratio, -total)
            reach = before.detach() * inside
    value = -al.accepted_length(reach * total, inside).to(measured.mass.dtype)
    if not wanted(x, heads):
        return value, measured
    outer_last = al.to_tokens(-reach, index, inside, len(x.column))  # [γ, R]
    return _second_sweep(x, heads, rounds, slope, outer_last, scales).carry(value), measured


@torch.no_grad()
def _last_factors(
    x: Unrolled, heads: Heads, rounds: Rounds
) -> tuple[Measured, tuple[Tensor, Tensor, Tensor]]:
    """Σ_x min(e^a·p, e^b·q) by position and token, and its parts from p and from q: 3 x `[γ, R]`.

    a and b depend on earlier positions at earlier tokens only, which the same sweep has passed.
    """
    sweep = _Sweep(x)
    total, from_p, from_q = sweep.log_q.new_zeros(3, rounds.gamma, len(x.column))
    for block in blocks(x, heads):
        p, q = sweep.add(block, block.logits)
        if not rounds.block:
            for k in rounds.positions(block.step):
                total[k, block.token] = sweep.result().overlap[block.step][block.rows].double()
            continue
        for k in rounds.positions(block.step):
            a, b = _scales_at(sweep.log_ratio, rounds, block.token, k)
            left, right = p * a.exp()[:, None].to(p.dtype), q * b.exp()[:, None].to(q.dtype)
            less = right < left
            from_p[k, block.token] = left.masked_fill(less, 0.0).sum(-1).double()
            from_q[k, block.token] = right.masked_fill(~less, 0.0).sum(-1).double()
    if rounds.block:
        total = from_p + from_q
    return sweep.result(), (total, from_p, from_q)


def _scales_at(log_ratio: Tensor, rounds: Rounds, token: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """log m_{k} and log R_{k} before draft position k (from 0) at tokens `[n]`."""
    if k == 0:
        none = log_ratio.new_zeros(len(token))
        return none, none
    back = torch.arange(k, 0, -1, device=token.device)[:, None]
    at = (token - back).clamp_min(0)  # [k, n]
    step = torch.zeros_like(back) if rounds.one_pass else k - back
    products = log_ratio[step, at].cumsum(0)
    return products.cummin(0).values[-1].clamp_max(0.0), products[-1].clamp_max(_MOST)


@torch.no_grad()
def _second_sweep(
    x: Unrolled,
    heads: Heads,
    rounds: Rounds,
    slope: Tensor,
    reach: Tensor | None,
    scales: Sequence[Tensor] | None,
) -> Gradients:
    """Gradients from d/dlog q(x) = `slope` [B, N, γ] and d/d(last factor) = `reach` [γ, R]."""
    by_token = al.to_tokens(slope, rounds.index, rounds.inside, len(x.column))  # [γ, R]
    grads = Gradients(x, heads)
    for block in blocks(x, heads, with_p=reach is not None):
        positions = rounds.positions(block.step)
        if not positions:
            continue
        with torch.enable_grad():
            raw = block.raw.requires_grad_()
            logits = block.logits
        q = logits.detach().softmax(-1)  # [n, V_d]
        own = by_token[positions][:, block.token].sum(0).to(q.dtype)  # [n]
        grad = torch.zeros_like(q)
        if reach is not None:
            p = block.log_p.exp()
            for k in positions:
                grad += _last_factor_gradient(p, q, reach, scales, k, block.token)
        grad -= q * (grad.sum(-1, keepdim=True) + own[:, None])
        column = x.column[block.token]
        here = own.masked_fill(column < 0, 0.0)[:, None]
        grad.scatter_add_(1, column.clamp_min(0)[:, None], here)
        (d_raw,) = torch.autograd.grad(logits, raw, grad)
        grads.add(block, d_raw)
    return grads


def _last_factor_gradient(
    p: Tensor, q: Tensor, reach: Tensor, scales: Sequence[Tensor] | None, k: int, token: Tensor
) -> Tensor:
    """d/d log q(v), softmax's coupling aside, of reach·Σ min(e^a·p, e^b·q): `[n, V_d]`."""
    weight = reach[k, token].to(q.dtype)[:, None]  # [n, 1]
    if scales is None:
        return (q * weight).masked_fill(q >= p, 0.0)
    a, b = (s[k, token].exp().to(q.dtype)[:, None] for s in scales)  # [n, 1] each
    right = q * b
    return (right * weight).masked_fill(right >= p * a, 0.0)
