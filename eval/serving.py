"""How a recipe's drafter is served: chains, policies that end them, or trees."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..configs.recipe import Recipe, ServingSection, TreeSection
from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .gamma import (
    AnyPolicy,
    CostModel,
    Costs,
    calibrate,
    confidence_of,
    make_policy,
    observations,
)
from .speed import Cost
from .tree import TreeShape

CALIBRATED = "cost_model"
"""The policy whose tables are measured, not written into a recipe."""


def check_serving(recipe: Recipe) -> None:
    """Raises `UserError` for a policy or tree that could not be served."""
    served = recipe.serving
    if served.policy is not None:
        if served.policy.get("name") != CALIBRATED:
            named_policy(served, recipe.name)
        elif set(served.policy) != {"name"}:
            raise UserError(
                f"recipe '{recipe.name}': serving.policy {CALIBRATED} takes no options, it is "
                "calibrated on training prompts"
            )
    settings(served, 1)


def check_length(family: str, most: int | None, num_draft_tokens: int) -> None:
    """Raises `UserError` for more tokens a round than a drafter of the family was made for."""
    if most is not None and num_draft_tokens > most:
        raise UserError(
            f"serving.num_draft_tokens is {num_draft_tokens}, and this drafter of family "
            f"'{family}' drafts {most} tokens at most"
        )


def settings(served: ServingSection, tokens: int) -> DecodeSettings:
    """The recipe's way of decoding up to `tokens` tokens, without a policy."""
    return DecodeSettings(
        tokens,
        served.num_draft_tokens,
        served.verifier,
        served.drafting,
        tree=None if served.tree is None else tree_shape(served.tree, served.num_draft_tokens),
    )


def tree_shape(section: TreeSection, depth: int) -> TreeShape | tuple[int, ...]:
    """The tree of a recipe, no deeper than `depth`."""
    if section.sampled:
        return section.sampled[:depth]
    return TreeShape(section.width, depth, section.budget, section.children)


def named_policy(served: ServingSection, recipe: str) -> AnyPolicy:
    """The recipe's policy, if it needs nothing measured."""
    assert served.policy is not None
    options = {"limit": served.num_draft_tokens, **served.policy}
    return make_policy(options, f"recipe '{recipe}'", "serving.policy")


@dataclass
class _Watch:
    """A static length that notes the confidence of every drafted token, for one row."""

    limit: int
    looks_at_batch = False
    rounds: list[list[float]] = field(default_factory=list)

    def begin(self, rows: int, device: torch.device) -> "_Watch":
        self.rounds.append([])
        return self

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        self.rounds[-1] += confidence_of(logits, chosen).tolist()
        return torch.full_like(chosen, k + 1 < self.limit, dtype=torch.bool)


def policy_of(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    law: Law,
    cost: Cost | None,
) -> AnyPolicy:
    """The recipe's policy under `law`; `cost_model` is calibrated on `requests`, one at a time."""
    served = recipe.serving
    if cost is None or served.policy is None or served.policy.get("name") != CALIBRATED:
        return named_policy(served, recipe.name)
    seen: list[tuple[list[float], int]] = []
    for request in requests:
        watch = _Watch(served.num_draft_tokens)
        how = replace(settings(served, recipe.collect.max_new_tokens), policy=watch)
        (out,) = decode(target, [replace(request, law=law)], how, drafter)
        accepted = [a for drafted, a in out.rounds if drafted > 0]
        # The last round may have been cut by the limit or an end token.
        seen += list(zip(watch.rounds, accepted, strict=True))[:-1]
    passes = tuple(cost.v[n] for n in sorted(cost.v))
    costs = Costs(cost.c_first, cost.c, cost.o, {1: passes})
    return CostModel(served.num_draft_tokens, calibrate(*observations(seen)), costs)
