"""All randomness of decoding: coins and draws, each row from a stream of its own.

The loop and its acceptance rules decide by chance only through `bernoulli` and `categorical`. A
script in the place of the streams can therefore walk every branch of a decoding exactly; see
`lossless`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..data.warp import pick

_CHUNK = 256


class Draws(Protocol):
    """What may be decided by chance. Rows are those of the batch as it stands."""

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        """True with probability p, `[B, n] -> [B, n]`; false, and no chance used, off `where`."""

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        """One id a row by unnormalised weights `[B, V] -> [B]`; 0 where `where [B]` is false."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""


class Streams:
    """Uniforms in [0, 1), float64, from one seeded generator a row.

    How many a row has used depends on that row alone, so its output does not depend on its
    neighbours.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device
        self.uniforms = torch.empty(len(seeds), 0, dtype=torch.float64, device=device)  # [B, S]
        self.used = torch.zeros(len(seeds), dtype=torch.long, device=device)  # [B]
        self._certain = 0  # no row has used more than this

    def _take(self, where: Tensor) -> Tensor:
        """The next uniforms of every row, one for each true place: `[B, n] -> [B, n]`."""
        self._certain += where.shape[1]
        while self.uniforms.shape[1] < self._certain:
            fresh = [torch.rand(_CHUNK, generator=g, dtype=torch.float64) for g in self.generators]
            self.uniforms = torch.cat([self.uniforms, torch.stack(fresh).to(self.device)], 1)
        count = where.long()  # [B, n]
        at = self.used[:, None] + count.cumsum(1) - count  # [B, n]
        self.used = self.used + count.sum(1)
        return self.uniforms.gather(1, at)

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        return (self._take(where) < p) & where

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        chosen = pick(weights, self._take(where[:, None]).squeeze(1))
        return chosen.masked_fill(~where, 0)

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        self.generators = [self.generators[r] for r in rows]
        self.uniforms, self.used = self.uniforms[index], self.used[index]
