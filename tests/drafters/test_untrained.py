"""Families that have nothing to train: kept as their options, refused by the trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from echoes import echoing

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter, read_own, save_drafter, weights_hash
from draftsmith.drafters.registry import UntrainedConfig, family_config, untrained_drafter
from draftsmith.drafters.start import new_drafter, resolved_taps
from draftsmith.eval.decode import DecodeSettings, decode

SECTIONS: list[dict[str, Any]] = [
    {"family": "lookup", "max_ngram": 2},
    {"family": "skip", "layers": [0, 1, 3]},
]


def config_of(section: dict[str, Any]) -> UntrainedConfig:
    family, config = family_config(section, "here")
    assert family == section["family"] and isinstance(config, UntrainedConfig)
    return config


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s["family"])
def test_a_saved_one_drafts_the_same(
    section: dict[str, Any], tiny_target: Target, tmp_path: Path
) -> None:
    drafter = untrained_drafter(config_of(section), tiny_target)
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    assert [path.name for path in folder.iterdir()] == ["draftsmith.json"]
    own = read_own(folder)
    assert own["options"] == {k: v for k, v in section.items() if k != "family"}
    assert own["layout"] is None and own["draft_ids"] is None
    loaded = load_drafter(folder, tiny_target)
    assert isinstance(loaded, type(drafter)) and not loaded.training
    assert loaded.config == drafter.config
    requests, settings = echoing(tiny_target, [1, 9, 4, 17]), DecodeSettings(24, 3)
    outputs = decode(tiny_target, requests, settings, loaded)
    assert outputs == decode(tiny_target, requests, settings, drafter)
    assert any(d for o in outputs for d, _ in o.rounds), "something was drafted"


def test_a_hash_stands_for_what_drafts(tiny_target: Target, tmp_path: Path) -> None:
    sections = [
        *SECTIONS,
        {"family": "lookup"},
        {"family": "skip"},
        {"family": "skip", "layers": [0]},
    ]
    hashes = []
    for i, section in enumerate(sections):
        drafter = untrained_drafter(config_of(section), tiny_target)
        hashes.append(weights_hash(save_drafter(drafter, tmp_path / f"{i}", tiny_target, {})))
    assert len(set(hashes)) == len(sections)
    again = untrained_drafter(config_of({"family": "skip", "layers": [0, 2, 3]}), tiny_target)
    same = weights_hash(save_drafter(again, tmp_path / "same", tiny_target, {"steps": 1}))
    assert same == hashes[3], "the layers that null stands for"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s["family"])
def test_the_trainer_refuses_it(section: dict[str, Any], tiny_target: Target) -> None:
    config = config_of(section)
    assert resolved_taps(config, 4) == ()
    with pytest.raises(UserError, match=f"'{section['family']}' has nothing to train.*eagle3"):
        new_drafter(config, tiny_target, [])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"family": "lookup", "max_ngram": 0}, "max_ngram is 0"),
        ({"family": "lookup", "ngram": 2}, "drafter.ngram.*max_ngram"),
        ({"family": "skip", "layer": [0]}, "drafter.layer.*layers"),
        ({"family": "lokup"}, "did you mean 'lookup'"),
    ],
)
def test_options_that_are_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        family_config(section, "here")


def test_a_target_without_the_kept_layers_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    drafter = untrained_drafter(config_of({"family": "skip", "layers": [0, 3]}), tiny_target)
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    own = (folder / "draftsmith.json").read_text()
    (folder / "draftsmith.json").write_text(own.replace("3\n", "9\n"))
    with pytest.raises(UserError, match=r"\[0, 9\] must name layers between 0 and 3"):
        load_drafter(folder, tiny_target)


def test_lookup_follows_the_device_of_the_target(tiny_target: Target) -> None:
    drafter = untrained_drafter(config_of({"family": "lookup"}), tiny_target)
    state = drafter.start(1, 4)
    ids = torch.tensor([[5, 5]])
    drafter.prefill(state, ids, [2], torch.zeros(1, 2, 0))
    logits = drafter.first(state)
    assert logits.device == tiny_target.device and logits.shape == (1, tiny_target.vocab_size)
    assert logits.dtype == torch.float32 and logits[0, 5] == 0
