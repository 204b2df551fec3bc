"""Overfitted on twenty rows, a drafter is accepted in real decoding of them as in training.

B069 and B070: teacher-forced agreement and acceptance of first drafts are the same number, expected
and decoded tokens per round too, and the loaded folder says what the drafter in memory says.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from watching import LIMIT, answered, quiet, watch

from draftsmith.configs.recipe import LawSection, Recipe, ServingSection
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.parity import parity
from draftsmith.train.loop import train

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 20
SERVING = ServingSection((LawSection(0.0),), num_draft_tokens=3)
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"family": "eagle3", "draft_vocab_size": 400},
    "eagle3 reduced": {"family": "eagle3", "draft_vocab_size": 250},
    "causal": {"family": "causal", "layers": [0, 3]},
    "adapter": {"family": "causal", "layers": [0, 1, 3], "lora": {"rank": 16}},
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_training_sees_is_what_decoding_accepts(
    kind: str,
    tiny_target: Target,
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = answered(tiny_target, tmp_path / "records", ROWS, Law(0.0))
    recipe = make_recipe(
        steps=90, eval_every=90, unroll=3, tokens_per_batch=400, packing=kind == "eagle3",
        warmup_steps=10, log_every=20, save_every=1000,
    )  # fmt: skip
    recipe = replace(recipe, drafter=DRAFTERS[kind], serving=SERVING)
    seen = watch(monkeypatch)
    saved = train(recipe, tiny_target, store, tmp_path / "run", quiet())
    rows = list(store.records("train"))
    assert len(rows) == ROWS and sum(len(r.reply) > 1 for r in rows) > 15
    served = load_drafter(saved, tiny_target)
    found = parity(tiny_target, served, rows, SERVING, LIMIT, seen.drafter)
    assert found.ok, found.lines
    assert found.warnings == ()
    figures = found.figures
    assert figures["agreement"] > 0.9 and figures["first_accepted"] > 0.9, found.lines
    assert abs(figures["agreement"] - figures["first_accepted"]) < 0.05
    assert figures["tokens_per_round"] == pytest.approx(figures["expected_tokens_per_round"])
    assert figures["tokens_per_round"] > 2.5
