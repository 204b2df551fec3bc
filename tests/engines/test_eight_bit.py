"""Moments in 8 bits: a run learns, and goes on where it was stopped (torchao).

Needs torchao, whose optimiser compiles itself once a run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_needs import needs
from launching import Launcher

pytestmark = needs("torchao")


def test_a_run_with_moments_in_8_bits_goes_on_to_the_same_bits(
    target_folder: Any, tmp_path: Path
) -> None:
    launcher = Launcher.prepared(tmp_path, target_folder(hidden_size=64))
    options = ("train.optimizer=adamw_8bit", "train.schedule=constant")
    recipe = launcher.recipe("eagle3")
    whole = launcher.run(None, tmp_path / "whole", recipe, *options)
    launcher.run(None, tmp_path / "cut", recipe, *options, "train.steps=3")
    rest = launcher.run(None, tmp_path / "cut", recipe, *options)
    assert "going on from step 3 of 6" in rest.errors
    for name, tensor in rest.tensors.items():
        assert torch.equal(tensor, whole.tensors[name]), name
    full = launcher.run(None, tmp_path / "full", recipe, "train.schedule=constant")
    losses = whole.figures("train", "loss")
    assert losses == pytest.approx(full.figures("train", "loss"), rel=0.05)
    assert losses != full.figures("train", "loss"), "the moments were rounded"
