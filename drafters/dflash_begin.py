"""What a new block-parallel drafter takes from its target: sizes, a mask token, layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from ..data.dense import dense_weight, whole
from ..data.target import Target, logit_factor
from .borrowed import full_rope, layer_weights, multiplies

_PROJECTIONS = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def draft_config(target: Target, layers: int, intermediate_size: int | None) -> Qwen3Config:
    """Layers of the target's sizes, with what it does to its head's output."""
    source = target.text_config
    heads, h, factor = source.num_attention_heads, source.hidden_size, logit_factor(source)
    config: dict[str, Any] = {
        "hidden_size": h,
        "intermediate_size": intermediate_size or getattr(source, "intermediate_size", 4 * h),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": getattr(source, "head_dim", None) or h // heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-6),
        "vocab_size": target.head.out_features,
        "max_position_embeddings": target.max_positions or 2048,
        "rope_parameters": full_rope(source),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": source.bos_token_id,
        "eos_token_id": source.eos_token_id,
        "final_logit_softcapping": getattr(source, "final_logit_softcapping", None),
        "logit_scale": None if factor == 1.0 else factor,
    }
    return Qwen3Config(**config)


def target_words(target: Target, draft_ids: Tensor | None) -> dict[str, Tensor]:
    """The target's embedding, and its head's rows of `draft_ids`, by a drafter's names of them."""
    head, bias = dense_weight(target.head, target.dtype), getattr(target.head, "bias", None)
    rows = slice(None) if draft_ids is None else draft_ids.to(head.device)
    words = {"embed_tokens.weight": whole(target.embedding.detach()), "lm_head.weight": head[rows]}
    return words if bias is None else {**words, "lm_head.bias": bias.detach()[rows]}


def free_token(target: Target) -> int:
    """A special token that neither text nor templates have; else one that stands for nothing."""
    tokenizer = target.tokenizer
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    spare = (tokenizer.unk_token_id, tokenizer.pad_token_id)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, *spare, *target.eos_ids}
    template = str(tokenizer.chat_template or "")
    free = [
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i not in used and i < target.vocab_size and str(token) not in template
    ]
    known = [*sorted(free, reverse=True), *spare, *target.eos_ids]
    return next((int(i) for i in known if i is not None), target.vocab_size - 1)


def copy_last_layers(layers: Sequence[nn.Module], target: Target) -> Tensor | None:
    """Start the draft layers as the target's last ones, whose queries and keys are not normed.

    The weight of the last one's first norm, or None: only of targets whose layers are Llama's in
    names, shapes and norms is anything copied.
    """
    sources = target.layers[-len(layers) :]
    if len(sources) < len(layers):
        return None
    copies = []
    for mine, source in zip(layers, sources, strict=True):
        theirs = layer_weights(source, target.dtype)
        norms = {name: _part(source, name) for name in (*_NORMS, *_HEAD_NORMS)}
        known = [n for n, norm in norms.items() if n in _NORMS or multiplies(norm)]
        names = [*_PROJECTIONS, *(f"{name}.weight" for name in known)]
        own = mine.state_dict()
        fits = all(name in theirs and theirs[name].shape == own[name].shape for name in names)
        if not fits or not all(multiplies(norms[name]) for name in _NORMS):
            return None
        copies.append((own, {name: theirs[name] for name in names}))
    for own, weights in copies:
        for name, weight in weights.items():
            own[name].copy_(weight)
    return copies[-1][1]["input_layernorm.weight"]


def copy_norm(mine: nn.Module, target: Target) -> None:
    """Start a norm as the target's final one, if that scales as it does."""
    final: Any = getattr(target.body, "norm", None)
    if multiplies(final):
        mine.load_state_dict(final.state_dict())


def _part(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def eye_added(weight: Tensor) -> None:
    """Let a map `[h, n*h]` of n states pass the last of them through."""
    h = len(weight)
    weight[:, -h:] += torch.eye(h, device=weight.device)
