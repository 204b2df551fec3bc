"""A round's draft: chains drawn token by token as far as a policy goes on, or trees.

Everything that was looked at is handed in for verification, and the law that a token was really
drawn from goes with it: that is what keeps any draft lossless.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data.cache import ancestors
from ..data.target import Target
from ..data.warp import Law, row_log_probs
from ..drafters.base import Drafter
from .draws import Draws
from .gamma import Policy
from .rows import Row, apply_rules, ruled
from .tree import TreeShape, grow, grow_sampled


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Clock:
    """Seconds inside model forwards and in all, prefill apart.

    passes: (tokens a row, seconds) of every target pass of a round.
    """

    prefill: float = 0.0
    decode: float = 0.0
    target: float = 0.0
    draft_first: float = 0.0
    draft_later: float = 0.0
    rounds: int = 0
    drafting_rounds: int = 0
    later_steps: int = 0
    passes: list[tuple[int, float]] = field(default_factory=list)

    @property
    def outside(self) -> float:
        """Decode time outside of model forwards: sampling, verification, cache work, Python."""
        return self.decode - self.target - self.draft_first - self.draft_later


@dataclass(frozen=True)
class Drafted:
    """What a round drafted: a chain, or a tree where `parents` is given.

    tokens: `[B, N]`; count: `[B]` how many each row really drafted; log_q: `[B, N, V]` the law of
    each, None where nothing was drawn; parents: `[B, N]` of a tree, -1 behind the last emitted
    token; fed: `[B, N]` how many tokens the drafter had read before it read this one, -1 if never.
    """

    tokens: Tensor
    count: Tensor
    log_q: Tensor | None
    parents: Tensor | None = None
    fed: Tensor | None = None

    @property
    def depth(self) -> Tensor:
        """Longest path that a row drafted, `[B]`."""
        if self.parents is None or not self.tokens.shape[1]:
            return self.count
        levels = ancestors(self.parents).sum(-1)  # [B, N]
        real = torch.arange(levels.shape[1], device=levels.device) < self.count[:, None]
        return (levels * real).amax(1)

    def path_to(self, row: int, node: int) -> list[int]:
        """The drafted tokens of `row` up to `node`, itself included; none for -1."""
        tokens = self.tokens[row].tolist()
        if self.parents is None:
            return tokens[: node + 1]
        path, parents = [], self.parents[row].tolist()
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        return path[::-1]


class Proposer:
    """A drafter at work on one batch: its state, and how it draws."""

    def __init__(self, drafter: Drafter, target: Target, rows: int, capacity: int, clock: Clock):
        self.drafter, self.target, self.clock = drafter, target, clock
        self.state: Any = drafter.start(rows, capacity)
        self._kept: Tensor | None = None

    def room(self, row: Row, limit: int) -> int:
        """Tokens this row may draft: within the limit, its budget and the drafter's context."""
        known = self.drafter.max_positions
        context = limit if known is None else known - row.length
        most = self.drafter.max_draft_tokens
        return max(0, min(limit if most is None else most, limit, row.room, context))

    def prefill(self, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        self.drafter.prefill(self.state, ids, lengths, taps)

    def commit(
        self, tokens: Tensor, counts: Sequence[int], taps: Tensor, path: Tensor | None
    ) -> None:
        self.drafter.commit(self.state, tokens, counts, taps, path)

    def select(self, rows: Sequence[int]) -> None:
        self.state.select(rows)

    def chain(
        self,
        rows: Sequence[Row],
        room: Sequence[int],
        laws: Sequence[Law],
        policy: Policy | None,
        draws: Draws | None,
    ) -> Drafted:
        """Draft up to `room[b]` tokens a row, each behind the one before, under `laws`.

        Without `draws` each row takes its most probable token, and no law is kept.
        """
        most, device = max(room), self.target.device
        limit = torch.tensor(list(room), device=device)  # [B]
        log_q: Tensor | None = None
        count = torch.zeros_like(limit)
        going = limit > 0  # [B]
        tokens = torch.empty(len(room), 0, dtype=torch.long, device=device)  # [B, k]
        asked = None if policy is None else policy.begin(len(room), device)
        ids_of = None if ruled(rows) else self.drafter.draft_ids
        wide = self._first()[:, None]  # [B, 1, V_d]
        for k in range(most):
            logits = self._proposals(wide, rows, _same_path(tokens))[:, 0]
            if self._may_be_silent(rows):
                silent = (logits == -torch.inf).all(-1)  # [B]
                going, logits = going & ~silent, logits.masked_fill(silent[:, None], 0.0)
            if draws is None:
                chosen = logits.argmax(-1)  # [B]
            else:
                law_q = row_log_probs(logits, laws)  # [B, V_d]
                log_q = self._laws(law_q, most)
                chosen = draws.categorical(law_q.exp(), going)
                log_q[:, k, slice(law_q.shape[1]) if ids_of is None else ids_of] = law_q
            new = chosen if ids_of is None else ids_of[chosen]
            tokens = torch.cat([tokens, new[:, None]], 1)
            count = count + going
            going = going & (count < limit)
            if asked is not None:
                going = going & asked.go_on(k, logits, chosen)
            if not bool(going.any()):
                break
            wide = self._extend(new[:, None])
        return Drafted(tokens, count, None if log_q is None else log_q[:, : tokens.shape[1]])

    def _laws(self, like: Tensor, most: int) -> Tensor:
        """Where a chain's laws are kept, `[B, most, V]`: one place for all rounds of these rows.

        Tokens that the drafter cannot propose stay at -inf, the others are written at each step.
        """
        known = self._kept
        if known is None or known.shape[0] != len(like) or known.shape[1] < most:
            self._kept = known = like.new_full(
                (len(like), most, self.target.vocab_size), -torch.inf
            )
        return known

    def tree(
        self,
        rows: Sequence[Row],
        room: Sequence[int],
        laws: Sequence[Law],
        shape: TreeShape | tuple[int, ...],
        draws: Draws,
    ) -> Drafted:
        """A tree no deeper than `room[b]`: of probable tokens, or sampled in a fixed shape."""
        ids_of = None if ruled(rows) else self.drafter.draft_ids
        paths: list[list[list[int]]] = [[] for _ in rows]  # by row, to the tokens fed so far

        def extend(tokens: Tensor, parents: Tensor) -> Tensor:
            logits = self._extend(tokens, parents)  # [B, w, V_d]
            if ruled(rows):
                for known, new, above in zip(paths, tokens.tolist(), parents.tolist(), strict=True):
                    known += [
                        [*(known[a] if a >= 0 else ()), t] for t, a in zip(new, above, strict=True)
                    ]
            w = tokens.shape[1]
            return self._proposals(logits, rows, lambda b, i: paths[b][i - w])

        def warp(logits: Tensor) -> Tensor:
            log_q = row_log_probs(logits, laws)
            if self._may_be_silent(rows):
                silent = (logits == -torch.inf).all(-1, keepdim=True)
                log_q = log_q.masked_fill(silent, -torch.inf)
            return log_q

        first = self._proposals(self._first()[:, None], rows, lambda b, i: [])[:, 0]
        deepest = torch.tensor(list(room), device=self.target.device)  # [B]
        size = self.target.vocab_size
        if isinstance(shape, TreeShape):
            tree = grow(first, extend, shape, warp, deepest, ids_of)
        else:
            tree = grow_sampled(first, extend, shape, warp, deepest, draws, size, ids_of)
        return Drafted(tree.tokens, tree.size, tree.log_q, tree.parents, tree.fed)

    def _proposals(
        self, logits: Tensor, rows: Sequence[Row], path: Callable[[int, int], list[int]]
    ) -> Tensor:
        """Logits of tokens that exist, `[B, w, V_d]`; under rules those of all, `[B, w, V]`."""
        ids_of, size = self.drafter.draft_ids, self.target.vocab_size
        if ids_of is None:
            logits = logits[..., :size]
        if not ruled(rows):
            return logits
        if ids_of is not None or logits.shape[-1] < size:
            wide = logits.new_full((*logits.shape[:-1], size), -torch.inf)
            wide[..., slice(logits.shape[-1]) if ids_of is None else ids_of] = logits
            logits = wide
        return apply_rules(rows, logits, path)

    def _may_be_silent(self, rows: Sequence[Row]) -> bool:
        """Whether a row may have nothing to propose: logits of -inf alone."""
        return self.drafter.may_abstain or ruled(rows)

    # ---- the drafter, on the clock

    def _first(self) -> Tensor:
        self.clock.drafting_rounds += 1
        start = now(self.target.device)
        logits = self.drafter.first(self.state)
        self.clock.draft_first += now(self.target.device) - start
        return logits

    def _extend(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        start = now(self.target.device)
        logits = self.drafter.extend(self.state, tokens, parents)
        self.clock.draft_later += now(self.target.device) - start
        self.clock.later_steps += 1
        return logits


def _same_path(tokens: Tensor) -> Callable[[int, int], list[int]]:
    """Paths of a chain's next position: all its tokens so far, `[B, k]`."""
    return lambda b, _: tokens[b].tolist()
