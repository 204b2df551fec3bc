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
from .cached_states import CachedStates
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
            k, v = layer.self_attn.keys(read, rope)
            mask, asked = None, rope
            if step == 0 and i + 1 < len(self.layers):  # whose outputs later layers have keys of
                mask = window.context()
            elif step == 0:
                read, state = window.take(read, 1), window.take(state, 1)
                asked = window.take(rope[0], 1), window.take(rope[1], 1)
            q = layer.self_attn.queries(read, asked)
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
            q = layer.self_attn.queries(read, rope)
            k, v = cache.update(*layer.self_attn.keys(read, rope), i)
            state = layer.finish(state, layer.self_attn.attend(q, k, v, mask))
        return state

    def start(self, rows: int, capacity: int, taps: Tensor) -> CachedStates:
        """Nothing drafted yet; `taps [rows, 0, L*h_t]` tells device and dtype."""

        def drafted(
            cache: SlabCache, before: Tensor, tokens: Tensor, branch: Branch | None
        ) -> Tensor:
            return self.forward(cache, self.fed(before), tokens, branch)

        return CachedStates.empty(
            drafted, SlabCache(self.config, rows, capacity, taps.device), taps
        )


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
        self, state: CachedStates, ids: Tensor, lengths: Sequence[int], taps: Tensor
    ) -> None:
        """Pairs up to the last prompt token; the last state waits for the first reply token."""
        if ids.shape[1] > 1:
            self._behind(state, taps[:, :-1], ids[:, 1:])
            state.prefilled(lengths)

    def commit(
        self,
        state: CachedStates,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        state.commit(tokens, counts, taps)

    def first(self, state: CachedStates) -> Tensor:
        """Takes in the pairs with true states."""
        return self.head(state.begin(self._behind(state, state.taps, state.tokens)))

    def extend(self, state: CachedStates, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.head(state.extend(tokens, parents))

    def _behind(self, state: CachedStates, taps: Tensor, tokens: Tensor) -> Tensor:
        """Pairs of true states behind the cache: the last layer's output `[B, n, h]`."""
        pairs = self.pairs
        return pairs.forward(state.cache, pairs.fuse(taps), tokens)
