"""A dry run: what it counts is what training does, and what cannot work is said at once."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import (
    LawSection,
    ObjectiveSection,
    Recipe,
    ServingSection,
)
from draftsmith.configs.training import OnPolicySection
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.train import dryrun
from draftsmith.train.blueprint import drafter_shapes, target_shapes
from draftsmith.train.dryrun import DryRun, dry_run
from draftsmith.train.memory import weights
from draftsmith.train.metrics import MetricsLog

RecipeFactory = Callable[..., Recipe]
Planner = Callable[..., DryRun]
SMALL = {"family": "eagle3", "draft_vocab_size": 100}


@pytest.fixture
def plan(store: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """A dry run on the records; loading a model's weights would fail."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("weights are read")

    def run(recipe: Recipe, **changes: Any) -> DryRun:
        console = changes.pop("console", Console(file=io.StringIO()))
        records = changes.pop("store", store)
        with monkeypatch.context() as patch:
            patch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
            return dry_run(recipe, records, console, tmp_path, **changes)

    return run


# ---- shapes


def test_a_drafter_of_shapes_is_the_real_one(
    findable: RecipeFactory, tiny_target: Target, records: list[Record], tmp_path: Path
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "head": SMALL,
        "lm": {"family": "causal", "layers": [0, 3]},
        "lm, reduced": {"family": "causal", "draft_vocab_size": 50},
        "adapter": {"family": "causal", "lora": {"rank": 4}},
        "medusa": {"family": "medusa"},
        "medusa, one output": {"family": "medusa", "shared_head": True, "train_head": False},
        "medusa, reduced": {"family": "medusa", "num_layers": 2, "draft_vocab_size": 50},
        "mlp": {"family": "mlp", "tie_weights": False, "inner_dim": 24},
        "mlp, reduced": {"family": "mlp", "draft_vocab_size": 50},
        "dflash": {"family": "dflash"},
        "dflash, corrected": {"family": "dflash", "layers": 1, "sequential": True},
        "dflash, reduced": {"family": "dflash", "block_size": 8, "draft_vocab_size": 50},
        "jump": {**SMALL, "family": "jump", "layers": 2},
        "jump, head": {**SMALL, "family": "jump", "train_head": True},
    }
    for name, section in sections.items():
        _check_shapes(replace(findable(), drafter=section), tiny_target, records, tmp_path / name)


def _check_shapes(recipe: Recipe, target: Target, records: list[Record], folder: Path) -> None:
    """Also of a drafter that goes on from the one that was saved."""
    _, config = family_config(recipe.drafter, "test")
    real: Any = new_drafter(config, target, records)
    shapes: Any = drafter_shapes(recipe, target_shapes(recipe))
    _same_shapes(shapes, real)
    if "lora" in recipe.drafter:
        return
    save_drafter(real, folder, target, {})
    section = {"family": recipe.drafter["family"], "start": str(folder)}
    again = replace(recipe, drafter=section)
    _same_shapes(drafter_shapes(again, target_shapes(again)), real)


def test_a_start_learns_what_the_recipe_says(
    findable: RecipeFactory, tiny_target: Target, records: list[Record], tmp_path: Path
) -> None:
    recipe = findable()
    _, config = family_config(SMALL, "test")
    folder = save_drafter(
        new_drafter(config, tiny_target, records), tmp_path / "d", tiny_target, {}
    )
    for learns in (True, False):
        section = {"family": "eagle3", "start": str(folder), "train_head": learns}
        again = replace(recipe, drafter=section)
        shapes: Any = drafter_shapes(again, target_shapes(again))
        _same_shapes(shapes, new_drafter(family_config(section, "test")[1], tiny_target, records))
        assert shapes.lm_head.weight.requires_grad == learns
    again = replace(recipe, drafter=section | {"train_embedding": True})
    with pytest.raises(UserError, match=r"drafter\.train_embedding is for a head with an"):
        drafter_shapes(again, target_shapes(again))


def _same_shapes(shapes: Any, real: Any) -> None:
    assert weights(shapes) == weights(real)
    assert _shapes(shapes) == _shapes(real)
    assert all(p.is_meta for p in shapes.parameters())
    assert shapes.head_rows()[0].shape == real.head_rows()[0].shape
    assert shapes.taps == real.taps


def _shapes(drafter: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    return {n: (p.shape, p.dtype, p.requires_grad) for n, p in drafter.named_parameters()}


def test_a_target_of_shapes_is_the_real_one(findable: RecipeFactory, tiny_target: Target) -> None:
    shapes = target_shapes(findable())
    told = {"weights": None, "name": None}
    assert shapes.provenance | told == tiny_target.provenance | told
    assert shapes.vocab_size == tiny_target.vocab_size
    assert shapes.eos_ids == tiny_target.eos_ids
    real = {n: p.shape for n, p in tiny_target.model.named_parameters()}
    assert {n: p.shape for n, p in shapes.model.named_parameters()} == real


# ---- what training does


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_steps_and_tokens_are_those_of_training(
    family: str, findable: RecipeFactory, plan: Planner, fit: Any, run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe = findable(family, steps=None, epochs=2.0, accumulation=2)
    found = plan(recipe)
    lines: list[tuple[int, dict[str, float]]] = []
    write = MetricsLog.write

    def kept(self: Any, kind: str, step: int, values: Any, **words: Any) -> None:
        if kind == "train":
            lines.append((step, values))
        write(self, kind, step, values, **words)

    monkeypatch.setattr(MetricsLog, "write", kept)
    fit(recipe, run_folder)
    assert lines[-1][0] == found.steps
    assert found.tokens_per_step * found.steps == pytest.approx(2 * found.supervised, rel=0.1)
    assert found.trained == weights(drafter_shapes(recipe, target_shapes(recipe)))[0]
    assert found.use == "absent"


def test_what_is_printed_names_the_figures(findable: RecipeFactory, plan: Planner) -> None:
    said = io.StringIO()
    found = plan(findable(), console=Console(file=said, width=80))
    text = said.getvalue()
    for wanted in (
        f"{found.trained / 1e6:.1f} M trained", f"{found.records} to train on",
        f"{found.supervised} supervised tokens", f"{found.steps} optimiser steps",
        "an estimate", "optimiser", "checkpoints",
    ):  # fmt: skip
        assert wanted in text, wanted
    assert len(text.splitlines()) == 7, "a line for each figure, however long"


def test_records_without_states_count_the_target_s_passes(
    findable: RecipeFactory,
    plan: Planner,
    store: RecordStore,
    records: list[Record],
    tmp_path: Path,
) -> None:
    known = plan(findable())
    settings = store.settings | {"distributions": "none", "taps": []}
    bare = RecordStore.create(tmp_path / "bare", settings)
    bare.add("a", [replace(record, states=None) for record in records])
    found = plan(findable(), store=bare.finish({}))
    assert found.use == "replicated"
    assert found.memory["target"] > known.memory["target"]
    assert found.flops_per_epoch > known.flops_per_epoch


# ---- what cannot work


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "warm-up": ({"warmup_steps": 12}, r"train\.warmup_steps 12 is no less than the 12 optimiser"),
    "domain": ({"domains": ("aa",)}, r"train names domain 'aa'.*did you mean 'a'\?"),
    "weight": ({"domain_weights": {"bb": 2.0}}, r"train names domain 'bb'.*did you mean 'b'\?"),
    "whole": (
        {"target": "absent", "on_policy": OnPolicySection(drafted=0.5)},
        r"train\.target absent keeps the target's head alone, and train\.on_policy needs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_recipe_is_one_sentence(
    name: str, findable: RecipeFactory, plan: Planner
) -> None:
    options, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as raised:
        plan(findable(**options))
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_said(
    findable: RecipeFactory, plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match="needs the package torchao"):
        plan(findable(optimizer="adamw_8bit"))


def test_a_family_without_training_is_said(findable: RecipeFactory, plan: Planner) -> None:
    with pytest.raises(UserError, match="'lookup' has nothing to train"):
        plan(replace(findable(), drafter={"family": "lookup"}))


def test_a_vocabulary_beyond_the_target_s_is_said(findable: RecipeFactory, plan: Planner) -> None:
    with pytest.raises(UserError, match=r"draft_vocab_size 5000 exceeds the target's 400 tokens"):
        plan(replace(findable(), drafter={"family": "eagle3", "draft_vocab_size": 5000}))
    with pytest.raises(UserError, match="draft_vocab_size 8192 exceeds"):
        plan(replace(findable(), drafter={"family": "eagle3"}))


def test_records_that_the_objective_cannot_use_are_said(
    findable: RecipeFactory, plan: Planner
) -> None:
    serving = ServingSection((LawSection(0.3),))
    recipe = replace(findable(unroll=2), serving=serving, objective=ObjectiveSection(loss="ce"))
    with pytest.raises(UserError, match=r"only valid on replies sampled under T=0\.3"):
        plan(recipe)


def test_records_of_another_tokenizer_are_said(
    findable: RecipeFactory, plan: Planner, store: RecordStore
) -> None:
    was = store.settings["target"] | {"tokenizer": "another"}
    other = replace(store, settings=store.settings | {"target": was})
    with pytest.raises(UserError, match=r"collected from another target.*tokenizer 'another'"):
        plan(findable(), store=other)


def test_records_that_all_have_one_token_are_said(
    findable: RecipeFactory, plan: Planner, store: RecordStore
) -> None:
    short = {r.key: (r.split, r.domain) for r in store.index() if len(r.reply) == 1}
    with pytest.raises(UserError, match=r"none of the .* has two reply tokens or more"):
        plan(findable(), store=replace(store, selection=short))


def test_too_little_memory_or_disk_is_said(
    findable: RecipeFactory, plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dryrun, "free_memory", lambda device: 1e5)
    with pytest.raises(UserError, match=r"need .* GB on cpu, and 0\.0 GB are free"):
        plan(findable())
    monkeypatch.undo()
    monkeypatch.setattr(
        dryrun.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000})()
    )
    with pytest.raises(UserError, match=r"checkpoints need .* lower train\.keep"):
        plan(findable())


def test_a_tight_fit_is_a_hint(
    findable: RecipeFactory, plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plan(findable()).memory
    nearly = sum(known.values()) - known["activations"] / 2
    monkeypatch.setattr(dryrun, "free_memory", lambda device: nearly)
    said = io.StringIO()
    plan(findable(), console=Console(file=said, width=80))
    assert "it may not fit: lower train.tokens_per_batch" in said.getvalue()
    monkeypatch.setattr(dryrun, "free_memory", lambda device: known["target"] * 1.1)
    monkeypatch.setattr(dryrun, "_refuse", lambda *args: None)
    plan(findable(), console=Console(file=said, width=80))
    assert "reads the whole target before it lets go of its layers" in said.getvalue()
