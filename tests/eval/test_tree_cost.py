"""What rounds with a draft tree cost: from known clock times, and by its shape on a real target."""

import math
from collections.abc import Callable

import pytest

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.eval import speed
from draftsmith.eval.decode import DecodeSettings
from draftsmith.eval.draft import Clock
from draftsmith.eval.rows import Output
from draftsmith.eval.speed import calibrate_tree, measure_tree
from draftsmith.eval.tree import TreeShape

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]

SHAPES = [TreeShape(2, 3, 4), (2, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=["dynamic", "sampled"])
def test_a_whole_tree_has_one_first_step_and_a_later_one_per_further_depth(
    shape: TreeShape | tuple[int, ...],
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counted(
        target: Target,
        asked: list[Request],
        settings: DecodeSettings,
        drafter: Drafter | None = None,
        clock: Clock | None = None,
    ) -> list[Output]:
        assert clock is not None and [r.law for r in asked] == [Law(0.0)]
        clock.rounds += 4
        clock.target += 4 * 0.01
        clock.decode += 4 * 0.012
        if drafter is not None:
            assert settings.tree == shape and settings.num_draft_tokens == 3
            clock.decode += 4 * 0.01
            clock.draft_first += 3 * 0.002  # one round in four had no room to draft
            clock.draft_later += 5 * 0.001  # one tree of three was cut by a depth
            clock.drafting_rounds += 3
            clock.later_steps += 5
            clock.passes += [(1 + settings.nodes, 0.016), (3, 0.012), (1, 0.01)]
        return [Output([0] * 9)]

    monkeypatch.setattr(speed, "decode", counted)
    drafter = make_drafter("causal", small_target)
    requests = make_requests(small_target, [3, 7])
    settings = DecodeSettings(8, 3, tree=shape)
    cost = calibrate_tree(small_target, drafter, requests, Law(0.0), 1.4, settings)
    assert cost.draft == pytest.approx(0.2 + 2 * 0.1)
    assert (cost.seconds, cost.v, cost.o_plain) == pytest.approx((0.01, 1.6, 0.2))
    assert cost.o == pytest.approx((4 * 0.022 - 0.04 - 0.006 - 0.005) / 4 / 0.01)
    assert cost.speedup([0.5, 0.3, 0.1]) == pytest.approx(1.9 * 1.2 / (0.4 + 1.6 + cost.o))


@pytest.mark.parametrize("shape", SHAPES, ids=["dynamic", "sampled"])
def test_a_real_tree_has_every_cost(
    shape: TreeShape | tuple[int, ...],
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
) -> None:
    v = measure_tree(small_target, 20, 6)
    assert 0.1 < v < 20
    drafter, requests = make_drafter("eagle3", small_target), make_requests(small_target, [3, 7])
    settings = DecodeSettings(12, 3, tree=shape)
    cost = calibrate_tree(small_target, drafter, requests, Law(1.0), v, settings)
    for value in (cost.seconds, cost.draft, cost.o, cost.o_plain):
        assert 0 < value < math.inf
