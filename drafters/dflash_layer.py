"""The layers of a block-parallel drafter, and which blocks are drafted in training.

Layers are Qwen3's, but for where their keys and values come from: of the text before a block, the
target's states, the same ones in every layer; of the block, its own states.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from .base import TrainBatch, supervised_at
from .rope import Rope, rotated

PLACES = 64
"""Places of blocks whose attention is computed at a time: each multiplies the keys of all."""


class Attention(nn.Module):
    """Self-attention with normed queries and keys."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        h, heads, kv_heads = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
        )
        self.d = d = config.head_dim or h // heads
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(h, heads * d, bias=bias)
        self.k_proj = nn.Linear(h, kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(h, kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, h, bias=bias)
        self.q_norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotated queries `[B, n, h] -> [B, H, n, d]`."""
        return rotated(self.q_norm(self._split(self.q_proj(x))), rope)

    def keys(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values: `[B, n, h] -> [B, KV, n, d]`."""
        k = rotated(self.k_norm(self._split(self.k_proj(x))), rope)
        return k, self._split(self.v_proj(x)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """`[B, H, n, d]` queries over `[B, KV, S, d]`, mask `[B, 1, ., S]`: `[B, n, h]`."""
        q, k = q.to(v.dtype), k.to(v.dtype)  # norms give float32 where autocast is on
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.d))  # [B, n, heads, d]


class Layer(nn.Module):
    """One Qwen3 layer over blocks; the context's keys and values are given."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(h, eps=eps)
        self.post_attention_layernorm = Qwen3RMSNorm(h, eps=eps)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, n, d]`, keys and values `[B, KV, n, d]` of blocks `[B, n, h]`."""
        x = self.input_layernorm(x)
        return self.self_attn.queries(x, rope), *self.self_attn.keys(x, rope)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual and MLP behind the attention: `[B, n, h]`."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(
        self, x: Tensor, context: Tensor, rope: Rope, context_rope: Rope, blocks: "Blocks"
    ) -> Tensor:
        """The layer in training, over blocks `[B, A*size, h]` behind states `[B, T-1, h]`."""
        q, k, v = self.project(x, rope)
        known_k, known_v = self.self_attn.keys(context, context_rope)
        parts = []
        for part, mask in blocks.groups:
            keys = torch.cat([known_k, k[:, :, part]], 2)  # [B, KV, T-1+g*size, d]
            values = torch.cat([known_v, v[:, :, part]], 2)
            parts.append(self.self_attn.attend(q[:, :, part], keys, values, mask))
        return self.finish(x, torch.cat(parts, 1))


class Correction(nn.Module):
    """What the token drafted before adds to a place's state, gated by that state.

    Zero at first: a new drafter begins as a plain block.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.state_norm = Qwen3RMSNorm(h, eps=eps)
        self.token_norm = Qwen3RMSNorm(h, eps=eps)
        self.gate_proj = nn.Linear(h, h // 2, bias=False)
        self.up_proj = nn.Linear(h, h // 2, bias=False)
        self.down_proj = nn.Linear(h // 2, h, bias=False)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """`[..., h]` states and embeddings of the tokens before: states `[..., h]`."""
        gate = F.silu(self.gate_proj(self.state_norm(state)))
        return state + self.down_proj(gate * self.up_proj(self.token_norm(embedding)))


@dataclass(frozen=True)
class Blocks:
    """One block for each token of a reply that a round can begin with.

    anchor: `[B, A]` its column, in order; rows of fewer are filled up with columns that none begins
    with, whose blocks predict nothing. groups: runs of blocks, of which they are which places
    `[A*size]`, and the keys they see, `[B, 1, g*size, T-1+g*size]`: of the context those before
    the anchor in its conversation, of the blocks their own.
    """

    batch: TrainBatch
    size: int
    anchor: Tensor
    groups: tuple[tuple[slice, Tensor], ...]

    @classmethod
    def of(cls, batch: TrainBatch, size: int) -> "Blocks":
        at = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)  # [T-1]
        begins = supervised_at(batch, at + 1, 0)  # [B, T-1]
        width = max(1, int(begins.sum(1).max()))
        order = begins.byte().argsort(dim=1, descending=True, stable=True)
        anchor = order[:, :width]  # [B, A]
        return cls(batch, size, anchor, tuple(_groups(batch, size, anchor, at)))

    @property
    def position(self) -> Tensor:
        """Of every place of every block: `[B, A*size]`."""
        first = self.batch.position.gather(1, self.anchor)[..., None]  # [B, A, 1]
        return (first + torch.arange(self.size, device=first.device)).flatten(1)

    def tokens(self, mask_token_id: int) -> Tensor:
        """The anchors, each with mask tokens behind it: `[B, A*size]`."""
        first = self.batch.ids.gather(1, self.anchor)[..., None]  # [B, A, 1]
        return F.pad(first, (0, self.size - 1), value=mask_token_id).flatten(1)


def _groups(
    batch: TrainBatch, size: int, anchor: Tensor, at: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    own = batch.conversation[:, :-1]  # [B, T-1]
    count = max(1, PLACES // size)
    for low in range(0, anchor.shape[1], count):
        some = anchor[:, low : low + count, None]  # [B, g, 1]
        same = own[:, None] == own.gather(1, some[..., 0])[..., None]
        context = ((at < some) & same).repeat_interleave(size, 1)  # [B, g*size, T-1]
        block = torch.arange(some.shape[1], device=at.device).repeat_interleave(size)
        inside = (block[:, None] == block).expand(len(anchor), -1, -1)  # [B, g*size, g*size]
        places = slice(low * size, (low + some.shape[1]) * size)
        yield places, torch.cat([context, inside], -1)[:, None]
