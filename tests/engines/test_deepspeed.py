"""DeepSpeed on this CPU: two processes train what one does, and go on where they were stopped.

Its first run compiles a small extension, which takes minutes once; `make test-engines` does so.
"""

from pathlib import Path

import pytest
import torch
from engine_needs import needs
from launching import Launcher, Trained, agree

FAMILIES = ("eagle3", "causal")
SPREAD = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")

pytestmark = needs("deepspeed")


@pytest.fixture(scope="module")
def launcher(target_folder, tmp_path_factory: pytest.TempPathFactory) -> Launcher:  # type: ignore[no-untyped-def]
    return Launcher.prepared(tmp_path_factory.mktemp("deepspeed"), target_folder())


@pytest.fixture(scope="module")
def alone(launcher: Launcher) -> dict[str, Trained]:
    """One process, whose steps take in four batches."""
    return {
        family: launcher.run(
            None, launcher.folder / f"alone-{family}", launcher.recipe(family, accumulation=4)
        )
        for family in FAMILIES
    }


@pytest.mark.parametrize(
    ("how", "family"),
    [*((how, "eagle3") for how in SPREAD), ("zero2", "causal"), ("zero3", "causal")],
)
def test_two_processes_with_accumulation_train_what_one_does(
    how: str, family: str, launcher: Launcher, alone: dict[str, Trained]
) -> None:
    recipe = launcher.recipe(family, accumulation=2)
    together = launcher.run(how, launcher.folder / f"{how}-{family}", recipe)
    agree(together, alone[family])


@pytest.mark.parametrize("how", ["zero2", "zero3"])
def test_a_longer_run_goes_on_to_the_same_bits(
    how: str, launcher: Launcher, tmp_path: Path
) -> None:
    recipe, constant = launcher.recipe("eagle3"), "train.schedule=constant"
    whole = launcher.run(how, tmp_path / "whole", recipe, constant)
    launcher.run(how, tmp_path / "cut", recipe, constant, "train.steps=3")
    rest = launcher.run(how, tmp_path / "cut", recipe, constant)
    assert "going on from step 3 of 6" in rest.errors
    for name, tensor in rest.tensors.items():
        assert torch.equal(tensor, whole.tensors[name]), name


def test_a_sharded_target_stays_out_of_the_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    bare = Launcher(launcher.folder, launcher.target, tmp_path / "bare")
    recipe = bare.recipe("eagle3")
    bare.collect(recipe, "collect.distributions=none")
    whole = bare.run(None, tmp_path / "whole", bare.recipe("eagle3", accumulation=2))
    spread = bare.run("zero2", tmp_path / "spread", recipe, "train.target=sharded")
    agree(spread, whole)
    saved = sum(p.stat().st_size for p in (tmp_path / "spread" / "step-000006").rglob("*.pt"))
    alone = sum(p.stat().st_size for p in (tmp_path / "whole" / "step-000006").iterdir())
    assert saved < 2 * alone


def test_other_processes_cannot_read_its_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    recipe, out = launcher.recipe("eagle3"), tmp_path / "out"
    launcher.run("zero2", out, recipe, "train.steps=2")
    refused = launcher.run(None, out, recipe, "train.steps=4")
    assert refused.code == 2
    assert "was saved under DeepSpeed ZeRO-2 and this is one process" in refused.errors
