"""EAGLE-3: one decoder layer over fused target states, unrolled on its own (arXiv 2503.01840).

The subset every engine loads: three tapped layers, one Llama layer whose attention reads the token
embedding beside the state, a reduced draft vocabulary, the layer's *un-normed* output fed back as
the next step's state. Position t pairs the target's state of token t with the embedding of token
t + 1 and predicts token t + 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.dense import dense_weight
from ..data.target import Target
from .base import Step, TrainBatch, supervised_at, token_index
from .vocab import check_floor


@dataclass(frozen=True)
class Eagle3Config:
    """What a recipe's `drafter:` section may say for `family: eagle3`."""

    taps: tuple[int, ...] | None = None
    """Target layers read (0-based outputs), three of them; null takes 1, the middle, last but 1."""
    draft_vocab_size: int = 8192
    """Tokens the head can propose, chosen by captured target mass; special tokens always in."""
    domain_floor: float = 0.5
    """Share of the draft vocabulary dealt out equally to the domains' own most likely tokens."""
    init: str = "target"
    """`target` starts the layer from the target's last one; `random` from noise."""

    def __post_init__(self) -> None:
        if self.taps is not None and len(self.taps) != 3:
            raise UserError(f"drafter.taps takes three layers, got {list(self.taps)}")
        if self.draft_vocab_size < 1:
            raise UserError(f"drafter.draft_vocab_size is {self.draft_vocab_size}, must be above 0")
        check_floor(self.domain_floor)
        if self.init not in ("target", "random"):
            raise UserError(f"drafter.init is '{self.init}', must be 'target' or 'random'")

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers to tap of a target with `num_layers` layers."""
        # Engines capture a layer's output when the next layer reads it, so the very last layer's
        # output is out of their reach.
        last = num_layers - 2
        taps = self.taps or (min(1, last), num_layers // 2 - 1, last)
        if not all(0 <= t <= last for t in taps):
            raise UserError(f"drafter.taps {list(taps)} must lie between 0 and {last}")
        return taps


class _Attention(nn.Module):
    """Self-attention over `[embedding; state]`, twice the hidden size wide at its input."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        h, self.heads = config.hidden_size, config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.heads
        self.d = d = config.head_dim or h // self.heads
        self.q_proj = nn.Linear(2 * h, self.heads * d, bias=False)
        self.k_proj = nn.Linear(2 * h, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(2 * h, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, h, bias=False)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: `[B, n, 2h] -> [B, H|KV, n, d]`."""
        shape = (*x.shape[:-1], -1, self.d)
        q = self.q_proj(x).view(shape).transpose(1, 2)  # [B, H, n, d]
        k = self.k_proj(x).view(shape).transpose(1, 2)  # [B, KV, n, d]
        v = self.v_proj(x).view(shape).transpose(1, 2)  # [B, KV, n, d]
        q, k = apply_rotary_pos_emb(q, k, *rope)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, H, n, d]` queries over `[B, KV, S, d]`, mask `[., 1, n, S]`: `[B, n, h]`."""
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(h, eps=eps)
        self.hidden_norm = LlamaRMSNorm(h, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps=eps)

    def inputs(self, embedding: Tensor, state: Tensor) -> Tensor:
        """The attention's input `[B, n, 2h]` from embeddings and states `[B, n, h]`."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], -1)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """Residual and MLP behind the attention: the layer's un-normed output `[B, n, h]`."""
        state = state + attended
        return state + self.mlp(self.post_attention_layernorm(state))


@dataclass
class _State:
    """Draft cache of the pairs with true states, and the pairs not yet taken in.

    hidden: `[B, 1 + fed, h]` states of a round: of the committed text, then of the drafted tokens
    fed (of a chain only the last); parents: `[B, fed]` of those, if they form a tree.
    """

    cache: SlabCache
    known: list[int]
    tokens: Tensor
    counts: list[int]
    taps: Tensor
    hidden: Tensor
    parents: Tensor | None

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        index = torch.tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        self.tokens, self.taps = self.tokens[index], self.taps[index]
        self.known = [self.known[r] for r in rows]
        self.counts = [self.counts[r] for r in rows]


class Eagle3Drafter(nn.Module):
    """See the module's docstring; tensor names are those of the flat engine layout."""

    family = "eagle3"
    may_abstain = False
    one_pass = False

    def __init__(self, config: LlamaConfig, taps: tuple[int, ...], draft_ids: Tensor):
        super().__init__()
        self.config, self.taps = config, taps
        h = config.hidden_size
        self.fc = nn.Linear(len(taps) * h, h, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(h, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(h, len(draft_ids), bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.embed_tokens.weight.requires_grad_(False)  # the target's own, shared when served
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)

    @classmethod
    def from_target(
        cls, target: Target, config: Eagle3Config, draft_ids: Tensor
    ) -> "Eagle3Drafter":
        """A head for `target`; norms, embedding and (by default) the layer start from its own."""
        drafter = cls(_llama_config(target), config.resolved_taps(target.num_layers), draft_ids)
        embedding = target.embedding.detach()[: drafter.config.vocab_size]
        drafter.embed_tokens.weight.data.copy_(embedding)
        drafter.lm_head.weight.data.copy_(dense_weight(target.head, target.dtype)[draft_ids])
        std = float(getattr(target.text_config, "initializer_range", 0.02))
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and not name.startswith(("lm_head", "embed_tokens")):
                nn.init.normal_(parameter, std=std)
        if config.init == "target":
            _copy_last_layer(drafter, target)
        return drafter

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def head_rows(self) -> tuple[Tensor, Tensor | None]:
        return self.lm_head.weight, None

    def finish_logits(self, logits: Tensor) -> Tensor:
        return logits

    def _fuse(self, taps: Tensor) -> Tensor:
        """Tapped states `[B, n, L*h] -> [B, n, h]`; the target may run in another dtype."""
        return self.fc(taps.to(self.fc.weight.dtype))

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Training-time test: step k reads its own step k-1 states and the true tokens."""
        ids, length = batch.ids, batch.ids.shape[1]
        device = ids.device
        at = torch.arange(length - 1, device=device)  # positions t of the pairs, [T-1]
        state = self._fuse(batch.taps)  # [B, T-1, h]
        embedding = self.embed_tokens(ids[:, 1:])  # [B, T-1, h]
        cos, sin = self.rotary(state, at[None])  # [1, T-1, d]
        q, k0, v0 = self.midlayer.self_attn.project(
            self.midlayer.inputs(embedding, state), (cos, sin)
        )
        # Later steps need only the positions that predict replies, step 0 must serve as context.
        begin = max(0, int(batch.prompt_lens.min()) - 1)
        window = at[begin:]  # [W]
        q, state = q[:, :, begin:], state[:, begin:]
        rope, embedding = (cos[:, begin:], sin[:, begin:]), embedding[:, begin:]
        keys, values = k0, v0
        visible = at <= window[:, None]  # [W, T-1]
        steps_out = []
        for k in range(steps):
            if k:
                state = F.pad(state[:, :-1], (0, 0, 1, 0))  # own output of the position before
                q, k_own, v_own = self.midlayer.self_attn.project(
                    self.midlayer.inputs(embedding, state), rope
                )
                keys, values = torch.cat([keys, k_own], 2), torch.cat([values, v_own], 2)
                visible = _visible(at, window, k)
            attended = self.midlayer.self_attn.attend(q, keys, values, visible)
            state = self.midlayer.finish(state, attended)  # [B, W, h]
            scored = supervised_at(batch, window + 2, k)  # [B, W]
            steps_out.append(Step(state[scored], token_index(batch, window + 2)[scored]))
        return steps_out

    # ---- decoding

    def start(self, rows: int, capacity: int) -> _State:
        device = self.fc.weight.device
        empty = torch.empty(rows, 0, dtype=torch.long, device=device)
        taps = self.fc.weight.new_empty(rows, 0, self.fc.in_features)
        cache = SlabCache(self.config, rows, capacity, device)
        return _State(cache, [0] * rows, empty, [], taps, taps, None)

    @property
    def max_positions(self) -> int | None:
        return self.config.max_position_embeddings

    def prefill(self, state: _State, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        """Pairs up to the last prompt token; the last state waits for the first reply token."""
        if ids.shape[1] > 1:
            self._forward(state.cache, self._fuse(taps[:, :-1]), ids[:, 1:])
            state.known = [n - 1 for n in lengths]
            state.cache.advance(state.known)

    def commit(
        self,
        state: _State,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        """Drafted pairs carry the head's own states, so all go; true ones are taken in later."""
        state.cache.truncate(state.known)
        state.tokens, state.counts, state.taps = tokens, list(counts), taps

    def first(self, state: _State) -> Tensor:
        """Takes in the pairs with true states."""
        rows = torch.arange(state.tokens.shape[0], device=state.tokens.device)
        last = torch.tensor(state.counts, device=rows.device) - 1  # [B]
        out = self._forward(state.cache, self._fuse(state.taps), state.tokens)  # [B, m, h]
        state.cache.advance(state.counts)
        state.known = list(state.cache.lengths)
        state.hidden, state.parents = out[rows, last][:, None], None
        return self.head(state.hidden[:, 0])

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Each token goes with the head's own state at its parent."""
        branch, before = None, state.hidden[:, -1:]  # [B, 1, h]
        if parents is not None:
            known = parents[:, :0] if state.parents is None else state.parents
            state.parents = torch.cat([known, parents], 1)  # [B, fed + w]
            branch = Branch(state.known, state.parents)
            index = (parents + 1)[..., None].expand(-1, -1, before.shape[-1])
            before = state.hidden.gather(1, index)  # [B, w, h]
        out = self._forward(state.cache, before, tokens, branch)  # [B, w, h]
        state.cache.advance([tokens.shape[1]] * len(tokens))
        state.hidden = out if parents is None else torch.cat([state.hidden, out], 1)
        return self.head(out)

    def _forward(
        self, cache: SlabCache, state: Tensor, tokens: Tensor, branch: Branch | None = None
    ) -> Tensor:
        """The layer over new pairs `[B, n]` behind the cache: un-normed output `[B, n, h]`."""
        cache.begin(tokens.shape[1], branch)
        rope = self.rotary(state, cache.position_ids())
        x = self.midlayer.inputs(self.embed_tokens(tokens), state)
        q, k, v = self.midlayer.self_attn.project(x, rope)
        k, v = cache.update(k, v, 0)
        mask = cache.mask(None)
        assert not isinstance(mask, dict)
        return self.midlayer.finish(state, self.midlayer.self_attn.attend(q, k, v, mask))


def _visible(at: Tensor, window: Tensor, k: int) -> Tensor:
    """Keys seen by step k: `[W, T-1 + k*W]`.

    Step 0's keys up to position t - k (true states), then of every step j = 1..k the one key at
    position t - k + j: exactly what decoding has in its cache k tokens into a round.
    """
    parts = [at <= window[:, None] - k]
    parts += [window == window[:, None] - k + j for j in range(1, k + 1)]
    return torch.cat(parts, 1)


def _llama_config(target: Target) -> LlamaConfig:
    source = target.text_config
    heads = source.num_attention_heads
    config: dict[str, Any] = {
        "hidden_size": source.hidden_size,
        "intermediate_size": getattr(source, "intermediate_size", 4 * source.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", heads),
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-5),
        "vocab_size": target.head.out_features,
        "max_position_embeddings": target.max_positions or 2048,
        "rope_parameters": _rope(source),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
    }
    return LlamaConfig(**config)


def _rope(source: Any) -> dict[str, Any] | None:
    """The target's RoPE (of several kinds that of full attention), for heads rotated whole."""
    rope = getattr(source, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return {name: v for name, v in rope.items() if name != "partial_rotary_factor"} or None


_COPIED = {f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")} | {
    "post_attention_layernorm": "post_attention_layernorm",
    "hidden_norm": "input_layernorm",
    "self_attn.o_proj": "self_attn.o_proj",
}
_HALF_COPIED = tuple(f"self_attn.{name}_proj" for name in "qkv")  # the half that reads the state


def _copy_last_layer(drafter: Eagle3Drafter, target: Target) -> None:
    """Start as the target's last layer over its last tap; what reads the embedding stays noise.

    Only for targets whose last layer is Llama's in names, shapes and norms; others start from
    noise throughout.
    """
    layer, final = target.layers[-1], getattr(target.body, "norm", None)
    theirs, mine = _weights(layer, target.dtype), drafter.midlayer.state_dict()
    h = drafter.config.hidden_size
    pairs = {f"{name}.weight": theirs.get(f"{source}.weight") for name, source in _COPIED.items()}
    halves = {f"{name}.weight": theirs.get(f"{name}.weight") for name in _HALF_COPIED}
    fits = all(w is not None and w.shape == mine[name].shape for name, w in pairs.items()) and all(
        w is not None and w.shape == mine[name][:, h:].shape for name, w in halves.items()
    )
    norms = (final, getattr(layer, "input_layernorm", None))
    if not fits or final is None or not all(_multiplies(norm) for norm in norms):
        return
    for name, weight in pairs.items():
        mine[name].copy_(weight)
    for name, weight in halves.items():
        mine[name][:, h:].copy_(weight)
    drafter.fc.weight.data[:, -h:] += torch.eye(h)
    drafter.norm.load_state_dict(final.state_dict())


def _weights(layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer's weights by name, of linear ones as they multiply."""
    found = {}
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            found[f"{name}.weight"] = dense_weight(module, dtype)
        elif isinstance(weight, Tensor):
            found[f"{name}.weight"] = weight
    return found


@torch.no_grad()
def _multiplies(norm: Any) -> bool:
    """Whether a norm scales by its weight as it stands; Gemma's scales by one more."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return False
    ones = torch.ones_like(weight)
    return torch.allclose(norm(ones).float(), weight.float(), rtol=0.02, atol=1e-3)
