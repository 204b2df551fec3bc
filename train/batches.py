"""Training batches from records: one order per seed and epoch, a token budget, little padding."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..configs.errors import UserError
from ..data.gather import recompute_states
from ..data.records import Record
from ..data.store import RecordStore
from ..data.target import Target
from ..drafters.base import TrainBatch

_POOL = 8  # batches' worth of rows that are sorted by length together


def records_with_states(
    store: RecordStore, target: Target, taps: tuple[int, ...], split: str | None = None
) -> list[Record]:
    """The store's records with the target's states, `taps` in that order; recomputed if not kept.

    Raises `UserError` if the records are of another target, or do not hold these layers.
    """
    was = store.settings
    if was["target"]["weights"] != target.provenance["weights"]:
        raise UserError(f"{store.folder} was collected from another target than this recipe's")
    records = list(store.records(split))
    if was["distributions"] == "none":
        size = int(was["batch_size"])
        parts = [records[i : i + size] for i in range(0, len(records), size)]
        return [r for part in parts for r in recompute_states(target, part, taps)]
    if not set(taps) <= set(was["taps"]):
        raise UserError(
            f"{store.folder} holds layers {was['taps']}, the drafter reads {list(taps)}; "
            "collect again with this recipe"
        )
    if list(taps) == was["taps"]:
        return records
    places = [was["taps"].index(tap) for tap in taps]
    return [_select_taps(r, places, len(was["taps"])) for r in records]


def _select_taps(record: Record, places: list[int], layers: int) -> Record:
    assert record.states is not None
    taps = record.states.taps.unflatten(-1, (layers, -1))[:, places].flatten(1)  # [T-1, L*h]
    return replace(record, states=replace(record.states, taps=taps))


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


def make_plan(records: Sequence[Record], tokens_per_batch: int, seed: int) -> Plan:
    """Raises `UserError` if no record has a token that could be drafted."""
    supervised = tuple(max(0, len(r.reply) - 1) for r in records)
    if not any(supervised):
        raise UserError(
            f"none of the {len(records)} training records has two reply tokens or more, so "
            "there is nothing to train on; collect longer replies"
        )
    return Plan(tuple(len(r.ids) for r in records), supervised, tokens_per_batch, seed)


def collate(records: Sequence[Record], domains: Sequence[str]) -> TrainBatch:
    """Records with states → one right-padded batch; domains are indices into `domains`."""
    longest = max(len(r.ids) for r in records)
    first_states = records[0].states
    assert first_states is not None
    ids = torch.zeros(len(records), longest, dtype=torch.long)
    taps = torch.zeros(len(records), longest - 1, first_states.taps.shape[-1])
    for b, record in enumerate(records):
        assert record.states is not None
        ids[b, : len(record.ids)] = record.ids
        taps[b, : len(record.ids) - 1] = record.states.taps.float()
    replies = torch.tensor([len(r.reply) for r in records])
    index = torch.tensor([domains.index(r.domain) for r in records])
    return TrainBatch(
        ids=ids,
        lengths=torch.tensor([len(r.ids) for r in records]),
        prompt_lens=torch.tensor([r.prompt_len for r in records]),
        taps=taps,
        hidden=torch.cat([r.states.hidden for r in records if r.states is not None]),
        log_z=torch.cat([r.states.log_z for r in records if r.states is not None]),
        domain=index.repeat_interleave(replies),
        first=replies.cumsum(0) - replies,
    )


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


def batches_per_epoch(plan: Plan, world: int) -> int:
    """Batches each process sees in an epoch (their number depends a little on the shuffle)."""
    return max(1, len(plan.epoch(0)) // world)
