"""Drafters that go from pair to pair: the state of token t beside the embedding of token t + 1.

A pair's output predicts token t + 2, and stands in for the target's state of token t + 1 until that
is known. Shared by EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840), whose layers, inputs
and heads differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from ..data.cache import Branch, SlabCache
from .base import Step, TrainBatch, supervised_at, token_index
from .eagle3_layer import Block, Window


@dataclass(frozen=True)
class Pairs:
    """What a family makes of its pairs.

    embed: token ids `[B, n]` -> `[B, n, h]`; fuse: what is tapped of the target `[B, n, L*h_t]` ->
    states `[B, n, h]`; fed: the last layer's output -> the state of the next pair; rotary: as
    transformers has it.
    """

    config: LlamaConfig
    layers: Sequence[Block]
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    embed: Callable[[Tensor], Tensor]
    fuse: Callable[[Tensor], Tensor]
    fed: Callable[[Tensor], Tensor]

    def embedded(self, ids: Tensor) -> Tensor:
        """`[B, n] -> [B, n, h]`."""
        # A tokenizer of more tokens than the draft knows: what is unknown reads as its last one.
        return self.embed(ids.clamp_max(self.config.vocab_size - 1))

    def unroll(self, batch: TrainBatch, steps: int, again: bool) -> list[Step]:
        """Training-time test: step k reads its own step k-1 states and the true tokens.

        again: whether the inside of a step is forgotten, and computed again for gradients.
        """
        window = Window.of(batch)
        embedding = self.embedded(batch.ids[:, 1:])  # [B, T-1, h]
        state = self.fuse(batch.taps)  # [B, T-1, h]
        position = batch.position[:, :-1] if batch.packed else window.at[None]
        rope = self.rotary(state, position)  # 2 x [., T-1, d]
        token = token_index(batch, window.column + 2)  # [B, W]
        known: list[Tensor] = []  # keys and values of the steps so far, in turn
        steps_out = []
        for k in range(steps):
            if k:
                state = self.fed(state)
                state = F.pad(state[:, :-1], (0, 0, 1, 0))  # own output of the pair before
            if k == 1:
                embedding = window.take(embedding, 1)
                rope = (window.take(rope[0], 1), window.take(rope[1], 1))
            run = partial(self._step, window=window, step=k, embedding=embedding, rope=rope)
            if again and torch.is_grad_enabled():
                state, *own = checkpoint(run, state, *known, use_reentrant=False)
            else:
                state, *own = run(state, *known)
            known += own
            scored = supervised_at(batch, window.column + 2, k)  # [B, W]
            steps_out.append(Step(state[scored], token[scored]))
        return steps_out

    def _step(
        self,
        state: Tensor,
        *known: Tensor,
        window: Window,
        step: int,
        embedding: Tensor,
        rope: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, ...]:
        """One step over states `[B, n, h]`, of all pairs in step 0 and of the window in others.

        `known` holds keys and values of the steps before, each layer's in turn. Its output in the
        window `[B, W, h]`, and its own keys and values.
        """
        own: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            read, state = layer.inputs(embedding, state)
            q, k, v = layer.self_attn.project(read, rope)
            mask = None
            if step == 0 and i + 1 < len(self.layers):  # whose outputs later layers have keys of
                mask = window.context()
            elif step == 0:
                q, state = window.take(q, 2), window.take(state, 1)
            turn = 2 * len(self.layers)
            keys = torch.cat([*known[2 * i :: turn], k], 2)  # [B, KV, S, d]
            values = torch.cat([*known[2 * i + 1 :: turn], v], 2)
            mask = window.visible(step) if mask is None else mask
            state = layer.finish(state, layer.self_attn.attend(q, keys, values, mask))
            own += [k, v]
        return state, *own

    def forward(
        self, cache: SlabCache, state: Tensor, tokens: Tensor, branch: Branch | None = None
    ) -> Tensor:
        """New pairs `[B, n]` behind the cache: the last layer's output `[B, n, h]`."""
        cache.begin(tokens.shape[1], branch)
        rope = self.rotary(state, cache.position_ids())
        embedding, mask = self.embedded(tokens), cache.mask(None)
        assert not isinstance(mask, dict)
        for i, layer in enumerate(self.layers):
            read, state = layer.inputs(embedding, state)
            q, k, v = layer.self_attn.project(read, rope)
            k, v = cache.update(k, v, i)
            state = layer.finish(state, layer.self_attn.attend(q, k, v, mask))
        return state


class PairDecoding:
    """What drafters of `Pairs` have of the contract in common: how they draft."""

    config: LlamaConfig

    @property
    def pairs(self) -> Pairs:
        raise NotImplementedError

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        raise NotImplementedError

    @property
    def max_positions(self) -> int | None:
        return self.config.max_position_embeddings

    def prefill(
        self, state: "PairState", ids: Tensor, lengths: Sequence[int], taps: Tensor
    ) -> None:
        state.prefill(ids, lengths, taps)

    def commit(
        self,
        state: "PairState",
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        state.commit(tokens, counts, taps)

    def first(self, state: "PairState") -> Tensor:
        return self.head(state.first())

    def extend(self, state: "PairState", tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.head(state.extend(tokens, parents))


@dataclass
class PairState:
    """A `DraftState`: the cache of the pairs with true states, and the pairs not yet taken in.

    hidden: `[B, 1 + fed, h]` outputs of a round: behind the committed text, then behind the drafted
    tokens fed (of a chain only the last); parents: `[B, fed]` of those, if they form a tree.
    """

    pairs: Pairs
    cache: SlabCache
    known: list[int]
    tokens: Tensor
    counts: list[int]
    taps: Tensor
    hidden: Tensor
    parents: Tensor | None

    @classmethod
    def empty(cls, pairs: Pairs, rows: int, capacity: int, taps: Tensor) -> "PairState":
        """Of `rows` rows; `taps [rows, 0, L*h_t]` tells device and dtype."""
        tokens = torch.empty(rows, 0, dtype=torch.long, device=taps.device)
        cache = SlabCache(pairs.config, rows, capacity, taps.device)
        return cls(pairs, cache, [0] * rows, tokens, [], taps, taps, None)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        index = torch.tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        self.tokens, self.taps = self.tokens[index], self.taps[index]
        self.known = [self.known[r] for r in rows]
        self.counts = [self.counts[r] for r in rows]

    def prefill(self, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        """Pairs up to the last prompt token; the last state waits for the first reply token."""
        if ids.shape[1] > 1:
            self.pairs.forward(self.cache, self.pairs.fuse(taps[:, :-1]), ids[:, 1:])
            self.known = [n - 1 for n in lengths]
            self.cache.advance(self.known)

    def commit(self, tokens: Tensor, counts: Sequence[int], taps: Tensor) -> None:
        """Drafted pairs carry the head's own states, so all go; true ones are taken in later."""
        self.cache.truncate(self.known)
        self.tokens, self.counts, self.taps = tokens, list(counts), taps

    def first(self) -> Tensor:
        """Take in the pairs with true states: the output behind the last of each row, `[B, h]`."""
        rows = torch.arange(self.tokens.shape[0], device=self.tokens.device)
        last = torch.tensor(self.counts, device=rows.device) - 1  # [B]
        out = self.pairs.forward(self.cache, self.pairs.fuse(self.taps), self.tokens)  # [B, m, h]
        self.cache.advance(self.counts)
        self.known = list(self.cache.lengths)
        self.hidden, self.parents = out[rows, last][:, None], None
        return self.hidden[:, 0]

    def extend(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Each token goes with the output behind its parent: outputs behind each, `[B, w, h]`."""
        branch, before = None, self.hidden[:, -1:]  # [B, 1, h]
        if parents is not None:
            known = parents[:, :0] if self.parents is None else self.parents
            self.parents = torch.cat([known, parents], 1)  # [B, fed + w]
            branch = Branch(self.known, self.parents)
            index = (parents + 1)[..., None].expand(-1, -1, before.shape[-1])
            before = self.hidden.gather(1, index)  # [B, w, h]
        out = self.pairs.forward(self.cache, self.pairs.fed(before), tokens, branch)  # [B, w, h]
        self.cache.advance([tokens.shape[1]] * len(tokens))
        self.hidden = out if parents is None else torch.cat([self.hidden, out], 1)
        return out
