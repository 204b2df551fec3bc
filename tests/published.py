"""Drafters as others publish them, written from the tables of their layouts and by nothing of ours.

For a target of width 32 with 400 tokens. Every writer returns the tensors by their public names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, TOKENS = 32, 400


def _noise(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random weights of these shapes, none of a neutral value."""
    generator = torch.Generator().manual_seed(8)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")


def medusa_for_vllm(
    folder: Path,
    heads: int = 3,
    layers: int = 1,
    bias: bool = False,
    original: bool = False,
    map: Tensor | None = None,
    whole_heads: bool = False,
    prefix: str = "",
) -> dict[str, Tensor]:
    """`map` are the target ids of a truncated vocabulary; whole heads have all rows beside it."""
    size = TOKENS if map is None else len(map)
    rows = TOKENS if whole_heads else size
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(heads):
        for i in range(layers):
            shapes[f"blocks.{h}.layers.{i}.weight"] = (WIDTH, WIDTH)
            if bias:
                shapes[f"blocks.{h}.layers.{i}.bias"] = (WIDTH,)
        if h == 0 or not original:
            shapes[f"lm_heads.{h}.weight"] = (rows, WIDTH)
    tensors = _noise(shapes)
    if map is not None:
        tensors["token_map"] = map
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": WIDTH,
        "vocab_size": TOKENS,
        "truncated_vocab_size": size,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": bias,
        "original_lm_head": original,
        "max_paths": 64,
        "topk": 10,
    }
    _write(folder, config, {prefix + name: t for name, t in tensors.items()})
    return tensors


def medusa_native(
    folder: Path, heads: int = 3, layers: int = 1, pickled: bool = True, said: int | None = None
) -> dict[str, Tensor]:
    """`said` is how many heads config.json tells of, if another number."""
    shapes: dict[str, tuple[int, ...]] = {}
    for h in range(heads):
        for i in range(layers):
            shapes |= {f"{h}.{i}.linear.weight": (WIDTH, WIDTH), f"{h}.{i}.linear.bias": (WIDTH,)}
        shapes[f"{h}.{layers}.weight"] = (TOKENS, WIDTH)
    tensors = _noise(shapes)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": said or heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "somebody/target",
        "transformers_version": "4.31.0",
    }
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return tensors


def mlp_speculator(
    folder: Path,
    steps: int = 3,
    inner: int = 24,
    tied: bool = False,
    scaled: bool = False,
    copies: bool = False,
) -> dict[str, Tensor]:
    """`copies` writes tied tensors out for every step."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(steps):
        if i == 0 or not tied:
            shapes |= {f"emb.{i}.weight": (TOKENS, inner), f"head.{i}.weight": (TOKENS, inner)}
            shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
        if i < 2 or not tied:
            shapes[f"proj.{i}.weight"] = (inner, inner if i else WIDTH)
    tensors = {f"speculator.{name}": tensor for name, tensor in _noise(shapes).items()}
    if copies:
        for i in range(1, steps):
            for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
                first = tensors["speculator." + name.format(0)]
                tensors["speculator." + name.format(i)] = first.clone()
            projection = tensors["speculator.proj.1.weight"]
            tensors[f"speculator.proj.{i}.weight"] = projection.clone()
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": TOKENS,
        "emb_dim": WIDTH,
        "inner_dim": inner,
        "n_predict": steps,
        "top_k_tokens_per_head": [5, 4, 3, 2, 1][:steps],
        "n_candidates": 5,
        "tie_weights": tied,
        "scale_input": scaled,
    }
    _write(folder, config, tensors)
    return tensors
