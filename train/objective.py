"""What a recipe trains on: which loss, under which law, and when the loss changes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from ..configs.errors import UserError
from ..configs.recipe import ObjectiveSection, ServingSection
from ..data.collect import law_of
from ..data.warp import Law
from .fused import TokenLoss
from .losses import ce, objective


@dataclass(frozen=True)
class Objective:
    """A recipe's objective, bound to how the drafter will be served.

    law: p's serving law, which also warps q, by temperature alone: a hard cut of q would take the
    gradient from the tokens it excludes. num_draft_tokens, verifier, drafting: as served.
    """

    law: Law
    token: TokenLoss
    then: Literal["accepted_length", "rounds"] | None
    num_draft_tokens: int
    verifier: str
    drafting: str

    def warp_draft(self, logits: Tensor) -> Tensor:
        """Draft logits under the law's temperature (1 for a greedy target)."""
        return logits if self.law.temperature in (0.0, 1.0) else logits / self.law.temperature


def bind_objective(section: ObjectiveSection, serving: ServingSection) -> Objective:
    """The recipe's objective. Raises `UserError` for an unknown name, or one serving rules out."""
    law = training_law(serving)
    mix = section.loss if isinstance(section.loss, dict) else {section.loss: 1.0}
    losses = [(weight, _bound(name, section)) for name, weight in mix.items()]
    cut = law.temperature == 0 or law.top_k or law.top_p < 1
    if cut and "rkl" in mix:
        raise UserError(
            f"objective.loss rkl is infinite under {law.label}, which gives most tokens "
            "probability 0; take another, such as nla or jsd"
        )
    if section.then is not None and (law.temperature == 0 or serving.drafting == "greedy"):
        raise UserError(
            f"objective.then {section.then} has no gradient when drafts are greedy; train on "
            "greedy_mass or ce alone"
        )
    return Objective(
        law, partial(_mixed, losses), section.then,
        serving.num_draft_tokens, serving.verifier, serving.drafting,
    )  # fmt: skip


def training_law(serving: ServingSection) -> Law:
    """The served law that training looks at: the first one that samples, else the greedy one."""
    laws = [law_of(section) for section in serving.laws]
    return next((law for law in laws if law.temperature > 0), laws[0])


def _bound(name: str, section: ObjectiveSection) -> TokenLoss:
    function = objective(name)
    if function is ce:
        return lambda log_p, logits, column: ce(logits, column)
    options = {
        "lk_hybrid": {"eta": section.eta},
        "jsd": {"beta": section.beta},
        "greedy_mass": {"b": section.sharpness},
    }.get(name, {})
    return lambda log_p, logits, column: function(log_p, logits, **options)


def _mixed(
    losses: list[tuple[float, Callable[[Tensor, Tensor, Tensor], Tensor]]],
    log_p: Tensor,
    logits: Tensor,
    column: Tensor,
) -> Tensor:
    (weight, loss), *rest = losses
    total = weight * loss(log_p, logits, column)
    for weight, loss in rest:
        total = total + weight * loss(log_p, logits, column)
    return total


def switch_step(section: ObjectiveSection, steps: int) -> int:
    """The optimiser step from which `then` is trained at the latest; `steps` without one."""
    return steps if section.then is None else round(section.switch_at * steps)
