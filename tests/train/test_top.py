"""A standalone LM learns from the most probable tokens alone, as servers tell them (B040)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.collection import CollectSection
from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import Recipe
from draftsmith.data.collection import collect_settings
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.top import top_of
from draftsmith.drafters.batch import records_with_states


@pytest.fixture
def told(records: list[Record], tiny_target: Target, tmp_path: Path) -> Any:
    """`told(k)`: the records with their k most probable tokens instead of states."""

    def make(k: int) -> RecordStore:
        section = CollectSection(max_new_tokens=14, batch_size=8, distributions="top", top=k)
        settings = collect_settings(Recipe("tiny", collect=section), tiny_target, ())
        store = RecordStore.create(tmp_path / f"top-{k}", settings)
        kept = []
        for record in records:
            assert record.states is not None
            top = top_of(tiny_target.logits(record.states.hidden), k)
            kept.append(replace(record, states=None, top=top))
        store.add("all", kept)
        return store.finish({})

    return make


@pytest.mark.parametrize("loss", ["fkl", "nla"])
def test_b040_all_tokens_told_train_as_states_do(
    loss: str, told: Any, fit: Any, make_recipe: Any, store: RecordStore, tmp_path: Path
) -> None:
    recipe = make_recipe("causal", steps=4, eval_every=4)
    recipe = replace(recipe, objective=replace(recipe.objective, loss=loss))
    from_states = fit(recipe, tmp_path / "states", store=store)
    from_all = fit(recipe, tmp_path / "all", store=told(400))
    from_few = fit(recipe, tmp_path / "few", store=told(8))
    for name, tensor in from_states.items():
        assert torch.allclose(from_all[name], tensor, atol=2e-3), name
        assert torch.isfinite(from_few[name]).all()
    assert any(not torch.allclose(from_few[n], t, atol=2e-3) for n, t in from_states.items())


def test_a_head_needs_more_than_the_most_probable_tokens(
    told: Any, fit: Any, make_recipe: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="most probable tokens alone"):
        fit(make_recipe("eagle3"), tmp_path / "head", store=told(8))


def test_evaluation_runs_the_target_itself(
    told: Any, tiny_target: Target, store: RecordStore
) -> None:
    """What was told bounds acceptance only; the target at hand knows it."""
    kept = {r.key: r for r in store.records("heldout")}
    for record in records_with_states(told(8), tiny_target, (1, 2), "heldout"):
        known, own = kept[record.key].states, record.states
        assert known is not None and own is not None
        assert torch.allclose(own.hidden, known.hidden, atol=1e-4)
        assert own.taps.shape == (len(record.ids) - 1, 2 * tiny_target.hidden_size)
