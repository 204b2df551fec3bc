"""Standalone draft LM: the target's embeddings, some of its layers, its norm and head.

Works for any decoder-only architecture of transformers. A reduced draft vocabulary makes the head
cheaper in our own loop; no serving engine reads one, so `publish` refuses it by name.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.target import Target, finish_logits
from .base import Step, TrainBatch, supervised_at, token_index
from .vocab import check_floor


@dataclass(frozen=True)
class CausalConfig:
    """What a recipe's `drafter:` section may say for `family: causal`."""

    layers: tuple[int, ...] | None = None
    """Target layers kept, in this order; null takes the first two and the last two."""
    draft_vocab_size: int | None = None
    """Reduces the head to that many tokens, in our own loop only; null keeps all."""
    domain_floor: float = 0.5
    """Share of the draft vocabulary dealt out equally to the domains' own most likely tokens."""

    def __post_init__(self) -> None:
        check_floor(self.domain_floor)

    def resolved_layers(self, num_layers: int) -> tuple[int, ...]:
        """The kept layers of a target with `num_layers` layers."""
        layers = self.layers or tuple(
            sorted({0, min(1, num_layers - 1), max(0, num_layers - 2), num_layers - 1})
        )
        wrong = [i for i in layers if not 0 <= i < num_layers]
        if wrong or not layers:
            raise UserError(
                f"drafter.layers {list(layers)} must name layers between 0 and {num_layers - 1}"
            )
        return layers


@dataclass
class _State:
    """The draft's own cache and the emitted tokens it has not seen.

    known: committed tokens in the cache, a row; fed: drafted tokens behind them; parents: `[B,
    fed]` of those, if they form a tree.
    """

    cache: SlabCache
    known: list[int]
    tokens: Tensor
    counts: list[int]
    fed: int
    parents: Tensor | None

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        index = torch.tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        self.tokens = self.tokens[index]
        self.known = [self.known[r] for r in rows]
        self.counts = [self.counts[r] for r in rows]


class CausalDrafter(nn.Module):
    """A causal LM of transformers behind the drafter contract."""

    family = "causal"
    may_abstain = False
    one_pass = True
    taps: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, draft_ids: Tensor | None):
        super().__init__()
        self.model = model
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._head_rows: Tensor | None = None

    @property
    def body(self) -> nn.Module:
        """The model without its head; held once, as a part of `model`."""
        return self.model.get_decoder()

    @classmethod
    def from_target(
        cls, target: Target, config: CausalConfig, draft_ids: Tensor | None
    ) -> "CausalDrafter":
        """Copy embeddings, the chosen layers, norm and head of `target`."""
        layers = config.resolved_layers(target.num_layers)
        kept = copy.deepcopy(target.model.config)
        text = kept.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None)
        text.num_hidden_layers = len(layers)
        if kinds:
            text.layer_types = [kinds[i] for i in layers]
        model = AutoModelForCausalLM.from_config(kept, dtype=torch.float32)
        model.load_state_dict(_pick_layers(target, layers), strict=True)
        model.tie_weights()
        return cls(model, draft_ids)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def head(self, hidden: Tensor) -> Tensor:
        if self.draft_ids is None:
            return self.finish_logits(self.model.get_output_embeddings()(hidden))
        return self.finish_logits(F.linear(hidden, *self.head_rows()))

    def head_inputs(self, hidden: Tensor) -> Tensor:
        return hidden

    def head_rows(self) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        if self.draft_ids is None:
            return head.weight, bias
        return self._rows(head.weight), None if bias is None else bias[self.draft_ids]

    def finish_logits(self, logits: Tensor) -> Tensor:
        return finish_logits(self.model.config.get_text_config(decoder=True), logits)

    def _rows(self, weight: Tensor) -> Tensor:
        """The head's rows of the draft vocabulary `[V_d, h]`, gathered once while decoding."""
        if self.training or torch.is_grad_enabled():
            return weight[self.draft_ids]
        if self._head_rows is None:
            self._head_rows = weight.detach()[self.draft_ids].contiguous()
        return self._head_rows

    def train(self, mode: bool = True) -> "CausalDrafter":
        self._head_rows = None
        return super().train(mode)

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        length = batch.ids.shape[1]
        at = torch.arange(length - 1, device=batch.ids.device)  # [T-1]
        mask = (at < batch.lengths[:, None] - 1).long()  # [B, T-1]
        out = self.body(
            input_ids=batch.ids[:, :-1], attention_mask=mask, position_ids=at[None], use_cache=False
        ).last_hidden_state  # [B, T-1, h]
        scored = supervised_at(batch, at + 1, 0)  # [B, T-1]
        return [Step(out[scored], token_index(batch, at + 1)[scored])]

    # ---- decoding

    def start(self, rows: int, capacity: int) -> _State:
        device = self.model.device
        cache = SlabCache(self.model.config, rows, capacity, device)
        empty = torch.empty(rows, 0, dtype=torch.long, device=device)
        return _State(cache, [0] * rows, empty, [0] * rows, 0, None)

    @property
    def max_positions(self) -> int | None:
        text = self.model.config.get_text_config(decoder=True)
        value = getattr(text, "max_position_embeddings", None)
        return int(value) if value else None

    def prefill(self, state: _State, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        self._forward(state.cache, ids)
        state.cache.advance(lengths)
        state.known = list(lengths)

    def commit(
        self,
        state: _State,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        """Of the emitted tokens, those that were fed as drafts stay in the cache."""
        if path is None:  # they lie where they belong
            seen = [min(c - 1, state.fed) for c in counts]
            state.cache.truncate([n + c for n, c in zip(state.known, seen, strict=True)])
        else:
            drafts = torch.tensor(list(counts), device=path.device)[:, None] - 1  # the last is new
            place = torch.arange(path.shape[1], device=path.device)
            seen = ((path >= 0) & (place < drafts)).long().cumprod(1).sum(1).tolist()
            state.cache.keep(state.known, path.clamp_min(0), seen)
        state.known = list(state.cache.lengths)
        state.counts = [c - s for c, s in zip(counts, seen, strict=True)]
        columns = torch.arange(max(state.counts), device=tokens.device)
        index = torch.tensor(seen, device=tokens.device)[:, None] + columns  # [B, m]
        state.tokens = tokens.gather(1, index.clamp_max(tokens.shape[1] - 1))
        state.fed, state.parents = 0, None

    def first(self, state: _State) -> Tensor:
        rows = torch.arange(len(state.counts), device=state.tokens.device)
        out = self._forward(state.cache, state.tokens)  # [B, m, h]
        state.cache.advance(state.counts)
        state.known = list(state.cache.lengths)
        state.tokens, last = state.tokens[:, :0], torch.tensor(state.counts, device=rows.device) - 1
        state.counts = [0] * len(rows)
        return self._logits(out[rows, last])

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        branch = None
        if parents is not None:
            before = parents[:, :0] if state.parents is None else state.parents
            state.parents = torch.cat([before, parents], 1)  # [B, fed + w]
            branch = Branch(state.known, state.parents)
        out = self._forward(state.cache, tokens, branch)  # [B, w, h]
        state.cache.advance([tokens.shape[1]] * len(tokens))
        state.fed += tokens.shape[1]
        return self._logits(out)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _forward(self, cache: SlabCache, ids: Tensor, branch: Branch | None = None) -> Tensor:
        cache.begin(ids.shape[1], branch)
        eager = self.model.config._attn_implementation == "eager"
        out: Any = self.body(
            input_ids=ids,
            attention_mask=cache.mask(self.model.dtype if eager else None),
            position_ids=cache.position_ids(),
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state


def _pick_layers(target: Target, layers: Sequence[int]) -> dict[str, Tensor]:
    """The target's tensors with the kept layers renumbered from 0."""
    place = next(n for n, m in target.model.named_modules() if m is target.layers)
    picked = {}
    for name, tensor in target.model.state_dict().items():
        if not name.startswith(f"{place}."):
            picked[name] = tensor
            continue
        number, rest = name[len(place) + 1 :].split(".", 1)
        for new, old in enumerate(layers):
            if int(number) == old:
                picked[f"{place}.{new}.{rest}"] = tensor.detach().clone()
    return picked
