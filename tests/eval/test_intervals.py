"""Intervals of pooled ratios."""

import numpy as np
import pytest

from draftsmith.eval.intervals import (
    Interval,
    ratio_interval,
    speedup_interval,
    standard_errors_apart,
)


def test_the_value_is_pooled_and_no_mean_of_means() -> None:
    """One long output that accepts much, nine short ones that accept nothing."""
    tokens = np.array([500.0, *[5.0] * 9])
    rounds = np.array([500 / 4.5, *[5.0] * 9])
    found = ratio_interval(tokens, rounds, 200)
    assert found.value == pytest.approx(545 / (500 / 4.5 + 45))
    assert found.value > 2 * (4.5 + 9) / 10
    assert found.low is not None and found.high is not None
    assert found.low < found.value < found.high


def test_more_conversations_narrow_the_interval() -> None:
    rng = np.random.default_rng(1)

    def width(n: int) -> float:
        rounds = rng.integers(5, 20, n).astype(float)
        found = ratio_interval(rounds * 2 + rng.normal(0, 2, n), rounds, 500)
        assert found.low is not None and found.high is not None
        return found.high - found.low

    assert width(1000) < width(100) / 2 < width(10) / 4


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        rounds = rng.integers(5, 20, 60).astype(float)
        found = ratio_interval(rng.poisson(1.7 * rounds).astype(float), rounds, 300)
        assert found.low is not None and found.high is not None
        hits += found.low <= 1.7 <= found.high
    assert 176 <= hits <= 199  # 190 expected, 4.5 standard deviations


def test_one_conversation_has_no_interval() -> None:
    one = np.array([3.0])
    assert ratio_interval(one, np.array([2.0]), 100) == Interval(1.5, None, None)
    assert speedup_interval(one, one, one / 2, one) == Interval(2.0, None, None)


def test_the_same_numbers_give_the_same_interval() -> None:
    a, b = np.arange(1.0, 9.0), np.arange(2.0, 10.0)
    assert ratio_interval(a, b, 100) == ratio_interval(a, b, 100)


def test_conversations_without_rounds_do_not_divide_by_zero() -> None:
    found = ratio_interval(np.array([0.0, 4.0]), np.array([0.0, 2.0]), 100)
    assert found == Interval(2.0, 2.0, 2.0)


def test_speedups_are_paired_by_prompt() -> None:
    """Prompts differ widely in length, the ratio does not: only pairing sees that."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(20, 400, 8).astype(float)
    plain = 0.1 * tokens
    fast = plain / 1.5 * rng.normal(1, 0.01, 8)
    paired = speedup_interval(plain, tokens, fast, tokens)
    unpaired = speedup_interval(plain, tokens, fast[::-1], tokens[::-1])
    assert paired.value == pytest.approx(plain.sum() / fast.sum()) == pytest.approx(unpaired.value)
    assert paired.low is not None and paired.high is not None
    assert 1.45 < paired.low < paired.value < paired.high < 1.55


def test_speedup_counts_the_tokens_of_each_loop() -> None:
    ones = np.ones(3)
    found = speedup_interval(2 * ones, 10 * ones, 1 * ones, 8 * ones)
    assert found.value == pytest.approx(8 / 5)
    assert (found.low, found.high) == pytest.approx((1.6, 1.6))


def test_ratios_of_one_mean_lie_a_standard_error_apart() -> None:
    """Two noisy counts of the same conversations, some missing from the first; then other means."""
    rng = np.random.default_rng(3)
    names = [f"p{i}" for i in range(60)]

    def apart(shift: float) -> float:
        base = rng.uniform(5, 20, 60)
        one = np.stack([base + rng.normal(0, 2, 60), base], 1)
        two = np.stack([base * (1 + shift) + rng.normal(0, 2, 60), base], 1)
        found, most = standard_errors_apart(one[3:], two, (names[3:], names))
        assert most == pytest.approx(4.17, abs=0.01), "Student's t with 59 degrees of freedom"
        return found

    equal = np.array([apart(0.0) for _ in range(400)])
    assert np.sqrt((equal**2).mean()) == pytest.approx(1.0, abs=0.12)
    assert min(apart(0.3) for _ in range(20)) > 4.17


def test_equal_ratios_are_not_apart_and_one_conversation_is_too_few() -> None:
    rows = np.array([[2.0, 1.0], [4.0, 2.0]])
    assert standard_errors_apart(rows, rows, (["a", "b"], ["a", "b"]))[0] == 0.0
    with pytest.raises(ValueError, match="two conversations"):
        standard_errors_apart(rows, rows, (["a", "a"], ["a", "a"]))
