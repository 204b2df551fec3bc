"""The optimiser, the course of its learning rate, and which parameters decay."""

import math
from typing import Any

import torch

from ..configs.errors import UserError
from ..configs.training import TrainSection
from ..drafters.base import Drafter


def learning_rate(step: int, steps: int, section: TrainSection) -> float:
    """Factor on the highest rate at optimiser step `step` of `steps`."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    done = (step - section.warmup_steps) / max(1, steps - section.warmup_steps)
    shape = 1 - done if section.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return section.final_lr_fraction + (1 - section.final_lr_fraction) * shape


def parameter_groups(drafter: Drafter, decay: float) -> list[dict[str, Any]]:
    """Trainable parameters for AdamW; weight decay on matrices only."""
    matrices = [p for p in drafter.trainable() if p.dim() >= 2]
    others = [p for p in drafter.trainable() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def make_optimizer(drafter: Drafter, section: TrainSection) -> torch.optim.Optimizer:
    """AdamW over the drafter's trainable parameters.

    Raises `UserError` if its moments are to be kept in 8 bits without the package for it.
    """
    groups = parameter_groups(drafter, section.weight_decay)
    options: dict[str, Any] = {"lr": section.lr, "betas": section.betas}
    if section.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True, **options)
    check_optimizer(section)
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, **options)
    return optimizer


def check_optimizer(section: TrainSection) -> None:
    """Raises `UserError` if the optimiser's package is not there."""
    if section.optimizer == "adamw":
        return
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"train.optimizer adamw_8bit needs the package torchao ({error}); install it, or take "
            "adamw"
        ) from error
