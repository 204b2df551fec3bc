"""DFlash: a block of tokens in one pass over the target's states (arXiv 2602.06036).

Of a round begun behind x_n, the block is x_n and mask tokens at positions n, n+1, ...; each place
but the first predicts the token at its own position. Places of a block see each other and the
context: the target's states of positions 0 to n-1, fused once, of which every layer makes keys and
values. Embedding and head are the target's own.

As the engines run it (vLLM, SGLang, z-lab's own code), all places are predicted at once, from x_n
alone. `sequential` lets a place know the token drafted before it, in this package's loop only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..configs.errors import UserError
from ..data.cache import SlabCache
from ..data.target import Target, finish_logits
from .base import Step, TrainBatch, supervised_at, token_index
from .borrowed import nothing_taken
from .dflash_begin import (
    copy_last_layers,
    copy_norm,
    draft_config,
    eye_added,
    free_token,
    target_words,
)
from .dflash_config import DFlashConfig
from .dflash_layer import Blocks, Correction, Layer
from .rounds import Depths, begins, by_level


@dataclass
class _State:
    """Keys and values of the context, and the emitted tokens whose states are not yet among them.

    places: `[B, size-1, .]` of a round, each place's logits or, where they are to be corrected, its
    state; depths: of the drafted tokens fed.
    """

    cache: SlabCache
    tokens: Tensor
    counts: list[int]
    taps: Tensor
    places: Tensor
    depths: Depths

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        index = torch.tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        self.tokens, self.taps = self.tokens[index], self.taps[index]
        self.counts = [self.counts[r] for r in rows]


class DFlashDrafter(nn.Module):
    """See the module's docstring; tensor names are those of z-lab's layout."""

    family = "dflash"
    may_abstain = False
    one_pass = False

    def __init__(
        self,
        config: Qwen3Config,
        taps: tuple[int, ...],
        block_size: int,
        mask_token_id: int,
        draft_ids: Tensor | None,
        target: Target,
        sequential: bool = False,
    ):
        """Embedding and head are `target`'s, the other weights random.

        `config` may have what `finish_logits` reads. With draft_ids `[V_d]` the head's rows of
        those are the drafter's own.
        """
        super().__init__()
        self.config, self.taps = config, taps
        self.block_size, self.mask_token_id = block_size, mask_token_id
        self.target_layers = target.num_layers
        h, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(taps) * target.hidden_size, h, bias=False)
        self.hidden_norm = Qwen3RMSNorm(h, eps=eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(h, eps=eps)
        self.correction = Correction(config) if sequential else None
        std = float(getattr(target.text_config, "initializer_range", 0.02))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
        if self.correction is not None:
            nn.init.zeros_(self.correction.down_proj.weight)
        where = torch.empty(0).device  # meta, where shapes alone are asked for
        words = target_words(target, draft_ids)
        embedding, rows = words["embed_tokens.weight"], len(words["lm_head.weight"])
        self.embed_tokens = skip_init(nn.Embedding, *embedding.shape, device=where)
        biased = "lm_head.bias" in words
        self.lm_head = skip_init(nn.Linear, h, rows, bias=biased, device=where)
        for name, weight in words.items():
            self.get_parameter(name).data.copy_(weight)
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        for name in self.shared:
            self.get_parameter(name).requires_grad_(False)
        self.rotary = Qwen3RotaryEmbedding(config)
        self._checkpointed = False

    @classmethod
    def from_target(
        cls, target: Target, config: DFlashConfig, draft_ids: Tensor | None = None
    ) -> "DFlashDrafter":
        """A drafter for `target`; by default its layers and norms start from the target's last.

        Raises `UserError` where the recipe says so and the target's layers are of another kind.
        """
        mask = config.mask_token_id
        if mask is not None and not 0 <= mask < len(target.embedding):
            raise UserError(
                f"drafter.mask_token_id {mask} must lie between 0 and {len(target.embedding) - 1}"
            )
        drafter = cls(
            draft_config(target, config.resolved_layers, config.intermediate_size),
            config.resolved_taps(target.num_layers),
            config.resolved_block_size,
            free_token(target) if mask is None else mask,
            draft_ids,
            target,
            bool(config.sequential),
        )
        if config.init != "random" and not drafter.fc.weight.is_meta:  # where nothing is copied
            scale = copy_last_layers(list(drafter.layers), target)
            if scale is None and config.init == "target":
                raise nothing_taken(target)
            if scale is not None:
                drafter.hidden_norm.weight.data.copy_(scale)
                eye_added(drafter.fc.weight.data)
            copy_norm(drafter.norm, target)
        return drafter

    @property
    def layout(self) -> str | None:
        return "dflash" if self.correction is None else "draftsmith"

    @property
    def shared(self) -> tuple[str, ...]:
        whole_head = ("lm_head.weight", "lm_head.bias")[: 1 + (self.lm_head.bias is not None)]
        return ("embed_tokens.weight", *(whole_head if self.draft_ids is None else ()))

    @property
    def unserved(self) -> str | None:
        if self.correction is not None:
            return "the sequential correction (drafter.sequential)"
        return None if self.lm_head.bias is None else "the bias of the target's head"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "layers": len(self.layers),
            "block_size": self.block_size,
            "taps": self.taps,
            "mask_token_id": self.mask_token_id,
            "intermediate_size": self.config.intermediate_size,
            "draft_vocab_size": None if self.draft_ids is None else len(self.draft_ids),
            "sequential": self.correction is not None,
        }

    @property
    def max_draft_tokens(self) -> int | None:
        return self.block_size - 1

    @property
    def max_positions(self) -> int | None:
        return self.config.max_position_embeddings

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def checkpoint(self, on: bool) -> None:
        self._checkpointed = on

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.finish_logits(self.lm_head(self.head_inputs(hidden)))

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.norm(hidden)

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return self.lm_head.weight, self.lm_head.bias

    def finish_logits(self, logits: Tensor) -> Tensor:
        return finish_logits(self.config, logits)

    def _fuse(self, taps: Tensor) -> Tensor:
        """Tapped states `[B, n, L*h] -> [B, n, h]`; the target may run in another dtype."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """All blocks of all replies in one pass; step k is place k + 1 of each."""
        blocks = Blocks.of(batch, self.block_size)
        context = self._fuse(batch.taps)  # [B, T-1, h]
        context_rope = self.rotary(context, batch.position[:, :-1])
        x = self.embed_tokens(blocks.tokens(self.mask_token_id)).to(context.dtype)
        rope = self.rotary(x, blocks.position)
        for layer in self.layers:
            given = (x, context, rope, context_rope, blocks)
            if self._checkpointed and self.training and torch.is_grad_enabled():
                x = checkpoint(layer, *given, use_reentrant=False)
            else:
                x = layer(*given)
        places = x.unflatten(1, (-1, self.block_size))  # [B, A, size, h]
        found = []
        for k in range(steps):
            column = blocks.anchor + k + 1  # [B, A]
            scored = supervised_at(batch, column, k)
            state = places[:, :, k + 1][scored]  # [N, h]
            if self.correction is not None:
                before = (column - 1).clamp_max(batch.ids.shape[1] - 1)
                state = self._corrected(state, batch.ids.gather(1, before)[scored])
            found.append(Step(state, token_index(batch, column)[scored]))
        return found

    def _corrected(self, state: Tensor, before: Tensor) -> Tensor:
        """States `[..., h]` of places, corrected by the tokens before them `[...]`."""
        assert self.correction is not None
        return self.correction(state, self.embed_tokens(before))

    # ---- decoding

    def start(self, rows: int, capacity: int) -> _State:
        device = self.fc.weight.device
        empty = torch.empty(rows, 0, dtype=torch.long, device=device)
        taps = self.fc.weight.new_empty(rows, 0, self.fc.in_features)
        cache = SlabCache(self.config, rows, capacity + self.block_size, device)
        return _State(cache, empty, [], taps, taps, Depths())

    def prefill(self, state: _State, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        """All states but the last, which comes with the reply's first token."""
        if ids.shape[1] > 1:
            self._take_in(state.cache, taps[:, :-1], [n - 1 for n in lengths])

    def commit(
        self,
        state: _State,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        """Of the block nothing was kept."""
        state.tokens, state.counts, state.taps = tokens, list(counts), taps

    def first(self, state: _State) -> Tensor:
        """Takes in the states of what was committed, and runs the block."""
        self._take_in(state.cache, state.taps, state.counts)
        begin, _ = begins(state.tokens, state.counts, state.taps)  # [B]
        places = self._block(state.cache, begin[:, None])[:, 1:]  # [B, size-1, h]
        state.depths = Depths()
        if self.correction is not None:
            state.places = places
            return self.head(self._corrected(places[:, 0], begin))
        state.places = self.head(places)  # [B, size-1, V_d]
        return state.places[:, 0]

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Looks up the places behind the tokens: one at depth i is followed by place i + 1."""

        def behind(depth: int) -> Tensor:
            places = state.places[:, depth, None].expand(-1, tokens.shape[1], -1)  # [B, w, .]
            return places if self.correction is None else self._corrected(places, tokens)

        found = by_level(state.depths.feed(parents), behind)
        return found if self.correction is None else self.head(found)

    def _take_in(self, cache: SlabCache, taps: Tensor, counts: Sequence[int]) -> None:
        """Keys and values of states `[B, m, L*h]`, the first `counts[b]` of each row."""
        cache.begin(taps.shape[1])
        context = self._fuse(taps)
        rope = self.rotary(context, cache.position_ids())
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            cache.update(*layer.self_attn.keys(context, rope), number)
        cache.advance(counts)

    def _block(self, cache: SlabCache, begin: Tensor) -> Tensor:
        """The block of first tokens `begin [B, 1]` behind what the cache keeps: `[B, size, h]`.

        What it writes lies behind the kept slots, and is overwritten by what comes next.
        """
        size = self.block_size
        cache.begin(size)
        x = self.embed_tokens(nn.functional.pad(begin, (0, size - 1), value=self.mask_token_id))
        rope, mask = self.rotary(x, cache.position_ids()), None
        if cache.common_start is None:
            ends = torch.tensor(cache.lengths, device=x.device)[:, None] + size  # [B, 1]
            mask = (torch.arange(cache.end, device=x.device) < ends)[:, None, None]  # [B, 1, 1, S]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            q, k, v = layer.project(x, rope)
            k, v = cache.update(k, v, number)
            x = layer.finish(x, layer.self_attn.attend(q, k, v, mask))
        return x
