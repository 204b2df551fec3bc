"""Schedules of objectives, the moving average, and patience."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import crash_after, largest_difference, log_of, stop_after
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, Recipe, ServingSection
from draftsmith.drafters.checkpoint import read_own
from draftsmith.train import corpus, judge, run
from draftsmith.train.checkpoints import checkpoints

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


def scheduled(recipe: Recipe, **objective: Any) -> Recipe:
    return replace(recipe, objective=ObjectiveSection(**objective))


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, set[float]]]:
    """Of every optimiser step: whether the second objective ran, and the laws of its records."""
    seen: list[tuple[bool, set[float]]] = []
    optimise, collated = run.Run._optimise, corpus.collate
    laws: dict[int, set[float]] = {}
    kept = []  # so that no address comes twice

    def watched(self: Any, window: Any, meter: Any, at: Any, stop: Any) -> float:
        switched = at.switched is not None
        seen.append((switched, set().union(*(laws[b.ids.data_ptr()] for b in window))))
        return optimise(self, window, meter, at, stop)

    def noted(records: Any, *args: Any) -> Any:
        kept.append(collated(records, *args))
        laws[kept[-1].ids.data_ptr()] = {r.law.temperature for r in records}
        return kept[-1]

    monkeypatch.setattr(run.Run, "_optimise", watched)
    monkeypatch.setattr(corpus, "collate", noted)
    return seen


@pytest.mark.parametrize("then", ["rounds", "accepted_length"])
def test_the_second_objective_takes_over_with_the_records_it_is_valid_on(
    then: str, fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, phases: Any
) -> None:
    fit(scheduled(make_recipe(), then=then, switch_at=0.5), run_folder)
    assert [switched for switched, _ in phases] == [False] * 6 + [True] * 6
    assert set().union(*(laws for _, laws in phases[:6])) == {0.7, 1.0}
    assert set().union(*(laws for _, laws in phases[6:])) == {1.0}


def test_enough_overlap_switches_earlier(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, phases: Any
) -> None:
    recipe = scheduled(make_recipe(), then="rounds", switch_at=1.0, switch_overlap=1e-6)
    fit(recipe, run_folder)
    assert [switched for switched, _ in phases] == [False] * 4 + [True] * 8  # evaluated every 4


def test_training_rounds_needs_samples_of_the_law(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    recipe = scheduled(make_recipe(), then="rounds")
    served = ServingSection((LawSection(0.6, top_k=3),))
    with pytest.raises(UserError, match=r"only valid on replies sampled under T=0.6 top_k=3"):
        fit(replace(recipe, serving=served), run_folder)


@pytest.mark.parametrize("then", ["rounds", "accepted_length"])
def test_a_run_stopped_in_the_second_half_ends_where_one_in_one_piece_does(
    then: str,
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = scheduled(make_recipe(ema=0.8, patience=9), then=then, switch_at=0.25)
    straight = fit(recipe, tmp_path / "straight")
    with monkeypatch.context() as patch:
        crash_after(patch, 8)
        with pytest.raises(RuntimeError):
            fit(recipe, tmp_path / "stopped")
    resumed = fit(recipe, tmp_path / "stopped")
    assert largest_difference(straight, resumed) == 0.0
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "straight")


def test_the_moving_average_is_what_is_saved(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path
) -> None:
    """Its weights after one step are those of the start, the first update being a copy."""
    one, few = (fit(make_recipe(steps=n), tmp_path / f"plain {n}") for n in (1, 3))
    averaged = fit(make_recipe(steps=3, ema=0.5, warmup_steps=2), tmp_path / "averaged")
    name = next(n for n in one if "q_proj" in n)
    two = fit(make_recipe(steps=2), tmp_path / "plain 2")[name]
    expected = 0.5 * (0.5 * one[name] + 0.5 * two) + 0.5 * few[name]
    torch.testing.assert_close(averaged[name], expected, rtol=1e-4, atol=1e-6)
    assert float((averaged[name] - few[name]).abs().max()) > 1e-4


def test_patience_ends_training_with_the_best_weights(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.2, 1.5, 1.4, 1.5, 1.9])
    monkeypatch.setattr(
        judge, "held_out_figures",
        lambda *args: {"tokens_per_round": next(taus), "overlap_step_1": 0.5},
    )  # fmt: skip
    stopped = fit(make_recipe(steps=12, eval_every=2, patience=2), tmp_path / "stopped")
    rows = log_of(tmp_path / "stopped", "heldout")
    assert [r["step"] for r in rows] == [2, 4, 6, 8]
    assert read_own(tmp_path / "stopped" / "drafter")["trained"]["steps"] == 4
    monkeypatch.setattr(judge, "held_out_figures", lambda *args: {})
    recipe = make_recipe(steps=12, eval_every=20, save_every=4)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, tmp_path / "four")
    best = load_file(checkpoints(tmp_path / "four")[-1] / "model.safetensors")
    name = next(n for n in stopped if "q_proj" in n)
    kept = next(t for n, t in best.items() if n.endswith(name))
    assert torch.equal(stopped[name], kept)
    best = load_file(tmp_path / "stopped" / "best" / "model.safetensors")
    assert torch.equal(stopped[name], best[name])
