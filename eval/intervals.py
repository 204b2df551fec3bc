"""Intervals of pooled ratios. The unit that is resampled is the conversation, never the token."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

_SEED = 20260101


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval; the ends are None where there is too little to tell."""

    value: float
    low: float | None
    high: float | None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


def ratio_interval(
    numerator: NDArray[np.float64],
    denominator: NDArray[np.float64],
    resamples: int,
    conversations: Sequence[str] | None = None,
) -> Interval:
    """Σ numerator / Σ denominator with a percentile bootstrap over the entries.

    Entries of one conversation, such as its turns, are resampled together.
    """
    if conversations is not None:
        numerator, denominator = by_conversation(conversations, numerator, denominator)
    if not denominator.sum() > 0:
        return Interval(0.0, None, None)
    value = float(numerator.sum() / denominator.sum())
    n = len(numerator)
    if n < 2:
        return Interval(value, None, None)
    rng = np.random.default_rng(_SEED)
    index = rng.integers(0, n, (resamples, n))
    below = denominator[index].sum(1)
    ratios = numerator[index].sum(1)[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def by_conversation(
    conversations: Sequence[str], *values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], ...]:
    """Each of `values` `[N]` summed over the entries of every conversation, `[M]`."""
    _, group = np.unique(np.array(conversations, dtype=np.str_), return_inverse=True)
    return tuple(np.bincount(group, weights=v).astype(np.float64) for v in values)


def jackknife(figure: Callable[[NDArray[np.bool_]], float], n: int) -> tuple[float, float]:
    """A figure of n entries, told which to keep, and its standard error by leaving out each."""
    value = figure(np.ones(n, dtype=bool))
    left_out = np.array([figure(np.arange(n) != i) for i in range(n)])
    return value, float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))


def speedup_interval(
    plain_seconds: NDArray[np.float64],
    plain_tokens: NDArray[np.float64],
    fast_seconds: NDArray[np.float64],
    fast_tokens: NDArray[np.float64],
) -> Interval:
    """Pooled speed of one loop over another, paired by prompt: jackknife t-interval of its log.

    With a handful of prompts a percentile bootstrap is too narrow; leaving out one prompt at a
    time with Student's t on n - 1 degrees of freedom is not.
    """

    def log_ratio(keep: NDArray[np.bool_]) -> float:
        fast = fast_tokens[keep].sum() / fast_seconds[keep].sum()
        plain = plain_tokens[keep].sum() / plain_seconds[keep].sum()
        return float(np.log(fast / plain))

    n = len(plain_seconds)
    if n < 2:
        return Interval(float(np.exp(log_ratio(np.ones(n, dtype=bool)))), None, None)
    value, error = jackknife(log_ratio, n)
    half = float(student.ppf(0.975, n - 1)) * error
    return Interval(float(np.exp(value)), float(np.exp(value - half)), float(np.exp(value + half)))


def standard_errors_apart(
    one: NDArray[np.float64],
    two: NDArray[np.float64],
    conversations: tuple[Sequence[str], Sequence[str]],
) -> tuple[float, float]:
    """(how far, at most) two pooled ratios Σ a / Σ b of the same conversations lie apart.

    `one` and `two` are rows (a, b), `conversations` whose they are. In standard errors of the
    difference, paired by conversation (delta method); of equal ratios one pair in 10,000 is further
    apart than the second figure (Student's t). Raises `ValueError` for a single conversation.
    """
    names, group = np.unique(np.concatenate([np.array(ids, np.str_) for ids in conversations]),
                             return_inverse=True)  # fmt: skip
    if len(names) < 2:
        raise ValueError("a standard error takes two conversations or more")
    n, split = len(names), len(one)
    values, parts = [], []
    for rows, own in ((one, group[:split]), (two, group[split:])):
        a, b = (np.bincount(own, weights=rows[:, i], minlength=n) for i in (0, 1))
        values.append(a.sum() / b.sum())
        parts.append((a - values[-1] * b) / b.mean())
    difference = abs(float(values[0] - values[1]))
    error = float((parts[0] - parts[1]).std(ddof=1)) / n**0.5
    most = float(student.ppf(1 - 0.5e-4, n - 1))
    if difference <= 1e-9:
        return 0.0, most
    return (difference / error if error > 0 else float("inf")), most
