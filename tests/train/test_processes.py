"""Two processes train what one does, however weights are spread over them."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from launching import Launcher, Trained, agree, environment, log_lines

FAMILIES = ("eagle3", "causal")
SPREAD = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def launcher(target_folder, tmp_path_factory: pytest.TempPathFactory) -> Launcher:  # type: ignore[no-untyped-def]
    return Launcher.prepared(tmp_path_factory.mktemp("launched"), target_folder())


@pytest.fixture(scope="module")
def alone(launcher: Launcher) -> dict[str, Trained]:
    """One process, whose steps take in two batches."""
    return {
        family: launcher.run(
            None, launcher.folder / f"alone-{family}", launcher.recipe(family, accumulation=2)
        )
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", SPREAD)
def test_two_processes_train_what_one_does(
    how: str, family: str, launcher: Launcher, alone: dict[str, Trained]
) -> None:
    together = launcher.run(
        how, launcher.folder / f"{how}-{family}", launcher.recipe(family, accumulation=1)
    )
    agree(together, alone[family])
    assert "2 processes" in together.errors


def test_a_sharded_target_gives_the_same_states(launcher: Launcher, tmp_path: Path) -> None:
    """Records without states: the processes meet in each pass of the target."""
    bare = Launcher(launcher.folder, launcher.target, tmp_path / "bare")
    recipe = bare.recipe("eagle3")
    bare.collect(recipe, "collect.distributions=none")
    whole = bare.run("ddp", tmp_path / "whole", recipe, "train.target=replicated")
    spread = bare.run("ddp", tmp_path / "spread", recipe, "train.target=sharded")
    agree(spread, whole)


def test_a_signal_saves_and_the_same_processes_go_on_to_the_same_bits(
    launcher: Launcher, tmp_path: Path
) -> None:
    recipe, long = launcher.recipe("causal"), ("train.steps=40", "train.save_every=1000")
    whole = launcher.run("ddp", tmp_path / "whole", recipe, *long)
    out = tmp_path / "cut"
    command = launcher.command("ddp", out, recipe, *long)
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_lines(out, 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0
    (saved,) = out.glob("step-*")
    assert 5 <= int(saved.name.removeprefix("step-")) < 40, "it was cut short, after saving"
    rest = launcher.run("ddp", out, recipe, *long)
    assert f"going on from step {int(saved.name[5:])}" in rest.errors
    for name, tensor in rest.tensors.items():
        assert torch.equal(tensor, whole.tensors[name]), name
    assert rest.figures("train", "loss") == whole.figures("train", "loss")


def wait_for_lines(folder: Path, count: int) -> None:
    for _ in range(600):
        if (folder / "metrics.jsonl").exists() and len(log_lines(folder)) >= count:
            return
        time.sleep(0.1)
    raise AssertionError("it never began")


def test_another_number_of_processes_goes_on_and_says_so(
    launcher: Launcher, tmp_path: Path
) -> None:
    recipe, out = launcher.recipe("eagle3"), tmp_path / "out"
    launcher.run("ddp", out, recipe, "train.steps=3")
    rest = launcher.run(None, out, recipe, "train.steps=6")
    assert rest.code == 0, rest.errors
    said = " ".join(rest.errors.split())
    assert "2 processes saved this, 1 go on with it: steps take in 1 batches instead of 2" in said
    assert [row["step"] for row in log_lines(out) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
