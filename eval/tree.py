"""Draft trees: which continuations of the last emitted token the target is asked about at once.

A tree of N nodes a row lists parents before children, so a node's siblings, its ancestors and its
place in the target's pass all follow from one index per node. `verify_tree` says what is accepted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from ..configs.errors import UserError
from .draws import Draws

Extend = Callable[[Tensor, Tensor], Tensor]
"""`extend(tokens [B, w], parents [B, w]) -> logits [B, w, V_d]`: the drafter reads w nodes more.

Tokens are target ids. Parents count the nodes *read* so far, in the order they were read; -1 is
right behind the committed tokens. A row that needs no more nodes is given some all the same.
"""

Warp = Callable[[Tensor], Tensor]
"""Draft logits `[..., V_d]` -> log-probabilities of the same shape, excluded tokens at -inf."""


def check_sampled_shape(shape: Sequence[int]) -> None:
    """UserError unless `shape` gives the children at each depth, as `grow_sampled` takes them."""
    if not shape:
        raise UserError("a sampled draft tree has no depth; give its children by depth: 3, 2, 1")
    for fan in shape:
        _check_count("the children at one depth of a draft tree", fan)


def _check_count(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{what} must be a whole number from 1 up, not {value!r}")


@dataclass(frozen=True)
class TreeShape:
    """How a dynamic tree grows (EAGLE-2, 2024). UserError for a value below 1."""

    width: int
    """Nodes of each depth that are read by the drafter, the most probable ones."""
    depth: int
    """Depth of the deepest nodes; children of the root have depth 1."""
    budget: int
    """Nodes that are kept in the end, the most probable ones of all: the target's pass has one
    more."""
    children: int | None = None
    """Children that a node gets when it is expanded; None for as many as `width`."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "budget", "children"):
            if getattr(self, name) is not None or name != "children":
                _check_count(f"{name} of a draft tree", getattr(self, name))

    @property
    def fan(self) -> int:
        """Children of an expanded node."""
        return self.width if self.children is None else self.children


@dataclass(frozen=True)
class Tree:
    """N nodes a row, parents before children, siblings in the order to be tried.

    tokens, parents: `[B, N]`, target ids, and the index of each node's parent (-1: the root); size:
    `[B]` nodes of each row, the rest is padding (0, and -1 as parent); fed: `[B, N]` how many nodes
    the drafter had read before it read this one, -1 if it never did; log_q: `[B, N, V]` the law
    each node was drawn from, None if nothing was drawn.
    """

    tokens: Tensor
    parents: Tensor
    size: Tensor
    fed: Tensor
    log_q: Tensor | None = None


def grow(
    first: Tensor,
    extend: Extend,
    shape: TreeShape,
    warp: Warp,
    room: Tensor,
    draft_ids: Tensor | None = None,
) -> Tree:
    """A deterministic tree: every node gets the most probable children, the best nodes stay.

    A node's score is the product of the draft probabilities on its path. Of each depth the `width`
    best nodes are read, best first, and get children; of all nodes the `budget` best stay. Of equal
    scores the first to come up wins (within one law, any). Nodes of the last depth are never read.
    A child of probability 0 is none.

    Args:
        first: draft logits behind the committed tokens, `[B, V_d]`.
        warp: the draft's law, from which scores come.
        room: deepest node allowed in each row, `[B]`; rows of 0 get no node.
        draft_ids: target ids of the drafter's vocabulary `[V_d]`; None where they are 0, 1, ...
    """
    depth = min(shape.depth, int(room.max()))
    pool = _Pool(first)
    logits, above = first[:, None], pool.root  # [B, w, V_d], [B, w] where in the pool
    score = torch.zeros_like(above, dtype=torch.float64)  # [B, w]
    for level in range(1, depth + 1):
        gain, ids = warp(logits).topk(min(shape.fan, logits.shape[2]), 2)  # [B, w, c]
        tokens = (ids if draft_ids is None else draft_ids[ids]).flatten(1)  # [B, w*c]
        # No child may score above its parent, rounding or not.
        scores = (score[..., None] + gain.clamp_max(0.0)).flatten(1)
        scores = scores.masked_fill(level > room[:, None], -math.inf)
        nodes = pool.add(tokens, above.repeat_interleave(ids.shape[2], 1), scores)
        if level < depth:
            score, best = scores.sort(dim=1, descending=True, stable=True)
            score, above = score[:, : shape.width], nodes.gather(1, best[:, : shape.width])
            logits = extend(*pool.feed(above))
    return pool.best(shape.budget)[0]


def grow_sampled(
    first: Tensor,
    extend: Extend,
    shape: Sequence[int],
    warp: Warp,
    room: Tensor,
    draws: Draws,
    vocab_size: int,
    draft_ids: Tensor | None = None,
) -> Tree:
    """A sampled tree: `shape[d]` children of every node at depth d, the root being at depth 0.

    Siblings are drawn one after the other from the draft's law without those before them. Where
    that law has run out of tokens there are fewer. Nothing is dropped after it was drawn. Every
    node above the last depth is read, depth by depth.

    Arguments are those of `grow`, and `vocab_size`, the V over which `Tree.log_q` is given (V_d is
    at most V). UserError if `shape` is empty or has a number below 1.
    """
    check_sampled_shape(shape)
    depth = min(len(shape), int(room.max()))
    pool = _Pool(first)
    logits, above = first[:, None], pool.root  # [B, w, V_d], [B, w] where in the pool
    exists = torch.ones_like(above, dtype=torch.bool)  # [B, w]
    laws = _no_laws(first, sum(accumulate(shape[:depth], mul)), vocab_size)  # [B, n, V]
    columns = slice(first.shape[1]) if draft_ids is None else draft_ids
    for level, fan in enumerate(shape[:depth], 1):
        ids: list[Tensor] = []
        there: list[Tensor] = []
        wanted = exists & (level <= room[:, None])
        for log_q, where in zip(warp(logits).unbind(1), wanted.unbind(1), strict=True):
            for token, drawn, law in _without_replacement(log_q, fan, where, draws):
                laws[:, pool.count + len(ids), columns] = law
                ids.append(token)
                there.append(drawn)
        tokens, exists = torch.stack(ids, 1), torch.stack(there, 1)  # [B, w*fan]
        tokens = tokens if draft_ids is None else draft_ids[tokens]
        scores = torch.zeros_like(tokens, dtype=torch.float64).masked_fill(~exists, -math.inf)
        above = pool.add(tokens, above.repeat_interleave(fan, 1), scores)
        if level < depth:
            logits = extend(*pool.feed(above))
    tree, kept = pool.best(pool.count)
    in_place = torch.arange(kept.shape[1], device=kept.device)
    if bool(((kept == in_place) | (kept == pool.count)).all()):
        return replace(tree, log_q=laws[:, : kept.shape[1]])
    rows = torch.arange(len(kept), device=kept.device)[:, None]
    return replace(tree, log_q=laws[rows, kept.clamp_max(pool.count - 1)])


def _no_laws(first: Tensor, count: int, vocab_size: int) -> Tensor:
    """`count` laws without any mass, `[B, count, V]`, in the precision of warped logits."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    return first.new_full((len(first), count, vocab_size), -math.inf, dtype=dtype)


def _without_replacement(
    log_q: Tensor, count: int, where: Tensor, draws: Draws
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Draw siblings from `log_q [B, V_d]`: (id [B], whether there is one [B], its law [B, V_d])."""
    log_q = log_q.clone()
    weights = log_q.double().exp()
    for _ in range(count):
        total = weights.sum(1)
        left = where & (total > 0)
        ids = draws.categorical(weights, left)
        yield ids, left, log_q - total.log().to(log_q.dtype)[:, None]
        weights.scatter_(1, ids[:, None], 0.0)
        log_q.scatter_(1, ids[:, None], -math.inf)


class _Pool:
    """All nodes a tree is chosen from, in the order they came up."""

    def __init__(self, first: Tensor):
        self.root = first.new_full((len(first), 1), -1, dtype=torch.long)  # [B, 1]
        self.parents = self.root[:, :0]  # [B, n], -1 for the root
        self.tokens = self.fed = self.parents
        self.scores = self.parents.double()  # [B, n] log-probabilities; -inf: does not exist
        self.read = 0  # nodes given to the drafter, in each row

    @property
    def count(self) -> int:
        return self.tokens.shape[1]

    def add(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> Tensor:
        """Append nodes, all `[B, m]`; returns where they are."""
        start = self.count
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.scores = torch.cat([self.scores, scores], 1)
        self.fed = torch.cat([self.fed, torch.full_like(parents, -1)], 1)
        return torch.arange(start, self.count, device=tokens.device).expand_as(tokens)

    def feed(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Arguments of `extend` for these nodes `[B, w]`, which count as read from here on."""
        places = torch.arange(self.read, self.read + nodes.shape[1], device=nodes.device)
        self.read += nodes.shape[1]
        self.fed = self.fed.scatter(1, nodes, places.expand_as(nodes))
        parents = self.parents.gather(1, nodes)
        fed = self.fed.gather(1, parents.clamp_min(0)).masked_fill(parents < 0, -1)
        return self.tokens.gather(1, nodes), fed

    def best(self, budget: int) -> tuple[Tree, Tensor]:
        """The tree of the `budget` best nodes, and where these are in the pool, `[B, N]`.

        A child scores no more than its parent and comes later, so it never stays without it.
        Padding is at `count`.
        """
        scores, nodes = self.scores.sort(dim=1, descending=True, stable=True)
        real = scores[:, :budget] > -math.inf
        size = real.sum(1)
        kept = nodes[:, :budget].masked_fill(~real, self.count)  # [B, m]
        kept = kept.sort(dim=1).values[:, : int(size.max())]  # [B, N] in the pool's order
        padding = kept == self.count
        index = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        place = torch.nn.functional.pad(torch.full_like(self.parents, -1), (0, 1))  # [B, n+1]
        place = place.scatter(1, kept, index)  # where each node of the pool is in the tree
        at = kept.masked_fill(padding, 0)
        parents = self.parents.gather(1, at)
        parents = place.gather(1, parents.clamp_min(0)).masked_fill(padding | (parents < 0), -1)
        tokens = self.tokens.gather(1, at).masked_fill(padding, 0)
        fed = self.fed.gather(1, at).masked_fill(padding, -1)
        return Tree(tokens, parents, size, fed), kept
