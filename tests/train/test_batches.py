"""Batches: every record once an epoch, in an order that seed and epoch fix, whole and in place."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record
from draftsmith.drafters.batch import collate
from draftsmith.train.batches import Plan, batches_per_epoch, endless, make_plan

SUPERVISED = (1, 2, 3, 5, 8, 50, 200, 0, 7, 7, 7, 12, 30, 1, 1, 4, 19)
BUDGET = 40


@pytest.fixture
def plan() -> Plan:
    sizes = tuple(10 + (3 * i) % 7 + n for i, n in enumerate(SUPERVISED))
    return Plan(sizes, SUPERVISED, BUDGET, seed=3)


def test_every_record_comes_once_an_epoch(plan: Plan) -> None:
    for number in range(5):
        drawn = Counter(i for batch in plan.epoch(number) for i in batch)
        assert drawn == {i: 1 for i, n in enumerate(SUPERVISED) if n > 0}


def test_order_follows_seed_and_epoch_alone(plan: Plan) -> None:
    again = Plan(plan.sizes, SUPERVISED, BUDGET, seed=3)
    assert [plan.epoch(e) for e in range(4)] == [again.epoch(e) for e in range(4)]
    assert plan.epoch(0) != plan.epoch(1), "the second epoch is shuffled differently"
    assert plan.epoch(0) != replace(plan, seed=4).epoch(0)


def test_a_batch_keeps_to_the_budget(plan: Plan) -> None:
    batches = [batch for number in range(5) for batch in plan.epoch(number)]
    used = [sum(SUPERVISED[i] for i in batch) for batch in batches]
    assert all(n <= BUDGET or len(batch) == 1 for n, batch in zip(used, batches, strict=True))
    assert any(len(batch) > 3 for batch in batches), "short rows share a batch"


def test_rows_of_a_batch_have_similar_lengths() -> None:
    sizes = tuple(10 if i % 2 else 100 for i in range(400))
    plan = Plan(sizes, (5,) * 400, 40, seed=0)
    mixed = sum(len({sizes[i] for i in batch}) > 1 for batch in plan.epoch(0))
    assert mixed <= len(plan.epoch(0)) / 5


def row(index: list[int]) -> Any:
    return index  # stands for the batch that loading these records would give


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_an_epoch_without_overlap(plan: Plan, world: int) -> None:
    count = len(plan.epoch(0)) // world
    parts = [
        [tuple(b) for b in islice(endless(plan, 0, row, rank, world), count)]
        for rank in range(world)
    ]
    seen = [batch for part in parts for batch in part]
    assert len(set(seen)) == len(seen) == count * world
    assert set(seen) <= {tuple(batch) for batch in plan.epoch(0)}
    assert batches_per_epoch(plan, world) == count


@pytest.mark.parametrize("world", [1, 2])
def test_starting_at_a_batch_is_skipping_those_before(plan: Plan, world: int) -> None:
    total = 4 * len(plan.epoch(0))
    whole = list(islice(endless(plan, 0, row, world - 1, world), total))
    for start in (1, len(plan.epoch(0)) // world, 2 * len(plan.epoch(0)) + 1):
        late = islice(endless(plan, start, row, world - 1, world), total - start)
        assert list(late) == whole[start:]


def test_starting_late_loads_nothing_before(plan: Plan) -> None:
    loaded: list[list[int]] = []

    def load(index: list[int]) -> Any:
        loaded.append(index)
        return index

    next(endless(plan, 9, load, 0, 1))
    assert len(loaded) == 1


def test_more_processes_than_batches_is_refused() -> None:
    plan = Plan((5, 5), (2, 2), 100, seed=0)
    with pytest.raises(UserError, match="1 batches an epoch, too few for 2 processes"):
        next(endless(plan, 0, row, 0, 2))


def test_rows_without_supervised_token_are_left_out(records: list[Record]) -> None:
    lengths = [len(r.reply) for r in records]
    assert 1 in lengths and 2 in lengths
    plan = make_plan(records, 30, seed=0)
    drawn = sorted(i for batch in plan.epoch(0) for i in batch)
    assert drawn == [i for i, n in enumerate(lengths) if n > 1]
    assert plan.supervised == tuple(n - 1 for n in lengths)


def test_records_without_any_supervised_token_are_refused(records: list[Record]) -> None:
    short = [r for r in records if len(r.reply) == 1]
    with pytest.raises(UserError, match=f"none of the {len(short)} training records .* longer"):
        make_plan(short, 30, seed=0)


def test_collate_puts_everything_in_its_place(records: list[Record]) -> None:
    rows = [records[i] for i in (7, 0, 12, 3)]
    batch = collate(rows, ("a", "b"))
    assert batch.ids.shape == (4, max(len(r.ids) for r in rows))
    assert batch.supervised == sum(len(r.reply) - 1 for r in rows)
    for b, record in enumerate(rows):
        assert record.states is not None
        n = len(record.ids)
        reply = slice(int(batch.first[b]), int(batch.first[b]) + len(record.reply))
        assert batch.lengths[b] == n
        assert batch.prompt_lens[b] == record.prompt_len
        assert torch.equal(batch.ids[b, :n], record.ids)
        assert torch.equal(batch.taps[b, : n - 1], record.states.taps)
        assert torch.equal(batch.hidden[reply], record.states.hidden)
        assert torch.equal(batch.log_z[reply], record.states.log_z)
        assert batch.domain[reply].tolist() == ["ab".index(record.domain)] * len(record.reply)
        assert not batch.ids[b, n:].any() and not batch.taps[b, n - 1 :].any()
    assert len(batch.hidden) == sum(len(r.reply) for r in rows)
