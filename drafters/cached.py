"""How language models draft: a cache of their own, behind whose text drafted tokens come and go.

Shared by the families that are language models, whoever owns their layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.cache import Branch, Sight, SlabCache
from .base import Step, TrainBatch, supervised_at, token_index

Run = Callable[[Tensor, SlabCache, Branch | None], Tensor]
"""One pass over ids `[B, n]` behind what the cache keeps, or as nodes of a tree: `[B, n, h]`."""


@dataclass
class CachedText:
    """A `DraftState`: the model's cache, and the emitted tokens it has not seen.

    known: committed tokens in the cache, a row; tokens: `[B, m]` of which the first `counts[b]` are
    to be read; fed: drafted tokens behind them; parents: `[B, fed]` of those, if they form a tree.
    """

    run: Run
    cache: SlabCache
    known: list[int]
    tokens: Tensor
    counts: list[int]
    fed: int
    parents: Tensor | None

    @classmethod
    def empty(cls, run: Run, cache: SlabCache) -> "CachedText":
        nothing = torch.empty(cache.rows, 0, dtype=torch.long, device=cache.device)
        return cls(run, cache, [0] * cache.rows, nothing, [0] * cache.rows, 0, None)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        index = torch.tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        self.tokens = self.tokens[index]
        self.known = [self.known[r] for r in rows]
        self.counts = [self.counts[r] for r in rows]

    def prefill(self, ids: Tensor, lengths: Sequence[int]) -> None:
        self.run(ids, self.cache, None)
        self.cache.advance(lengths)
        self.known = list(lengths)

    def commit(self, tokens: Tensor, counts: Sequence[int], path: Tensor | None) -> None:
        """Of the emitted tokens, those that were fed as drafts stay in the cache."""
        if path is None:  # they lie where they belong
            seen = [min(c - 1, self.fed) for c in counts]
            self.cache.truncate([n + c for n, c in zip(self.known, seen, strict=True)])
        else:
            drafts = torch.tensor(list(counts), device=path.device)[:, None] - 1  # the last is new
            place = torch.arange(path.shape[1], device=path.device)
            seen = ((path >= 0) & (place < drafts)).long().cumprod(1).sum(1).tolist()
            self.cache.keep(self.known, path.clamp_min(0), seen)
        self.known = list(self.cache.lengths)
        self.counts = [c - s for c, s in zip(counts, seen, strict=True)]
        columns = torch.arange(max(self.counts), device=tokens.device)
        index = torch.tensor(seen, device=tokens.device)[:, None] + columns  # [B, m]
        self.tokens = tokens.gather(1, index.clamp_max(tokens.shape[1] - 1))
        self.fed, self.parents = 0, None

    def first(self) -> Tensor:
        """Read what is left; the head's inputs behind all of it, `[B, h]`."""
        rows = torch.arange(len(self.counts), device=self.tokens.device)
        out = self.run(self.tokens, self.cache, None)  # [B, m, h]
        self.cache.advance(self.counts)
        self.known = list(self.cache.lengths)
        self.tokens, last = self.tokens[:, :0], torch.tensor(self.counts, device=rows.device) - 1
        self.counts = [0] * len(rows)
        return out[rows, last]

    def extend(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Read drafted tokens `[B, w]`; the head's inputs behind each, `[B, w, h]`."""
        branch = None
        if parents is not None:
            before = parents[:, :0] if self.parents is None else self.parents
            self.parents = torch.cat([before, parents], 1)  # [B, fed + w]
            branch = Branch(self.known, self.parents)
        out = self.run(tokens, self.cache, branch)  # [B, w, h]
        self.cache.advance([tokens.shape[1]] * len(tokens))
        self.fed += tokens.shape[1]
        return out


def unroll_text(body: nn.Module, batch: TrainBatch) -> list[Step]:
    """`Drafter.unroll` of a language model without its head: one pass over the true text.

    Raises `UserError` if rows are packed and a layer is of a kind that cannot tell them apart.
    """
    at = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)  # [T-1]
    if batch.packed:
        position, mask = batch.position[:, :-1], _isolating(body, batch, at)
    else:
        position, mask = at[None], (at < batch.lengths[:, None] - 1).long()  # [B, T-1]
    out = body(
        input_ids=batch.ids[:, :-1], attention_mask=mask, position_ids=position, use_cache=False
    ).last_hidden_state  # [B, T-1, h]
    scored = supervised_at(batch, at + 1, 0)  # [B, T-1]
    return [Step(out[scored], token_index(batch, at + 1)[scored])]


def _isolating(body: Any, batch: TrainBatch, at: Tensor) -> Tensor | dict[str, Tensor]:
    """Masks of packed rows, each conversation seeing itself alone: `[B, 1, T-1, T-1]`.

    Every attention that decoding can use takes them. Kernels for ragged rows would skip what is
    hidden instead of computing it, but are for few devices and dtypes.
    """
    own = batch.conversation[:, :-1]  # [B, T-1]
    before = at[:, None] >= at  # [T-1, T-1]
    visible = (before & (own[:, :, None] == own[:, None]))[:, None]  # [B, 1, T-1, T-1]
    eager = body.config._attn_implementation == "eager"
    return Sight.of(body.config).mask(visible, at[:, None], at, body.dtype if eager else None)
