"""Drafters that might be: how they are named, what the grid holds, how they are made untrained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.registry import FAMILIES
from draftsmith.eval.candidates import asked_for, built, other_families, own_grid, weights

SIZED = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_a_candidate_is_read_as_a_recipe_would_be() -> None:
    found = asked_for("family=causal, layers=[0,3],draft_vocab_size=64")
    assert found.section == {"family": "causal", "layers": [0, 3], "draft_vocab_size": 64}
    assert found.config == CausalConfig(layers=(0, 3), draft_vocab_size=64)
    assert found.name == "causal layers=[0,3] draft_vocab_size=64" and found.asked
    inner = asked_for("family=causal,config={model_type: llama, hidden_size: 16}")
    assert inner.section["config"] == {"model_type": "llama", "hidden_size": 16}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=[0]", "must be written family=NAME,option=value"),
        ("family=causal,layers", "must be written family=NAME"),
        ("causal", "must be written family=NAME"),
        ("family=causal,layers=[0", "not valid YAML"),
        ("family=casual", "unknown drafter.family 'casual' .*did you mean 'causal'"),
        ("family=causal,layer=[0]", "unknown key 'drafter.layer' in .*did you mean"),
        ("family=eagle3,draft_vocab_size=many", "must be a whole number or null"),
    ],
)
def test_what_is_no_candidate_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        _ = asked_for(text).config
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grid_begins_with_the_recipes_own(family: str, tiny_target: Target) -> None:
    section = {"family": family}
    found = own_grid(section, tiny_target)
    assert found[0].section == section and found[0].asked
    assert not any(one.asked for one in found[1:])
    assert all(one.section["family"] == family for one in found)
    assert len({one.name for one in found}) == len(found)
    names = {one.section["family"] for one in other_families(section)}
    assert names == set(FAMILIES) - {family}


def test_the_grid_changes_one_thing(load_tiny: Callable[..., Target]) -> None:
    target = load_tiny(num_hidden_layers=9)
    section = {"family": "causal", "layers": [0, 8], "start": None, "domain_floor": 0.2}
    first, *others = own_grid(section, target)
    assert first.config == CausalConfig(layers=(0, 8), domain_floor=0.2)
    assert [one.section["layers"] for one in others] == [[8], [0, 1, 2, 8]]
    assert all(one.section["domain_floor"] == 0.2 for one in others)


FITTING: dict[str, dict[str, Any]] = {
    family: {"draft_vocab_size": 50} for family in ("eagle3", "jump")
}
"""Families whose vocabulary is larger than the tiny target's by default."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_made_without_records(family: str, tiny_target: Target) -> None:
    candidate = next(
        one for one in own_grid({"family": family, **FITTING.get(family, {})}, tiny_target)
    )
    drafter = built(candidate.config, tiny_target)
    assert drafter.family == family
    assert isinstance(drafter, torch.nn.Module) and not drafter.training
    own = weights(drafter)
    assert own.bytes == 4 * own.parameters
    assert (own.parameters == 0) == (family in ("lookup", "skip"))


def test_a_reduced_vocabulary_has_the_special_tokens(tiny_target: Target) -> None:
    drafter = built(asked_for("family=eagle3,draft_vocab_size=50").config, tiny_target)
    assert drafter.draft_ids is not None
    ids = drafter.draft_ids.tolist()
    assert len(ids) == 50 and ids == sorted(set(ids)) and {0, 1, 2} <= set(ids)
    trained = sum(p.numel() for p in drafter.trainable())
    assert weights(drafter).parameters == trained, "the embedding is the target's"
    for size, words in ((2, "cannot hold the 3 special tokens"), (401, "exceeds the target's 400")):
        with pytest.raises(UserError, match=words):
            built(asked_for(f"family=causal,draft_vocab_size={size}").config, tiny_target)


def test_an_adapter_is_merged_and_a_start_is_read(tiny_target: Target, tmp_path: Path) -> None:
    whole = built(CausalConfig(layers=(1,)), tiny_target)
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(1,)), None)
    folder = save_drafter(drafter, tmp_path / "drafter", tiny_target, {})
    section = {"family": "causal", "start": str(folder), "lora": {"rank": 2}}
    first, *others = own_grid(section, tiny_target)
    again = built(first.config, tiny_target)
    assert weights(again) == weights(whole)
    assert all("start" not in one.section for one in others)


def test_sizes_of_its_own_are_counted(tiny_target: Target) -> None:
    found = weights(built(CausalConfig(config=SIZED), tiny_target))
    tied = weights(built(CausalConfig(config={**SIZED, "tie_word_embeddings": True}), tiny_target))
    assert found.parameters - tied.parameters == 400 * 16
