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


Heads = Head | Sequence[Head]
"""The head of all unrolled steps, or one for each."""


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

    rows: where they stand among the step's rows; token: `[n]` the reply tokens they predict; head:
    what reads them; raw: `[n, V_d]` its products, a leaf; log_p: `[n, V_d]` of the target, empty if
    not asked for.
    """

    step: int
    rows: slice
    token: Tensor
    head: Head
    raw: Tensor
    log_p: Tensor

    @property
    def logits(self) -> Tensor:
        """Draft logits `[n, V_d]`, with gradient to `raw` where that wants one."""
        return self.head.logits(self.raw)


def rows_of_a_block(width: int) -> int:
    """Tokens that are taken together, where the widest of their rows has `width` numbers."""
    return max(_FEWEST_ROWS, CHUNK_BYTES // (4 * width))


def of_steps(x: Unrolled, heads: Heads) -> list[Head]:
    """The head of each unrolled step."""
    return [heads] * len(x.token) if isinstance(heads, Head) else list(heads)


def blocks(x: Unrolled, heads: Heads, with_p: bool = True) -> Iterator[Block]:
    """Runs of tokens, and within each run every step's rows with their head outputs."""
    each = of_steps(x, heads)
    size = rows_of_a_block(max(x.width, each[0].weight.shape[0]))
    casts = {id(head): _Cast(head) for head in each}
    every = x.token[0]
    starts = every[::size].contiguous()
    bounds = [[*torch.searchsorted(t, starts).tolist(), len(t)] for t in x.token]
    for number in range(len(starts)):
        low = number * size
        tokens = every[low : low + size]
        log_p = x.log_p(tokens) if with_p else each[0].weight.new_empty(0)
        for step, edges in enumerate(bounds):
            rows = slice(edges[number], edges[number + 1])
            token = x.token[step][rows]
            if len(token) == 0:
                continue
            head = each[step]
            raw = casts[id(head)](x.hidden[step][rows])  # [n, V_d]
            own = log_p
            if with_p and len(token) != len(tokens):
                own = log_p[torch.searchsorted(tokens, token)]
            yield Block(step, rows, token, head, raw, own)


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


class _HeadGradients:
    """Gradients of one head, summed up over the blocks that it reads."""

    def __init__(self, head: Head):
        self._head = head
        rows, dtype = head.weight.shape[0], head.weight.dtype
        self.weight = torch.zeros_like(head.weight) if head.weight.requires_grad else None
        self._weight: Tensor | None = None  # in the dtype of the blocks
        trained = head.bias is not None and head.bias.requires_grad
        self.bias = head.weight.new_zeros(rows, dtype=dtype) if trained else None

    def add(self, raw: Tensor, hidden: Tensor) -> Tensor:
        """Take in a block's outer gradient `[n, V_d]`; returns that of its inputs `[n, h]`."""
        if self._weight is None:
            self._weight = self._head.weight.detach().to(raw.dtype)
        if self.weight is not None and raw.dtype == self.weight.dtype == hidden.dtype:
            self.weight.addmm_(raw.t(), hidden)
        elif self.weight is not None:
            self.weight += raw.t() @ hidden.to(raw.dtype)
        if self.bias is not None:
            self.bias += raw.sum(0)
        return raw @ self._weight


class Gradients:
    """Gradients of head inputs and heads, summed up over blocks."""

    def __init__(self, x: Unrolled, heads: Heads):
        self._x = x
        self._heads = {id(head): head for head in of_steps(x, heads)}
        self.of_heads = {key: _HeadGradients(head) for key, head in self._heads.items()}
        self.hidden = [torch.zeros_like(h) for h in x.hidden]

    @torch.no_grad()  # or the sums would keep every block alive
    def add(self, block: Block, raw: Tensor) -> None:
        """Take in the gradient `[n, V_d]` of a block's head outputs."""
        hidden, own = self._x.hidden[block.step][block.rows], self.hidden[block.step]
        own[block.rows] = self.of_heads[id(block.head)].add(raw, hidden).to(own.dtype)

    def carry(self, value: Tensor) -> Tensor:
        """`value` with these gradients."""
        heads, found = self._heads.values(), self.of_heads.values()
        inputs = [t for head in heads for t in (head.weight, head.bias)]
        grads = [t for own in found for t in (own.weight, own.bias)]
        return _Carry.apply(value, [*grads, *self.hidden], *inputs, *self._x.hidden)


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


def wanted(x: Unrolled, heads: Heads) -> bool:
    inputs = [t for head in of_steps(x, heads) for t in (head.weight, head.bias)]
    every = (*inputs, *x.hidden)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in every)
