"""Course of the learning rate, and which parameters decay."""

import math
from typing import Any

from ..configs.recipe import TrainSection
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
