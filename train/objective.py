"""What a recipe trains on: which loss, under which law, and when the loss changes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..configs.errors import UserError
from ..configs.recipe import ObjectiveSection, ServingSection
from ..data.warp import Law, law_of
from .fused import TokenLoss
from .losses import ce, objective
from .score import Drafting

ON_LENGTH = ("accepted_length", "rounds")
"""Second objectives that weigh a token by what happens to its neighbours."""


@dataclass(frozen=True)
class Objective:
    """A recipe's objective, bound to how the drafter will be served.

    law: p's serving law, which also warps q, by temperature alone: a hard cut of q would take the
    gradient from the tokens it excludes. token: the first loss; then: what takes over, a token loss
    or one of `ON_LENGTH`; needs_samples: whether the first loss, like all that take over, is only
    valid on replies sampled under the law. num_draft_tokens, verifier, drafting: as served.
    """

    law: Law
    token: TokenLoss
    then: TokenLoss | str | None
    needs_samples: bool
    num_draft_tokens: int
    verifier: str
    drafting: Drafting

    def warp_draft(self, logits: Tensor) -> Tensor:
        """Draft logits under the law's temperature (1 for a greedy target)."""
        return logits if self.law.temperature in (0.0, 1.0) else logits / self.law.temperature


def bind_objective(section: ObjectiveSection, serving: ServingSection) -> Objective:
    """The recipe's objective. Raises `UserError` for an unknown name, or one serving rules out."""
    law = training_law(serving)
    mix = section.loss if isinstance(section.loss, dict) else {section.loss: 1.0}
    losses = [(weight, _bound(name, section)) for name, weight in mix.items()]
    then: TokenLoss | str | None = section.then
    if section.then is not None and section.then not in ON_LENGTH:
        then = _bound(section.then, section)
    names = {*mix, section.then} - {None}
    _check_law(names, section, law)
    greedy = law.temperature == 0 or serving.drafting == "greedy"
    if greedy and names & set(ON_LENGTH):
        raise UserError(
            f"objective.then {section.then} has no gradient when drafts are greedy; train on "
            "greedy_mass or ce alone"
        )
    if serving.drafting == "greedy" and not names & set(_FOR_GREEDY):
        raise UserError(
            "serving.drafting greedy is accepted with p(argmax q), which objective.loss "
            f"{section.loss} does not train; take {' or '.join(_FOR_GREEDY)}"
        )
    return Objective(
        law, partial(_mixed, losses), then, "ce" in mix,
        serving.num_draft_tokens, serving.verifier, serving.drafting,
    )  # fmt: skip


_FOR_GREEDY = ("greedy_mass", "ce")


def _check_law(names: set[str | None], section: ObjectiveSection, law: Law) -> None:
    """Refuse what is infinite, with gradient 0, where the law cuts p to 0."""
    cut = law.temperature == 0 or law.truncates
    if cut and reverse(names, section.beta):
        raise UserError(
            f"objective.loss rkl (jsd with beta 1) is infinite under {law.label}, which gives most "
            "tokens probability 0; take another, such as nla or jsd"
        )


def reverse(names: set[str | None], beta: float) -> bool:
    """Whether one of the objectives is the reverse divergence, infinite where p is 0."""
    return "rkl" in names or ("jsd" in names and beta == 1)


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
