"""What training reads, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, Recipe, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train import loop
from draftsmith.train.checkpoints import checkpoints
from draftsmith.train.corpus import load_data
from draftsmith.train.objective import Objective, bind_objective

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


def bound(recipe: Recipe) -> Objective:
    return bind_objective(recipe.objective, recipe.serving)


def test_a_gradient_that_is_not_finite_stops_the_run(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(save_every=2)
    optimise, done = loop._Run._optimise, 0

    def poisoned(self: Any, *args: Any) -> float:
        nonlocal done
        done += 1
        if done == 4:
            next(iter(self.drafter.trainable())).data.fill_(float("nan"))
        return optimise(self, *args)

    monkeypatch.setattr(loop._Run, "_optimise", poisoned)
    with pytest.raises(UserError, match=r"gradient is not finite .*lower train\.lr"):
        fit(recipe, run_folder)
    weights = load_file(checkpoints(run_folder)[-1] / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in weights.values())


def test_records_of_another_target_are_refused(
    load_tiny: Any, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    other = load_tiny(intermediate_size=40)
    with pytest.raises(UserError, match="collected from another target"):
        load_data(make_recipe(), other, store, bound(make_recipe()))


def test_records_without_the_layers_are_refused(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    recipe = make_recipe()
    recipe.drafter["taps"] = (0, 1, 2)
    with pytest.raises(UserError, match=r"holds layers \[1, 1, 2\], the drafter reads \[0, 1, 2\]"):
        load_data(recipe, tiny_target, store, bound(recipe))


def test_layers_are_read_in_the_drafters_order(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory, records: list[Record]
) -> None:
    recipe = make_recipe()
    recipe.drafter["taps"] = (2, 1, 1)
    data = load_data(recipe, tiny_target, store, bound(recipe))
    stored = {r.key: r.states for r in records}
    for record in data.training:
        one, other, two = stored[record.key].taps.chunk(3, -1)  # type: ignore[union-attr]
        assert torch.equal(record.states.taps, torch.cat([two, one, other], -1))  # type: ignore[union-attr]


def test_states_that_were_not_kept_are_recomputed(
    tiny_target: Target,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    bare = RecordStore.create(tmp_path, {**store.settings, "distributions": "none"})
    bare.add([replace(r, states=None) for r in records])
    kept, redone = (
        load_data(make_recipe(), tiny_target, s, bound(make_recipe())) for s in (store, bare)
    )
    assert [r.key for r in kept.training] == [r.key for r in redone.training]
    for a, b in zip(kept.training, redone.training, strict=True):
        assert a.states is not None and b.states is not None
        for name in ("hidden", "log_z", "taps"):
            torch.testing.assert_close(
                getattr(a.states, name), getattr(b.states, name), rtol=1e-4, atol=1e-4
            )


def test_splits_and_laws_go_where_they_belong(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    data = load_data(make_recipe(), tiny_target, store, bound(make_recipe()))
    assert {r.split for r in data.training} == {"train"}
    assert {r.split for r in data.held_out} == {"heldout"}
    assert len(data.training) + len(data.held_out) == 40
    assert data.domains == ("a", "b")


def test_an_unknown_objective_is_refused_before_training(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    recipe = replace(make_recipe(), objective=ObjectiveSection(loss="kld"))
    with pytest.raises(UserError, match="'kld'"):
        fit(recipe, run_folder)
    assert not (run_folder / "metrics.jsonl").exists()


def test_held_out_figures_are_logged_by_domain(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    fit(make_recipe(steps=4), run_folder)
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (row,) = [r for r in map(json.loads, lines) if r["kind"] == "heldout"]
    for name in ("tokens_per_round", "captured_mass", "overlap"):
        assert {f"{name}/a", f"{name}/b"} <= row.keys()
    assert 1.0 < row["tokens_per_round"] <= 3.0, "γ = 2"
    assert row["overlap/a"] <= row["captured_mass/a"] <= 1.0001


def test_held_out_figures_are_of_the_objectives_law_alone(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    """An estimate is valid on samples of its own law; the fixture holds out T = 1 only."""
    served = ServingSection((LawSection(0.7),))
    recipe = replace(make_recipe(), serving=served)
    data = load_data(recipe, tiny_target, store, bound(recipe))
    assert data.held_out == [] and len(data.training) > 0
    for judged in (
        replace(recipe, train=replace(recipe.train, patience=3)),
        replace(recipe, objective=ObjectiveSection(then="rounds", switch_overlap=0.5)),
    ):
        with pytest.raises(UserError, match=r"no held-out replies under T=0\.7"):
            load_data(judged, tiny_target, store, bound(judged))


@pytest.mark.parametrize("loss", ["ce", {"fkl": 0.5, "ce": 0.5}])
def test_the_sampled_token_is_only_trained_on_where_it_is_a_sample_of_p(
    loss: Any, tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    recipe = replace(make_recipe(), objective=ObjectiveSection(loss=loss))
    data = load_data(recipe, tiny_target, store, bound(recipe))
    used = {data.training[i].law.temperature for batch in data.plan.epoch(0) for i in batch}
    assert used == {1.0}
    assert data.lawful == sum(r.law.temperature == 1.0 for r in data.training)
