"""How long a chain's draft is: policies that say after each drafted token whether to go on.

Lossless by construction. A policy is asked only *after* a token was drawn, and cannot take it back:
whatever it saw is submitted to the acceptance rule. It looks at nothing but the draft.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..configs.errors import UserError, did_you_mean, require
from ..configs.load import parse
from ..data.warp import float32_or_better

LEAST = 50
"""A bin of a calibration, or a position with a table of its own, rests on this many tokens."""
MOST_BINS = 20


# ---- what the decode loop calls


class Round(Protocol):
    """The decisions of one round, with what it remembers of the tokens so far."""

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        """Which rows draft another token after their token k = 0, 1, ...: bool `[B]`.

        `logits` `[B, V_d]` are the draft's own, before any law; `chosen` `[B]` is the token that
        was drawn, as an index into them. Asked once for each k in order. The rows are those of
        `begin`; one that has stopped stays stopped, whatever it is told later. False at the limit.
        """


class Policy(Protocol):
    """When to stop drafting."""

    @property
    def limit(self) -> int:
        """Most tokens drafted in a round; the first is always drafted."""

    @property
    def looks_at_batch(self) -> bool:
        """Whether a row's decisions depend on how many rows there are (never on their content)."""

    def begin(self, rows: int, device: torch.device) -> Round:
        """A new round of `rows` rows."""


def confidence_of(logits: Tensor, chosen: Tensor) -> Tensor:
    """The draft's plain softmax at its tokens: `[B, V_d], [B] -> [B]`, float32 at least.

    Not the law they were drawn from: that is one-hot where drafts are greedy, and so always sure.
    """
    logits = float32_or_better(logits)
    return (logits.gather(-1, chosen[:, None]).squeeze(-1) - logits.logsumexp(-1)).exp()


# ---- policies without a memory: each is its own round


@dataclass(frozen=True)
class Static:
    """Always `limit` tokens."""

    limit: int
    """Tokens of every draft."""
    looks_at_batch = False

    def __post_init__(self) -> None:
        require(self.limit >= 1, "limit", self.limit, "at least 1")

    def begin(self, rows: int, device: torch.device) -> Round:
        return self

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        return torch.full_like(chosen, k + 1 < self.limit, dtype=torch.bool)


@dataclass(frozen=True)
class Confidence:
    """Stop behind a token that the draft's softmax gives less than `threshold`."""

    limit: int
    """Most tokens of a draft."""
    threshold: float
    """Probability from 0 (never stop early) to 1."""
    looks_at_batch = False

    def __post_init__(self) -> None:
        require(self.limit >= 1, "limit", self.limit, "at least 1")
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "between 0 and 1")

    def begin(self, rows: int, device: torch.device) -> Round:
        return self

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        return (confidence_of(logits, chosen) >= self.threshold) & (k + 1 < self.limit)


@dataclass(frozen=True)
class AdaEDL:
    """Stop where 1 - sqrt(g·H) < `threshold`, H in nats the entropy of the draft's softmax.

    The left side stands for a lower bound on the overlap of draft and target (AdaEDL, 2024). There
    the threshold follows the acceptance seen so far; here it is fixed, so that rounds are alike.
    """

    limit: int
    """Most tokens of a draft."""
    threshold: float
    """At most 1; any entropy passes if it is low enough."""
    g: float = 0.2
    """Weight of the entropy, above 0."""
    looks_at_batch = False

    def __post_init__(self) -> None:
        require(self.limit >= 1, "limit", self.limit, "at least 1")
        require(-math.inf < self.threshold <= 1, "threshold", self.threshold, "at most 1")
        require(0 < self.g < math.inf, "g", self.g, "a number above 0")

    def begin(self, rows: int, device: torch.device) -> Round:
        return self

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        logits = float32_or_better(logits)
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)  # [B]
        return (1 - (self.g * entropy).sqrt() >= self.threshold) & (k + 1 < self.limit)


# ---- calibration: from confidence to the chance of acceptance


@dataclass(frozen=True)
class Calibration:
    """P(token accepted | all before it accepted, its confidence), a step function per position.

    Valid for the drafter, law, verifier and kind of text it was measured on. The last table serves
    all later positions. Stored by `dataclasses.asdict`, read by `configs.load.parse`.
    """

    edges: tuple[tuple[float, ...], ...]
    """Per position, the confidences at which a new bin begins, the first bin apart; ascending."""
    chances: tuple[tuple[float, ...], ...]
    """Per position, the chance of each bin; never falls with confidence."""
    means: tuple[float, ...]
    """Per position, accepted / judged."""
    counts: tuple[int, ...]
    """Per position, how many tokens were judged."""

    def __post_init__(self) -> None:
        sizes = {len(self.edges), len(self.chances), len(self.means), len(self.counts)}
        fits = len(sizes) == 1 and min(sizes) > 0
        require(fits, "means", self.means, "as many as there are tables, at least one")
        for edges, chances in zip(self.edges, self.chances, strict=True):
            rising = all(a < b for a, b in itertools.pairwise(edges))
            require(rising, "edges", edges, "ascending in each table")
            rising = all(a <= b for a, b in itertools.pairwise((0.0, *chances, 1.0)))
            accepted = "one more than edges in each table, between 0 and 1, never falling"
            require(rising and len(chances) == len(edges) + 1, "chances", chances, accepted)
        possible = all(0 <= mean <= 1 for mean in self.means)
        require(possible, "means", self.means, "between 0 and 1")

    def mean(self, limit: int) -> np.ndarray:
        """Average chance at positions 0 .. limit-1, `[limit]`."""
        return np.array([self.means[min(k, len(self.means) - 1)] for k in range(limit)])


def observations(
    rounds: Iterable[tuple[Sequence[float], int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, acceptance and position, `[N]` each, of the tokens that were really judged.

    `rounds` gives the confidence of every drafted token and how many were accepted, *not* cut at an
    end token or a limit. A round with a of n accepted tells of its first min(a + 1, n) tokens; what
    lies beyond a refused token was never judged given the ones before.
    """
    seen = [
        (confidence, k < accepted, k)
        for confidences, accepted in rounds
        for k, confidence in enumerate(confidences[: accepted + 1])
    ]
    columns = list(zip(*seen, strict=True)) or [(), (), ()]
    return np.array(columns[0], float), np.array(columns[1], bool), np.array(columns[2], int)


def calibrate(confidence: np.ndarray, accepted: np.ndarray, position: np.ndarray) -> Calibration:
    """Fit a calibration to tokens of real rounds, `[N]` each; see `observations`.

    Use rounds of a static length: a policy that stops early judges later positions on the texts
    that it was sure of only. Bins hold about equally many tokens, and the chances of neighbours
    that would fall are pooled (isotonic regression). Positions from the first with fewer than
    `LEAST` tokens on share one table, with the position before them if they are still too few.

    Raises:
        UserError: no token, unequal lengths, or a confidence that is no probability.
    """
    confidence, accepted, position = (np.asarray(x) for x in (confidence, accepted, position))
    if not confidence.shape == accepted.shape == position.shape == (confidence.size,):
        raise UserError("calibration: confidence, accepted and position must be equally long lists")
    if not confidence.size:
        raise UserError("calibration: no drafted token was judged, at least one round is needed")
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise UserError("calibration: every confidence must be a probability between 0 and 1")
    if not bool((position >= 0).all()):
        raise UserError("calibration: every position must count from 0 up")
    confidence = confidence.astype(np.float32).astype(float)  # so that midpoints are distinct
    counts = np.bincount(position.astype(int))
    own = int((np.append(counts, 0) < LEAST).argmax())  # positions with a table of their own
    last = own if counts[own:].sum() >= LEAST else max(0, own - 1)
    of = np.minimum(position, last)
    tables = [_table(confidence[of == k], accepted[of == k]) for k in range(last + 1)]
    return Calibration(
        edges=tuple(edges for edges, _ in tables),
        chances=tuple(chances for _, chances in tables),
        means=tuple(float(accepted[of == k].mean()) for k in range(last + 1)),
        counts=tuple(int((of == k).sum()) for k in range(last + 1)),
    )


def _table(
    confidence: np.ndarray, accepted: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(edges, chances) of one position. Edges lie between neighbouring confidences that were seen,
    so that every bin holds a token, and equal confidences stay together despite rounding.
    """
    seen = np.unique(confidence)
    bins = min(max(len(confidence) // LEAST, 1), MOST_BINS)
    first = np.quantile(confidence, np.arange(1, bins) / bins, method="higher")  # of each bin
    at = np.unique(np.searchsorted(seen, first))
    at = at[at > 0]
    edges = (seen[at - 1] + seen[at]) / 2
    bin_of = np.searchsorted(edges, confidence, side="right")
    weights = np.bincount(bin_of, minlength=len(edges) + 1)
    rates = np.bincount(bin_of, weights=accepted, minlength=len(edges) + 1) / weights
    chances = isotonic_regression(rates, weights=weights).x.clip(0.0, 1.0)
    return tuple(edges.tolist()), tuple(chances.tolist())


# ---- the cost model


@dataclass(frozen=True)
class Costs:
    """What a round costs, all in one unit of time, such as a plain target pass of one row.

    Stored by `dataclasses.asdict`, read by `configs.load.parse`.
    """

    c_first: float
    """The first draft step."""
    c: float
    """Each later draft step."""
    o: float
    """Time of a round outside of model passes."""
    v: dict[int, tuple[float, ...]]
    """By batch size: v(1), v(2), ..., a target pass over n tokens a row."""

    def __post_init__(self) -> None:
        for name in ("c_first", "c", "o"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "a number from 0 up")
        passes = [x for row in self.v.values() for x in row]
        fits = bool(passes) and all(self.v.values()) and min(self.v) >= 1
        fits = fits and all(0 < x < math.inf for x in passes)
        require(fits, "v", self.v, "lists of numbers above 0, by batch sizes from 1 up")

    def nearest(self, rows: int) -> int:
        """The measured batch size nearest to `rows`; of two equally near, the smaller."""
        return min(self.v, key=lambda batch: (abs(batch - rows), batch))

    def of(self, batch: int, limit: int) -> np.ndarray:
        """Cost of a round that drafts 1 .. `limit` tokens, `[limit]`; `batch` was measured."""
        steps = np.arange(limit)
        return self.c_first + self.c * steps + np.array(self.v[batch][1 : limit + 1]) + self.o


@dataclass(frozen=True)
class CostModel:
    """Go on while the tokens still to be won are worth more than the time they take.

    After token k the chance that all so far survive is the product of their calibrated chances.
    Further tokens would survive as they do on average. The price of time is the throughput of the
    best static length under the same calibration and costs. A row goes on if *any* longer draft, up
    to the limit, gains: a jump of v(n) may pay two tokens later. With a right calibration, and
    tokens that tell nothing of later ones, this is at least as fast as every static length: at that
    price the best of them breaks even, and to decide anew after each token can only gain.

    Costs are those of the measured batch size nearest to the rows still decoding. Every row decides
    as if the others drafted as far as it does.
    """

    limit: int
    """Most tokens of a draft."""
    calibration: Calibration
    costs: Costs

    def __post_init__(self) -> None:
        longest = min(len(row) for row in self.costs.v.values()) - 1
        accepted = f"at least 1, and at most {longest}: v was measured up to v({longest + 1})"
        require(1 <= self.limit <= longest, "limit", self.limit, accepted)

    @property
    def looks_at_batch(self) -> bool:
        return len(self.costs.v) > 1

    @cached_property
    def thresholds(self) -> dict[int, tuple[float, ...]]:
        """By measured batch size: go on after token k if all so far survive with more than this."""
        return {batch: self._thresholds(batch) for batch in self.costs.v}

    def _thresholds(self, batch: int) -> tuple[float, ...]:
        mean = self.calibration.mean(self.limit)
        cost = self.costs.of(batch, self.limit)
        price = ((1 + mean.cumprod().cumsum()) / cost).max()  # tokens per unit of time
        least = []
        for k in range(self.limit):
            gain = mean[k + 1 :].cumprod().cumsum()  # tokens won by 1, 2, ... more, if all survive
            spent = price * (cost[k + 1 :] - cost[k])
            pays = np.divide(spent, gain, out=np.full(len(gain), np.inf), where=gain > 0)
            least.append(float(pays.min(initial=np.inf)))
        return tuple(least)

    def begin(self, rows: int, device: torch.device) -> Round:
        return _Survival(self, rows, device)


class _Survival:
    """A round of the cost model: the chance `[B]` that all tokens of a row so far survive."""

    def __init__(self, policy: CostModel, rows: int, device: torch.device):
        self.thresholds = policy.thresholds[policy.costs.nearest(rows)]
        tables = policy.calibration
        self.edges = _stack(tables.edges, math.inf).to(device)  # [P, bins-1]
        self.chances = _stack(tables.chances, 1.0).to(device)  # [P, bins]
        self.survival = torch.ones(rows, dtype=torch.float64, device=device)  # [B]

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        confidence = confidence_of(logits, chosen).double()  # [B]
        table = min(k, len(self.edges) - 1)
        bins = torch.searchsorted(self.edges[table], confidence, right=True)  # [B]
        self.survival = self.survival * self.chances[table][bins]
        return self.survival > self.thresholds[k]


def _stack(rows: Sequence[Sequence[float]], padding: float) -> Tensor:
    """Ragged rows as one float64 tensor."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


# ---- by name


AnyPolicy = Static | Confidence | AdaEDL | CostModel

POLICIES: dict[str, type[AnyPolicy]] = {
    "static": Static,
    "confidence": Confidence,
    "adaedl": AdaEDL,
    "cost_model": CostModel,
}


def make_policy(mapping: Mapping[str, Any], where: str, section: str = "") -> AnyPolicy:
    """The policy of {"name": a key of `POLICIES`, and its options}.

    Args:
        where, section: named in errors, as in `configs.load.parse`.
    Raises:
        UserError: an unknown name or option, a missing one, or a value out of range.
    """
    options = dict(mapping)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in POLICIES:
        key = f"{section}.name" if section else "name"
        raise UserError(
            f"'{key}' in {where} must be a draft length policy, not {name!r}"
            f"{did_you_mean(str(name), POLICIES)}"
        )
    return parse(POLICIES[name], options, where, section)


def as_mapping(policy: AnyPolicy) -> dict[str, Any]:
    """What `make_policy` builds it from, also after a trip through JSON."""
    name = next(name for name, kind in POLICIES.items() if kind is type(policy))
    return {"name": name, **asdict(policy)}
