"""Serving under a rate of requests, simulated round by round from measured costs.

Requests arrive at random (a Poisson process), wait in one line, and join the batch between two
rounds: continuous batching. A new one is prefilled first, while the others wait. What a round takes
depends on how many conversations it is of; how many tokens each of them gets is drawn from S_k. One
clock is all there is, so that the loop is plain; it is tested against the formulas of queueing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from ..configs.errors import UserError
from .intervals import Interval
from .machine import Machine

WARM_UP = 0.1
"""Share of the requests, the first ones, that no latency is told of: they met an empty machine."""
_BLOCK = 4096  # draws made at a time
_NEAR = 0.98  # of what can be served: beyond, a run is too short to tell how long requests wait


@dataclass(frozen=True)
class Serving:
    """One way of serving: costs in seconds, the most that is served at a time.

    steps: a round of 1, 2, ... conversations, as many as may be served at a time; survival: S_k,
    none for plain decoding; prefill: of a prompt token; kv: bytes of a conversation's token; room:
    bytes for all of them, None without a limit.
    """

    steps: tuple[float, ...]
    survival: tuple[float, ...]
    prefill: float
    kv: float = 0.0
    room: float | None = None

    def held(self, prompt: int, reply: int) -> float:
        """Bytes kept free for a conversation until it ends."""
        return self.kv * (prompt + reply + len(self.survival))


def serving(
    machine: Machine, survival: Sequence[float], most: int, budget: float | None = None
) -> Serving:
    """Serving with drafts of `len(survival)` tokens, plainly for none, up to `most` at a time.

    Args:
        budget: bytes for weights, keys and values; the drafter's count where there is one.
    Raises:
        UserError: a larger batch or longer drafts than were measured, a budget without known
            sizes, or one that does not hold the weights.
    """
    if most > machine.largest:
        raise UserError(
            f"a batch of {most} is larger than any that was measured ({machine.largest}): evaluate "
            "with larger eval.batch_sizes, or give costs of your own"
        )
    gamma, sizes = len(survival), sorted(machine.batches)
    known = [machine.batches[b].round(gamma) if gamma else machine.batches[b].plain for b in sizes]
    steps = np.interp(np.arange(1, most + 1), sizes, known) * machine.seconds
    prefill = machine.prefill + (machine.draft_prefill if gamma else 0.0)
    times = tuple(steps.tolist()), tuple(survival), prefill * machine.seconds
    if budget is None:
        return Serving(*times)
    memory = machine.memory
    if memory is None:
        raise UserError("how much memory weights and caches take is not known: give costs with it")
    weights = memory.target_weights + (memory.drafter_weights if gamma else 0.0)
    if weights >= budget:
        raise UserError(
            f"{budget / 2**30:.2f} GiB do not hold the weights, which take {weights / 2**30:.2f}"
        )
    kv = memory.target_kv + (memory.drafter_kv if gamma else 0.0)
    return Serving(*times, kv, budget - weights)


@dataclass(frozen=True)
class Course:
    """What became of every request of one run, in the order they came.

    arrival, first, finish: seconds, `[n]`, of arriving, of the first token and of the last; tokens:
    `[n]` of the replies; busy: seconds that the machine worked; served: the integral of the number
    of conversations in the batch over time; full: (seconds, tokens) until the line was first empty
    behind the last arrival.
    """

    arrival: NDArray[np.float64]
    first: NDArray[np.float64]
    finish: NDArray[np.float64]
    tokens: NDArray[np.int64]
    busy: float
    served: float
    full: tuple[float, float]

    @property
    def seconds(self) -> float:
        return float(self.finish.max())


def run(
    way: Serving,
    lengths: Sequence[tuple[int, int]],
    rate: float | None,
    requests: int,
    seed: int,
) -> Course:
    """Serve `requests` requests that come at `rate` a second, or all at once for None.

    `lengths` are (prompt, reply) tokens to draw from. Two ways of serving meet the same requests at
    the same times under one seed. Raises `UserError` for a conversation that memory cannot hold.
    """
    chance, which, draws = (np.random.default_rng([seed, i]) for i in range(3))
    gaps = chance.exponential(1.0, requests)
    arrival = np.zeros(requests) if rate is None else np.cumsum(gaps) / rate
    drawn = np.array(lengths, dtype=np.int64)[which.integers(0, len(lengths), requests)]
    line = _Line(way, arrival, drawn, draws)
    while line.ended < requests:
        line.turn()
    return Course(arrival, line.first, line.finish, drawn[:, 1], line.busy, line.served, line.full)


class _Line:
    """The machine, its batch, and the requests that wait; `turn` goes on to the next round."""

    def __init__(
        self,
        way: Serving,
        arrival: NDArray[np.float64],
        lengths: NDArray[np.int64],
        draws: np.random.Generator,
    ):
        self.way, self.arrival, self.lengths, self.draws = way, arrival, lengths, draws
        self.first, self.finish = np.zeros(len(arrival)), np.zeros(len(arrival))
        self.clock = self.busy = self.served = self.taken = 0.0
        self.full = (0.0, 0.0)
        self.produced = 0
        self.next = self.ended = 0
        self.waiting: deque[int] = deque()
        self.batch: list[list[int]] = []  # of each conversation: which, and tokens left
        self._uniform: list[float] = []
        held = [way.held(int(p), int(r)) for p, r in lengths]
        if way.room is not None and max(held) > way.room:
            raise UserError(
                f"{way.room / 2**30:.3f} GiB beside the weights do not hold one conversation of "
                f"{int(lengths.sum(1).max())} tokens"
            )
        self.held = held

    def turn(self) -> None:
        """Let in who has come, prefill them, and decode a round."""
        if not self.batch and not self.waiting:
            self.clock = max(self.clock, float(self.arrival[self.next]))
        self._arrive()
        while self.waiting and self._fits(self.waiting[0]):
            self._prefill(self.waiting.popleft())
        if self.batch:
            self._round()
        self._arrive()
        if self.next == len(self.arrival) and not self.waiting and not self.full[0]:
            self.full = (self.clock, float(self.produced))

    def _arrive(self) -> None:
        while self.next < len(self.arrival) and self.arrival[self.next] <= self.clock:
            self.waiting.append(self.next)
            self.next += 1

    def _fits(self, request: int) -> bool:
        room = self.way.room
        free = room is None or self.taken + self.held[request] <= room
        return free and len(self.batch) < len(self.way.steps)

    def _pass(self, seconds: float, conversations: int) -> None:
        self.clock += seconds
        self.busy += seconds
        self.served += seconds * conversations

    def _prefill(self, request: int) -> None:
        prompt, reply = self.lengths[request].tolist()
        self._pass(self.way.prefill * prompt, len(self.batch) + 1)
        self.first[request] = self.clock
        self.produced += 1
        if reply == 1:
            self._end(request)
        else:
            self.batch.append([request, reply - 1])
            self.taken += self.held[request]

    def _round(self) -> None:
        self._pass(self.way.steps[len(self.batch) - 1], len(self.batch))
        going = []
        for place in self.batch:
            got = min(place[1], 1 + self._accepted())
            place[1] -= got
            self.produced += got
            if place[1]:
                going.append(place)
            else:
                self.taken -= self.held[place[0]]
                self._end(place[0])
        self.batch = going

    def _accepted(self) -> int:
        """Drafted tokens of a round that are accepted: A with P(A >= k) = S_k."""
        survival = self.way.survival
        if not survival:
            return 0
        if not self._uniform:
            self._uniform = self.draws.random(_BLOCK).tolist()
        u = self._uniform.pop()
        k = 0
        while k < len(survival) and u < survival[k]:
            k += 1
        return k

    def _end(self, request: int) -> None:
        self.finish[request] = self.clock
        self.ended += 1


# ---- figures


@dataclass(frozen=True)
class Load:
    """Figures at one rate, means over runs with 95 % intervals (Student's t over the runs).

    tokens_per_s: produced; latency: seconds from arriving to the last token; per_token: seconds
    between tokens of a reply; wait: to the first token; utilisation: share of time at work;
    concurrent: conversations in the batch. Latencies are None where more comes than can be served.
    """

    rate: float
    tokens_per_s: Interval
    latency_p50: Interval | None
    latency_p99: Interval | None
    per_token_p50: Interval | None
    per_token_p99: Interval | None
    wait_p50: Interval | None
    utilisation: Interval
    concurrent: Interval


def capacity(way: Serving, lengths: Sequence[tuple[int, int]], requests: int, seed: int) -> float:
    """The most requests a second that can be served: what a line that is never empty is served."""
    course = run(way, lengths, None, requests, seed)
    seconds, tokens = course.full
    return tokens / seconds / float(course.tokens.mean())


def load(
    way: Serving,
    lengths: Sequence[tuple[int, int]],
    rate: float,
    requests: int,
    seeds: Sequence[int],
    most: float,
) -> Load:
    """Figures at `rate` from a run of each seed; `most` is the way's `capacity`."""
    sustained = rate < _NEAR * most
    courses = [run(way, lengths, rate if sustained else None, requests, seed) for seed in seeds]
    spans = [c.seconds if sustained else c.full[0] for c in courses]
    made = [c.tokens.sum() if sustained else c.full[1] for c in courses]
    found = [_latencies(course) for course in courses]

    def late(name: str) -> Interval | None:
        return _over_runs([one[name] for one in found]) if sustained else None

    busy = [c.busy / c.seconds if sustained else 1.0 for c in courses]
    inside = [c.served / c.seconds for c in courses]
    return Load(
        rate=rate,
        tokens_per_s=_over_runs([n / s for n, s in zip(made, spans, strict=True)]),
        latency_p50=late("latency_p50"),
        latency_p99=late("latency_p99"),
        per_token_p50=late("per_token_p50"),
        per_token_p99=late("per_token_p99"),
        wait_p50=late("wait_p50"),
        utilisation=_over_runs(busy),
        concurrent=_over_runs(inside),
    )


def _latencies(course: Course) -> dict[str, float]:
    start = int(WARM_UP * len(course.arrival))
    whole = (course.finish - course.arrival)[start:]
    more = course.tokens[start:] > 1
    each = (course.finish - course.first)[start:][more] / (course.tokens[start:][more] - 1)
    found = {"latency": whole, "per_token": each, "wait": (course.first - course.arrival)[start:]}
    return {
        f"{name}_p{share}": float(np.percentile(values, share)) if len(values) else 0.0
        for name, values in found.items()
        for share in (50, 99)
    }


def _over_runs(values: Sequence[float]) -> Interval:
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Interval(mean, None, None)
    half = float(student.ppf(0.975, n - 1)) * float(np.std(values, ddof=1)) / n**0.5
    return Interval(mean, max(0.0, mean - half), mean + half)  # of times, rates and shares


def pays_up_to(
    plain: Serving,
    fast: Serving,
    lengths: Sequence[tuple[int, int]],
    requests: int,
    seed: int,
    most: tuple[float, float],
) -> float | None:
    """Up to how many requests a second speculation answers sooner than plain decoding, in the mean.

    Bisects the rate at which mean latencies meet, both ways under the same requests. 0 where it
    never does, None where it does at every rate that plain decoding can serve.

    `most` are the capacities of `plain` and `fast`.
    """

    def sooner(rate: float) -> bool:
        ways = (run(way, lengths, rate, requests, seed) for way in (plain, fast))
        slow, quick = (float((c.finish - c.arrival).mean()) for c in ways)
        return quick < slow

    low, high = 0.01 * min(most), _NEAR * min(most)
    if not sooner(low):
        return 0.0
    if sooner(high):
        return None if most[1] >= most[0] else most[1]
    for _ in range(10):
        middle = (low * high) ** 0.5
        if sooner(middle):
            low = middle
        else:
            high = middle
    return high
