"""Training checkpoints: the newest whole one is taken, damaged ones are passed over."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from safetensors import SafetensorError

from draftsmith.configs.errors import UserError
from draftsmith.train.checkpoints import (
    checkpoints,
    damaged_checkpoints,
    newest,
    restore_newest,
    save_checkpoint,
)


class Training:
    """A one-layer model that can be saved and restored."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.free_memory()
        layer = torch.nn.Linear(4, 4)
        self.layer, optimizer = self.accelerator.prepare(
            layer, torch.optim.AdamW(layer.parameters(), lr=0.1)
        )
        self.optimizer = optimizer

    def step(self, value: float) -> None:
        with torch.no_grad():
            self.layer.weight.fill_(value)
        self.accelerator.backward(self.layer(torch.ones(1, 4)).sum())
        self.optimizer.step()

    def save(self, folder: Path, step: int, keep: int = 3) -> None:
        save_checkpoint(self.accelerator, folder, step, {"tokens": 10 * step}, keep)


@pytest.fixture
def training() -> Training:
    return Training()


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_newest_is_restored(training: Training, tmp_path: Path) -> None:
    for step in (5, 10):
        training.step(step)
        training.save(tmp_path, step)
    kept = training.layer.weight.detach().clone()
    moments = training.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    training.step(99.0)
    known = newest(training.accelerator, tmp_path)
    assert known is not None and (known["step"], known["tokens"]) == (10, 100)
    restore_newest(training.accelerator, tmp_path)
    assert torch.equal(training.layer.weight, kept)
    assert torch.equal(training.optimizer.state_dict()["state"][0]["exp_avg"], moments)


def test_only_the_last_are_kept(training: Training, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        training.save(tmp_path, step, keep=2)
    assert names(checkpoints(tmp_path)) == ["step-000003", "step-000004"]


def test_a_tied_weight_is_restored_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    kept = model[0].weight.detach().clone()
    save_checkpoint(accelerator, tmp_path, 5, {}, keep=1)
    assert caplog.text == ""
    with torch.no_grad():
        model[0].weight.zero_()
    restore_newest(accelerator, tmp_path)
    assert torch.equal(model[0].weight, kept) and model[1].weight is model[0].weight


def test_a_folder_without_checkpoints(training: Training, tmp_path: Path) -> None:
    assert newest(training.accelerator, tmp_path / "none") is None


def cut_weights(folder: Path) -> None:
    cut(folder / "model.safetensors")


def cut_optimizer(folder: Path) -> None:
    cut(folder / "optimizer.bin")


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def drop_optimizer(folder: Path) -> None:
    (folder / "optimizer.bin").unlink()


def drop_progress(folder: Path) -> None:
    (folder / "progress.json").unlink()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("harm", [cut_weights, cut_optimizer, drop_optimizer, drop_progress, empty])
def test_a_damaged_checkpoint_is_passed_over(harm, training: Training, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for step in (5, 10):
        training.save(tmp_path, step, keep=1 if step == 5 else 2)
    harm(tmp_path / "step-000010")
    assert names(damaged_checkpoints(tmp_path)) == ["step-000010"]
    progress = newest(training.accelerator, tmp_path)
    assert progress is not None and progress["step"] == 5
    training.save(tmp_path, 10, keep=1)
    assert damaged_checkpoints(tmp_path) == [], "saving that step again replaces it"
    assert names(checkpoints(tmp_path)) == ["step-000010"]


def test_damaged_ones_do_not_push_out_the_last_good_one(training: Training, tmp_path: Path) -> None:
    for step in (5, 10):
        training.save(tmp_path, step, keep=2)
    empty(tmp_path / "step-000010")
    training.save(tmp_path, 7, keep=2)
    assert names(checkpoints(tmp_path)) == ["step-000005", "step-000007"]


def test_a_kill_while_saving_leaves_no_checkpoint(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(tmp_path, 5)
    save_state = training.accelerator.save_state

    def killed(folder: str) -> None:
        save_state(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.accelerator, "save_state", killed)
    with pytest.raises(KeyboardInterrupt):
        training.save(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


LEFT = (".step-000005.part", ".step-000007.4711.part", ".step-000005.4711.old")


def test_what_a_killed_process_left_is_removed(training: Training, tmp_path: Path) -> None:
    training.save(tmp_path, 5)
    for name in (*LEFT, ".metrics.4711.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    training.save(tmp_path, 10)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".metrics.4711.part", "step-000005", "step-000010"]


@pytest.mark.parametrize("main", [True, False])
def test_of_several_processes_one_removes_before_any_writes(main: bool, tmp_path: Path) -> None:
    for name in LEFT:
        (tmp_path / name).mkdir()
    waits: list[int] = []

    def save_state(folder: str) -> None:
        assert waits == [0 if main else len(LEFT)]
        Path(folder).mkdir()

    accelerator: Any = SimpleNamespace(
        is_main_process=main,
        num_processes=2,
        distributed_type=DistributedType.MULTI_CPU,
        save_state=save_state,
        wait_for_everyone=lambda: waits.append(len(list(tmp_path.glob(".step-*")))),
    )
    save_checkpoint(accelerator, tmp_path, 10, {}, keep=1)
    assert len(waits) == 3


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_one_sentence_and_costs_no_checkpoint(
    error: Exception, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(tmp_path, 5, keep=1)

    def full(folder: str) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(training.accelerator, "save_state", full)
    with pytest.raises(UserError, match=r"could not write .*step-000010: .* run the same command"):
        training.save(tmp_path, 10, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


@pytest.mark.parametrize(
    ("was", "message"),
    [
        ({"spread": "FSDP"}, "was saved under FSDP and this is one process"),
        ({"spread": "DeepSpeed ZeRO-2"}, "was saved under DeepSpeed ZeRO-2 and this is one"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(
    was: dict[str, Any], message: str, training: Training, tmp_path: Path
) -> None:
    training.save(tmp_path, 5)
    path = tmp_path / "step-000005" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | was))
    with pytest.raises(UserError, match=message):
        newest(training.accelerator, tmp_path)


def test_deepspeed_wants_as_many_processes(tmp_path: Path, training: Training) -> None:
    training.save(tmp_path, 5)
    path = tmp_path / "step-000005" / "progress.json"
    told = json.loads(path.read_text()) | {"spread": "DeepSpeed ZeRO-2", "processes": 4}
    path.write_text(json.dumps(told))
    plugin = SimpleNamespace(zero_stage=2)
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        num_processes=2,
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )
    with pytest.raises(UserError, match=r"saved by 4 processes, .* launch as many, not 2"):
        newest(accelerator, tmp_path)
