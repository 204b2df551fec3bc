"""Costs, predicted and measured speed: formulas by hand, measurements by their shape."""

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
from draftsmith.eval.speed import Cost, calibrate, measure_rows

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]

COST = Cost(
    seconds=0.01,
    v={1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3},
    c_first=0.2,
    c=0.1,
    o=0.05,
    o_plain=0.02,
)


def test_predicted_speedup_is_the_formula() -> None:
    assert COST.speedup([0.6]) == pytest.approx(1.6 * 1.02 / (0.2 + 1.1 + 0.05))
    assert COST.speedup([0.6, 0.3, 0.1]) == pytest.approx(2.0 * 1.02 / (0.2 + 0.2 + 1.3 + 0.05))
    assert COST.speedup([0.0, 0.0]) < 1, "drafting in vain costs"


@pytest.fixture
def requests(small_target: Target, make_requests: MakeRequests) -> list[Request]:
    return make_requests(small_target, [3, 7, 5])


def test_costs_of_rows_are_seconds(small_target: Target) -> None:
    rows = measure_rows(small_target, 20, range(1, 5))
    assert sorted(rows) == [1, 2, 3, 4]
    assert all(0 < seconds < 5 for seconds in rows.values())


@pytest.mark.parametrize("kind", ["eagle3", "causal"])
@pytest.mark.parametrize("law", [Law(0.0), Law(1.0)], ids=lambda law: law.label)
def test_calibration_gives_every_cost(
    kind: str, law: Law, small_target: Target, make_drafter: MakeDrafter, requests: list[Request]
) -> None:
    drafter = make_drafter(kind, small_target)
    rows = {1: 0.5, 2: 0.6, 3: 0.7}
    cost = calibrate(small_target, drafter, requests, law, rows, DecodeSettings(8, 2))
    assert cost.v[1] == 1.0 and cost.v[3] / cost.v[2] == pytest.approx(0.7 / 0.6)
    for value in (cost.seconds, cost.c, cost.c_first, cost.o, cost.o_plain):
        assert 0 < value < math.inf
    assert 0 < cost.speedup([0.5, 0.2]) < 3


def test_costs_are_means_over_what_was_counted(
    small_target: Target,
    make_drafter: MakeDrafter,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock with known times; the first call of each loop warms up and is not counted."""
    calls: list[tuple[int, str]] = []

    def counted(
        target: Target,
        asked: list[Request],
        settings: DecodeSettings,
        drafter: Drafter | None = None,
        clock: Clock | None = None,
    ) -> list[Output]:
        assert clock is not None and [r.law for r in asked] == [Law(1.0)]
        calls.append((settings.num_draft_tokens, asked[0].prompt_id))
        warm = len(calls) > 2
        clock.rounds += 4
        clock.target += 4 * 0.01 if warm else 100.0
        clock.decode += 4 * 0.012
        if drafter is not None:
            clock.decode += 4 * 0.01
            clock.draft_first += 3 * 0.002
            clock.draft_later += 6 * 0.001
            clock.drafting_rounds += 3
            clock.later_steps += 6
            # Behind a draft a pass over 3 rows takes half as long again as back to back.
            clock.passes += 3 * [(3, 1.5 * 1.4 * 0.01)] + [(1, 0.01)]
        return [Output([0] * 9)]

    monkeypatch.setattr(speed, "decode", counted)
    rows = {1: 0.5, 2: 0.6, 3: 0.7}
    drafter = make_drafter("causal", small_target)
    cost = calibrate(small_target, drafter, requests, Law(1.0), rows, DecodeSettings(8, 2))
    assert cost.seconds == pytest.approx(0.01)
    assert cost.v == pytest.approx({1: 1.0, 2: 1.2 * 1.5, 3: 1.4 * 1.5})
    assert (cost.c_first, cost.c) == (pytest.approx(0.2), pytest.approx(0.1))
    assert cost.o_plain == pytest.approx(0.2)
    assert cost.o == pytest.approx(4 * 0.022 / 4 / 0.01 - 1 - 0.012 / 4 / 0.01)
    assert [name for _, name in calls[::2]] == ["p0", "p0", "p1", "p2"]
    assert [gamma for gamma, _ in calls] == [0, 2] * 4
