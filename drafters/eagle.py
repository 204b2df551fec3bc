"""EAGLE-1 and EAGLE-2 heads that others published (arXiv 2401.15077, 2406.16858): measured alone.

A head takes what the target's head reads of token t and the embedding of token t + 1, and says what
the target's head would read of token t + 1. Embedding and head are the target's own. The two papers
differ in how drafts are chosen, not in the head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..data.target import Target, finish_logits
from .base import Step, TrainBatch
from .cached_states import CachedStates
from .eagle3_layer import Block, LaterLayer
from .pairs import PairDecoding, Pairs


class FusedLayer(Block):
    """The first layer: it reads and goes on from one product of embedding and state, un-normed."""

    def __init__(self, config: LlamaConfig, bias: bool):
        h = config.hidden_size
        super().__init__(config, h)
        self.fc = nn.Linear(2 * h, h, bias=bias)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps=config.rms_norm_eps)

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat([embedding, state], -1))  # [B, n, h]
        return fused, fused


class EagleDrafter(PairDecoding, nn.Module):
    """See the module's docstring. It has nothing that is trained here."""

    family = "eagle"
    may_abstain = False
    one_pass = False
    layout: str | None = "eagle"
    unserved: str | None = "an EAGLE-1 or EAGLE-2 head, which is measured and not written"
    max_draft_tokens: int | None = None
    draft_ids: Tensor | None = None

    def __init__(self, config: LlamaConfig, target: Target, bias: bool):
        """Its weights are any; those that are the target's own, too."""
        super().__init__()
        self.config, self._text = config, target.text_config
        self.taps: tuple[int, ...] = (target.num_layers,)
        self.first_layer = FusedLayer(config, bias)
        self.later = nn.ModuleList(LaterLayer(config) for _ in range(1, config.num_hidden_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        rows, theirs = target.head.out_features, getattr(target.head, "bias", None)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=theirs is not None)
        self.rotary = LlamaRotaryEmbedding(config)
        self.requires_grad_(False)

    @property
    def shared(self) -> tuple[str, ...]:
        names = ("embed_tokens.weight", "lm_head.weight")
        return names if self.lm_head.bias is None else (*names, "lm_head.bias")

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def trainable(self) -> list[nn.Parameter]:
        return []

    def checkpoint(self, on: bool) -> None:
        """It has no gradients."""

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.finish_logits(self.lm_head(hidden))

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return hidden

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return self.lm_head.weight, self.lm_head.bias

    def finish_logits(self, logits: Tensor) -> Tensor:
        return finish_logits(self._text, logits)

    @property
    def pairs(self) -> Pairs:
        layers: list[Any] = [self.first_layer, *self.later]
        return Pairs(self.config, layers, self.rotary, self.embed_tokens, self._fuse, lambda x: x)

    def _fuse(self, taps: Tensor) -> Tensor:
        """The target may run in another dtype."""
        return taps.to(self.lm_head.weight.dtype)

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        return self.pairs.unroll(batch, steps, False)

    def start(self, rows: int, capacity: int) -> CachedStates:
        taps = self.lm_head.weight.new_empty(rows, 0, self.config.hidden_size)
        return self.pairs.start(rows, capacity, taps)
