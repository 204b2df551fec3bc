"""The tables of what engines read: complete, and as the libraries behind the engines have it."""

from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from draftsmith.drafters.card_commands import SERVING
from draftsmith.drafters.layouts import LAYOUTS
from draftsmith.eval.engines.registry import ENGINES as DRIVEN
from draftsmith.eval.preflight.rules import ENGINES, LLAMA, QWEN3, RULES, engines_of, layouts_of
from draftsmith.eval.preflight.terms import Like

UNREAD = {"mlp_speculator", "medusa native"}  # of engines that are gone, or imported only


@pytest.mark.parametrize(("keys", "config"), [(LLAMA, LlamaConfig()), (QWEN3, Qwen3Config())])
def test_defaults_are_those_of_transformers(keys: Any, config: Any) -> None:
    for name, key in keys.items():
        default = key.default
        if isinstance(default, Like):
            default = keys[default.option].default
        if default is not None:  # computed of others
            assert getattr(config, name) == default, name


def test_every_layout_that_a_card_serves_can_be_replayed() -> None:
    for layout in SERVING:
        assert engines_of(layout) or layout in UNREAD, layout
    assert {layout for _, layout in RULES} <= LAYOUTS.keys()


def test_every_drafter_that_an_engine_is_driven_with_can_be_replayed() -> None:
    for engine, known in DRIVEN.items():
        for layout in known.engine.methods:
            assert (engine, layout) in RULES
    assert all(layouts_of(engine) for engine in ENGINES)


def test_families_are_those_of_the_layouts() -> None:
    for (_, layout), rules in RULES.items():
        assert rules.family == LAYOUTS[layout].family
