"""How drafters draft that begin from the target's states: true ones stay, their own ones go.

Shared by the families that keep a cache of what the target's states of the text gave, and go on
from states of their own while they draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.cache import Branch, SlabCache

Run = Callable[[SlabCache, Tensor, Tensor, Branch | None], Tensor]
"""One pass behind the cache over drafted tokens `[B, w]`, the third argument, from states before
them `[B, w, h]`, the second: states at them `[B, w, h]`."""


@dataclass
class CachedStates:
    """A `DraftState`: the cache of the true states, and the emitted tokens not yet taken in.

    known: true states in the cache, a row; tokens: `[B, m]`, of which the first `counts[b]` count,
    and taps, as they were committed; hidden: `[B, 1 + fed, h]` own states of a round, at the end of
    the committed text, then at the drafted tokens fed (of a chain only the last); since: what the
    cache held when the round began, a row; parents: `[B, fed]` of those fed, if they form a tree.
    """

    run: Run
    cache: SlabCache
    known: list[int]
    tokens: Tensor
    counts: list[int]
    taps: Tensor
    hidden: Tensor
    since: list[int]
    parents: Tensor | None

    @classmethod
    def empty(cls, run: Run, cache: SlabCache, taps: Tensor) -> "CachedStates":
        """`taps [B, 0, L*h]` tells the dtype of states."""
        tokens = torch.empty(cache.rows, 0, dtype=torch.long, device=cache.device)
        nothing = [0] * cache.rows
        return cls(run, cache, nothing, tokens, [], taps, taps, nothing, None)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        index = torch.tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        self.tokens, self.taps = self.tokens[index], self.taps[index]
        self.known = [self.known[r] for r in rows]
        self.counts = [self.counts[r] for r in rows]

    def prefilled(self, lengths: Sequence[int]) -> None:
        """A pass took in the states of prompts but for the last, which waits for the reply."""
        self.known = [n - 1 for n in lengths]
        self.cache.advance(self.known)

    def commit(self, tokens: Tensor, counts: Sequence[int], taps: Tensor) -> None:
        """What was drafted has own states, so it all goes; true ones are taken in later."""
        self.cache.truncate(self.known)
        self.tokens, self.counts, self.taps = tokens, list(counts), taps

    def begin(self, out: Tensor, guessed: int = 0) -> Tensor:
        """A pass took in what was committed, and `guessed` states behind: out `[B, m, h]` of it.

        Own states where the round begins, `[B, h]`.
        """
        taken = [n + guessed for n in self.counts]
        self.cache.advance(taken)
        self.since = list(self.cache.lengths)
        self.known = [n - guessed for n in self.since]
        rows = torch.arange(len(taken), device=out.device)
        self.hidden = out[rows, torch.tensor(taken, device=out.device) - 1][:, None]  # [B, 1, h]
        self.parents = None
        return self.hidden[:, 0]

    def extend(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Each token goes with the own state of its parent: states at each, `[B, w, h]`."""
        branch, before = None, self.hidden[:, -1:]  # [B, 1, h]
        if parents is not None:
            fed = parents[:, :0] if self.parents is None else self.parents
            self.parents = torch.cat([fed, parents], 1)  # [B, fed + w]
            branch = Branch(self.since, self.parents)
            index = (parents + 1)[..., None].expand(-1, -1, before.shape[-1])
            before = self.hidden.gather(1, index)  # [B, w, h]
        out = self.run(self.cache, before, tokens, branch)  # [B, w, h]
        self.cache.advance([tokens.shape[1]] * len(tokens))
        self.hidden = out if parents is None else torch.cat([self.hidden, out], 1)
        return out
