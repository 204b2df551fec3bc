"""The flat EAGLE-3 layout, which SafeAILab and SpecForge write, and vLLM and SGLang load.

Layer ids are written in both conventions: nested, 0-based layer *outputs* (SGLang); top level, the
same plus one, the layer whose *input* is read (vLLM). RoPE is written in both spellings, because
old readers silently fall back to base 10,000. `d2t` is an offset: target id = draft id + d2t[draft
id]. One layer is written as `midlayer.`, several as `layers.i.`, which vLLM alone reads; either
name of the first is read. Norms in other places than the paper's are told by the names that vLLM
looks up, and left out where they are not there.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..eagle3 import Eagle3Drafter
from ..eagle3_layer import Norms
from .config import architectures, config_of, flag, old_rope, read_config, table
from .eagle3_parts import (
    IDS,
    Told,
    draft_size,
    layer_ids,
    read_of,
    recipe_taps,
    shape_of,
    told,
    written,
)
from .fits import check_taps
from .tensors import write_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such a head."""
    raw = config_of(folder)
    if "speculators_model_type" in raw:
        return False
    named = " ".join(architectures(raw))
    return "Eagle3" in named or "eagle_config" in raw or "draft_vocab_size" in raw


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    found = read_taps(read_config(folder), folder / "config.json", about.taps)
    check_taps(folder, found, num_layers - 1)
    return found


def shape(folder: Path, target: Target, about: About) -> Eagle3Drafter:
    return shape_of(_told(folder, about.taps), folder, target, about)


def read_for(folder: Path, target: Target, about: About) -> Eagle3Drafter:
    return read_of(_told(folder, about.taps), folder, target, about)


def _told(folder: Path, unnamed: tuple[int, ...] | None) -> Told:
    raw, path = read_config(folder), folder / "config.json"
    nested = table(raw, "eagle_config", path)
    if not flag(nested, "use_aux_hidden_state", path, True):
        raise UserError(f"{path}: use_aux_hidden_state is false, and heads without are not read")
    said = raw | {name: value for name, value in nested.items() if value is not None}
    norms = Norms(**{name: flag(said, name, path) for name in asdict(Norms())})
    return told(raw, raw, read_taps(raw, path, unnamed), norms, path)


def read_taps(
    raw: dict[str, Any], path: Path, unnamed: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Target layers (0-based outputs) that the config `raw` of `path` names, or else `unnamed`.

    Raises `UserError` if there are neither, or different ones in its two conventions.
    """
    nested, outer = layer_ids(table(raw, "eagle_config", path), path), layer_ids(raw, path)
    below = [i - 1 for i in outer]
    if nested and outer and nested != below:
        raise UserError(
            f"{path}: layer ids disagree, {nested} in eagle_config must be one below {outer}"
        )
    return tuple(nested or below) or recipe_taps(unnamed, path)


def write(drafter: Eagle3Drafter, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder.

    The target's embedding is left out: every engine shares it where a head has none. Another one of
    its width is read by vLLM, and not by SGLang.
    """
    write_tensors(written(drafter, drafter.config.num_hidden_layers > 1, dtype), folder)
    config = engine_config(drafter.config, drafter.taps, draft_size(drafter), dtype)
    config |= {name: on for name, on in asdict(drafter.norms).items() if on}
    if drafter.target_width != drafter.config.hidden_size:
        config["target_hidden_size"] = drafter.target_width
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def engine_config(
    config: LlamaConfig, taps: tuple[int, ...], draft_vocab_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """`config.json` as engines read it, of a head that norms as the paper's."""
    rope: dict[str, Any] = {**(config.rope_parameters or {})}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "norm_before_residual": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": rope,
        **old_rope(rope),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        IDS: [t + 1 for t in taps],
        "eagle_config": {IDS: list(taps), "use_aux_hidden_state": True},
    }
