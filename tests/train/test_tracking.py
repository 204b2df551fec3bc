"""Trackers: nothing told is lost to them, and nothing that they lack ends training."""

import io
import json
import os
import pty
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2 as pb

from draftsmith.configs.load import recipe_hash
from draftsmith.configs.recipe import Recipe
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train.loop import train
from draftsmith.train.metrics import MetricsLog, log_samples
from draftsmith.train.tracking import new_run_id, start_tracking

BLOCK = 32 * 1024
SAMPLES = [{"prompt_id": "p1", "domain": "a", "text": "yes\nno", "tokens_per_round": 1.5}]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key, no settings of the machine's, a server that is not there."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    yield


def records(path: Path) -> list[Any]:
    """All of a run that ended: W&B's own process writes its file, late on a busy machine."""
    for _ in range(300):
        found = written(path)
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            break
        time.sleep(0.1)
    return found


def written(path: Path) -> list[Any]:
    """An offline run's file: 7 bytes, then blocks of records with header (checksum, size, part)."""
    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        _, size, part = struct.unpack("<IHB", data[at : at + 7]) if left >= 7 else (0, 0, 0)
        if part == 0:  # too little room in this block for a header
            at += left
            continue
        if at + 7 + size > len(data):  # still being written
            break
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last part of several
            found.append(pb.Record.FromString(parts))
            parts = b""
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    """All that offline runs in `folder` were told, in order."""
    lines = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):  # by the second they began in
        for record in records(path):
            items = record.history.item
            if items:
                lines.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return lines


class Session:
    """A run's trackers and its log between a start and a stop of training."""

    def __init__(self, recipe: Recipe, folder: Path, run_id: str, step: int) -> None:
        self.screen = io.StringIO()
        self.accelerator = Accelerator(cpu=True)
        console = Console(file=self.screen, width=300)
        start_tracking(self.accelerator, recipe, folder, run_id, step, console)
        self.log = MetricsLog(folder / "metrics.jsonl", step, self.accelerator)

    def run(self, begin: int, end: int, loss: float) -> None:
        """Steps `begin` to `end`, held-out figures at every fourth."""
        for step in range(begin, end + 1):
            self.log.write("train", step, {"loss": loss + step})
            if step % 4 == 0:
                figures = {"overlap/a": loss - step, "survival_1/a": 0.5, "survival_2/a": 0.25}
                self.log.write("heldout", step, figures, weights="abc")


TrainFactory = Callable[..., Recipe]


def test_no_value_is_lost_to_wandb_after_a_resume(
    make_recipe: TrainFactory, tmp_path: Path
) -> None:
    """B138: told up to step 12, stopped, resumed from 8, ended at 20; held-out at every fourth."""
    recipe = make_recipe(wandb="offline")
    run_id = new_run_id(recipe)
    Session(recipe, tmp_path, run_id, 0).run(1, 12, 0.0)  # and no end
    time.sleep(1)  # W&B names an offline run's folder by the second
    second = Session(recipe, tmp_path, run_id, 8)
    second.run(9, 20, 100.0)
    second.accelerator.end_training()

    lines = history(tmp_path)
    told = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert told == [(s, s) for s in range(1, 13)] + [(s, s + 100) for s in range(9, 21)]
    held_out = [
        (line["step"], line["heldout/overlap/a"]) for line in lines if "heldout/weights" in line
    ]
    assert held_out == [(4, -4), (8, -8), (12, -12), (12, 88), (16, 84), (20, 80)]
    bars = [line["heldout/survival/a/values"] for line in lines if "heldout/weights" in line]
    assert bars == [[0.5, 0.25]] * 6

    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}, "one run, in two files"
    for path in files:
        metrics = [r.metric for r in records(path) if r.WhichOneof("record_type") == "metric"]
        assert [m.step_metric for m in metrics if m.glob_name == "*"] == ["step"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["kind"] == "train"] == list(range(1, 21))
    assert [r["loss"] for r in rows if r["kind"] == "train"][8:10] == [109, 110]


def test_steps_that_go_back_are_kept_by_wandb(make_recipe: TrainFactory, tmp_path: Path) -> None:
    """B138: an online run that is resumed stands where it stopped, at a later step."""
    recipe = make_recipe(wandb="offline")
    session = Session(recipe, tmp_path, new_run_id(recipe), 0)
    session.run(1, 12, 0.0)
    session.run(9, 20, 100.0)
    session.accelerator.end_training()
    told = [line["train/loss"] for line in history(tmp_path) if "train/loss" in line]
    assert told == [*range(1, 13), *range(109, 121)]


def test_a_run_tells_what_it_is(make_recipe: TrainFactory, tmp_path: Path) -> None:
    recipe = make_recipe(wandb="offline", lr=0.125)
    session = Session(recipe, tmp_path, new_run_id(recipe), 0)
    log_samples(session.accelerator, tmp_path, 3, SAMPLES)
    session.accelerator.end_training()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    config = {}
    for record in records(path):
        for item in (*record.run.config.update, *record.config.update):
            config[item.key or item.nested_key[0]] = json.loads(item.value_json)
    assert config["train"]["lr"] == 0.125
    assert config["run"]["processes"] == 1
    assert config["run"]["draftsmith"] and config["run"]["torch"] and config["run"]["transformers"]
    assert str(config["run"]["commit"]).removesuffix("-dirty") in (commit(), "None")
    (line,) = history(tmp_path)
    assert (line["samples/_type"], line["samples/nrows"], line["step"]) == ("table-file", 1, 3)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    shown = json.loads(table.read_text())
    assert dict(zip(shown["columns"], shown["data"][0], strict=True)) == SAMPLES[0]


def commit() -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def test_run_ids_are_of_the_recipe_and_differ(make_recipe: TrainFactory) -> None:
    recipe = make_recipe()
    first, second = new_run_id(recipe), new_run_id(recipe)
    assert first != second
    assert first.startswith(f"tiny-{recipe_hash(recipe)[:8]}-")


def test_tensorboard_shows_each_step_once_after_a_resume(
    make_recipe: TrainFactory, tmp_path: Path
) -> None:
    recipe = make_recipe(tensorboard=True)
    first = Session(recipe, tmp_path, "unused", 0)
    first.run(1, 12, 0.0)
    log_samples(first.accelerator, tmp_path, 12, SAMPLES)
    first.accelerator.end_training()
    second = Session(recipe, tmp_path, "unused", 8)
    second.run(9, 20, 100.0)
    log_samples(second.accelerator, tmp_path, 12, SAMPLES * 2)
    second.accelerator.end_training()

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    told = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert told == [(s, s if s < 9 else s + 100) for s in range(1, 21)]
    assert [event.step for event in board.Scalars("heldout/overlap/a")] == [4, 8, 12, 16, 20]
    texts = {name: board.Tensors(f"{name}/text_summary") for name in ("config", "samples")}
    shown = {name: events[-1].tensor_proto.string_val[0] for name, events in texts.items()}
    assert b"log_every: 1" in shown["config"]
    assert shown["samples"].count(b"prompt_id: p1") == 2
    rows = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [12, 12], (
        "those of the stopped run are gone"
    )


def test_a_tracker_that_fails_is_told_of_once(
    make_recipe: TrainFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(wandb="offline", tensorboard=True)
    session = Session(recipe, tmp_path, new_run_id(recipe), 0)
    run = session.accelerator.get_tracker("wandb", unwrap=True)

    def gone(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError("the service is gone")

    monkeypatch.setattr(run, "log", gone)
    session.run(1, 8, 0.0)
    session.accelerator.end_training()
    assert session.screen.getvalue().count("W&B is off (the service is gone)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(board.Scalars("train/loss")) == 8, "the other goes on"


CASES = """
import io, json, os, sys, time
from pathlib import Path
from accelerate import Accelerator
from rich.console import Console
from draftsmith.configs.recipe import Recipe
from draftsmith.configs.training import TrainSection
from draftsmith.train.tracking import new_run_id, start_tracking

def case(name, **environment):
    os.environ.update(environment)
    recipe = Recipe(name=name, train=TrainSection(wandb="online", tensorboard=name == "missing"))
    screen, accelerator, folder = io.StringIO(), Accelerator(cpu=True), Path(sys.argv[1]) / name
    begin = time.perf_counter()
    console = Console(file=screen, width=300)
    start_tracking(accelerator, recipe, folder, new_run_id(recipe), 0, console)
    seconds = time.perf_counter() - begin
    accelerator.log({"train/loss": 1.0}, step=1)
    accelerator.end_training()
    for option in environment:
        del os.environ[option]
    return {"name": name, "seconds": seconds, "said": screen.getvalue()}

sys.modules |= {"wandb": None, "tensorboard": None, "tensorboardX": None}
found = [case("missing")]
del sys.modules["wandb"]
found += [case("no-key"), case("offline", WANDB_MODE="offline")]
found += [case("disabled", WANDB_MODE="disabled")]
import wandb
wandb.teardown()
found += [case("unreached", WANDB_API_KEY="a" * 40, WANDB_HTTP_TIMEOUT="1")]
(Path(sys.argv[1]) / "found.json").write_text(json.dumps(found))
"""


def test_training_never_waits_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B139: without package, key, network, at a terminal where one could be asked for a key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", CASES, str(tmp_path)]
    done = subprocess.run(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr.decode()
    found = {case["name"]: case for case in json.loads((tmp_path / "found.json").read_text())}
    assert all(case["seconds"] < 30 for case in found.values())
    assert found["missing"]["said"].splitlines() == [
        f"{name} is off, its package is not installed; metrics.jsonl is complete without it"
        for name in ("W&B", "TensorBoard")
    ]
    assert "W&B is offline (no key is known)" in found["no-key"]["said"]
    assert "W&B is offline (Failed to authenticate" in found["unreached"]["said"]
    assert found["disabled"]["said"] == ""
    assert "W&B is" not in found["offline"]["said"], "it was asked for"
    for name in ("no-key", "unreached", "offline"):
        assert [line["train/loss"] for line in history(tmp_path / name)] == [1.0]
        assert len(found[name]["said"].splitlines()) <= 2


def test_an_offline_run_is_kept_beside_the_drafter(
    tiny_target: Target, store: RecordStore, make_recipe: TrainFactory, run_folder: Path
) -> None:
    recipe = make_recipe(steps=2, wandb="offline")
    train(recipe, tiny_target, store, run_folder, Console(file=io.StringIO()))
    names = {name for line in history(run_folder) for name in line}
    assert {"train/loss", "heldout/overlap_step_1", "heldout/survival_1"} <= names
