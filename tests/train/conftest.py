"""A tiny target's answers, and recipes that train on them within a second."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.recipe import (
    CollectSection,
    EvalSection,
    Recipe,
    TargetSection,
    TrainSection,
)
from draftsmith.data.collect import collect_settings
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law

TAPS = (1, 1, 2)  # what an EAGLE head reads of four layers
LIMIT = 14

RecipeFactory = Callable[..., Recipe]


@pytest.fixture(scope="session")
def records(tiny_target: Target) -> list[Record]:
    """40 conversations of two domains with states, replies of 1 to 14 tokens."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(40):
        ids = torch.randint(3, tiny_target.vocab_size, (3 + i % 9,), generator=generator)
        split = "heldout" if i % 4 == 3 else "train"
        law = Law((0.7, 1.0)[i % 2])
        requests.append(Request(f"p{i}", "ab"[i // 4 % 2], split, tuple(ids.tolist()), law, i))
    settings = GatherSettings(LIMIT, batch_size=8, taps=TAPS, keep_states=True)
    full = answer(tiny_target, requests, settings)
    return [cut(r, 1 + (5 * i) % LIMIT) for i, r in enumerate(full)]


def cut(record: Record, reply: int) -> Record:
    """The record as it would be had the limit been `reply` tokens."""
    reply = min(reply, len(record.reply))
    end = record.prompt_len + reply
    assert record.states is not None
    states = replace(
        record.states,
        hidden=record.states.hidden[:reply],
        log_z=record.states.log_z[:reply],
        taps=record.states.taps[: end - 1],
    )
    return replace(record, ids=record.ids[:end], states=states)


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


@pytest.fixture(scope="session")
def store(
    records: list[Record], tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> RecordStore:
    """The records on disk, as `collect` leaves them."""
    folder = tmp_path_factory.mktemp("records")
    recipe = Recipe(name="tiny", collect=CollectSection(max_new_tokens=LIMIT, batch_size=8))
    kept = RecordStore.create(folder, collect_settings(recipe, tiny_target, TAPS, []))
    kept.add(records[:25])
    kept.add(records[25:])
    return kept.finish({})


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"
