"""EAGLE-3: decoder layers over fused target states, unrolled on their own (arXiv 2503.01840).

What every engine loads: three tapped layers, one Llama layer whose attention reads the token
embedding beside the state, a reduced draft vocabulary, the layer's *un-normed* output fed back as
the next step's state. Position t pairs the target's state of token t with the embedding of token
t + 1 and predicts token t + 2. Published heads may have more layers, another width than the target
with an embedding of their own, and norms in other places (`Norms`).
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ..configs.errors import UserError
from ..data.target import Target
from . import eagle3_begin
from .base import Step, TrainBatch
from .cached_states import CachedStates
from .eagle3_config import HEAD_OF_FACTORS, Eagle3Config
from .eagle3_layer import LaterLayer, Layer, Norms
from .pairs import PairDecoding, Pairs


class Eagle3Drafter(PairDecoding, nn.Module):
    """See the module's docstring; tensor names are those of the flat engine layout.

    But for `later.i`, which is its layer i + 1, and `head_down`, which it does not have.
    """

    family = "eagle3"
    may_abstain = False
    one_pass = False
    max_draft_tokens: int | None = None

    def __init__(
        self,
        config: LlamaConfig,
        taps: tuple[int, ...],
        draft_ids: Tensor | None,
        target_width: int | None = None,
        head_rank: int | None = None,
        norms: Norms | None = None,
        own_embedding: bool = False,
    ):
        """With `draft_ids` None it proposes all tokens.

        target_width: of the target's states, if it is not the head's own; head_rank: of a head of
        two factors; own_embedding: whether it has one that is not the target's, as it always has
        where the widths differ.
        """
        super().__init__()
        self.config, self.taps = config, taps
        self.norms = norms = norms or Norms()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.target_width = width = target_width or h
        self.own_embedding = own_embedding or width != h
        rows = config.vocab_size if draft_ids is None else len(draft_ids)
        self.fc = nn.Linear(len(taps) * width, h, bias=False)
        self.input_norm = self.fc_norm = None
        if norms.norm_before_fc:
            self.input_norm = LlamaRMSNorm(len(taps) * width, eps=eps)
        if norms.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps=eps) for _ in taps)
        self.midlayer = Layer(config, norms.norm_before_residual)
        self.later = nn.ModuleList(LaterLayer(config) for _ in range(1, config.num_hidden_layers))
        self.norm = LlamaRMSNorm(h, eps=eps)
        self.head_down = None if head_rank is None else nn.Linear(h, head_rank, bias=False)
        self.lm_head = nn.Linear(head_rank or h, rows, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.embed_tokens.weight.requires_grad_(False)
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self._checkpointed = False

    @classmethod
    def from_target(
        cls, target: Target, config: Eagle3Config, draft_ids: Tensor | None
    ) -> "Eagle3Drafter":
        """A head for `target`; norms, embedding and (by default) the layer start from its own.

        Raises `UserError` for widths that do not go together.
        """
        drafter = cls(
            eagle3_begin.llama_config(target, config),
            config.resolved_taps(target.num_layers),
            draft_ids,
            target.hidden_size,
            config.head_rank,
            config.norms,
        )
        eagle3_begin.begin(drafter, target, config)
        return drafter

    @property
    def layout(self) -> str | None:
        return "eagle3" if self.head_down is None else "draftsmith"

    @property
    def unserved(self) -> str | None:
        return None if self.head_down is None else "the head of two factors (drafter.head_rank)"

    @property
    def shared(self) -> tuple[str, ...]:
        return () if self.own_embedding else ("embed_tokens.weight",)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "taps": self.taps,
            "draft_vocab_size": None if self.draft_ids is None else len(self.draft_ids),
            "hidden_size": self.config.hidden_size,
            "layers": self.config.num_hidden_layers,
            "intermediate_size": self.config.intermediate_size,
            "head_rank": None if self.head_down is None else self.head_down.out_features,
            **asdict(self.norms),
        }

    @property
    def layers(self) -> list[Layer | LaterLayer]:
        return [self.midlayer, *self.later]

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def learn(self, head: bool, embedding: bool) -> None:
        """Whether the head's rows, and an embedding of its own, are trained.

        Raises `UserError` for what this head does not have.
        """
        if embedding and not self.own_embedding:
            raise UserError(
                "drafter.train_embedding is for a head with an embedding of its own, as one of "
                "another width than the target's has; this one reads the target's"
            )
        if self.head_down is not None and not head:
            raise UserError(HEAD_OF_FACTORS)
        self.lm_head.requires_grad_(head)
        self.embed_tokens.requires_grad_(embedding)

    def checkpoint(self, on: bool) -> None:
        self._checkpointed = on

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.lm_head(self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        normed = self.norm(hidden)
        return normed if self.head_down is None else self.head_down(normed)

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return self.lm_head.weight, None

    def finish_logits(self, logits: Tensor) -> Tensor:
        return logits

    @property
    def pairs(self) -> Pairs:
        return Pairs(
            self.config, self.layers, self.rotary, self.embed_tokens, self._fuse, self._fed
        )

    def _fuse(self, taps: Tensor) -> Tensor:
        """Tapped states `[B, n, L*h_t] -> [B, n, h]`; the target may run in another dtype."""
        taps = taps.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            each = taps.split(self.target_width, -1)
            taps = torch.cat([norm(t) for norm, t in zip(self.fc_norm, each, strict=True)], -1)
        return self.fc(taps)

    def _fed(self, output: Tensor) -> Tensor:
        """The state of the next pair, of the layers' output."""
        return self.norm(output) if self.norms.norm_output else output

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        return self.pairs.unroll(batch, steps, self._checkpointed and self.training)

    def start(self, rows: int, capacity: int) -> CachedStates:
        taps = self.fc.weight.new_empty(rows, 0, self.fc.in_features)
        return self.pairs.start(rows, capacity, taps)
