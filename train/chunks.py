"""Head outputs chunk by chunk, and gradients summed up over chunks.

What `fused` computes with: no tensor of all tokens by vocabulary is ever held.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..data.warp import float32_or_better

CHUNK_BYTES = 8 << 20
"""Size of one [tokens, V] block; a dozen or two of them are alive at a time."""
_FEWEST_ROWS = 32  # fewer would read the head more often than they save memory


@dataclass(frozen=True)
class Head:
    """How head inputs become draft logits: `finish(hidden · weightᵀ + bias)`.

    weight: `[V_d, h]`; bias: `[V_d]` or None; finish: what a family and the serving law do to a
    head's output, row by row.
    """

    weight: Tensor
    bias: Tensor | None
    finish: Callable[[Tensor], Tensor]

    def logits(self, raw: Tensor) -> Tensor:
        """float32 logits (float64 stays) of the head's output."""
        return self.finish(float32_or_better(raw))


@dataclass(frozen=True)
class Unrolled:
    """A batch with R reply tokens as K unrolled steps see it.

    hidden: K x `[N_k, h]` head inputs; token: K x `[N_k]` the reply token each predicts, ascending,
    step k's among step 0's; log_p: token indices `[n]` -> the target's log-probabilities `[n, V_d]`
    on the draft vocabulary; column: `[R]` where each reply token stands there, or -1; width: of the
    widest rows that `log_p` forms on its way, which chunks are sized by.
    """

    hidden: Sequence[Tensor]
    token: Sequence[Tensor]
    log_p: Callable[[Tensor], Tensor]
    column: Tensor
    width: int


@dataclass(frozen=True)
class Block:
    """The rows of one unrolled step within a run of tokens.

    rows: where they stand among the step's rows; token: `[n]` the reply tokens they predict; raw:
    `[n, V_d]` the head's products, a leaf; log_p: `[n, V_d]` of the target, empty if not asked for.
    """

    step: int
    rows: slice
    token: Tensor
    raw: Tensor
    log_p: Tensor


def rows_of_a_block(width: int) -> int:
    """Tokens that are taken together, where the widest of their rows has `width` numbers."""
    return max(_FEWEST_ROWS, CHUNK_BYTES // (4 * width))


def blocks(x: Unrolled, head: Head, with_p: bool = True) -> Iterator[Block]:
    """Runs of tokens, and within each run every step's rows with their head outputs."""
    size = rows_of_a_block(max(x.width, head.weight.shape[0]))
    cast = _Cast(head)
    every = x.token[0]
    starts = every[::size].contiguous()
    bounds = [[*torch.searchsorted(t, starts).tolist(), len(t)] for t in x.token]
    for number in range(len(starts)):
        low = number * size
        tokens = every[low : low + size]
        log_p = x.log_p(tokens) if with_p else head.weight.new_empty(0)
        for step, edges in enumerate(bounds):
            rows = slice(edges[number], edges[number + 1])
            token = x.token[step][rows]
            if len(token) == 0:
                continue
            raw = cast(x.hidden[step][rows])  # [n, V_d]
            own = log_p
            if with_p and len(token) != len(tokens):
                own = log_p[torch.searchsorted(tokens, token)]
            yield Block(step, rows, token, raw, own)


class _Cast:
    """The head's product without gradient, its weight cast once where autocast asks for it."""

    def __init__(self, head: Head):
        kind = head.weight.device.type
        lower = torch.is_autocast_enabled(kind) and head.weight.dtype == torch.float32
        self._dtype = torch.get_autocast_dtype(kind) if lower else head.weight.dtype
        self._weight = head.weight.detach().to(self._dtype)
        self._bias = None if head.bias is None else head.bias.detach().to(self._dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.detach().to(self._dtype), self._weight, self._bias)


class Gradients:
    """Gradients of head inputs and head, summed up over blocks."""

    def __init__(self, x: Unrolled, head: Head):
        self._x, self._head = x, head
        self.hidden = [torch.zeros_like(h) for h in x.hidden]
        trained = head.weight.requires_grad
        dtype = head.weight.dtype
        self.weight = torch.zeros_like(head.weight) if trained else None
        self._weight: Tensor | None = None  # in the dtype of the blocks
        trained = head.bias is not None and head.bias.requires_grad
        self.bias = head.weight.new_zeros(head.weight.shape[0], dtype=dtype) if trained else None

    @torch.no_grad()  # or the sums would keep every block alive
    def add(self, block: Block, raw: Tensor) -> None:
        """Take in the gradient `[n, V_d]` of a block's head outputs."""
        hidden = self._x.hidden[block.step][block.rows]
        own = self.hidden[block.step]
        if self._weight is None:
            self._weight = self._head.weight.detach().to(raw.dtype)
        own[block.rows] = (raw @ self._weight).to(own.dtype)
        if self.weight is not None and raw.dtype == self.weight.dtype == hidden.dtype:
            self.weight.addmm_(raw.t(), hidden)
        elif self.weight is not None:
            self.weight += raw.t() @ hidden.to(raw.dtype)
        if self.bias is not None:
            self.bias += raw.sum(0)

    def carry(self, value: Tensor) -> Tensor:
        """`value` with these gradients."""
        inputs = [self._head.weight, self._head.bias, *self._x.hidden]
        grads = [self.weight, self.bias, *self.hidden]
        return _Carry.apply(value, grads, *inputs)


class _Carry(torch.autograd.Function):
    """A scalar whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None  # scaled in place: a head's gradient is large
        if grads is None:
            raise RuntimeError("a fused objective can be differentiated once")
        return (None, None, *(None if g is None else g.mul_(outer.to(g.dtype)) for g in grads))


def wanted(x: Unrolled, head: Head) -> bool:
    inputs = (head.weight, head.bias, *x.hidden)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
