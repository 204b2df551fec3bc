"""The `train:` section of a recipe: how a drafter is optimised on the records."""

import math
from dataclasses import dataclass, field
from typing import Literal

from .errors import require


@dataclass(frozen=True)
class OnPolicySection:
    """Training records made anew while training, instead of those collected beforehand."""

    drafted: float = 0.0
    """Share of the training records replaced by replies that the drafter sampled and the target
    scored: what a drafter meets is then what it was trained on."""
    resampled: float = 0.0
    """Share of the training records replaced by new replies of the target to the same prompts."""
    every: int = 200
    """Optimiser steps between such renewals; the first is made after as many."""
    max_new_tokens: int = 64
    """Longest reply made anew."""

    def __post_init__(self) -> None:
        for option in ("drafted", "resampled"):
            value = getattr(self, option)
            require(0 <= value <= 1, option, value, "between 0 and 1")
        ok = 0 < self.drafted + self.resampled <= 1
        require(ok, "drafted + resampled", self.drafted + self.resampled, "above 0, at most 1")
        require(self.every > 0, "every", self.every, "above 0")
        ok = self.max_new_tokens > 1  # the first token of a reply is never drafted
        require(ok, "max_new_tokens", self.max_new_tokens, "2 or more")


@dataclass(frozen=True)
class TrainSection:
    """Optimising the drafter on the records."""

    steps: int | None = None
    """Optimiser steps; null derives them from epochs."""
    epochs: float = 3.0
    """Passes over the training records; unused where steps is set."""
    tokens_per_batch: int = 256
    """Supervised tokens of one batch on one device."""
    accumulation: int = 1
    """Batches of one optimiser step on each device."""
    packing: bool = False
    """Puts short conversations behind each other into one row, isolated, instead of padding."""
    unroll: int = 3
    """Steps the drafter runs on its own states in training, as it will when it drafts."""
    lr: float = 1e-3
    """Highest learning rate."""
    warmup_steps: int = 20
    """Optimiser steps in which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""
    final_lr_fraction: float = 0.1
    """Where the schedule ends, as a fraction of lr."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps both moments in 8 bits (package torchao)."""
    weight_decay: float = 0.0
    """AdamW's decay, on matrices only."""
    clip: float = 1.0
    """Largest gradient norm."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """Of the passes, weights stay float32; auto takes bf16 where the device is fast at it."""
    gradient_checkpointing: bool = False
    """Forgets what is inside the drafter's layers and computes it again for the gradient."""
    target: Literal["auto", "replicated", "sharded", "absent"] = "auto"
    """The frozen target while training: whole on each device, spread over them, or its head and
    embedding alone, for which records must hold its states; auto takes what the records allow."""
    domains: tuple[str, ...] | None = None
    """Domains to train on, for a drafter or an adapter of their own; null takes all."""
    domain_weights: dict[str, float] = field(default_factory=dict)
    """How often records of a domain are seen relative to the others, 1 where it is not named."""
    reweight: float = 0.0
    """Pull, at each evaluation, toward the domains with the fewest expected tokens per round;
    0 is off, 1 sees a domain with half the others' gain twice as often."""
    on_policy: OnPolicySection | None = None
    """Renews a part of the records while training."""
    save_every: int = 200
    """Optimiser steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept, the newest ones; the best weights are kept beside them."""
    eval_every: int = 100
    """Optimiser steps between evaluations on held-out records."""
    eval_conversations: int = 32
    """Held-out records of such an evaluation."""
    samples: int = 0
    """Held-out prompts that are decoded with the drafter at each evaluation, for the log."""
    log_every: int = 10
    """Optimiser steps between log lines."""
    ema: float = 0.0
    """Decay of the weights' moving average, which is then measured and saved; 0 is off."""
    patience: int | None = None
    """Evaluations without better expected tokens per round before training ends; null runs to the
    end."""
    result: Literal["last", "best"] | None = None
    """The weights that become the drafter: the last ones, or those of the best evaluation (which
    held-out figures then flatter); null takes the best where patience ends training."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Tracking with Weights & Biases."""
    wandb_project: str = "draftsmith"
    """The project that runs are filed under."""
    tensorboard: bool = False
    """Writes TensorBoard files into the run's folder, too."""

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps > 0, "steps", self.steps, "above 0, or null")
        require(0 < self.epochs < math.inf, "epochs", self.epochs, "above 0")
        for option in ("tokens_per_batch", "accumulation", "unroll", "save_every", "keep"):
            require(getattr(self, option) > 0, option, getattr(self, option), "above 0")
        for option in ("eval_every", "eval_conversations", "log_every"):
            require(getattr(self, option) > 0, option, getattr(self, option), "above 0")
        for option in ("warmup_steps", "samples"):
            require(getattr(self, option) >= 0, option, getattr(self, option), "0 or more")
        require(0 < self.lr < math.inf, "lr", self.lr, "above 0")
        ok = 0 <= self.final_lr_fraction <= 1
        require(ok, "final_lr_fraction", self.final_lr_fraction, "between 0 and 1")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "0 or more")
        require(0 < self.clip < math.inf, "clip", self.clip, "above 0")
        require(0 <= self.ema < 1, "ema", self.ema, "from 0 (off) to below 1")
        require(self.patience is None or self.patience > 0, "patience", self.patience, "above 0")
        ok = all(0 <= beta < 1 for beta in self.betas)
        require(ok, "betas", list(self.betas), "two numbers from 0 to below 1")
        ok = self.domains is None or len(self.domains) > 0
        require(ok, "domains", [], "a list of at least one domain, or null")
        ok = all(0 < weight < math.inf for weight in self.domain_weights.values())
        require(ok, "domain_weights", self.domain_weights, "weights above 0 by domain")
        require(0 <= self.reweight < math.inf, "reweight", self.reweight, "0 (off) or more")
