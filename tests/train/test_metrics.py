"""Counting: every figure is a ratio of pooled counts, and survives a restart."""

import io
import json
import re
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.text import Text

from draftsmith.data.records import Record
from draftsmith.drafters.batch import collate
from draftsmith.train.fused import Measured
from draftsmith.train.metrics import Meter, MetricsLog, log_samples, training_progress
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


def test_flops_are_a_share_of_what_all_devices_can_do(accelerator: Accelerator, batches) -> None:  # type: ignore[no-untyped-def]
    meter = Meter(("a", "b", "c"), rate=1e6)
    for flops in (2e5, 3e5):
        meter.add(batches[0], sums([0.1], [1]), TOTAL, flops)
    second = Meter(("a", "b", "c"), rate=1e6)
    state = json.loads(json.dumps(meter.state(accelerator)))
    second.restore({**state, "seconds": 2.0}, accelerator)
    assert second.read(accelerator, 0.0, 0.0)["mfu"] == pytest.approx(0.25, rel=0.05)
    second.add(batches[0], sums([0.1], [1]), TOTAL, 0.0)
    assert second.read(accelerator, 0.0, 0.0)["mfu"] == 0.0
    bare = Meter(("a", "b", "c"))
    bare.restore({}, accelerator)  # a run that begins
    bare.add(batches[0], sums([0.1], [1]), TOTAL, 1e5)
    assert "mfu" not in bare.read(accelerator, 0.0, 0.0), "of an unknown rate it is no share"


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


def test_a_log_is_not_lost_to_a_kill_while_it_is_opened(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, 0, accelerator).write("train", 1, {"loss": 1.0})
    before = path.read_bytes()

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(path, 1, accelerator)
    assert path.read_bytes() == before


def test_words_and_sentences_are_logged_among_figures(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, accelerator)
    log.write("heldout", 4, {"overlap_step_1": 0.5}, weights="abc")
    log.note(4, "a plateau")
    rows = [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]
    assert rows == [
        {"kind": "heldout", "step": 4, "overlap_step_1": 0.5, "weights": "abc"},
        {"kind": "watch", "step": 4, "text": "a plateau"},
    ]


def test_samples_of_a_stopped_run_are_replaced(accelerator: Accelerator, tmp_path: Path) -> None:
    def sample(text: str) -> list[dict[str, object]]:
        return [{"prompt_id": "p", "domain": "a", "text": text, "tokens_per_round": 1.5}]

    for step, text in ((4, "é\u2028\n"), (8, "stopped"), (12, "stopped"), (8, "again")):
        log_samples(accelerator, tmp_path, step, sample(text))
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
    found = [(row["step"], row["text"]) for row in map(json.loads, lines)]
    assert found == [(4, "é\u2028\n"), (8, "again")]
    log_samples(accelerator, tmp_path, 9, [])
    assert (
        len((tmp_path / "samples.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")) == 2
    )


def test_the_bar_tells_figures_and_time_left() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with training_progress(console, 10, 4) as show:
        show(6, {"loss": 1.25, "overlap": 0.5, "tokens_per_s": 321.0})
    text = Text.from_ansi(screen.getvalue()).plain
    assert "6/10" in text and "loss 1.250  α 0.500  321 tokens/s" in text
    assert re.search(r"-:--:--|\d:\d\d:\d\d", text), "time left"
