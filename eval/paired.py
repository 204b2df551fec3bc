"""What lies between two pooled figures of the same requests: intervals, and what chance could do.

Entries are paired, and one conversation's go together: what makes a prompt easy to draft makes it
easy for both. Whether a difference is more than chance is asked by exchanging the two sides of
conversations at random: where both draft alike, every exchange is as likely as what was seen, so
that the p-value is exact for any number of conversations. (With few of them a percentile bootstrap
is too narrow, and calls chance a difference more often than it says.)
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from .intervals import Interval, by_conversation, jackknife

Pairs = NDArray[np.float64]
_SEED = 20260102
_LEAST = 1e-12  # differences below it are rounding


@dataclass(frozen=True)
class Difference:
    """A figure of two sides, and what lies between them.

    change: other - one, or other / one for speeds; p: how often sides that are alike differ as
    much; None where too little is known to tell.
    """

    one: float
    other: float
    change: Interval
    p: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio_difference(
    one: Pairs, other: Pairs, conversations: Sequence[str], resamples: int
) -> Difference | None:
    """Between two pooled ratios Σ a / Σ b; `one` and `other` are rows (a, b), `[N, 2]`.

    The interval is a percentile bootstrap over the conversations, which are N names. None if a
    side's denominators are all zero.
    """
    sums = by_conversation(conversations, *one.T, *other.T)
    first, second = np.stack(sums[:2], 1), np.stack(sums[2:], 1)  # [M, 2]
    if not (first[:, 1].sum() > 0 and second[:, 1].sum() > 0):
        return None
    values = [float(side[:, 0].sum() / side[:, 1].sum()) for side in (first, second)]
    seen, m = values[1] - values[0], len(first)
    if m < 2:
        return Difference(values[0], values[1], Interval(seen, None, None), None)
    rng = np.random.default_rng(_SEED)
    times = rng.multinomial(m, np.full(m, 1 / m), resamples)  # [R, M]
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = _between(times @ first, times @ second)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [0.025, 0.975])
    p = _exchanged(first, second, seen, rng, resamples)
    return Difference(values[0], values[1], Interval(seen, float(low), float(high)), p)


def _between(first: Pairs, second: Pairs) -> NDArray[np.float64]:
    """Differences of ratios whose sums are `[R, 2]`."""
    return second[:, 0] / second[:, 1] - first[:, 0] / first[:, 1]


def _exchanged(
    first: Pairs, second: Pairs, seen: float, rng: np.random.Generator, resamples: int
) -> float:
    """How often the sides lie `seen` apart or further, if each conversation's are exchanged or not.

    All ways are tried where there are few, else `resamples` of them beside the one that was seen.
    """
    m = len(first)
    if every := 2**m <= resamples:
        swapped = (np.arange(2**m)[:, None] >> np.arange(m)) & 1
    else:
        swapped = rng.integers(0, 2, (resamples, m))
    moved = swapped @ (second - first)  # [R, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.abs(_between(first.sum(0) + moved, second.sum(0) - moved))
    # A side without a denominator is as far from the other as can be.
    hits = int((~(apart < abs(seen) - _LEAST)).sum())
    return hits / len(apart) if every else (1 + hits) / (1 + len(apart))


def speedup_ratio(one: Pairs, other: Pairs, conversations: Sequence[str]) -> Difference | None:
    """Between two pooled speedups over plain decoding, each against the plain loop of its own run.

    Rows are (plain seconds, plain tokens, fast seconds, fast tokens), `[N, 4]`. Of their ratio's
    logarithm a jackknife over conversations with Student's t: of a handful of prompts no exchange
    could tell anything. None if nothing was timed.
    """
    if not len(one):
        return None
    sums = by_conversation(conversations, *one.T, *other.T)
    sides = [np.stack(part, 1) for part in (sums[:4], sums[4:])]  # [M, 4] each

    def log_speedup(side: Pairs, keep: NDArray[np.bool_]) -> float:
        plain_s, plain_n, fast_s, fast_n = side[keep].sum(0)
        return float(np.log((fast_n / fast_s) / (plain_n / plain_s)))

    def log_ratio(keep: NDArray[np.bool_]) -> float:
        return log_speedup(sides[1], keep) - log_speedup(sides[0], keep)

    m = len(sides[0])
    every = np.ones(m, dtype=bool)
    was, is_ = (float(np.exp(log_speedup(side, every))) for side in sides)
    if m < 2:
        return Difference(was, is_, Interval(is_ / was, None, None), None)
    apart, error = jackknife(log_ratio, m)
    half = float(student.ppf(0.975, m - 1)) * error
    ends = (float(np.exp(apart - half)), float(np.exp(apart + half)))
    if abs(apart) < _LEAST:
        p = 1.0
    else:
        p = 2 * float(student.sf(abs(apart) / error, m - 1)) if error > 0 else 0.0
    return Difference(was, is_, Interval(float(np.exp(apart)), *ends), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted so that among them all one false alarm is as rare as alone (Holm 1979).

    Valid whatever the tests have to do with each other.
    """
    count, worst = len(p_values), 0.0
    adjusted = [0.0] * count
    for rank, place in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        worst = max(worst, (count - rank) * p_values[place])
        adjusted[place] = min(1.0, worst)
    return adjusted
