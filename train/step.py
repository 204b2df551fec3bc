"""One batch through drafter and objective: loss sums, counts and overlap, per unrolled step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..configs.recipe import ObjectiveSection
from ..data.warp import Law
from ..drafters.base import Drafter, TrainBatch
from ..drafters.distribution import DraftVocabularyP, reply_columns
from .losses import ce, objective, overlap

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`f(log_p [N, V_d], logits [N, V_d], column [N])`, column being the sampled token's or -1."""


@dataclass(frozen=True)
class StepSums:
    """Sums over the tokens scored at one unrolled step (floats never meaned before pooling).

    loss: scalar with gradient; overlap, mass: `[R_k]` per token; token: `[R_k]` index in the batch.
    """

    loss: Tensor
    overlap: Tensor
    mass: Tensor
    token: Tensor


def scored_tokens(batch: TrainBatch, steps: int) -> Tensor:
    """How many tokens each unrolled step scores: `[steps]`, known before any forward."""
    k = torch.arange(steps, device=batch.lengths.device)
    return (batch.reply_lens[:, None] - 1 - k).clamp_min(0).sum(0)


class Scorer(nn.Module):
    """Drafter and objective as one module, so that accelerate wraps one forward."""

    def __init__(self, drafter: Drafter, section: ObjectiveSection, p: DraftVocabularyP):
        super().__init__()
        assert isinstance(drafter, nn.Module)
        self.drafter = drafter
        self._p = p
        self._temperature = section.temperature
        self._loss = bound_objective(section)

    def forward(self, batch: TrainBatch, steps: int) -> list[StepSums]:
        table = self._p(batch.hidden, batch.log_z)  # [R, V_d]
        mass = table.exp().sum(-1)  # [R]
        column = reply_columns(batch, self.drafter.draft_ids, table.shape[-1])  # [R]
        sums = []
        for step in self.drafter.unroll(batch, steps):
            logits = self.drafter.head(step.hidden)[:, : table.shape[-1]]  # [N, V_d], no padding
            logits = logits.float() / self._temperature
            log_p = table[step.token]  # [N, V_d]
            loss = self._loss(log_p, logits, column[step.token]).sum()
            with torch.no_grad():
                shared = overlap(log_p, logits.detach())  # [N]
            sums.append(StepSums(loss, shared, mass[step.token], step.token))
        return sums


def bound_objective(section: ObjectiveSection) -> Loss:
    """The recipe's objective. Raises `UserError` for an unknown name."""
    function = objective(section.name)
    if function is ce:
        return lambda log_p, logits, column: ce(logits, column)
    options = {"eta": section.eta} if section.name == "lk_hybrid" else {}
    return lambda log_p, logits, column: function(log_p, logits, **options)


def objective_law(section: ObjectiveSection) -> Law:
    """The law whose p the objective compares with."""
    return Law(section.temperature)
