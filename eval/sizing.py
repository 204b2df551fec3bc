"""What draft steps cost before anything is trained, and how good a drafter would have to be.

Costs do not depend on what weights say, only on how many tokens a round reads and keeps. So drafts
are made by the decode loop as it is, with acceptance by a fixed pattern in the place of chance:
0, 1, ... and at last all tokens of a round, in turn. All drafters take turns with plain decoding,
and figures are medians over the turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..configs.errors import UserError
from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law, pick
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .draft import Clock, now
from .speed import Calibration, Cost, limit_of

_CYCLE = 29
"""Tokens after which the text repeats, so that drafters that look text up find something."""
_BISECTIONS = 40
_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear",
    "_mkl_linear", "_linear_pointwise", "_grouped_mm",
}  # fmt: skip


@dataclass(frozen=True)
class StepCost:
    """Costs of a drafter at batch 1 in units of one plain target pass.

    floor_first, floor: the first draft step's and a later one's matrix products and attention
    alone, called one after the other behind a target pass.
    """

    cost: Cost
    floor_first: float
    floor: float

    @property
    def c_first(self) -> float:
        return self.cost.c_first

    @property
    def c(self) -> float:
        return self.cost.c

    @property
    def outside_first(self) -> float:
        """What the first draft step takes outside of its products."""
        return self.c_first - self.floor_first

    @property
    def outside(self) -> float:
        """What a later draft step takes outside of its products."""
        return self.c - self.floor


@dataclass(frozen=True)
class Need:
    """The least overlap that reaches a speedup, and the draft length that does with it."""

    overlap: float
    num_draft_tokens: int


def evenly(overlap: float, num_draft_tokens: int) -> list[float]:
    """S_k = α^k: survival where every drafted token is accepted with the same chance."""
    return [overlap**k for k in range(1, num_draft_tokens + 1)]


def needed(cost: Cost, speedup: float, most: int) -> Need | None:
    """The least α with which drafts of up to `most` tokens reach `speedup`; None if none does.

    By the formula of `Cost.speedup` with S_k = α^k, and the best draft length for it.
    """
    found = []
    for gamma in range(1, most + 1):
        if cost.speedup(evenly(1.0, gamma)) < speedup:
            continue
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if cost.speedup(evenly(middle, gamma)) < speedup:
                low = middle
            else:
                high = middle
        found.append(Need(high, gamma))
    return min(found, key=lambda need: (need.overlap, need.num_draft_tokens), default=None)


def check_room(drafter: Drafter, context: int) -> None:
    """Raise `UserError` for a drafter that drafts nothing behind so many tokens and a first one."""
    most = drafter.max_positions
    if most is not None and most <= context + 1:
        raise UserError(
            f"a drafter of family '{drafter.family}' for texts of {most} tokens drafts nothing "
            f"behind {context}"
        )


# ---- measuring


class _Pattern:
    """`Draws` of one row: so many tokens of each round are kept, whatever the laws say.

    Every draw is paid for as if it counted. What is emitted repeats itself.
    """

    def __init__(self, text: Sequence[int], num_draft_tokens: int):
        self.text, self.period = text, num_draft_tokens + 1
        self.emitted = self.rounds = 0
        self.verifying = True  # the first token, from prefill, is drawn as those behind a draft

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        kept = min(int(where.sum()), self.rounds % self.period)
        self.rounds, self.emitted, self.verifying = self.rounds + 1, self.emitted + kept, True
        return (torch.arange(p.shape[1], device=p.device) < kept) & where

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        pick(weights, torch.full((len(weights),), 0.5, dtype=torch.float64, device=weights.device))
        if not self.verifying:
            return weights.argmax(-1)
        token = self.text[self.emitted % len(self.text)]
        self.emitted, self.verifying = self.emitted + 1, self.period == 1
        return torch.full((len(weights),), token, dtype=torch.long, device=weights.device)

    def select(self, rows: Sequence[int]) -> None:
        """One row stays one row."""


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Products(TorchDispatchMode):
    """Notes the matrix products and attention of what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func._schema.name.rpartition("::")[2]
        if name in _PRODUCTS or "scaled_dot_product" in name:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Noted:
    """A drafter whose draft steps' products are noted, round by round."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.firsts: list[list[Call]] = []
        self.later: list[list[list[Call]]] = []  # of each round, of each step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def first(self, state: Any) -> Tensor:
        with Products() as products:
            logits = self.drafter.first(state)
        self.firsts.append(products.calls)
        self.later.append([])
        return logits

    def extend(self, state: Any, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        with Products() as products:
            logits = self.drafter.extend(state, tokens, parents)
        self.later[-1].append(products.calls)
        return logits


@dataclass
class _Course:
    """One drafter's turns."""

    drafter: Drafter
    settings: DecodeSettings
    noted: Any
    costs: list[Cost] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    """Products of each first and each later step, in units of the same turn."""


def step_costs(
    target: Target,
    drafters: Mapping[str, Drafter],
    rows: dict[int, float],
    *,
    law: Law = Law(1.0),  # noqa: B008
    num_draft_tokens: int = 3,
    context: int = 96,
    tokens: int = 25,
    turns: int = 7,
) -> dict[str, StepCost]:
    """Costs of drafters by name, each drafting `num_draft_tokens` a round if it drafts so many.

    They are to be as they are served: in evaluation mode, on the target's device, their linear
    layers sped up as its are. Each turn decodes `tokens` tokens behind `context` ones under `law`,
    and verifies token by token.

    Args:
        rows: `speed.measure_rows`, for one row more than are drafted at least.
    Raises:
        UserError: as `check_room`.
    """
    target = replace(target, eos_ids=())  # replies have one length
    length = min(_CYCLE, context)
    cycle = torch.randint(target.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    text = cycle.tolist()
    ids = (text * (context // length + 1))[:context]
    request = Request("size", "", "", tuple(ids), law, 0)
    follows = text[context % length :] + text[: context % length]
    courses = {}
    for name, drafter in drafters.items():
        check_room(drafter, context)
        gamma = limit_of(drafter, num_draft_tokens)
        how = DecodeSettings(tokens, gamma, "token")
        noted: Any = _Noted(drafter)
        decode(target, [request], how, noted, draws=_Pattern(follows, gamma))
        courses[name] = _Course(drafter, how, noted)
    plain = DecodeSettings(tokens, 0)
    decode(target, [request], plain, draws=_Pattern(follows, 0))  # all have now warmed up
    names = list(courses)
    for turn in range(turns):
        slow = Clock()
        decode(target, [request], plain, clock=slow, draws=_Pattern(follows, 0))
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            course, fast = courses[name], Clock()
            draws = _Pattern(follows, course.settings.num_draft_tokens)
            decode(target, [request], course.settings, course.drafter, fast, draws=draws)
            calibration = Calibration(target, course.drafter, law, course.settings, slow, fast)
            cost = calibration.cost(rows)
            course.costs.append(cost)
            _time_products(target, course, cost.seconds)
    return {name: _medians(course) for name, course in courses.items()}


def step_cost(target: Target, drafter: Drafter, rows: dict[int, float], **options: Any) -> StepCost:
    """`step_costs` of one drafter."""
    return step_costs(target, {drafter.family: drafter}, rows, **options)[drafter.family]


@torch.inference_mode()
def _time_products(target: Target, course: _Course, unit: float) -> None:
    """Add what the noted products take by themselves, over one period of acceptance.

    In the order of a round, behind a target pass that has pushed the weights out of the caches.
    """
    gamma = course.settings.num_draft_tokens
    device, noted = target.device, course.noted
    cache = target.new_cache(1, gamma + 1)
    block = torch.arange(gamma + 1, device=device)[None]  # [1, γ+1]
    for first, later in list(zip(noted.firsts, noted.later, strict=True))[: gamma + 1]:
        target.logits(target.forward(block, cache).hidden)
        course.first.append(_seconds(first, device) / unit)
        course.later += [_seconds(calls, device) / unit for calls in later]


def _seconds(calls: Sequence[Call], device: torch.device) -> float:
    if not calls:
        return 0.0
    start = now(device)
    for func, args, options in calls:
        func(*args, **options)
    return now(device) - start


def _medians(course: _Course) -> StepCost:
    """Costs as medians over the turns, each figure by itself."""
    costs = course.costs
    figures = {
        name: median(getattr(cost, name) for cost in costs)
        for name in ("seconds", "c_first", "c", "o", "o_plain")
    }
    v = {n: median(cost.v[n] for cost in costs) for n in costs[0].v}
    later = median(course.later) if course.later else 0.0
    return StepCost(Cost(v=v, **figures), median(course.first), later)
