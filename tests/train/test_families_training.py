"""Every family that learns in the training loop: resumed, overfitted, refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interrupted import crash_after, largest_difference, log_of
from watching import LIMIT, answered, quiet, watch

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, Recipe, ServingSection
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import records_with_states
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.registry import trained_families
from draftsmith.eval.parity import parity
from draftsmith.train.loop import train

pytestmark = pytest.mark.usefixtures("one_thread")

SECTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"family": "eagle3", "draft_vocab_size": 100},
    "eagle3, low rank": {"family": "eagle3", "head_rank": 16},
    "eagle3, shaped": {"family": "eagle3", "draft_vocab_size": 100, "hidden_size": 24, "layers": 2},
    "dflash": {"family": "dflash"},
    "dflash, sequential": {"family": "dflash", "sequential": True},
    "causal": {"family": "causal", "layers": [0, 3]},
    "causal, narrow": {
        "family": "causal",
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "jump": {"family": "jump", "begin": 1, "end": 2, "draft_vocab_size": 100},
    "medusa": {"family": "medusa"},
    "medusa, frozen": {"family": "medusa", "shared_head": True, "train_head": False},
    "mlp": {"family": "mlp"},
    "mlp, reduced": {"family": "mlp", "draft_vocab_size": 100, "tie_weights": False},
}
SERVING = ServingSection((LawSection(0.0),), num_draft_tokens=3)


@pytest.fixture(scope="module")
def state_store(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> RecordStore:
    """Twenty greedy replies with all states of the target."""
    folder = tmp_path_factory.mktemp("records")
    return answered(tiny_target, folder, 20, Law(0.0), taps=(0, 1, 2, 3, 4))


@pytest.fixture
def make_family(make_recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    def make(kind: str, **options: Any) -> Recipe:
        return replace(make_recipe(unroll=3, **options), drafter=SECTIONS[kind], serving=SERVING)

    return make


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_stopped_run_ends_where_one_in_one_piece_does(
    kind: str,
    make_family: Callable[..., Recipe],
    fit: Any,
    state_store: RecordStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_family(kind, log_every=3, tokens_per_batch=60, ema=0.5, packing=True)
    straight = fit(recipe, tmp_path / "straight", store=state_store)
    with monkeypatch.context() as patch:
        crash_after(patch, 7)
        with pytest.raises(RuntimeError):
            fit(recipe, tmp_path / "stopped", store=state_store)
    resumed = fit(recipe, tmp_path / "stopped", store=state_store)
    assert largest_difference(straight, resumed) == 0.0
    rows = log_of(tmp_path / "stopped", "train")
    assert rows == log_of(tmp_path / "straight", "train")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_no_family_is_left_out() -> None:
    assert {section["family"] for section in SECTIONS.values()} == set(trained_families())


@pytest.mark.parametrize("kind", ["dflash", "dflash, sequential", "medusa", "mlp"])
def test_what_training_sees_is_what_decoding_accepts(
    kind: str,
    make_family: Callable[..., Recipe],
    tiny_target: Target,
    state_store: RecordStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overfitted on twenty rows (B069, B070)."""
    recipe = make_family(
        kind, steps=120, eval_every=120, tokens_per_batch=400, warmup_steps=10, log_every=20,
        save_every=1000, lr=3e-2,
    )  # fmt: skip
    seen = watch(monkeypatch)
    saved = train(recipe, tiny_target, state_store, tmp_path / "run", quiet())
    served = load_drafter(saved, tiny_target)
    rows = records_with_states(state_store, tiny_target, served.taps, "train")
    found = parity(tiny_target, served, rows, SERVING, LIMIT, seen.drafter)
    assert found.ok and found.warnings == (), found.lines
    figures = found.figures
    assert figures["agreement"] > 0.9 and figures["first_accepted"] > 0.9, found.lines
    assert figures["tokens_per_round"] == pytest.approx(figures["expected_tokens_per_round"])
    assert figures["tokens_per_round"] > 2.5


@pytest.mark.parametrize("kind", ["dflash", "medusa", "mlp"])
def test_a_head_that_is_not_unrolled_is_refused(
    kind: str,
    make_family: Callable[..., Recipe],
    fit: Any,
    state_store: RecordStore,
    tmp_path: Path,
) -> None:
    recipe = make_family(kind)
    recipe = replace(recipe, train=replace(recipe.train, unroll=2))
    with pytest.raises(UserError, match=r"take train\.unroll 3"):
        fit(recipe, tmp_path / "run", store=state_store)
