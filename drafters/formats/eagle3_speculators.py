"""The EAGLE-3 layout of the speculators library, with which `vllm serve DRAFT` alone is enough.

What the layers are lies in `transformer_layer_config`, the target and the length of drafts in
`speculators_config`. Layer ids are those of the layers whose *input* is read, one more than ours.
A head that does not say where it norms adds to the normed state, as vLLM takes it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...data.target import Target
from ..about import About
from ..eagle3 import Eagle3Drafter
from ..eagle3_layer import Norms
from .config import config_of, flag, needed_table, read_config
from .eagle3_flat import engine_config
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

FOLDER = "speculators"
"""Where it is published, within the folder of the flat layout."""
KIND = "eagle3"
_DEFAULTS = ("norm_before_residual",)  # true, if nothing is said
_OF_LAYERS = (
    *("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "num_hidden_layers", "hidden_act", "rms_norm_eps", "vocab_size"),
    *("max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("rope_parameters", "rope_theta", "rope_scaling", "torch_dtype"),
)


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such a head."""
    return config_of(folder).get("speculators_model_type") == KIND


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    found = _taps(read_config(folder), folder / "config.json", about.taps)
    check_taps(folder, found, num_layers - 1)
    return found


def shape(folder: Path, target: Target, about: About) -> Eagle3Drafter:
    return shape_of(_told(folder, about.taps), folder, target, about)


def read_for(folder: Path, target: Target, about: About) -> Eagle3Drafter:
    return read_of(_told(folder, about.taps), folder, target, about)


def _told(folder: Path, unnamed: tuple[int, ...] | None) -> Told:
    raw, path = read_config(folder), folder / "config.json"
    layer = needed_table(raw, "transformer_layer_config", path)
    norms = Norms(**{n: flag(raw, n, path, n in _DEFAULTS) for n in asdict(Norms())})
    return told(layer, raw, _taps(raw, path, unnamed), norms, path)


def _taps(raw: Mapping[str, Any], path: Path, unnamed: tuple[int, ...] | None) -> tuple[int, ...]:
    """Target layers (0-based outputs) that the config names, or else `unnamed`."""
    return tuple(i - 1 for i in layer_ids(raw, path)) or recipe_taps(unnamed, path)


def write(
    drafter: Eagle3Drafter,
    folder: Path,
    dtype: torch.dtype,
    verifier: str,
    architecture: str,
    num_draft_tokens: int,
) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder.

    verifier, architecture: the target's Hub id, and the class of its model; num_draft_tokens: those
    that vLLM drafts unless it is told otherwise.
    """
    write_tensors(written(drafter, True, dtype), folder)
    whole = engine_config(drafter.config, drafter.taps, draft_size(drafter), dtype)
    own = drafter.config.hidden_size != drafter.target_width
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": KIND,
        "speculators_config": {
            "algorithm": KIND,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": [architecture]},
        },
        "transformer_layer_config": {name: whole[name] for name in _OF_LAYERS},
        "draft_vocab_size": draft_size(drafter),
        "target_hidden_size": drafter.target_width if own else None,
        IDS: [tap + 1 for tap in drafter.taps],
        **asdict(drafter.norms),
        "tie_word_embeddings": False,
        "torch_dtype": whole["torch_dtype"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
