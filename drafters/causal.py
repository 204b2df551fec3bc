"""Standalone draft LM: parts of the target, a published one, or one of sizes that a recipe gives.

Works for any decoder-only architecture of transformers. A reduced draft vocabulary makes the head
cheaper in our own loop; no serving engine reads one, so `publish` refuses it by name.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.dense import dense_weight, whole
from ..data.target import Target, finish_logits
from ..data.warp import float32_or_better
from .adapters import LoraSection, adapted
from .base import Step, TrainBatch
from .cached import CachedText, unroll_text
from .sized import check_sizes, sized_model
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
    start: str | None = None
    """Goes on from a causal LM, its folder or Hub id, which decides what is left unset here; null
    copies parts of the target."""
    config: dict[str, Any] | None = None
    """Begins with layers of noise by a configuration of transformers, such as {model_type: llama,
    hidden_size: 256, ...}; what is left out of tokens and positions is the target's."""
    lora: LoraSection | None = None
    """Trains a low-rank adapter and nothing else; null trains all weights."""

    reads_target: ClassVar[bool] = False
    most: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_floor(self.domain_floor)
        if self.config is None:
            return
        for name in ("layers", "start", "lora"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"drafter.config begins a model of its own, which drafter.{name} is not for; "
                    "leave one of them out"
                )
        check_sizes(self.config)

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the draft vocabulary."""
        return self.draft_vocab_size

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """It reads no states."""
        return ()

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


class CausalDrafter(nn.Module):
    """A causal LM of transformers behind the drafter contract."""

    family = "causal"
    may_abstain = False
    one_pass = True
    taps: tuple[int, ...] = ()
    layout: str | None = "transformers"
    shared: tuple[str, ...] = ()
    max_draft_tokens: int | None = None

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
        """Copy embeddings, the chosen layers, norm and head of `target`, or begin by `config`."""
        if config.config is not None:
            return cls(sized_model(config.config, target), draft_ids)
        layers = config.resolved_layers(target.num_layers)
        kept = copy.deepcopy(target.model.config)
        text = kept.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None)
        text.num_hidden_layers = len(layers)
        if kinds:
            text.layer_types = [kinds[i] for i in layers]
        if hasattr(kept, "quantization_config"):  # the copy is dense
            del kept.quantization_config
        model = AutoModelForCausalLM.from_config(kept, dtype=torch.float32)
        model.load_state_dict(_pick_layers(target, layers), strict=True)
        model.tie_weights()
        drafter = cls(model, draft_ids)
        if config.lora is not None:
            drafter.adapt(config.lora)
        return drafter

    def adapt(self, section: LoraSection, base: str = "") -> None:
        """Freeze the model as it is, and train an adapter on it instead; `base` as `adapted`."""
        # peft's wrapper answers for what is inside it.
        self.model = cast(PreTrainedModel, adapted(self.model, section, base))

    @property
    def options(self) -> dict[str, Any]:
        return {"draft_vocab_size": None if self.draft_ids is None else len(self.draft_ids)}

    @property
    def unserved(self) -> str | None:
        if self.draft_ids is None:
            return None
        return (
            f"a reduced draft vocabulary of {len(self.draft_ids)} tokens (drafter.draft_vocab_size)"
        )

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        if self.draft_ids is None:
            return self.finish_logits(self.model.get_output_embeddings()(hidden))
        return self.finish_logits(F.linear(hidden, *self.head_rows()))

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return hidden

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
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

    def checkpoint(self, on: bool) -> None:
        if not on:
            self.model.activation_checkpointing_disable()
            return
        try:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
            self.model.disable_input_require_grads()  # which only the other kind would need
        except ValueError as error:
            raise UserError(
                f"a drafter of model type '{self.model.config.model_type}' cannot compute its "
                "layers again for the gradient; take train.gradient_checkpointing false"
            ) from error

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        return unroll_text(self.body, replace(batch, ids=self._known(batch.ids)))

    # ---- decoding

    def start(self, rows: int, capacity: int) -> CachedText:
        cache = SlabCache(self.model.config, rows, capacity, self.model.device)
        return CachedText.empty(self._forward, cache)

    @property
    def max_positions(self) -> int | None:
        text = self.model.config.get_text_config(decoder=True)
        value = getattr(text, "max_position_embeddings", None)
        return int(value) if value else None

    def prefill(self, state: CachedText, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        state.prefill(ids, lengths)

    def commit(
        self,
        state: CachedText,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        state.commit(tokens, counts, path)

    def first(self, state: CachedText) -> Tensor:
        return self._logits(state.first())

    def extend(self, state: CachedText, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self._logits(state.extend(tokens, parents))

    def _logits(self, hidden: Tensor) -> Tensor:
        return float32_or_better(self.head(hidden))

    def _known(self, ids: Tensor) -> Tensor:
        # A tokenizer of more tokens than the draft knows: what is unknown reads as its last one.
        known = cast(nn.Embedding, self.model.get_input_embeddings()).num_embeddings
        return ids.clamp_max(known - 1)

    def _forward(self, ids: Tensor, cache: SlabCache, branch: Branch | None) -> Tensor:
        ids = self._known(ids)
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
    picked, state = {}, target.model.state_dict()
    if getattr(target.model.config, "quantization_config", None) is not None:
        state = _dense_state(target)
    for name, tensor in state.items():
        if not name.startswith(f"{place}."):
            picked[name] = tensor
            continue
        number, rest = name[len(place) + 1 :].split(".", 1)
        for new, old in enumerate(layers):
            if int(number) == old:
                picked[f"{place}.{new}.{rest}"] = whole(tensor.detach()).clone()
    return picked


def _dense_state(target: Target) -> dict[str, Tensor]:
    """A quantised target's tensors as they multiply, without what quantisation adds to them."""
    linear = {n: m for n, m in target.model.named_modules() if isinstance(m, nn.Linear)}
    found = {name: p.detach() for name, p in target.model.named_parameters()}
    found |= {f"{name}.weight": dense_weight(m, target.dtype) for name, m in linear.items()}
    return found
