"""The flat DFlash layout of z-lab, which vLLM, SGLang and TensorRT-LLM load.

`dflash_config.target_layer_ids` are 0-based layer *outputs* (vLLM adds one by itself, versions from
before it did are told by the same ids plus one at top level). Neither embedding nor head are
written, being the target's. A head of a reduced vocabulary is, with `d2t`, an offset as in
EAGLE-3's layout: vLLM alone reads one, SGLang takes the target's head beside it.

Of what the target does to its logits, z-lab's code reads a factor and then a soft cap, in
`dflash_config` or at top level, SGLang in `dflash_config` alone, vLLM `logit_scale` and no cap.

What is not read is refused by its name: sliding or causal layers, RoPE of interleaved pairs, other
activations than SiLU, an embedding of the mask token beside the weights, and anything in
`dflash_config` that is not known here, such as a scale of embeddings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..dflash import DFlashDrafter
from ..dflash_begin import target_words
from .config import (
    architectures,
    built,
    check_attention,
    config_of,
    factor,
    is_whole,
    kinds_of_layers,
    number,
    numbers,
    old_rope,
    read_config,
    rope_of,
    table,
)
from .fits import check_head, check_ids, check_shared, check_taps, check_width
from .tensors import check_tensors, fill, read_tensors, weights_file, write_tensors
from .vocab_maps import take_ids

ARCHITECTURE = "DFlashDraftModel"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
_LAYER = (
    *_SIZES,
    *("head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
    *("attention_bias", "bos_token_id", "eos_token_id"),
)
_WINDOWS = ("num_hidden_layers", "use_sliding_window", "sliding_window", "max_window_layers")
_NEUTRAL = {
    "causal": False,
    "is_causal": False,
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "input_embedding_scale": 1.0,
    "use_aux_hidden_state": True,
    "conv_kernel_size": 0,
    "conv_group_size": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
}
"""What both places of the configuration may say as long as it says this."""
_KNOWN = {
    *_NEUTRAL,
    *("mask_token_id", "mask_token", "target_layer_ids", "block_size", "num_target_layers"),
    *("output_multiplier", "final_logit_softcapping"),
}
_MASK_EMBEDDING = "mask_embedding.pt"


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such a drafter."""
    raw = config_of(folder)
    flat = "speculators_model_type" not in raw
    return flat and ("DFlash" in " ".join(architectures(raw)) or "dflash_config" in raw)


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return taps_of(read_config(folder), folder, num_layers)


def shape(folder: Path, target: Target, about: About) -> DFlashDrafter:
    return shape_of(read_config(folder), folder, target)


def read_for(folder: Path, target: Target, about: About) -> DFlashDrafter:
    """Raises `UserError` naming any tensor that is missing, unexpected or of another shape."""
    return read_of(read_config(folder), folder, target)


def taps_of(raw: Mapping[str, Any], folder: Path, num_layers: int) -> tuple[int, ...]:
    """Target layers (0-based outputs) that a flat config `raw` names.

    Raises `UserError` if there are none, one twice, different ones in its two conventions, or any
    that the target lacks.
    """
    path = folder / "config.json"
    named, outer = numbers(_told(raw, path), "target_layer_ids", path), None
    if raw.get("eagle_aux_hidden_state_layer_ids") is not None:
        outer = numbers(raw, "eagle_aux_hidden_state_layer_ids", path)
    if outer is not None and [i - 1 for i in outer] != named:
        raise UserError(
            f"{path}: layer ids disagree, {named} in dflash_config must be one below {outer}"
        )
    if len(set(named)) != len(named):
        raise UserError(f"{path}: 'target_layer_ids' {named} must be different layers")
    check_taps(folder, named, num_layers - 1)
    return tuple(named)


def shape_of(
    raw: Mapping[str, Any], folder: Path, target: Target, ids: Tensor | None = None
) -> DFlashDrafter:
    """The drafter of a flat config `raw`, with the target's embedding and head.

    ids: `[V_d]` of its draft vocabulary, the first ones if they are not known yet.
    """
    path = folder / "config.json"
    weights_file(folder)
    told = _told(raw, path)
    for name in _SIZES:
        number(raw, name, path)
    check_attention(raw, path)
    _check_kind(raw, told, path)
    found = taps_of(raw, folder, target.num_layers)
    check_width(folder, raw.get("hidden_size"), target)
    check_width(folder, raw.get("target_hidden_size") or target.hidden_size, target)
    rows = number(raw, "vocab_size", path)
    check_head(folder, rows, target)
    layers = number(told, "num_target_layers", path, target.num_layers)
    if layers != target.num_layers:
        raise UserError(
            f"{folder} is for a target of {layers} layers, '{target.provenance['name']}' has "
            f"{target.num_layers}"
        )
    mask, size = told.get("mask_token_id"), told.get("block_size")
    if not is_whole(mask) or not 0 <= mask < len(target.embedding):
        raise UserError(
            f"{path}: 'dflash_config.mask_token_id' is {mask}, must be a token of the target's"
        )
    if not is_whole(size) or size < 2:
        raise UserError(f"{path}: 'block_size' is {size}, must be a number above 1")
    reduced = number(raw, "draft_vocab_size", path, rows, rows)
    if ids is None and reduced < rows:
        ids = torch.arange(reduced, device="cpu")
    config = _layer_config(raw, told, path)
    return built(path, lambda: DFlashDrafter(config, found, size, mask, ids, target))


def read_of(raw: Mapping[str, Any], folder: Path, target: Target) -> DFlashDrafter:
    """The drafter of a flat config `raw` with the folder's tensors, on the CPU.

    Raises `UserError` for an embedding or a whole head that is not the target's.
    """
    with torch.device("meta"):
        asked = shape_of(raw, folder, target)  # which refuses what does not fit
    tensors, rows = read_tensors(folder), number(raw, "vocab_size", folder / "config.json")
    size = rows if asked.draft_ids is None else len(asked.draft_ids)
    ids = take_ids(tensors, folder, size, rows, ("d2t",))
    if asked.draft_ids is None:
        ids = None  # maps of all tokens, which say nothing
    elif ids is not None:
        check_ids(folder, int(ids[-1]), target)
    with torch.device("meta"):
        drafter = shape_of(raw, folder, target, ids)
    drafter.rotary = Qwen3RotaryEmbedding(drafter.config)  # it has no weights, but numbers
    expected = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    words = target_words(target, ids)
    theirs = {name: words[name].cpu() for name in drafter.shared}
    check_tensors(expected, {**theirs, **tensors}, folder)
    for name, tensor in theirs.items():
        check_shared(folder, name, tensors.get(name, tensor), tensor)
    dtype = tensors["fc.weight"].dtype
    return fill(drafter, {name: t.to(dtype) for name, t in {**tensors, **theirs}.items()})


def write(drafter: DFlashDrafter, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder."""
    shared = set(drafter.shared)
    tensors = {n: p.detach().to(dtype) for n, p in drafter.named_parameters() if n not in shared}
    config = engine_config(drafter, dtype)
    if drafter.draft_ids is not None:
        ids = drafter.draft_ids.cpu()  # [V_d]
        tensors["d2t"] = ids - torch.arange(len(ids))
        config["draft_vocab_size"] = len(ids)
    write_tensors(tensors, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def engine_config(drafter: DFlashDrafter, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` as engines read it."""
    config = drafter.config
    rope: dict[str, Any] = {**(config.rope_parameters or {})}
    layer = {name: getattr(config, name, None) for name in _LAYER}
    scale, cap = (getattr(config, n, None) for n in ("logit_scale", "final_logit_softcapping"))
    after: dict[str, Any] = {} if scale is None else {"output_multiplier": scale}
    if cap:  # of a file it holds for logits that are multiplied
        after["final_logit_softcapping"] = cap * (1.0 if scale is None else scale)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **{name: value for name, value in layer.items() if value is not None},
        **after,
        **({} if scale is None else {"logit_scale": scale}),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": rope,
        **old_rope(rope),
        "block_size": drafter.block_size,
        "num_target_layers": drafter.target_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "eagle_aux_hidden_state_layer_ids": [t + 1 for t in drafter.taps],
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(drafter.taps),
            **after,
        },
    }


def _told(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the config says, in `dflash_config` or else at top level."""
    nested = table(raw, "dflash_config", path)
    return {**raw, **{name: value for name, value in nested.items() if value is not None}}


def _check_kind(raw: Mapping[str, Any], told: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` for a drafter that is built otherwise, naming how."""
    faults = [f"architecture {name}" for name in architectures(raw) if name != ARCHITECTURE]
    nested = table(raw, "dflash_config", path)
    faults += [f"dflash_config.{n}" for n in nested if n not in _KNOWN and nested[n] is not None]
    faults += [
        f"{name} {value}"
        for name, neutral in _NEUTRAL.items()
        if (value := told.get(name)) not in (None, neutral)
    ]
    windows = {name: raw[name] for name in _WINDOWS if raw.get(name) is not None}
    kinds = kinds_of_layers(raw, path)
    kinds = kinds or built(path, lambda: Qwen3Config(**windows).layer_types or [])
    faults += [f"layers of kind {kind}" for kind in sorted(set(kinds) - {"full_attention"})]
    if raw.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act {raw['hidden_act']}")
    if raw.get("quantization_config"):
        faults.append("quantization_config")
    if (path.parent / _MASK_EMBEDDING).exists():
        faults.append(f"{_MASK_EMBEDDING} beside it")
    if faults:
        raise UserError(f"{path} has {', '.join(faults)}, which this layout does not read")


def _layer_config(raw: Mapping[str, Any], told: Mapping[str, Any], path: Path) -> Qwen3Config:
    """The layers of a flat config. Raises `UserError` for sizes or RoPE that it does not say."""
    rope = rope_of(raw, path)
    if rope is None or rope.get("rope_theta") is None:
        raise UserError(f"{path} has neither rope_parameters nor rope_theta")
    kept = {name: raw[name] for name in _LAYER if raw.get(name) is not None}
    after = _after_head(told, path)
    return built(path, lambda: Qwen3Config(**kept, rope_parameters=rope, **after))


def _after_head(told: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What follows the head, as `finish_logits` reads it. Raises `UserError` for two factors."""
    scales = {factor(told, name, path) for name in ("output_multiplier", "logit_scale")} - {None}
    if len(scales) > 1:
        raise UserError(
            f"{path}: 'output_multiplier' {told['output_multiplier']} and 'logit_scale' "
            f"{told['logit_scale']} must be the same"
        )
    scale = next(iter(scales), None)
    caps = {
        **told,
        "final_logit_softcapping": told.get("final_logit_softcapping") or None,
    }  # 0: none
    cap = factor(caps, "final_logit_softcapping", path)
    return {
        "logit_scale": scale,
        "final_logit_softcapping": cap if cap is None or scale is None else cap / scale,
    }
