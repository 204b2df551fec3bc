"""What else a recipe may ask for, with weights spread by FSDP2 and ZeRO (gloo, two processes)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_needs import needs
from launching import Launcher, Trained, agree

pytestmark = needs("deepspeed")
LEAN = ("train.packing=true", "train.gradient_checkpointing=true", "train.tokens_per_batch=40")
LOW = ("train.mixed_precision=bf16",)
Alone = Callable[..., Trained]


@pytest.fixture(scope="module")
def launcher(target_folder, tmp_path_factory: pytest.TempPathFactory) -> Launcher:  # type: ignore[no-untyped-def]
    return Launcher.prepared(tmp_path_factory.mktemp("spread"), target_folder())


@pytest.fixture(scope="module")
def alone(launcher: Launcher) -> Alone:
    """`alone(family, options)`: one process that takes in as much a step, run once."""
    made: dict[tuple[str, tuple[str, ...]], Trained] = {}

    def run(family: str, options: tuple[str, ...] = ()) -> Trained:
        if (family, options) not in made:
            out, recipe = launcher.folder / f"alone-{len(made)}", launcher.recipe(family, 2)
            made[family, options] = launcher.run(None, out, recipe, *options)
        return made[family, options]

    return run


@pytest.mark.parametrize(
    ("family", "options"),
    [("lora", ()), ("eagle3", LEAN), ("causal", LEAN)],
    ids=["adapter", "lean head", "lean lm"],
)
@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_options_work_however_weights_are_spread(
    how: str,
    family: str,
    options: tuple[str, ...],
    launcher: Launcher,
    alone: Alone,
    tmp_path: Path,
) -> None:
    spread = launcher.run(how, tmp_path / "out", launcher.recipe(family), *options)
    agree(spread, alone(family, options))


@pytest.mark.parametrize("how", ["fsdp2", "zero2"])
def test_low_precision_is_of_the_passes_alone(
    how: str, launcher: Launcher, alone: Alone, tmp_path: Path
) -> None:
    """Weights, the target's distribution and the counts stay exact: losses agree as closely."""
    spread = launcher.run(how, tmp_path / "out", launcher.recipe("eagle3"), *LOW)
    one = alone("eagle3", LOW)
    agree(spread, one, within=2e-3)
    exact = alone("eagle3")
    assert one.figures("train", "loss") != exact.figures("train", "loss"), "bf16 was on"
    for name, tensor in spread.tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name} is rounded"


@pytest.mark.parametrize("how", ["fsdp2"])
def test_a_longer_run_goes_on_to_the_same_bits(
    how: str, launcher: Launcher, tmp_path: Path
) -> None:
    recipe, constant = launcher.recipe("causal"), "train.schedule=constant"
    whole = launcher.run(how, tmp_path / "whole", recipe, constant)
    launcher.run(how, tmp_path / "cut", recipe, constant, "train.steps=3")
    rest = launcher.run(how, tmp_path / "cut", recipe, constant)
    assert "going on from step 3 of 6" in rest.errors
    for name, tensor in rest.tensors.items():
        assert torch.equal(tensor, whole.tensors[name]), name
