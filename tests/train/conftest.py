"""A tiny target's answers, and recipes that train on them within a second."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.configs.collection import CollectSection
from draftsmith.configs.recipe import EvalSection, Recipe, TargetSection
from draftsmith.configs.training import TrainSection
from draftsmith.data.collection import collect_settings
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train.loop import train

TAPS = (1, 1, 2)  # as in the records of tests/conftest.py
LIMIT = 14

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


@pytest.fixture
def make_recipe(tiny_target: Target) -> RecipeFactory:
    """`make_recipe(family, **train options)`: a recipe for 12 short steps."""

    def make(family: str = "eagle3", **options: Any) -> Recipe:
        small = {"eagle3": {"draft_vocab_size": 100}, "causal": {"layers": [0, 3]}}[family]
        train: dict[str, Any] = {
            "steps": 12,
            "tokens_per_batch": 40,
            "warmup_steps": 2,
            "unroll": 2,
            "lr": 1e-2,
            "log_every": 1,
            "eval_every": 4,
            "save_every": 5,
            "mixed_precision": "no",
        }
        return Recipe(
            name="tiny",
            target=TargetSection(name="unused", device="cpu"),
            collect=CollectSection(max_new_tokens=LIMIT, batch_size=8),
            drafter={"family": family, **small},
            train=TrainSection(**{**train, **options}),
            eval=EvalSection(),
        )

    return make


@pytest.fixture
def findable(make_recipe: RecipeFactory, tiny_target: Target) -> RecipeFactory:
    """`findable(family, **train options)`: such a recipe whose target can be found."""

    def make(*args: Any, **options: Any) -> Recipe:
        place = tiny_target.model.config._name_or_path
        section = TargetSection(name=place, device="cpu")
        return replace(make_recipe(*args, **options), target=section)

    return make


@pytest.fixture(scope="session")
def store(
    records: list[Record], tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> RecordStore:
    """The records on disk, as `collect` leaves them."""
    folder = tmp_path_factory.mktemp("records")
    recipe = Recipe(name="tiny", collect=CollectSection(max_new_tokens=LIMIT, batch_size=8))
    kept = RecordStore.create(folder, collect_settings(recipe, tiny_target, TAPS))
    kept.add("a", records[:25])
    kept.add("b", records[25:])
    return kept.finish({})


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def fit(tiny_target: Target, store: RecordStore) -> Trainer:
    """`fit(recipe, folder)` trains and returns the drafter's tensors."""

    def run(recipe: Recipe, folder: Path, **changes: Any) -> dict[str, Tensor]:
        console = changes.pop("console", Console(file=io.StringIO()))
        drafter = train(recipe, tiny_target, changes.pop("store", store), folder, console)
        assert drafter == folder / "drafter"
        return load_file(drafter / "model.safetensors")

    return run
