"""Rounds that begin from one state of the target, for families that read no other.

A round behind the tokens x_0 ... x_n begins from the target's head input at x_(n-1), where x_n was
decided: the newest state that is known then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import TrainBatch, supervised_at, token_index

Level = tuple[int, Tensor | None]
"""A depth, and which of the tokens `[B, w]` lie there; None if all do."""


@dataclass(frozen=True)
class Rounds:
    """The N rounds of a batch that predict at least one token, in the order of their rows.

    row, column: `[N]` where each round's state lies.
    """

    batch: TrainBatch
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, batch: TrainBatch) -> "Rounds":
        at = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)  # [T-1]
        row, column = supervised_at(batch, at + 2, 0).nonzero(as_tuple=True)
        return cls(batch, row, column)

    @property
    def states(self) -> Tensor:
        """What each round begins from, `[N, L*h]`."""
        return self.batch.taps[self.row, self.column]

    def last(self, step: int) -> Tensor:
        """The token that step k of each round reads: of step 0 the last emitted one. `[N]`

        Any token where the round is over by then.
        """
        column = (self.column + 1 + step).clamp_max(self.batch.ids.shape[1] - 1)
        return self.batch.ids[self.row, column]

    def scored(self, step: int) -> tuple[Tensor, Tensor]:
        """Rounds that step k is scored on, bool `[N]`, and reply tokens they predict, `[N_k]`."""
        at = torch.arange(self.batch.ids.shape[1] - 1, device=self.batch.ids.device) + 2 + step
        mask = supervised_at(self.batch, at, step)[self.row, self.column]  # [N]
        return mask, token_index(self.batch, at)[self.row, self.column][mask]


def begins(tokens: Tensor, counts: Sequence[int], taps: Tensor) -> tuple[Tensor, Tensor]:
    """What a round begins from behind these, as `Drafter.commit` takes them.

    The last tokens `[B]`, and the target's states where they were decided `[B, h]`.
    """
    rows = torch.arange(len(counts), device=tokens.device)
    last = torch.tensor(list(counts), device=tokens.device) - 1  # [B]
    return tokens[rows, last], taps[rows, last]


@dataclass
class Depths:
    """How deep in a round's draft the tokens fed so far lie, the first ones at depth 1.

    chain: of the token fed last, if each was fed behind the other; fed: `[B, n]` of all in a tree.
    """

    chain: int = 0
    fed: Tensor | None = None

    def feed(self, parents: Tensor | None) -> list[Level]:
        """Take in the tokens fed next, as `Drafter.extend` is told of them: where they lie."""
        if parents is None:
            self.chain += 1
            return [(self.chain, None)]
        known = parents[:, :0] if self.fed is None else self.fed  # [B, n]
        above = torch.cat([torch.zeros_like(parents[:, :1]), known], 1).gather(1, parents + 1)
        depth = above + 1  # [B, w]
        self.fed = torch.cat([known, depth], 1)
        levels = depth.unique().tolist()
        if len(levels) == 1:
            return [(levels[0], None)]
        return [(level, depth == level) for level in levels]


def by_level(levels: Sequence[Level], compute: Callable[[int], Tensor]) -> Tensor:
    """`compute(depth)` `[B, w, ..]` of the tokens at each depth, put together."""
    found = compute(levels[0][0])
    for depth, there in levels[1:]:
        assert there is not None
        found = torch.where(there[..., None], compute(depth), found)
    return found
