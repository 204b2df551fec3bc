"""The stages of a run: folders that never meet stale files, times that add up."""

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from draftsmith.configs.collection import DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import ObjectiveSection, Recipe
from draftsmith.scripts.pipeline import Run, check_recipe, with_prompts


@pytest.fixture
def run(recipe_file: Path, tmp_path: Path) -> Run:
    return Run(load_recipe(recipe_file), tmp_path / "run", Console(file=io.StringIO(), width=400))


def changed(run: Run, **sections: object) -> Run:
    """The same run folder and target under a changed recipe."""
    other = Run(replace(run.recipe, **sections), run.root, run.console)  # type: ignore[arg-type]
    other._target = run.target
    return other


def test_a_changed_recipe_meets_no_stale_files(run: Run) -> None:
    store = run.collect()
    assert run.collect().folder == store.folder
    more = changed(run, collect=replace(run.recipe.collect, max_new_tokens=6)).collect()
    seeded = changed(run, seed=1).collect()
    assert len({store.folder, more.folder, seeded.folder}) == 3

    drafter = run.train(store)
    assert run.train(store) == drafter
    slower = changed(run, train=replace(run.recipe.train, lr=1e-4)).train(store)
    other = changed(run, objective=ObjectiveSection("fkl")).train(store)
    elsewhere = run.train(seeded)
    assert len({drafter, slower, other, elsewhere}) == 4
    measured = changed(run, eval=replace(run.recipe.eval, bootstrap=7)).train(store)
    assert measured == drafter, "what comes later does not train again"


def test_rejected_rows_are_counted_by_reason(run: Run, recipe_file: Path) -> None:
    source = Path(run.recipe.domains[0].source)
    with source.open("a", encoding="utf-8") as handle:
        handle.write('{"answer": 1}\n' * 12)
    assert len(run.prepared) == 16
    said = run.console.file.getvalue()  # type: ignore[attr-defined]
    assert "28 rows: 16 prompts kept" in said
    row = next(line for line in said.splitlines() if f"{source.name}:9" in line.replace(" ", ""))
    assert "12" in row.split()


def test_times_add_up_over_restarts(tmp_path: Path, run: Run) -> None:
    for _ in range(2):
        with run._stage("collect"):
            time.sleep(0.02)
    with pytest.raises(KeyboardInterrupt), run._stage("train"):
        raise KeyboardInterrupt
    stages = {s["stage"]: s["seconds"] for s in run.stages()}
    assert list(stages) == ["collect", "train"]
    assert stages["collect"] >= 0.04
    assert json.loads((run.root / "stages.json").read_text(encoding="utf-8")) == stages


def test_prompts_on_the_command_line_are_all_held_out() -> None:
    recipe = Recipe(name="x")
    changed = with_prompts(recipe, ["code", "mine=a/b.jsonl", "c/d.jsonl"], 5)
    assert changed.domains == (
        DomainSection("code", "code", holdout=1.0, max_rows=5),
        DomainSection("mine", "a/b.jsonl", holdout=1.0, max_rows=5),
        DomainSection("d", "c/d.jsonl", holdout=1.0, max_rows=5),
    )
    assert changed.name != recipe.name, "a run folder of its own"
    assert with_prompts(recipe, ["code"], None).name != changed.name


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(name="x", drafter={"family": "eagel"}), "unknown drafter.family 'eagel'"),
        (Recipe(name="x", drafter={"family": "eagle3", "taps": [1]}), "takes three layers"),
        (Recipe(name="x", objective=ObjectiveSection(loss="kl")), "'kl'"),
    ],
)
def test_a_recipe_is_checked_before_a_model_is_loaded(recipe: Recipe, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_recipe(recipe)


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", False)])
def test_training_is_lent_the_target_where_there_is_no_room_for_two(
    run: Run, device: str, kept: bool
) -> None:
    """So that an absent target's layers go when training lets go of them."""
    target: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    run._target = target
    assert run._lent() is target
    assert (run._target is target) is kept
