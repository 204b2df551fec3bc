"""Objectives and drafters for tests of records that are made anew while training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.data.gather import Request
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.train.objective import Objective, bind_objective

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"family": "eagle3", "draft_vocab_size": 100},
    "causal": {"family": "causal", "layers": [0, 3]},
    "reduced": {"family": "causal", "layers": [0, 3], "draft_vocab_size": 100},
}


def serving(law: LawSection, num_draft_tokens: int = 3, drafting: Any = "sampled") -> Objective:
    served = ServingSection((law,), num_draft_tokens=num_draft_tokens, drafting=drafting)
    return bind_objective(ObjectiveSection(loss={"lk_hybrid": 0.5, "ce": 0.5}), served)


def drafter_of(kind: str, target: Target, records: Sequence[Record]) -> Drafter:
    """One of `DRAFTERS` as training begins with it, in evaluation mode."""
    _, config = family_config(DRAFTERS[kind], "test")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = new_drafter(config, target, [r for r in records if r.split == "train"])
    assert isinstance(drafter, nn.Module)
    return drafter.eval()


def copy_of(target: Target) -> Drafter:
    """A drafter whose every guess is the target's."""
    layers = tuple(range(target.num_layers))
    return CausalDrafter.from_target(target, CausalConfig(layers=layers), None).eval()


def requests_of(records: Sequence[Record], law: Law) -> list[Request]:
    return [
        Request(r.prompt_id, r.domain, r.split, tuple(r.ids[: r.prompt_len].tolist()), law, i)
        for i, r in enumerate(records)
    ]
