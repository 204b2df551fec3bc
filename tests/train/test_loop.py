"""The training loop: it learns, splits and restarts change no number, bad input is refused."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import crash_after, largest_difference, log_of, stop_after
from rich.console import Console
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import ObjectiveSection, Recipe
from draftsmith.configs.training import TrainSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter, read_own
from draftsmith.train import loop
from draftsmith.train.batches import Plan
from draftsmith.train.checkpoints import checkpoints
from draftsmith.train.optimizer import learning_rate

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]
FAMILIES = ["eagle3", "causal"]


# ---- learning


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss_and_raises_overlap(
    family: str, fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    recipe = make_recipe(family, steps=30, lr=1e-2, eval_every=30)
    fit(recipe, run_folder)
    rows = log_of(run_folder, "train")
    begin, end = rows[:5], rows[-5:]
    for name, sign in (("loss", -1), ("overlap", 1)):
        change = sum(r[name] for r in end) - sum(r[name] for r in begin)
        assert sign * change / 5 > 0.03, name
    (last,) = log_of(run_folder, "heldout")
    assert 0 < last["overlap_step_1"] <= last["captured_mass"] <= 1.0001
    assert {"overlap/a", "overlap/b"} <= last.keys()


def test_the_drafter_folder_says_what_it_is(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, tiny_target: Target
) -> None:
    fit(make_recipe(steps=3), run_folder)
    own = read_own(run_folder / "drafter")
    assert own["family"] == "eagle3"
    assert own["trained"]["steps"] == 3
    assert own["target"]["weights"] == tiny_target.provenance["weights"]
    assert load_drafter(run_folder / "drafter", tiny_target).taps == (1, 1, 2)


# ---- splits of a batch


@pytest.mark.parametrize("then", [None, "rounds", "accepted_length"])
@pytest.mark.parametrize("family", FAMILIES)
def test_accumulation_changes_no_parameter(
    family: str,
    then: Any,
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    records: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain descent shows differences of gradients that Adam's division would hide or inflate."""
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda groups, lr, **other: torch.optim.SGD(groups, lr=1.0)
    )
    training = [r for r in records if r.split == "train"]
    by_length = [next(i for i, r in enumerate(training) if len(r.reply) == n) for n in (1, 2, 3)]
    rows = by_length + [i for i, r in enumerate(training) if len(r.reply) > 4][:5]
    results = []
    for size in (8, 4, 1):
        parts = [rows[i : i + size] for i in range(0, 8, size)]
        monkeypatch.setattr(Plan, "epoch", lambda self, number, parts=parts: parts)
        recipe = make_recipe(family, steps=1, accumulation=8 // size, warmup_steps=0, clip=10.0)
        recipe = replace(recipe, objective=ObjectiveSection(then=then, switch_at=0.0))
        results.append(fit(recipe, tmp_path / str(size)))
    monkeypatch.setattr(Plan, "epoch", lambda self, number: [rows])
    nearly = make_recipe(family, steps=1, accumulation=1, warmup_steps=0, lr=1.0, clip=1e-3)
    start = fit(nearly, tmp_path / "start")
    assert largest_difference(results[0], start) > 1e-3, "the step was no step"
    assert largest_difference(results[0], results[1]) < 1e-6
    assert largest_difference(results[0], results[2]) < 1e-6


# ---- learning rate


@pytest.mark.parametrize(
    ("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)]
)
def test_the_rate_rises_falls_and_ends(schedule: Any, middle: float) -> None:
    section = TrainSection(warmup_steps=4, schedule=schedule, final_lr_fraction=0.1)
    rates = [learning_rate(step, 24, section) for step in range(25)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[14] == pytest.approx(middle)
    assert rates[24] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_the_rate_advances_once_an_optimiser_step(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []

    class Recorded(torch.optim.AdamW):
        def step(self, *args: Any, **options: Any) -> Any:
            used.append(self.param_groups[0]["lr"])
            return super().step(*args, **options)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    recipe = make_recipe(
        steps=10, accumulation=4, lr=0.01, warmup_steps=2, schedule="linear", final_lr_fraction=0.0
    )
    stop_after(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, run_folder)
    fit(recipe, run_folder)
    expected = [0.5, 1.0, *(1 - (step - 2) / 8 for step in range(2, 10))]
    assert used == pytest.approx([0.01 * factor for factor in expected])
    assert log_of(run_folder, "train")[-1]["lr"] == 0.0


# ---- stopping and going on


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("interrupt", "error", "found"),
    [(stop_after, KeyboardInterrupt, [5, 7]), (crash_after, RuntimeError, [5])],
)
def test_a_stopped_run_ends_where_one_in_one_piece_does(
    interrupt: Any,
    error: type[BaseException],
    found: list[int],
    family: str,
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe(family, accumulation=2, log_every=3, tokens_per_batch=60)
    straight = fit(recipe, tmp_path / "straight")
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        with pytest.raises(error):
            fit(recipe, tmp_path / "stopped")
    kept = [int(path.name[-6:]) for path in checkpoints(tmp_path / "stopped")]
    assert kept == found
    assert not (tmp_path / "stopped" / "drafter").exists()
    console = Console(file=io.StringIO(), width=200)
    resumed = fit(recipe, tmp_path / "stopped", console=console)
    assert f"going on from step {found[-1]} of 12" in console.file.getvalue()
    assert largest_difference(straight, resumed) == 0.0
    rows = log_of(tmp_path / "stopped")
    assert rows == log_of(tmp_path / "straight")
    assert [r["step"] for r in rows if r["kind"] == "train"] == [3, 6, 9, 12]


def test_a_half_written_checkpoint_is_passed_over(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    straight = fit(recipe, tmp_path / "straight")
    with monkeypatch.context() as patch:
        crash_after(patch, 11)
        with pytest.raises(RuntimeError):
            fit(recipe, tmp_path / "cut")
    weights = tmp_path / "cut" / "step-000010" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    console = Console(file=io.StringIO(), width=200)
    resumed = fit(recipe, tmp_path / "cut", console=console)
    said = console.file.getvalue()
    assert "step-000010 is damaged" in said and "going on from step 5" in said
    assert largest_difference(straight, resumed) == 0.0


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"steps": 7, "save_every": 5}, [5, 7]),
        ({"steps": 4, "save_every": 100}, [4]),
        ({"steps": 6, "save_every": 3}, [3, 6]),
        ({"steps": None, "epochs": 1.0, "save_every": 1000}, None),
    ],
)
def test_the_last_step_is_saved_once(
    options: dict[str, Any],
    kept: list[int] | None,
    fit: Trainer,
    make_recipe: RecipeFactory,
    run_folder: Path,
) -> None:
    fit(make_recipe(**options), run_folder)
    found = [int(path.name[-6:]) for path in checkpoints(run_folder)]
    last = log_of(run_folder, "train")[-1]["step"]
    assert found == (kept or [last])
    assert log_of(run_folder, "heldout")[-1]["step"] == last


def test_a_finished_drafter_is_not_trained_again(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fit(make_recipe(steps=3), run_folder)
    monkeypatch.setattr(loop, "new_drafter", lambda *args: pytest.fail("began to train"))
    console = Console(file=io.StringIO(), width=200)
    again = fit(make_recipe(steps=3), run_folder, console=console)
    assert largest_difference(first, again) == 0.0
    assert "already trained" in console.file.getvalue()


@pytest.mark.parametrize(
    "change", [{"accumulation": 3}, {"lr": 0.5}, {"unroll": 3}], ids=lambda c: next(iter(c))
)
def test_a_folder_of_another_run_is_refused(
    change: dict[str, Any], fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    fit(make_recipe(steps=3), run_folder)
    with pytest.raises(UserError, match=r"run of other settings \(train differ\)"):
        fit(make_recipe(**{"steps": 3, **change}), run_folder)


def test_a_finished_run_can_be_made_longer(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path
) -> None:
    """Order and weights go on where they were, so a constant rate ends where one run would."""
    recipe = make_recipe(schedule="constant")
    straight = fit(recipe, tmp_path / "straight")
    fit(make_recipe(schedule="constant", steps=7), tmp_path / "longer")
    console = Console(file=io.StringIO(), width=200)
    longer = fit(recipe, tmp_path / "longer", console=console)
    said = console.file.getvalue()
    assert "going on with train.steps 12 instead of 7" in said
    assert "going on from step 7 of 12" in said
    assert largest_difference(straight, longer) == 0.0
    assert [r["loss"] for r in log_of(tmp_path / "longer", "train")] == [
        r["loss"] for r in log_of(tmp_path / "straight", "train")
    ]
    assert read_own(tmp_path / "longer" / "drafter")["trained"]["steps"] == 12


def test_options_of_the_log_alone_do_not_make_another_run(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    stop_after(monkeypatch, 6)
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, run_folder)
    fit(make_recipe(log_every=4, save_every=50, keep=1), run_folder)
    assert [r["step"] for r in log_of(run_folder, "train")] == [1, 2, 3, 4, 5, 6, 8, 12]
