"""Measured speed: loops in turns, prefill apart, against plain decoding and `generate`."""

from collections.abc import Callable

import pytest

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.drafters.base import Drafter
from draftsmith.eval import timing
from draftsmith.eval.decode import DecodeSettings
from draftsmith.eval.timing import Lap, Timing, generate_ratio, time_cell

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]


@pytest.fixture
def requests(small_target: Target, make_requests: MakeRequests) -> list[Request]:
    return make_requests(small_target, [3, 7, 5])


def test_a_cell_is_timed_with_every_length(
    small_target: Target, make_drafter: MakeDrafter, requests: list[Request]
) -> None:
    drafter = make_drafter("causal", small_target)
    cell = time_cell(small_target, drafter, requests, DecodeSettings(10, 2), (1, 2))
    assert cell.prompts == 3
    assert cell.tokens_per_s(0) > 0
    assert cell.lengths == [2, 1]
    for gamma in cell.lengths:
        ratio = cell.speedup(gamma)
        assert ratio.low is not None and ratio.high is not None
        assert ratio.low <= ratio.value <= ratio.high
        assert ratio.value == pytest.approx(cell.tokens_per_s(gamma) / cell.tokens_per_s(0))
        assert cell.prefill(gamma) > 0


def test_speeds_are_pooled_over_prompts() -> None:
    """Known laps: tokens together over seconds together, prefill in neither."""
    plain = (Lap(9.0, 2.0, 10), Lap(7.0, 8.0, 20))
    fast = (Lap(9.5, 1.0, 10), Lap(7.5, 5.0, 20))
    cell = Timing({0: plain, 3: fast})
    assert cell.tokens_per_s(0) == pytest.approx(3.0)
    assert cell.tokens_per_s(3) == pytest.approx(5.0)
    assert cell.speedup(3).value == pytest.approx(5 / 3)
    assert (cell.prefill(0), cell.prefill(3)) == (8.0, 8.5)


def test_what_calibrates_takes_its_turn_behind_every_prompt(
    small_target: Target, make_drafter: MakeDrafter, requests: list[Request]
) -> None:
    turns: list[int] = []
    drafter = make_drafter("causal", small_target)
    settings = DecodeSettings(4, 2)
    time_cell(small_target, drafter, requests, settings, between=lambda: turns.append(1))
    assert len(turns) == len(requests)


def test_loops_take_turns_in_both_orders(
    small_target: Target,
    make_drafter: MakeDrafter,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[int, bool]] = []
    decode = timing.decode

    def noted(target, asked, settings, drafter=None, clock=None):  # type: ignore[no-untyped-def]
        order.append((settings.num_draft_tokens, drafter is not None))
        return decode(target, asked, settings, drafter, clock)

    monkeypatch.setattr(timing, "decode", noted)
    drafter = make_drafter("causal", small_target)
    time_cell(small_target, drafter, requests[:2], DecodeSettings(6, 2))
    assert order == [(0, False), (2, True), (2, True), (0, False)]


@pytest.mark.parametrize("name", ["tiny_target", "small_target"])
def test_our_plain_loop_is_compared_with_generate(
    name: str, request: pytest.FixtureRequest, make_requests: MakeRequests
) -> None:
    target: Target = request.getfixturevalue(name)  # with an end token, and without
    found = generate_ratio(target, make_requests(target, [3, 7]), 6)
    assert 0.05 < found.value < 50
    assert found.low is not None and found.high is not None
