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


def test_rows_to_be_packed_are_mixed() -> None:
    sizes = tuple(10 if i % 2 else 100 for i in range(400))
    plan = Plan(sizes, (5,) * 400, 40, seed=0, grouped=False)
    mixed = sum(len({sizes[i] for i in batch}) > 1 for batch in plan.epoch(0))
    assert mixed > 0.9 * len(plan.epoch(0))


def row(index: list[int]) -> Any:
    return index  # stands for the batch that loading these records would give


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_together_see_what_one_sees_in_the_same_order(plan: Plan, world: int) -> None:
    """Over the ends of epochs, too: nothing is dropped there, nothing comes twice."""
    total = 3 * len(plan.epoch(0)) * world
    alone = list(islice(endless(plan, 0, row, 0, 1), total))
    parts = [islice(endless(plan, 0, row, rank, world), total // world) for rank in range(world)]
    assert [batch for together in zip(*parts, strict=True) for batch in together] == alone
    first = batches_per_epoch(plan)
    assert alone[:first] == plan.epoch(0) and alone[first:][: len(plan.epoch(1))] == plan.epoch(1)


@pytest.mark.parametrize("world", [1, 2])
def test_starting_at_a_batch_is_skipping_those_before(plan: Plan, world: int) -> None:
    total = 4 * len(plan.epoch(0))
    whole = list(islice(endless(plan, 0, row, 0, 1), total))
    for begin in (1, len(plan.epoch(0)), 2 * len(plan.epoch(0)) + 1):
        late = islice(endless(plan, begin, row, world - 1, world), 5)
        assert list(late) == whole[begin + world - 1 :: world][:5]


def test_another_number_of_processes_goes_on_with_the_next_batch(plan: Plan) -> None:
    """Positions count the batches of all processes."""
    alone = list(islice(endless(plan, 0, row, 0, 1), 12))
    two = [islice(endless(plan, 0, row, rank, 2), 3) for rank in range(2)]
    three = [islice(endless(plan, 6, row, rank, 3), 2) for rank in range(3)]
    seen = [b for part in (two, three) for batches in zip(*part, strict=True) for b in batches]
    assert seen == alone


def test_starting_late_loads_nothing_before(plan: Plan) -> None:
    loaded: list[list[int]] = []

    def load(index: list[int]) -> Any:
        loaded.append(index)
        return index

    next(endless(plan, 9, load, 0, 1))
    assert len(loaded) == 1


def test_more_processes_than_batches_take_them_from_the_next_epochs() -> None:
    plan = Plan((5, 5), (2, 2), 100, seed=0)
    assert next(endless(plan, 0, row, 2, 3)) == plan.epoch(2)[0]


def test_weights_say_how_often_a_record_comes() -> None:
    weights = (2.0, 0.5, 1.0, 0.25, 1.25)
    plan = Plan((9,) * 5, (4,) * 5, 8, seed=1, weights=weights)
    drawn = Counter(i for number in range(800) for batch in plan.epoch(number) for i in batch)
    for index, weight in enumerate(weights):
        assert drawn[index] / 800 == pytest.approx(weight, abs=0.05)
    assert drawn[0] == 1600, "a whole number comes as often each time"
    assert plan.epoch(3) == Plan((9,) * 5, (4,) * 5, 8, 1, weights).epoch(3)


def test_weights_keep_an_epochs_length(records: list[Record]) -> None:
    weights = [3.0 if r.domain == "a" else 1.0 for r in records]
    plan = make_plan(records, 30, seed=0, weights=weights)
    assert plan.weights is not None
    used = [w for w, n in zip(plan.weights, plan.supervised, strict=True) if n]
    assert sum(used) == pytest.approx(len(used))
    assert max(used) / min(used) == pytest.approx(3.0)
    assert make_plan(records, 30, seed=0, weights=[2.0] * len(records)).weights is None


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
