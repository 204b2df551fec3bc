"""Weights & Biases: an offline run is kept in the run folder, without a key or a network."""

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.configs.recipe import Recipe
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train.loop import train


def test_an_offline_run_is_kept_beside_the_drafter(
    tiny_target: Target,
    store: RecordStore,
    make_recipe: Callable[..., Recipe],
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    recipe = make_recipe(steps=2, wandb="offline")
    train(recipe, tiny_target, store, run_folder, Console(file=io.StringIO()))
    (kept,) = run_folder.glob("wandb/offline-run-*/*.wandb")
    names = (b"train/loss", b"heldout/overlap_step_1")
    for _ in range(150):  # its own process writes the file, late on a busy machine
        content = kept.read_bytes()
        if all(name in content for name in names):
            break
        time.sleep(0.2)
    assert all(name in content for name in names)
