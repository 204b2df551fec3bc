"""Acceptance rules for trees: which path of drafted nodes stays, and what follows it.

Batched, rows independent. A tree of N nodes a row is `tokens [B, N]`, `parents [B, N]` (the index
of a node's parent, smaller than its own; -1 for a child of the root, which is the last emitted
token) and `size [B]`: row b has its first `size[b]` nodes, the rest is padding of any content. The
target's laws `[B, N+1, V]` stand at index 0 behind the root and at i+1 behind node i.

Every rule returns (path [B, D], accepted [B], next_token [B]): the round emits the tokens of the
nodes `path[b, :accepted[b]]`, then next_token[b]. D is the most that any row accepted; shorter
paths are filled with -1. The output is distributed as the target alone, whatever the draft.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .draws import Draws
from .verify import residual

Verified = tuple[Tensor, Tensor, Tensor]
"""(path [B, D], accepted [B], next_token [B])."""

TreeRule = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Draws], Verified]
"""(tokens, parents, log_q, log_p, size, draws), as `tree`."""


def greedy_tree(tokens: Tensor, parents: Tensor, target_argmax: Tensor, size: Tensor) -> Verified:
    """T = 0: descend while a child is the target's argmax, then emit the argmax.

    `tokens`, `parents` [B, N], `target_argmax` [B, N+1], `size` [B].
    """

    def choose(place: Tensor, where: Tensor) -> Tensor:
        return target_argmax.gather(1, place[:, None]).squeeze(1)

    return _descend(tokens, parents, _real(tokens, size), choose)


def tree(
    tokens: Tensor,
    parents: Tensor,
    log_q: Tensor | None,
    log_p: Tensor,
    size: Tensor,
    draws: Draws,
) -> Verified:
    """Recursive rejection (SpecInfer, 2023): try the children of a node in order of index.

    With p the node's target law at first, child c is accepted with probability min(1, p(c)/q_c(c));
    refused, p becomes norm(max(p - q_c, 0)) for the next one; after the last one, draw from p.

    `tokens`, `parents` [B, N], `log_p` [B, N+1, V], `size` [B]. `log_q` [B, N, V] holds for each
    child the law that it was *really drawn from*: among siblings drawn without replacement, q
    without the earlier siblings. Sampled children may not be dropped after the draw by their own
    probability. None means that nothing was drawn: children were picked deterministically.
    """
    real = _real(tokens, size)
    if log_q is not None:
        return _reject(tokens, parents, log_q, log_p, real, draws)

    # One-hot laws: each child is accepted with p(c), or removed from p. The k-th of a node's
    # children is then taken with its target probability, repeated ones never. So is it if the
    # target's token is drawn first and looked up among the children.
    rows = torch.arange(len(tokens), device=tokens.device)

    def choose(place: Tensor, where: Tensor) -> Tensor:
        return draws.categorical(log_p[rows, place].double().exp(), where)

    return _descend(tokens, parents, real, choose)


def _real(tokens: Tensor, size: Tensor) -> Tensor:
    """True at nodes that are no padding, `[B, N]`."""
    return torch.arange(tokens.shape[1], device=tokens.device) < size[:, None]


def _descend(
    tokens: Tensor, parents: Tensor, real: Tensor, choose: Callable[[Tensor, Tensor], Tensor]
) -> Verified:
    """Follow chosen tokens as far as the tree has them.

    `choose(place [B], where [B])` is the token at index `place` of the laws; asked `where` only.
    """
    node = torch.full_like(real.sum(1), -1)  # [B]
    inside = torch.ones_like(node, dtype=torch.bool)
    following, path = node, []
    while True:
        following = torch.where(inside, choose(node + 1, inside), following)
        child = (parents == node[:, None]) & (tokens == following[:, None]) & real  # [B, N]
        inside = inside & child.any(1)
        if not inside.any():
            break
        node = torch.where(inside, child.int().argmax(1), node)  # the first of repeated children
        path.append(torch.where(inside, node, -1))
    steps = torch.stack(path, 1) if path else tokens.new_empty(len(tokens), 0)  # [B, D]
    return steps, (steps >= 0).sum(1), following


def _reject(
    tokens: Tensor, parents: Tensor, log_q: Tensor, log_p: Tensor, real: Tensor, draws: Draws
) -> Verified:
    """One pass over the nodes: parents come first, so all children of an accepted node follow it.

    Acceptance reads single entries. Whole laws are formed only where something was refused, and
    for the last draw.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    node = torch.full_like(rows, -1)
    law = log_p.new_zeros(len(rows), log_p.shape[2], dtype=torch.float64)  # [B, V], what is left
    fresh = torch.ones_like(rows, dtype=torch.bool)  # nothing refused yet where the row stands
    kept = torch.zeros_like(real)

    def form(where: Tensor) -> None:
        law[where] = log_p[where, node[where] + 1].double().exp()

    for i in range(tokens.shape[1]):
        tried = (parents[:, i] == node) & real[:, i]  # [B]
        if not tried.any():
            continue
        ids = tokens[:, i].masked_fill(~tried, 0)
        p_x = torch.where(fresh, log_p[rows, node + 1, ids].double().exp(), law[rows, ids])
        chance = (p_x / log_q[rows, i, ids].double().exp()).clamp_max(1.0)
        passed = draws.bernoulli(chance[:, None], tried[:, None]).squeeze(1)
        refused = tried & ~passed
        if refused.any():
            form(refused & fresh)
            left = residual(law[refused], log_q[refused, i].double().exp())
            law[refused] = left / left.sum(1, keepdim=True)
        kept[:, i] = passed
        node = torch.where(passed, i, node)
        fresh = (fresh & ~refused) | passed
    form(fresh)
    return *_path(kept), draws.categorical(law, torch.ones_like(fresh))


def _path(kept: Tensor) -> tuple[Tensor, Tensor]:
    """(path [B, D], accepted [B]) from the mask `[B, N]` of the nodes on the path."""
    accepted = kept.sum(1)
    nodes = (~kept).int().argsort(dim=1, stable=True)  # [B, N], those of the path first
    steps = torch.arange(kept.shape[1], device=kept.device)
    path = nodes.masked_fill(steps >= accepted[:, None], -1)
    return path[:, : int(accepted.max())], accepted
