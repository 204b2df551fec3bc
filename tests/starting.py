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
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter

WEIGHTS = "model.safetensors"
TAPS = (0, 1, 2)  # not those that null takes
SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])
KINDS = ("eagle3", "causal", "causal reduced")


def build(target: Target, kind: str) -> Eagle3Drafter | CausalDrafter:
    """A drafter that is not what a new one begins as."""
    torch.manual_seed(2)
    drafter: Eagle3Drafter | CausalDrafter
    if kind == "eagle3":
        drafter = Eagle3Drafter.from_target(target, Eagle3Config(TAPS, len(SOME)), SOME)
    else:
        ids = SOME if kind == "causal reduced" else None
        drafter = CausalDrafter.from_target(target, CausalConfig(layers=(3, 1, 0)), ids)
    with torch.no_grad():
        for parameter in drafter.trainable():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


def config_for(folder: Path | str, family: str, **options: Any) -> Eagle3Config | CausalConfig:
    section = {"family": family, "start": str(folder), **options}
    _, config = family_config(section, "r.yaml")
    assert isinstance(config, Eagle3Config | CausalConfig)
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
