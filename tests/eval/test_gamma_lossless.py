"""Draft length policies keep the target's law: enumeration of every draw of chained rounds."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.eval import verify
from draftsmith.eval.gamma import (
    POLICIES,
    AdaEDL,
    Calibration,
    Confidence,
    CostModel,
    Costs,
    Policy,
    Static,
)
from draftsmith.eval.lossless import Tokens, target_law, total_variation

CPU = torch.device("cpu")


class Walk:
    """Chance that follows one branch, for a batch of one row; `law_of` visits all of them."""

    def __init__(self, path: list[int]):
        self.path, self.sizes, self.mass = path, list[int](), 1.0

    def _choose(self, weights: list[float]) -> int:
        options = [i for i, w in enumerate(weights) if w > 0]
        depth = len(self.sizes)
        self.sizes.append(len(options))
        if depth == len(self.path):
            self.path.append(0)
        chosen = options[self.path[depth]]
        self.mass *= weights[chosen] / math.fsum(weights)
        return chosen

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        asked = zip(p[0].tolist(), where[0].tolist(), strict=True)
        return torch.tensor([[w and self._choose([1 - x, x]) == 1 for x, w in asked]])

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        return torch.tensor([self._choose(weights[0].tolist())])

    def select(self, rows: Sequence[int]) -> None:
        raise NotImplementedError


def branches(run: Callable[[Walk], Tokens]) -> Iterator[tuple[Tokens, float]]:
    """Every outcome of `run` with its probability, depth first."""
    path: list[int] = []
    while True:
        walk = Walk(path)
        outcome = run(walk)
        yield outcome, walk.mass
        while path and path[-1] == walk.sizes[len(path) - 1] - 1:
            path.pop()
        if not path:
            return
        path[-1] += 1


def table(seed: int) -> Callable[[Tokens], Tensor]:
    """Logits [3] for each history, float64."""

    def of(history: Tokens) -> Tensor:
        g = np.random.default_rng([seed, len(history), *history])
        return torch.from_numpy(1.5 * g.standard_normal(3))

    return of


def play(
    policy: Policy,
    rule: verify.Rule,
    greedy: bool,
    prefix: Tokens,
    room: int,
    fault: bool,
    walk: Walk,
) -> tuple[Tokens, int]:
    """One round of a chain draft behind `prefix`: what it emits, how much it submitted."""
    p, q = table(1), table(9)
    round_, draft, laws, going = policy.begin(1, CPU), list[int](), list[Tensor](), room > 0
    while going:
        logits = q(prefix + tuple(draft))
        law = torch.eye(3, dtype=torch.float64)[logits.argmax()] if greedy else logits.softmax(-1)
        chosen = walk.categorical(law[None], torch.tensor([True]))
        draft.append(int(chosen))
        laws.append(law.log())
        going = bool(round_.go_on(len(draft) - 1, logits[None], chosen)) and len(draft) < room
        if fault and not going and len(draft) < room:
            draft.pop()
            laws.pop()
    n = len(draft)
    log_q = torch.stack(laws)[None] if n else torch.empty(1, 0, 3, dtype=torch.float64)
    log_p = torch.stack([p(prefix + tuple(draft[:i])).log_softmax(-1) for i in range(n + 1)])[None]
    ids = torch.tensor([draft], dtype=torch.long).view(1, n)
    accepted, following = rule(ids, log_q, log_p, torch.tensor([n]), walk)
    return (*draft[: int(accepted)], int(following)), n


def decoded(
    policy: Policy, rule: verify.Rule, greedy: bool = False, fault: bool = False, length: int = 4
) -> tuple[dict[Tokens, float], set[int]]:
    """Law of the first `length` tokens over all draws, and the draft lengths of first rounds."""
    mass: dict[Tokens, float] = {(): 1.0}
    submitted = set[int]()
    for done in range(length):
        room = min(policy.limit, length - done - 1)
        for prefix in [x for x in mass if len(x) == done]:
            reached = mass.pop(prefix)

            def run(walk: Walk, prefix: Tokens = prefix, room: int = room) -> Tokens:
                emitted, n = play(policy, rule, greedy, prefix, room, fault, walk)
                if not prefix:
                    submitted.add(n)
                return prefix + emitted

            for outcome, chance in branches(run):
                mass[outcome] = mass.get(outcome, 0.0) + reached * chance
    return mass, submitted


LOSSLESS: dict[str, Policy] = {
    "static": Static(2),
    "confidence": Confidence(3, 0.5),
    "adaedl": AdaEDL(3, 0.63),
    "cost_model": CostModel(
        3,
        Calibration(((0.4, 0.8),), ((0.1, 0.55, 0.97),), (0.583,), (1000,)),
        Costs(c_first=0.15, c=0.05, o=0.05, v={1: (1.0, 1.05, 1.1, 1.15)}),
    ),
}


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy drafts"])
@pytest.mark.parametrize("rule", [verify.token, verify.block])
@pytest.mark.parametrize("name", list(POLICIES))
def test_policies_are_lossless(name: str, rule: verify.Rule, greedy: bool) -> None:
    law, submitted = decoded(LOSSLESS[name], rule, greedy)
    truth = target_law(lambda history: table(1)(history).softmax(-1), 4)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(law, truth) <= 1e-12
    if name != "static" and not greedy:
        assert len(submitted) > 1  # it did decide


@pytest.mark.parametrize("rule", [verify.token, verify.block])
@pytest.mark.parametrize("name", ["confidence", "cost_model"])
def test_a_dropped_token_is_caught(name: str, rule: verify.Rule) -> None:
    law, _ = decoded(LOSSLESS[name], rule, fault=True)
    truth = target_law(lambda history: table(1)(history).softmax(-1), 4)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(law, truth) > 0.01
