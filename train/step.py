"""One batch through drafter and objective: the loss, and what is to be reported about it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..configs.errors import UserError
from ..configs.recipe import ObjectiveSection
from ..drafters.base import Drafter, TrainBatch
from ..drafters.distribution import DraftVocabularyP
from . import accepted_length as al
from .chunks import Heads, Unrolled
from .fused import Measured, Rounds, accepted_loss, measure, rounds_loss, weighted_loss
from .objective import Objective
from .score import unrolled


class Scored(NamedTuple):
    """A batch's part of the global loss, with gradient, and what was measured on the way.

    token: K x `[N_k]` the reply token that each of `measured.overlap` belongs to. A tuple, because
    what shards weights looks for the loss in what a module returns.
    """

    loss: Tensor
    measured: Measured
    token: list[Tensor]


def scored_tokens(batch: TrainBatch, steps: int) -> Tensor:
    """How many tokens each unrolled step scores: `[steps]`, known before any forward."""
    k = torch.arange(steps, device=batch.lengths.device)
    return (batch.reply_lens[:, None] - 1 - k).clamp_min(0).sum(0)


def check_unroll(family: str, most: int | None, unroll: int) -> None:
    """Raises `UserError` unless a drafter of at most so many tokens a round learns all of them."""
    if most is not None and unroll != most:
        raise UserError(
            f"train.unroll is {unroll}, and this drafter of family '{family}' drafts {most} tokens "
            f"a round: what is not unrolled is not trained; take train.unroll {most}"
        )


class Scorer(nn.Module):
    """Drafter and objective as one module, so that accelerate wraps one forward."""

    def __init__(
        self,
        drafter: Drafter,
        section: ObjectiveSection,
        objective: Objective,
        p: DraftVocabularyP,
        low_precision: bool = False,
    ):
        """`low_precision` runs the drafter's passes in bf16, over weights of float32."""
        super().__init__()
        assert isinstance(drafter, nn.Module)
        self.drafter = drafter
        # Layers that FSDP may shard one by one: those that are always called as a whole.
        self._no_split_modules = getattr(getattr(drafter, "model", None), "_no_split_modules", None)
        self._section, self._objective, self._p = section, objective, p
        self._low_precision = low_precision

    def forward(
        self, batch: TrainBatch, steps: int, totals: Tensor, second: bool = False
    ) -> Scored:
        """The loss of `steps` unrolled steps; `second` takes the objective that takes over.

        `totals` `[steps]` counts the tokens each step scores in the *global* batch, so that the
        losses of its parts add up to the whole's. Raises `UserError` where the batch tells too
        little of the target's distributions for the objective's law.
        """
        # Here, not around the module: what shards it would round weights and inputs as well.
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self._low_precision):
            return self._scored(batch, steps, totals, second)

    def _scored(self, batch: TrainBatch, steps: int, totals: Tensor, second: bool) -> Scored:
        x, heads = unrolled(self.drafter, self._p, batch, steps, self._objective.warp_draft)
        objective = self._objective.then if second else self._objective.token
        if isinstance(objective, str):
            rounds = rounds_of(batch, self._objective, self.drafter.one_pass)
            function = {"rounds": rounds_loss, "accepted_length": accepted_loss}[objective]
            total, measured = function(x, heads, rounds)
            return Scored(total / totals[0].clamp_min(1), measured, list(x.token))
        assert objective is not None
        weight = self._weights(batch, x, heads, totals)
        loss, measured = weighted_loss(x, heads, objective, weight)
        return Scored(loss, measured, list(x.token))

    def _weights(
        self, batch: TrainBatch, x: Unrolled, heads: Heads, totals: Tensor
    ) -> list[Tensor]:
        """Weight of every scored token, K x `[N_k]`, its share of the global counts included."""
        section = self._section
        if section.position_weights == "product":
            index, inside = al.start_index(batch.first, batch.reply_lens - 1, len(totals))
            log_q = measure(x, heads).log_q  # [K, R]
            found = al.by_position(log_q, len(totals), self.drafter.one_pass)
            each = al.position_weights(
                al.from_tokens(found, index, inside), inside, section.product_floor
            )
            by_token = al.to_tokens(each, index, inside, len(x.column))  # [K, R]
            if self.drafter.one_pass:
                by_token = by_token.sum(0, keepdim=True)
            count = totals[0].clamp_min(1)
            return [by_token[k, token] / count for k, token in enumerate(x.token)]
        if len(x.token) == 1:  # a family that predicts in one pass has a single step
            return [torch.ones_like(x.token[0], dtype=totals.dtype) / totals[0].clamp_min(1)]
        decay = section.position_decay ** torch.arange(len(totals), device=totals.device)
        share = decay / decay.sum() / totals.clamp_min(1)  # [K]
        return [share[k].expand(len(token)) for k, token in enumerate(x.token)]


def rounds_of(batch: TrainBatch, objective: Objective, one_pass: bool) -> Rounds:
    """All rounds that could start in a batch's replies."""
    length = batch.reply_lens - 1
    index, inside = al.start_index(batch.first, length, objective.num_draft_tokens)
    return Rounds(index, inside, length, one_pass, objective.verifier == "block")
