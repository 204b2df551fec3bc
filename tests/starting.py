"""Drafters to go on from: made, laid out as others publish them, and taken up by a recipe."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.jump import JumpConfig, JumpDrafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.drafters.registry import TrainedConfig, family_config
from draftsmith.drafters.start import new_drafter

WEIGHTS = "model.safetensors"
TAPS = (0, 1, 2)  # not those that null takes
SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])
KINDS = (
    *("eagle3", "causal", "causal reduced", "dflash", "dflash reduced"),
    *("medusa", "medusa reduced", "mlp", "jump"),
)


def build(target: Target, kind: str) -> Any:
    """A drafter that is not what a new one begins as."""
    torch.manual_seed(2)
    drafter: Any
    family, _, reduced = kind.partition(" ")
    ids = SOME if reduced else None
    if family == "eagle3":
        drafter = Eagle3Drafter.from_target(target, Eagle3Config(TAPS, len(SOME)), SOME)
    elif family == "medusa":
        drafter = MedusaDrafter.from_target(target, MedusaConfig(num_layers=2), ids)
    elif family == "mlp":
        drafter = MLPDrafter.from_target(target, MLPConfig(scale_input=True), ids)
    elif family == "jump":
        drafter = JumpDrafter.from_target(target, JumpConfig(begin=1), SOME)
    elif family == "dflash":
        drafter = DFlashDrafter.from_target(target, DFlashConfig(taps=TAPS), ids)
    else:
        drafter = CausalDrafter.from_target(target, CausalConfig(layers=(3, 1, 0)), ids)
    with torch.no_grad():
        for parameter in drafter.trainable():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


def config_for(folder: Path | str, family: str, **options: Any) -> TrainedConfig:
    section = {"family": family, "start": str(folder), **options}
    _, config = family_config(section, "r.yaml")
    assert isinstance(config, TrainedConfig)
    return config


def begun(folder: Path | str, family: str, target: Target, **options: Any) -> Any:
    return new_drafter(config_for(folder, family, **options), target, [])


def bare(folder: Path, place: Path) -> Path:
    """A head as others publish it: weights and configuration."""
    shutil.copytree(folder, place)
    for path in place.iterdir():
        if path.name not in (WEIGHTS, "config.json"):
            path.unlink()
    return place


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
