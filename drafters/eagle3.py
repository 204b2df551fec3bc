"""EAGLE-3: one decoder layer over fused target states, unrolled on its own (arXiv 2503.01840).

The subset every engine loads: three tapped layers, one Llama layer whose attention reads the token
embedding beside the state, a reduced draft vocabulary, the layer's *un-normed* output fed back as
the next step's state. Position t pairs the target's state of token t with the embedding of token
t + 1 and predicts token t + 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.dense import dense_weight, whole
from ..data.target import Target
from .base import Step, TrainBatch, supervised_at, token_index
from .eagle3_layer import Layer, Window
from .vocab import check_floor


@dataclass(frozen=True)
class Eagle3Config:
    """What a recipe's `drafter:` section may say for `family: eagle3`."""

    taps: tuple[int, ...] | None = None
    """Target layers read (0-based outputs), three of them; null takes 1, the middle, last but 1."""
    draft_vocab_size: int | None = None
    """Tokens the head can propose, chosen by captured target mass; special tokens always in. null
    takes 8192."""
    domain_floor: float = 0.5
    """Share of the draft vocabulary dealt out equally to the domains' own most likely tokens."""
    init: str | None = None
    """`target` starts the layer from the target's last one, as null does; `random` from noise."""
    start: str | None = None
    """Goes on from a published head, its folder or Hub id, which decides what is left unset here;
    null begins anew."""

    reads_target: ClassVar[bool] = True
    most: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.taps is not None and len(self.taps) != 3:
            raise UserError(f"drafter.taps takes three layers, got {list(self.taps)}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise UserError(f"drafter.draft_vocab_size is {self.draft_vocab_size}, must be above 0")
        check_floor(self.domain_floor)
        if self.init not in ("target", "random", None):
            raise UserError(f"drafter.init is '{self.init}', must be 'target' or 'random'")
        if self.init is not None and self.start is not None:
            raise UserError(
                f"drafter.init '{self.init}' begins anew and drafter.start '{self.start}' goes on "
                "from other weights; leave one of them out"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens of the draft vocabulary of a head that begins anew."""
        return 8192 if self.draft_vocab_size is None else self.draft_vocab_size

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers to tap of a target with `num_layers` layers."""
        # Engines capture a layer's output when the next layer reads it, so the very last layer's
        # output is out of their reach.
        last = num_layers - 2
        taps = self.taps or (min(1, last), num_layers // 2 - 1, last)
        if not all(0 <= t <= last for t in taps):
            raise UserError(f"drafter.taps {list(taps)} must lie between 0 and {last}")
        return taps


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
    layout: str | None = "eagle3"
    shared: tuple[str, ...] = ("embed_tokens.weight",)
    unserved: str | None = None
    max_draft_tokens: int | None = None

    def __init__(self, config: LlamaConfig, taps: tuple[int, ...], draft_ids: Tensor):
        super().__init__()
        self.config, self.taps = config, taps
        h = config.hidden_size
        self.fc = nn.Linear(len(taps) * h, h, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(h, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(h, len(draft_ids), bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.embed_tokens.weight.requires_grad_(False)  # the target's own, shared when served
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self._checkpointed = False

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
        if config.init != "random":
            _copy_last_layer(drafter, target)
        return drafter

    @property
    def options(self) -> dict[str, Any]:
        return {"taps": self.taps, "draft_vocab_size": len(self.draft_ids)}

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def checkpoint(self, on: bool) -> None:
        self._checkpointed = on

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.lm_head(self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.norm(hidden)

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return self.lm_head.weight, None

    def finish_logits(self, logits: Tensor) -> Tensor:
        return logits

    def _fuse(self, taps: Tensor) -> Tensor:
        """Tapped states `[B, n, L*h] -> [B, n, h]`; the target may run in another dtype."""
        return self.fc(taps.to(self.fc.weight.dtype))

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Training-time test: step k reads its own step k-1 states and the true tokens."""
        window = Window.of(batch)
        embedding = self.embed_tokens(batch.ids[:, 1:])  # [B, T-1, h]
        state = self._fuse(batch.taps)  # [B, T-1, h]
        position = batch.position[:, :-1] if batch.packed else window.at[None]
        rope = self.rotary(state, position)  # 2 x [., T-1, d]
        token = token_index(batch, window.column + 2)  # [B, W]
        known: list[Tensor] = []  # keys and values of the steps so far, in turn
        steps_out = []
        for k in range(steps):
            if k:
                state = F.pad(state[:, :-1], (0, 0, 1, 0))  # own output of the pair before
            if k == 1:
                embedding = window.take(embedding, 1)
                rope = (window.take(rope[0], 1), window.take(rope[1], 1))
            run = partial(self._unrolled, window=window, step=k, embedding=embedding, rope=rope)
            if self._checkpointed and self.training and torch.is_grad_enabled():
                state, *own = checkpoint(run, state, *known, use_reentrant=False)
            else:
                state, *own = run(state, *known)
            known += own
            scored = supervised_at(batch, window.column + 2, k)  # [B, W]
            steps_out.append(Step(state[scored], token[scored]))
        return steps_out

    def _unrolled(
        self,
        state: Tensor,
        *known: Tensor,
        window: Window,
        step: int,
        embedding: Tensor,
        rope: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step over states `[B, n, h]`, of all pairs in step 0 and of the window in others.

        `known` holds keys and values of the steps before. Its output in the window `[B, W, h]`, and
        its own keys and values.
        """
        attention = self.midlayer.self_attn
        q, k, v = attention.project(self.midlayer.inputs(embedding, state), rope)
        if step == 0:
            q, state = window.take(q, 2), window.take(state, 1)
        keys = torch.cat([*known[0::2], k], 2)  # [B, KV, S, d]
        values = torch.cat([*known[1::2], v], 2)
        attended = attention.attend(q, keys, values, window.visible(step))
        return self.midlayer.finish(state, attended), k, v

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
            found[f"{name}.weight"] = whole(weight.detach())
    return found


@torch.no_grad()
def _multiplies(norm: Any) -> bool:
    """Whether a norm scales by its weight as it stands; Gemma's scales by one more."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return False
    weight = whole(weight.detach())
    out = functional_call(norm, {"weight": weight}, (torch.ones_like(weight),))
    return torch.allclose(out.float(), weight.float(), rtol=0.02, atol=1e-3)
