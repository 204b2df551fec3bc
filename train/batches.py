"""Training batches from records: one order per seed and epoch, a token budget, little padding."""

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..configs.errors import UserError
from ..drafters.base import TrainBatch

T = TypeVar("T")

_POOL = 8  # batches' worth of rows that are sorted by length together


@dataclass(frozen=True)
class Plan:
    """Which records make up which batch of an epoch, for one process of `world`."""

    sizes: tuple[int, ...]
    """Tokens of each record."""
    supervised: tuple[int, ...]
    """Of these, how many can be drafted."""
    tokens_per_batch: int
    seed: int

    def epoch(self, number: int) -> list[list[int]]:
        """Batches of record indices, shuffled anew for every epoch, the same for the same seed.

        Rows of similar length share a batch; a batch is closed before it exceeds the budget of
        supervised tokens.
        """
        rng = random.Random(f"{self.seed}/{number}")
        order = [i for i in range(len(self.sizes)) if self.supervised[i] > 0]
        rng.shuffle(order)
        mean = sum(self.supervised[i] for i in order) / max(1, len(order))
        pool = max(1, int(_POOL * self.tokens_per_batch / max(1.0, mean)))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            rows = sorted(order[start : start + pool], key=lambda i: (self.sizes[i], i))
            batches += _split(rows, self.supervised, self.tokens_per_batch)
        rng.shuffle(batches)
        return batches


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
    records: Sequence[Extent], tokens_per_batch: int, seed: int, use: Sequence[bool] | None = None
) -> Plan:
    """A plan over `records`, or those that `use` marks.

    Raises `UserError` if none of them has a token that could be drafted.
    """
    used = use or [True] * len(records)
    supervised = tuple(
        max(0, len(r.reply) - 1) if mine else 0 for r, mine in zip(records, used, strict=True)
    )
    if not any(supervised):
        raise UserError(
            f"none of the {sum(used)} training records has two reply tokens or more, so "
            "there is nothing to train on; collect longer replies"
        )
    sizes = tuple(r.prompt_len + len(r.reply) for r in records)
    return Plan(sizes, supervised, tokens_per_batch, seed)


def endless(
    plan: Plan, start_batch: int, load: Callable[[list[int]], TrainBatch], rank: int, world: int
) -> Iterator[TrainBatch]:
    """Batches from number `start_batch` on, epoch after epoch; a process takes every world-th.

    Raises `UserError` if an epoch has not one batch for each process.
    """
    number = 0
    epoch = 0
    while True:
        batches = plan.epoch(epoch)
        if len(batches) < world:
            raise UserError(
                f"the records make {len(batches)} batches an epoch, too few for {world} "
                "processes; lower train.tokens_per_batch or collect more"
            )
        for batch in batches[rank : len(batches) - len(batches) % world : world]:
            if number >= start_batch:
                yield load(batch)
            number += 1
        epoch += 1


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items in the same order, the next one made by a thread while one is in use.

    What making one raises is raised here in its turn. The thread ends with this iterator.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def batches_per_epoch(plan: Plan, world: int) -> int:
    """Batches each process sees in an epoch (their number depends a little on the shuffle)."""
    return max(1, len(plan.epoch(0)) // world)
