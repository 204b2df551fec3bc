"""What else a recipe may ask for, with weights spread by FSDP2 and ZeRO (gloo, two processes)."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launching import Launcher, Trained, agree

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-engines does it"
)
LEAN = ("train.packing=true", "train.gradient_checkpointing=true", "train.tokens_per_batch=40")
LOW = ("train.mixed_precision=bf16",)


@pytest.fixture(scope="module")
def launcher(target_folder, tmp_path_factory: pytest.TempPathFactory) -> Launcher:  # type: ignore[no-untyped-def]
    return Launcher.prepared(tmp_path_factory.mktemp("spread"), target_folder())


def alone(launcher: Launcher, family: str, *options: str) -> Trained:
    """One process that takes in as much a step, run once."""
    out = launcher.folder / f"alone-{family}-{len(options)}-{'-'.join(options)[:30]}"
    return launcher.run(None, out, launcher.recipe(family, accumulation=2), *options)


@pytest.mark.parametrize(
    ("family", "options"),
    [("lora", ()), ("eagle3", LEAN), ("causal", LEAN)],
    ids=["adapter", "lean head", "lean lm"],
)
@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_options_work_however_weights_are_spread(
    how: str, family: str, options: tuple[str, ...], launcher: Launcher, tmp_path: Path
) -> None:
    spread = launcher.run(how, tmp_path / "out", launcher.recipe(family), *options)
    agree(spread, alone(launcher, family, *options))


@pytest.mark.parametrize("how", ["fsdp2", "zero2"])
def test_low_precision_is_of_the_passes_alone(how: str, launcher: Launcher, tmp_path: Path) -> None:
    """Weights, the target's distribution and the counts stay exact: losses agree as closely."""
    spread = launcher.run(how, tmp_path / "out", launcher.recipe("eagle3"), *LOW)
    one = alone(launcher, "eagle3", *LOW)
    agree(spread, one, within=2e-3)
    exact = alone(launcher, "eagle3")
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
