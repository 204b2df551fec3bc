"""Simulated serving against the formulas of queueing, and against courses worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import planned
import pytest

from draftsmith.configs.errors import UserError
from draftsmith.configs.load import parse, to_dict
from draftsmith.eval.machine import Machine, Memory, Steps, entries_of, machine_of
from draftsmith.eval.simulate import (
    Course,
    Serving,
    capacity,
    load,
    pays_up_to,
    run,
    serving,
)
from draftsmith.eval.speed import Cost

ALONE = Serving(steps=(0.01,), survival=(), prefill=0.001)
LENGTHS = [(100, 41)]  # 0.1 seconds of prefill and 40 of 0.01


def waits(course: Course, way: Serving, prompt: Sequence[int] | int) -> np.ndarray:
    """Seconds in the line, `[n]`."""
    return course.first - course.arrival - way.prefill * np.array(prompt)


# ---- one at a time: the formulas


@pytest.mark.parametrize("rate", [0.6, 1.2])
def test_replies_of_one_length_wait_as_in_m_d_1(rate: float) -> None:
    """W = ρ S / 2(1 - ρ), utilisation ρ = λ S with S = 0.5 s."""
    course = run(ALONE, LENGTHS, rate, 12000, seed=1)
    rho = 0.5 * rate
    expected = rho * 0.5 / (2 * (1 - rho))
    assert waits(course, ALONE, 100).mean() == pytest.approx(expected, rel=0.06)
    assert course.busy / course.seconds == pytest.approx(rho, rel=0.03)


def test_replies_of_random_length_wait_as_in_m_m_1() -> None:
    """Geometric lengths are nearly exponential: W = ρ / (μ - λ); exactly, Pollaczek–Khinchine."""
    lengths = np.random.default_rng(0).geometric(1 / 50, 50_000)
    way = Serving((0.01,), (), prefill=0.01)
    course = run(way, [(1, int(n)) for n in lengths], 1.2, 12000, seed=2)
    service = 0.01 * lengths
    rho = 1.2 * service.mean()
    exact = 1.2 * (service**2).mean() / (2 * (1 - rho))
    exponential = rho / (1 / service.mean() - 1.2)
    assert exact == pytest.approx(exponential, rel=0.03)
    assert waits(course, way, 1).mean() == pytest.approx(exact, rel=0.08)


def test_rounds_of_speculation_wait_as_pollaczek_and_khinchine_say() -> None:
    """Times of service are random by S_k alone."""
    way = Serving((0.015,), (0.7, 0.4), prefill=0.001)
    course = run(way, LENGTHS, 2.0, 12000, seed=3)
    wait = waits(course, way, 100)
    service = course.finish - course.arrival - wait
    rho = 2.0 * service.mean()
    expected = 2.0 * (service**2).mean() / (2 * (1 - rho))
    assert wait.mean() == pytest.approx(expected, rel=0.06)
    assert course.busy / course.seconds == pytest.approx(rho, rel=0.03)
    # 40 tokens in rounds of 2.1 in the mean; the last round is cut.
    assert service.mean() == pytest.approx(0.1 + 0.015 * 40 / 2.1, rel=0.02)


# ---- batches: identities


def test_little_s_law_and_the_time_at_work() -> None:
    way = Serving((0.01, 0.012, 0.016, 0.02), (0.6,), prefill=0.0005)
    course = run(way, [(40, 20), (200, 60)], 6.0, 3000, seed=4)
    prompts = np.where(course.tokens == 20, 40, 200)
    inside = course.finish - course.first + way.prefill * prompts  # prefill is service, too
    assert course.served == pytest.approx(inside.sum())
    assert course.busy < course.seconds and course.served <= 4 * course.busy
    assert (waits(course, way, prompts) > -1e-9).all()
    assert (np.diff(course.first) > 0).all(), "who comes first is let in first"


def test_accepted_tokens_follow_s_k() -> None:
    """S = .8, .5, .5: 2.8 tokens a round."""
    way = Serving((1.0,), (0.8, 0.5, 0.5), 0.0)
    course = run(way, [(1, 100_001)], None, 1, seed=5)
    assert 100_000 / course.busy == pytest.approx(2.8, rel=0.01)


def test_tokens_that_are_all_accepted() -> None:
    course = run(Serving((0.5,), (1.0,), 0.0), [(1, 41)], None, 1, seed=0)
    assert course.finish[0] == pytest.approx(20 * 0.5)
    cut = run(Serving((0.5,), (1.0, 1.0), 0.0), [(1, 6)], None, 1, seed=0)
    assert cut.finish[0] == pytest.approx(2 * 0.5), "5 tokens in rounds of 3"
    one = run(ALONE, [(100, 1)], None, 1, seed=0)
    assert one.finish[0] == one.first[0] == pytest.approx(0.1), "prefill gives the only token"


def test_a_batch_shares_its_rounds() -> None:
    """Two at once: 0.1 + 0.1 of prefill, 40 rounds of both, and the same again for two more."""
    way = Serving((0.01, 0.015), (), 0.001)
    course = run(way, LENGTHS, None, 4, seed=0)
    assert course.finish == pytest.approx([0.8, 0.8, 1.6, 1.6])
    assert course.first == pytest.approx([0.1, 0.2, 0.9, 1.0])
    assert course.served == pytest.approx(2 * (0.1 + 2 * 0.1 + 40 * 0.015 * 2))


def test_two_ways_meet_the_same_requests() -> None:
    other = replace(ALONE, survival=(0.5,))
    one, two = (run(way, [(1, 5), (9, 50)], 1.0, 200, seed=7) for way in (ALONE, other))
    assert (one.arrival == two.arrival).all() and (one.tokens == two.tokens).all()
    again = run(other, [(1, 5), (9, 50)], 1.0, 200, seed=7)
    assert (again.finish == two.finish).all()
    assert (run(other, [(1, 5), (9, 50)], 1.0, 200, seed=8).arrival != one.arrival).all()


# ---- what can be served


def test_the_most_that_is_served() -> None:
    assert capacity(ALONE, LENGTHS, 400, 0) == pytest.approx(2.0, rel=0.01)
    four = Serving((0.01, 0.01, 0.01, 0.02), (), 0.001)
    assert capacity(four, LENGTHS, 2000, 0) == pytest.approx(4 / (0.4 + 40 * 0.02), rel=0.01)


def test_more_than_can_be_served_is_told() -> None:
    full = load(ALONE, LENGTHS, 2.5, 300, (0, 1), most=2.0)
    assert full.latency_p50 is None and full.per_token_p99 is None
    assert full.tokens_per_s.value == pytest.approx(2 * 41, rel=0.01)
    assert full.utilisation.value == 1.0
    calm = load(ALONE, LENGTHS, 0.01, 300, (0, 1, 2), most=2.0)
    assert calm.latency_p50 is not None and calm.per_token_p99 is not None
    assert calm.latency_p50.value == pytest.approx(0.5)
    assert calm.per_token_p99.value == pytest.approx(0.01)
    assert calm.utilisation.value == pytest.approx(0.005, rel=0.2)
    tokens = calm.tokens_per_s
    assert tokens.low is not None and tokens.high is not None
    assert tokens.low < 0.41 < tokens.high


def ways(plain: Sequence[float], fast: Sequence[float]) -> tuple[Serving, Serving]:
    """A drafted token is always accepted: rounds of `fast` seconds give two tokens."""
    return Serving(tuple(plain), (), 0.0), Serving(tuple(fast), (1.0,), 0.0)


def crossing(one: tuple[Serving, Serving]) -> float | None:
    most = tuple(capacity(way, LENGTHS, 400, 0) for way in one)
    return pays_up_to(*one, LENGTHS, 400, 0, (most[0], most[1]))


def test_the_rate_at_which_speculation_stops_paying() -> None:
    assert crossing(ways([0.01], [0.015])) is None, "sooner at every rate"
    assert crossing(ways([0.01], [0.025])) == 0.0
    met = ways([0.01, 0.01], [0.015, 0.026])  # 1.33 times as fast alone, 0.77 in a batch of two
    rate = crossing(met)
    assert rate is not None and 0 < rate < 1 / (0.5 * 20 * 0.026)
    means = []
    for at in (0.8 * rate, 1.15 * rate):
        slow, quick = (run(way, LENGTHS, at, 4000, 9) for way in met)
        means.append((quick.finish - quick.arrival).mean() / (slow.finish - slow.arrival).mean())
    assert means[0] < 1 < means[1]


# ---- memory


MACHINE = Machine(
    seconds=0.1,
    batches={
        1: Steps({1: 1.0, 2: 1.2, 3: 1.4}, 0.1, 0.05, 0.05, 0.0),
        5: Steps({1: 2.0, 2: 3.2, 3: 4.4}, 0.3, 0.2, 0.1, 0.5),
    },
    prefill=0.02,
    draft_prefill=0.01,
    memory=Memory(1000.0, 200.0, 8.0, 2.0),
)


def test_costs_between_batch_sizes() -> None:
    plain = serving(MACHINE, (), 5)
    assert plain.steps == pytest.approx([0.1, 0.1375, 0.175, 0.2125, 0.25])
    fast = serving(MACHINE, (0.6, 0.3), 5)
    assert (fast.steps[0], fast.steps[2], fast.steps[4]) == pytest.approx((0.16, 0.33, 0.5))
    assert (plain.prefill, fast.prefill) == pytest.approx((0.002, 0.003))
    with pytest.raises(UserError, match=r"batch of 6 is larger than any that was measured \(5\)"):
        serving(MACHINE, (), 6)
    with pytest.raises(UserError, match="drafts of 3 tokens were not measured, the longest are 2"):
        serving(MACHINE, (0.5, 0.5, 0.5), 2)


def test_memory_limits_how_many_are_served_at_once() -> None:
    """Beside 1200 bytes of weights, 10 a token: room for one of 30 + 2 tokens, not for two."""
    fast = serving(MACHINE, (1.0, 1.0), 5, budget=1200.0 + 639)
    course = run(fast, [(10, 20)], None, 50, seed=0)
    assert course.served == pytest.approx(course.busy)
    wider = serving(MACHINE, (1.0, 1.0), 5, budget=1200.0 + 640)
    both = run(wider, [(10, 20)], None, 50, seed=0)
    assert both.served > 1.5 * both.busy
    plain = serving(MACHINE, (), 5, budget=1200.0 + 639)
    more = run(plain, [(10, 20)], None, 50, seed=0)
    assert more.served > 2 * more.busy, "without the drafter's share there is room for three"


def test_memory_that_holds_too_little() -> None:
    with pytest.raises(UserError, match="do not hold the weights"):
        serving(MACHINE, (), 1, budget=1000.0)
    tight = serving(MACHINE, (), 1, budget=1000.0 + 8 * 29)
    with pytest.raises(UserError, match="do not hold one conversation of 30 tokens"):
        run(tight, [(10, 20)], 1.0, 10, seed=0)
    with pytest.raises(UserError, match="memory weights and caches take is not known"):
        serving(replace(MACHINE, memory=None), (), 1, budget=1e9)


# ---- machines


def test_a_machine_is_read_from_a_report() -> None:
    found = machine_of(planned.report(), planned.rows(), planned.LAW)
    assert found.seconds == 0.1 and sorted(found.batches) == [1, 8]
    # 8 timed prompts of 25 tokens in the mean: 0.5 seconds, and 0.1 more with the drafter.
    assert found.prefill == pytest.approx(0.5 / 25 / 0.1)
    assert found.draft_prefill == pytest.approx(0.1 / 25 / 0.1)
    assert found.memory == Memory(**planned.MEMORY)
    assert parse(Machine, to_dict(found), "x") == found


def test_a_report_without_costs_is_refused() -> None:
    empty: dict[str, Any] = {**planned.report(), "batches": []}
    with pytest.raises(UserError, match=r"no costs: evaluate with eval\.timing_prompts"):
        machine_of(empty, planned.rows(), planned.LAW)
    with pytest.raises(UserError, match=r"no costs under 'T=0.1' \(known: T=0\)"):
        entries_of(planned.report(), "T=0.1")


def test_costs_in_units_of_one_conversation_and_back() -> None:
    own = Cost(seconds=0.2, v={1: 1.0, 2: 1.6}, c_first=0.15, c=0.1, o=0.05, o_plain=0.25)
    steps = Steps.of(own, 0.1)
    assert steps == Steps({1: 2.0, 2: 3.2}, 0.3, 0.2, 0.1, 0.5)
    assert steps.plain == 2.5 and steps.round(1) == pytest.approx(3.6)
    back = steps.cost(0.1)
    assert back.v == pytest.approx(own.v) and back.seconds == pytest.approx(0.2)
    assert back.speedup([0.6]) == pytest.approx(1.6 * steps.plain / steps.round(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": 0}, "'seconds' in x must be above 0"),
        ({"batches": {"2": planned.SMALL}}, "'batches' in x must be by batch size, from 1 up"),
        ({"batches": {"1": {**planned.SMALL, "c": -1}}}, "must be a number from 0 up, not -1"),
        ({"batches": {"1": {**planned.SMALL, "v": {"1": 1.0}}}}, "passes over 1, 2 and more"),
        ({"second": 1}, "unknown key 'second' in x"),
    ],
)
def test_costs_of_ones_own_are_checked(change: dict[str, Any], said: str) -> None:
    mapping = {**to_dict(MACHINE), **change}
    with pytest.raises(UserError) as error:
        parse(Machine, mapping, "x")
    assert said in str(error.value)
