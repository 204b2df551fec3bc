"""Runs that become longer, are stopped at a bad moment, signalled twice, or cannot be."""

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from interrupted import crash_after, largest_difference, log_of, stop_after
from rich.console import Console
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import ObjectiveSection, Recipe
from draftsmith.configs.training import OnPolicySection
from draftsmith.data.store import RecordStore
from draftsmith.data.work import start_processes
from draftsmith.drafters.checkpoint import read_own
from draftsmith.train import progress
from draftsmith.train.checkpoints import checkpoints
from draftsmith.train.distributed import make_accelerator
from draftsmith.train.judge import Judge
from draftsmith.train.loop import train_settings
from draftsmith.train.progress import stop_signal

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


# ---- longer runs


def test_a_longer_run_that_is_stopped_goes_on_too(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends, the shorter one's drafter is not taken for its own."""
    recipe = make_recipe(schedule="constant")
    straight = fit(recipe, tmp_path / "straight")
    fit(make_recipe(schedule="constant", steps=7), tmp_path / "longer")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, tmp_path / "longer")
    assert largest_difference(fit(recipe, tmp_path / "longer"), straight) == 0.0
    assert read_own(tmp_path / "longer" / "drafter")["trained"]["steps"] == 12


def test_the_rate_of_a_longer_run_is_its_own_from_the_first_step(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    options = {"schedule": "linear", "final_lr_fraction": 0.0, "warmup_steps": 2, "lr": 0.01}
    fit(make_recipe(steps=6, **options), run_folder)
    used: list[float] = []
    step = torch.optim.AdamW.step

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        used.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noted)
        fit(make_recipe(steps=10, **options), run_folder)
    assert used == pytest.approx([0.01 * (1 - (s - 2) / 8) for s in range(6, 10)])


def test_a_shorter_run_is_refused_where_more_is_done(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    fit(make_recipe(steps=7), run_folder)
    with pytest.raises(UserError, match=r"has done 7 steps already, and 3 are asked for"):
        fit(make_recipe(steps=3), run_folder)


def test_draft_lengths_are_part_of_a_run_that_drafts_its_records(
    make_recipe: RecipeFactory, store: RecordStore
) -> None:
    plain, renewing = make_recipe(), make_recipe(on_policy=OnPolicySection(drafted=0.5))

    def settings(recipe: Recipe, count: int) -> dict[str, Any]:
        served = replace(recipe.serving, num_draft_tokens=count)
        return train_settings(replace(recipe, serving=served), store)

    assert settings(plain, 1) == settings(plain, 2)
    assert settings(renewing, 1) != settings(renewing, 2)


# ---- signals


def test_a_signal_that_comes_twice_still_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers pass on what the whole group was sent."""
    with stop_signal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        monkeypatch.setattr(progress, "_SAME_WISH", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("options", [{}, {"patience": 1}])
def test_a_signal_does_not_wait_for_an_evaluation(
    options: dict[str, Any],
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe(eval_every=4, ema=0.5, **options)
    straight = fit(recipe, tmp_path / "straight")
    judged: list[int] = []
    evaluate = Judge.evaluate

    def noted(self: Judge, at: Any, log: Any) -> Any:
        judged.append(at.step)
        return evaluate(self, at, log)

    monkeypatch.setattr(Judge, "evaluate", noted)
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, tmp_path / "cut")
    assert judged == [4] and checkpoints(tmp_path / "cut")[-1].name == "step-000008"
    assert largest_difference(fit(recipe, tmp_path / "cut"), straight) == 0.0
    assert judged[:2] == [4, 8], "it follows at once"
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "straight")


# ---- what the second objective may be trained on


@pytest.mark.parametrize(
    "policy",
    [
        OnPolicySection(drafted=1.0, every=2, max_new_tokens=8),
        OnPolicySection(drafted=0.5, resampled=0.5, every=2, max_new_tokens=8),
    ],
    ids=["drafted", "both"],
)
def test_it_never_sees_what_the_drafter_wrote(
    policy: OnPolicySection,
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe(on_policy=policy, save_every=2)
    recipe = replace(recipe, objective=ObjectiveSection(then="rounds", switch_at=0.4))
    straight = fit(recipe, tmp_path / "straight")
    for crash in (4, 7, 9):  # before, at and after the switch
        with monkeypatch.context() as patch:
            crash_after(patch, crash)
            with pytest.raises(RuntimeError, match="power cut"):
                fit(recipe, tmp_path / str(crash))
        assert largest_difference(fit(recipe, tmp_path / str(crash)), straight) == 0.0
    (folder,) = sorted((tmp_path / "straight").glob("renewed-*"))[-1:] or [None]
    if policy.resampled:
        assert {r.origin for r in RecordStore.open(folder).records()} == {"target"}


# ---- launchers


def test_the_recipe_alone_says_how_many_batches_a_step_has(
    make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    section = make_recipe(accumulation=2).train
    found: Accelerator = make_accelerator(section, start_processes(torch.device("cpu")), tmp_path)
    assert found.gradient_accumulation_steps == 2


def test_best_weights_that_are_gone_are_missed(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    sound = Judge.sound

    def lost(self: Judge, step: int) -> Any:
        shutil.rmtree(run_folder / "best")
        return sound(self, step)

    monkeypatch.setattr(Judge, "sound", lost)
    with pytest.raises(UserError, match=r"best is gone, which train\.result best"):
        fit(make_recipe(result="best"), run_folder)
    assert not (run_folder / "drafter").exists()
    assert json.loads((run_folder / "settings.json").read_text())["over"] is False


def test_progress_says_what_precision_it_is(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    console = Console(file=io.StringIO(), width=200)
    found = fit(make_recipe(mixed_precision="bf16", steps=3), run_folder, console=console)
    assert "training on cpu in bf16, weights float32" in console.file.getvalue()
    assert all(t.dtype == torch.float32 for t in found.values() if t.is_floating_point())
    changed = next(t for n, t in found.items() if "q_proj" in n)
    assert not torch.equal(changed, changed.bfloat16().float()), "weights are not rounded"
