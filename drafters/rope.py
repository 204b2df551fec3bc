"""Rotary positions, of pairs half a head's width apart as Llama and Qwen have them."""

from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

Rope = tuple[Tensor, Tensor]
"""Cosines and sines `[., n, d]`."""


def rotated(x: Tensor, rope: Rope) -> Tensor:
    """`[B, n, heads, d] -> [B, heads, n, d]`."""
    cos, sin = (part[:, :, None] for part in rope)  # [., n, 1, d]
    return (x * cos + rotate_half(x) * sin).transpose(1, 2)
