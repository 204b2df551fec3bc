"""Training batches from records: one order per seed and epoch, a token budget, little padding.

Batches are numbered over all epochs, and numbers are dealt out to processes and accumulation.
"""

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from ..configs.errors import UserError
from ..drafters.base import TrainBatch

T = TypeVar("T")

_POOL = 8  # batches' worth of rows that are sorted by length together


@dataclass(frozen=True)
class Plan:
    """Which records make up which batch of an epoch."""

    sizes: tuple[int, ...]
    """Tokens of each record."""
    supervised: tuple[int, ...]
    """Of these, how many can be drafted."""
    tokens_per_batch: int
    seed: int | str
    weights: tuple[float, ...] | None = None
    """How often each record comes in an epoch, on average; None takes each once."""
    grouped: bool = True
    """Whether rows of similar length share a batch; packing fills rows best with mixed ones."""

    def epoch(self, number: int) -> list[list[int]]:
        """Batches of record indices, shuffled anew for every epoch, the same for the same seed.

        A batch is closed before it exceeds the budget of supervised tokens.
        """
        rng = random.Random(f"{self.seed}/{number}")
        order = [i for i in range(len(self.sizes)) if self.supervised[i] > 0]
        if self.weights is not None:
            order = [i for i in order for _ in range(_copies(self.weights[i], rng))]
        rng.shuffle(order)
        mean = sum(self.supervised[i] for i in order) / max(1, len(order))
        pool = max(1, int(_POOL * self.tokens_per_batch / max(1.0, mean)))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            rows = order[start : start + pool]
            if self.grouped:
                rows.sort(key=lambda i: (self.sizes[i], i))
            batches += _split(rows, self.supervised, self.tokens_per_batch)
        rng.shuffle(batches)
        return batches


def _copies(weight: float, rng: random.Random) -> int:
    """A whole number whose mean is `weight`."""
    return int(weight) + (rng.random() < weight - int(weight))


def _split(rows: Sequence[int], supervised: Sequence[int], budget: int) -> Iterator[list[int]]:
    batch: list[int] = []
    used = 0
    for row in rows:
        if batch and used + supervised[row] > budget:
            yield batch
            batch, used = [], 0
        batch.append(row)
        used += supervised[row]
    if batch:
        yield batch


class Extent(Protocol):
    """How long a record is: its prompt, and something as long as its reply."""

    @property
    def prompt_len(self) -> int: ...
    @property
    def reply(self) -> Sized: ...


def make_plan(
    records: Sequence[Extent],
    tokens_per_batch: int,
    seed: int | str,
    use: Sequence[bool] | None = None,
    weights: Sequence[float] | None = None,
    grouped: bool = True,
) -> Plan:
    """A plan over `records`, or those that `use` marks; `weights` are relative to each other.

    Raises `UserError` if none of them has a token that could be drafted.
    """
    used = use or [True] * len(records)
    supervised = tuple(
        max(0, len(r.reply) - 1) if mine else 0 for r, mine in zip(records, used, strict=True)
    )
    drawn = [n for n, count in enumerate(supervised) if count]
    if not drawn:
        raise UserError(
            f"none of the {sum(used)} training records has two reply tokens or more, so "
            "there is nothing to train on; collect longer replies"
        )
    sizes = tuple(r.prompt_len + len(r.reply) for r in records)
    if weights is None or len({weights[n] for n in drawn}) == 1:
        return Plan(sizes, supervised, tokens_per_batch, seed, None, grouped)
    mean = sum(weights[n] for n in drawn) / len(drawn)  # an epoch keeps its length
    relative = tuple(w / mean for w in weights)
    return Plan(sizes, supervised, tokens_per_batch, seed, relative, grouped)


def endless(
    plan: Plan, begin: int, load: Callable[[list[int]], TrainBatch], rank: int, world: int
) -> Iterator[TrainBatch]:
    """Batches `begin + rank`, `begin + rank + world`... of all epochs one behind the other.

    So `world` processes together see what one would, in the same order.
    """
    number, passed, epoch = begin + rank, 0, 0
    while True:
        batches = plan.epoch(epoch)
        while number < passed + len(batches):
            yield load(batches[number - passed])
            number += world
        passed, epoch = passed + len(batches), epoch + 1


def grouped(batches: Iterator[T], size: int) -> Iterator[list[T]]:
    """`size` at a time, without end."""
    while True:
        yield list(islice(batches, size))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items in the same order, the next one made by a thread while one is in use.

    What making one raises is raised here in its turn. The thread ends with this iterator.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def batches_per_epoch(plan: Plan) -> int:
    """Batches of an epoch (their number depends a little on the shuffle)."""
    return max(1, len(plan.epoch(0)))
