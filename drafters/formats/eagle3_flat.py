"""The flat EAGLE-3 layout that vLLM, SGLang and TensorRT-LLM load.

Layer ids are written in both conventions: nested, 0-based layer *outputs* (SGLang); top level, the
same plus one, the layer whose *input* is read (vLLM). RoPE is written in both spellings, because
old readers silently fall back to base 10,000. `d2t` is an offset: target id = draft id + d2t[draft
id]. The layer is written as `midlayer.`, and read as `layers.0.`, too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..eagle3 import Eagle3Drafter
from .config import config_of, old_rope, read_config
from .fits import check_rows, check_taps, check_width
from .tensors import check_tensors, read_tensors, weights_file, write_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SHARED = "embed_tokens.weight"


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such a head."""
    raw = config_of(folder)
    named = " ".join(raw.get("architectures") or ())
    return "Eagle3" in named or "eagle_config" in raw or "draft_vocab_size" in raw


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    found = read_taps(read_config(folder), folder / "config.json", about.taps)
    check_taps(folder, found, num_layers - 1)
    return found


def shape(folder: Path, target: Target, about: About) -> Eagle3Drafter:
    raw, path = read_config(folder), folder / "config.json"
    weights_file(folder)
    config, found = layer_config(raw, path), read_taps(raw, path, about.taps)
    name = f"'{target.provenance['name']}'"
    check_taps(folder, found, target.num_layers - 1, name)
    check_width(folder, raw.get("hidden_size"), target)
    check_rows(folder, int(raw.get("vocab_size", 0)), target)
    size = int(raw.get("draft_vocab_size") or raw["vocab_size"])
    return Eagle3Drafter(config, found, torch.arange(size))


def read_for(folder: Path, target: Target, about: About) -> Eagle3Drafter:
    with torch.device("meta"):
        shape(folder, target, about)  # which refuses what does not fit
    return read(folder, target.embedding.cpu(), about.taps)


def write(drafter: Eagle3Drafter, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder.

    The embedding is left out: every engine shares the target's when it is absent.
    """
    tensors = {n: t.detach().to(dtype) for n, t in drafter.state_dict().items() if n != _SHARED}
    ids = drafter.draft_ids.cpu()  # [V_d]
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    tensors["t2d"][ids] = True
    write_tensors(tensors, folder)
    config = engine_config(drafter.config, drafter.taps, len(ids), dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def engine_config(
    config: LlamaConfig, taps: tuple[int, ...], draft_vocab_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """`config.json` as engines read it."""
    rope: dict[str, Any] = {**(config.rope_parameters or {})}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": rope,
        **old_rope(rope),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "eagle_aux_hidden_state_layer_ids": [t + 1 for t in taps],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(taps),
            "use_aux_hidden_state": True,
        },
    }


def read(folder: Path, embedding: Tensor, unnamed: tuple[int, ...] | None = None) -> Eagle3Drafter:
    """Load a folder in this layout; `embedding [V, h]` is the target's, shared.

    `unnamed` as `read_taps`. Raises `UserError` naming any tensor that is missing, unexpected or of
    another shape.
    """
    raw, path = read_config(folder), folder / "config.json"
    config, taps = layer_config(raw, path), read_taps(raw, path, unnamed)
    tensors = _own_names(read_tensors(folder))
    drafter = Eagle3Drafter(config, taps, _draft_ids(raw, tensors, folder))
    tensors.setdefault(_SHARED, embedding[: config.vocab_size].detach().clone())
    check_tensors({n: tuple(t.shape) for n, t in drafter.state_dict().items()}, tensors, folder)
    dtype = tensors["fc.weight"].dtype
    for parameter in drafter.parameters():  # frequencies of RoPE stay as exact as engines have them
        parameter.data = parameter.data.to(dtype)
    drafter.load_state_dict({n: t.to(dtype) for n, t in tensors.items()})
    return drafter


def layer_config(raw: dict[str, Any], path: Path) -> LlamaConfig:
    """The head's layer, as the config `raw` of `path` has it.

    Raises `UserError` for one that is built otherwise.
    """
    if raw.get("norm_before_residual"):
        raise UserError(f"{path}: norm_before_residual is true, which this layout does not read")
    old = ("rope_theta", "rope_scaling") if raw.get("rope_parameters") else ()
    return LlamaConfig(**{k: v for k, v in raw.items() if k not in ("architectures", *old)})


def _own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the layer under its one name of the two that engines read."""
    other = {name: name.replace("layers.0.", "midlayer.", 1) for name in tensors}
    own = {n: m for n, m in other.items() if n.startswith("layers.0.") and m not in tensors}
    return {own.get(name, name): tensor for name, tensor in tensors.items()}


def _draft_ids(raw: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Tensor:
    """Target ids of the draft vocabulary `[V_d]`, from both maps, which are taken out.

    A head that drafts all tokens needs none.
    """
    size, vocab = raw.get("draft_vocab_size") or raw.get("vocab_size"), raw.get("vocab_size")
    if vocab and size == vocab and not {"d2t", "t2d"} & set(tensors):
        return torch.arange(vocab)
    for name in ("d2t", "t2d"):
        if name not in tensors:
            raise UserError(f"{folder}: tensor '{name}' (of the draft vocabulary) is missing")
    offsets, known = tensors.pop("d2t"), tensors.pop("t2d")
    if tuple(offsets.shape) != (size,) or tuple(known.shape) != (vocab,):
        raise UserError(
            f"{folder}: tensors 'd2t' {list(offsets.shape)} and 't2d' {list(known.shape)} must "
            f"be [{size}] and [{vocab}], the draft_vocab_size and vocab_size of config.json"
        )
    ids = offsets + torch.arange(len(offsets))
    if not torch.equal(known.nonzero().flatten(), ids):
        raise UserError(f"{folder}: tensors 'd2t' and 't2d' name different tokens")
    return ids


def read_taps(
    raw: dict[str, Any], path: Path, unnamed: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Target layers (0-based outputs) that the config `raw` of `path` names, or else `unnamed`.

    Raises `UserError` if there are neither, or different ones in its two conventions.
    """
    nested = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    outer = raw.get("eagle_aux_hidden_state_layer_ids")
    if nested is None and outer is None:
        if unnamed is None:
            raise UserError(
                f"{path}: 'eagle_aux_hidden_state_layer_ids' is missing; to train the head "
                "further, name in drafter.taps the layers that it reads"
            )
        return unnamed
    taps = tuple(nested) if nested is not None else tuple(i - 1 for i in outer or ())
    if outer is not None and [i - 1 for i in outer] != list(taps):
        raise UserError(
            f"{path}: layer ids disagree, {list(taps)} in eagle_config must be one below {outer}"
        )
    return taps
