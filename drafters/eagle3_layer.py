"""The layers of an EAGLE-3 head, and which pairs they see in training-time test."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from .base import TrainBatch, supervised_at
from .rope import Rope, rotated


@dataclass(frozen=True)
class Norms:
    """Where published heads norm beside what the paper says, by the names of their configurations.

    `Eagle3Config` says what each means.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Attention(nn.Module):
    """Self-attention over what is `width` wide: `[embedding; state]`, or a state."""

    def __init__(self, config: LlamaConfig, width: int):
        super().__init__()
        h, self.heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.kv_heads = config.num_key_value_heads or self.heads
        self.d = d = config.head_dim or h // self.heads
        self.q_proj = nn.Linear(width, self.heads * d, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(self.heads * d, h, bias=bias)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotated queries: `[B, n, width] -> [B, H, n, d]`."""
        return rotated(self._split(self.q_proj(x)), rope)

    def keys(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values: `[B, n, width] -> [B, KV, n, d]`."""
        return rotated(self._split(self.k_proj(x)), rope), self._split(self.v_proj(x)).transpose(
            1, 2
        )

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.d))  # [B, n, heads, d]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, H, n, d]` queries over `[B, KV, S, d]`, mask `[., 1, n, S]`: `[B, n, h]`."""
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A Llama layer over states of pairs, but for what its attention reads."""

    post_attention_layernorm: LlamaRMSNorm

    def __init__(self, config: LlamaConfig, width: int):
        super().__init__()
        self.self_attn = Attention(config, width)
        self.mlp = LlamaMLP(config)

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads `[B, n, width]`, and what it is added to `[B, n, h]`.

        Of embeddings and states `[B, n, h]`.
        """
        raise NotImplementedError

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """Residual and MLP behind the attention: the layer's un-normed output `[B, n, h]`."""
        state = state + attended
        return state + self.mlp(self.post_attention_layernorm(state))


class Layer(Block):
    """The first layer: it reads the embedding beside the state, each with a norm of its own."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool = False):
        h, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, 2 * h)
        self.input_layernorm = LlamaRMSNorm(h, eps=eps)
        self.hidden_norm = LlamaRMSNorm(h, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps=eps)
        self.norm_before_residual = norm_before_residual

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(state)
        read = torch.cat([self.input_layernorm(embedding), normed], -1)  # [B, n, 2h]
        return read, normed if self.norm_before_residual else state


class LaterLayer(Block):
    """A layer behind the first: an ordinary one, over the state alone."""

    def __init__(self, config: LlamaConfig):
        h, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(config, h)
        self.input_layernorm = LlamaRMSNorm(h, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(h, eps=eps)

    def inputs(self, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.input_layernorm(state), state


@dataclass(frozen=True)
class Window:
    """The pairs that predict replies; later steps need only those, step 0 serves as context.

    at: `[T-1]` all pairs of a row; column: which of them the window has, `[W]` of every row, its
    last ones, or `[B, W]` of each row where rows are packed (filled up with any others).
    """

    batch: TrainBatch
    at: Tensor
    column: Tensor

    @classmethod
    def of(cls, batch: TrainBatch) -> "Window":
        at = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)  # [T-1]
        if not batch.packed:
            return cls(batch, at, at[max(0, int(batch.prompt_lens.min()) - 1) :])
        predicts = supervised_at(batch, at + 2, 0)  # [B, T-1]
        width = max(1, int(predicts.sum(1).max()))
        first = predicts.byte().argsort(dim=1, descending=True, stable=True)  # in order of columns
        return cls(batch, at, first[:, :width])

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The window's part of `[B, .., T-1, w]`, of which `dim` counts pairs: `[B, .., W, w]`."""
        if not self.batch.packed:
            return x.narrow(dim, len(self.at) - len(self.column), len(self.column))
        shape = [len(self.column), *[1] * (x.dim() - 1)]
        shape[dim] = self.column.shape[1]
        return x.take_along_dim(self.column.view(shape), dim)

    def context(self) -> Tensor:
        """Keys that each pair sees in step 0: `[T-1, T-1]`, of packed rows `[B, 1, T-1, T-1]`."""
        before = self.at <= self.at[:, None]  # [T-1, T-1]
        if not self.batch.packed:
            return before
        of = self.batch.conversation[:, :-1]  # [B, T-1]
        return (before & (of[:, None] == of[:, :, None]))[:, None]

    def visible(self, k: int, since: int = 1) -> Tensor:
        """Keys seen by step k: `[W, S]` with S = T-1 + k*W, or `[B, 1, W, S]` of packed rows.

        `since` is the first step whose keys are not among those of the true states: from 0 on, S is
        larger by W.

        Step 0's keys up to pair t - k (true states), then of every step j = since..k the one key at
        pair t - k + j: exactly what decoding has in its cache k tokens into a round. In packed rows
        the former of its own conversation alone. The latter need no more care, nor does what a pair
        is given from the pair before: a scored pair's round began within its conversation.
        """
        own = self.column[..., None]  # [., W, 1]
        early = self.at <= own - k  # [., W, T-1]
        late = [self.column[..., None, :] == own - k + j for j in range(since, k + 1)]  # [., W, W]
        if not self.batch.packed:
            return torch.cat([early, *late], -1)
        of = self.batch.conversation[:, :-1]  # [B, T-1], of a pair's state
        early = early & (of[:, None] == self.take(of, 1)[..., None])
        return torch.cat([early, *late], -1)[:, None]
