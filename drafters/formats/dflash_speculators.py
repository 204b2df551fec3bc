"""The DFlash layout of vLLM's speculators, which is only read.

Its layers are told of in `transformer_layer_config`, tensors lie as in the flat layout.
`aux_hidden_state_layer_ids` count as vLLM does, k being the *input* of layer k: one more than the
0-based output that is read.
"""

from pathlib import Path
from typing import Any

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..dflash import DFlashDrafter
from . import dflash_flat
from .config import config_of, needed_table, numbers, read_config

_NEUTRAL = {
    "projector_type": "dflash",
    "shift_label": False,
    "sample_from_anchor": False,
}


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such a drafter."""
    return config_of(folder).get("speculators_model_type") == "dflash"


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return dflash_flat.taps_of(_flat(folder), folder, num_layers)


def shape(folder: Path, target: Target, about: About) -> DFlashDrafter:
    return dflash_flat.shape_of(_flat(folder), folder, target)


def read_for(folder: Path, target: Target, about: About) -> DFlashDrafter:
    """Raises `UserError` naming any tensor that is missing, unexpected or of another shape."""
    return dflash_flat.read_of(_flat(folder), folder, target)


def _flat(folder: Path) -> dict[str, Any]:
    """The configuration as the flat layout would say it."""
    raw, path = read_config(folder), folder / "config.json"
    layer = needed_table(raw, "transformer_layer_config", path)
    faults = [
        f"{name} {raw[name]}"
        for name, neutral in _NEUTRAL.items()
        if raw.get(name, neutral) not in (None, neutral)
    ]
    if faults:
        raise UserError(f"{path} has {', '.join(faults)}, which this layout does not read")
    ids = numbers(raw, "aux_hidden_state_layer_ids", path)
    if raw.get("mask_token_id") is None:
        raise UserError(f"{path}: 'mask_token_id' is missing")
    told = {name: raw.get(name) for name in ("block_size", "draft_vocab_size")}
    return {
        **layer,
        "architectures": [dflash_flat.ARCHITECTURE],
        "target_hidden_size": raw.get("target_hidden_size"),
        **told,
        "dflash_config": {
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [i - 1 for i in ids],
        },
    }
