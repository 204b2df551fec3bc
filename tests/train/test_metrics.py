"""Counting: every figure is a ratio of pooled counts, and survives a restart."""

import json
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.data.records import Record
from draftsmith.drafters.batch import collate
from draftsmith.train.fused import Measured
from draftsmith.train.metrics import Meter, MetricsLog
from draftsmith.train.step import Scored


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


TOTAL = 8.0  # tokens of the global batch, by which losses are divided


def sums(values: list[float], tokens: list[int]) -> Scored:
    shared = torch.tensor(values)
    measured = Measured([shared], shared / 2, *(torch.empty(0),) * 3)
    return Scored(shared.sum() / TOTAL, measured, [torch.tensor(tokens)])


@pytest.fixture
def batches(records: list[Record]) -> tuple[object, object]:
    long = [r for r in records if len(r.reply) > 8]
    a, b = (next(r for r in long if r.domain == d) for d in "ab")
    return collate([a], ("a", "b", "c")), collate([b, a], ("a", "b", "c"))


def test_figures_are_pooled_over_tokens(accelerator: Accelerator, batches) -> None:  # type: ignore[no-untyped-def]
    meter = Meter(("a", "b", "c"))
    meter.add(batches[0], sums([1.0], [1]), TOTAL)
    meter.add(batches[1], sums([0.0, 0.2, 0.6], [1, 2, int(batches[1].first[1]) + 1]), TOTAL)
    line = meter.read(accelerator, norm=2.5, lr=1e-3)
    assert line["loss"] == pytest.approx(1.8 / 4), "not the mean of 1.0 and 0.8 / 3"
    assert line["overlap"] == pytest.approx(1.8 / 4)
    assert line["captured_mass"] == pytest.approx(0.9 / 4)
    assert line["captured_mass/b"] == pytest.approx(0.05)
    assert line["overlap/a"] == pytest.approx((1.0 + 0.6) / 2)
    assert line["overlap/b"] == pytest.approx(0.1)
    assert "overlap/c" not in line, "a domain without tokens has no figure"
    assert (line["gradient_norm"], line["lr"]) == (2.5, 1e-3)
    meter.add(batches[0], sums([0.5], [1]), TOTAL)
    assert meter.read(accelerator, 0.0, 0.0)["overlap"] == 0.5, "each line starts afresh"


def test_counts_go_on_after_a_restart(accelerator: Accelerator, batches) -> None:  # type: ignore[no-untyped-def]
    whole, first, second = (Meter(("a", "b", "c")) for _ in range(3))
    for meter in (whole, first):
        meter.add(batches[0], sums([0.1, 0.7], [1, 2]), TOTAL)
    kept = json.loads(json.dumps(first.state(accelerator)))
    second.restore(kept, accelerator)
    for meter in (whole, second):
        meter.add(batches[1], sums([0.3], [1]), TOTAL)
    lines = [meter.read(accelerator, 0.0, 0.0) for meter in (whole, second)]
    for line in lines:
        del line["tokens_per_s"], line["data_wait"]
    assert lines[0] == lines[1]


def test_time_spent_waiting_for_data_is_a_share_of_all(accelerator: Accelerator, batches) -> None:  # type: ignore[no-untyped-def]
    meter = Meter(("a", "b", "c"))
    meter.add(batches[0], sums([0.1], [1]), TOTAL)
    with meter.waiting():
        time.sleep(0.03)
    second = Meter(("a", "b", "c"))
    second.restore(json.loads(json.dumps(meter.state(accelerator))), accelerator)
    for counted in (meter, second):
        assert counted.read(accelerator, 0.0, 0.0)["data_wait"] > 0.2
    second.add(batches[0], sums([0.1], [1]), TOTAL)
    assert second.read(accelerator, 0.0, 0.0)["data_wait"] == 0.0


def test_a_resumed_log_drops_what_is_redone(accelerator: Accelerator, tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, 0, accelerator)
    for step in (1, 2, 3, 4):
        log.write("train", step, {"loss": float(step)})
    with path.open("a", encoding="utf-8") as handle:
        handle.write('{"kind": "train", "st')  # cut off by a kill
    MetricsLog(path, 2, accelerator).write("train", 3, {"loss": 30.0})
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]
