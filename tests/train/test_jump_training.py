"""Jump drafting in the training loop: through the target's layers, which have to be there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import log_of
from torch import Tensor
from unrolling import conversations
from watching import LIMIT, answered, quiet, watch

from draftsmith.configs.recipe import LawSection, ObjectiveSection, Recipe, ServingSection
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.jump import JumpConfig, JumpDrafter
from draftsmith.eval.parity import parity
from draftsmith.train.loop import train
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

RecipeFactory = Callable[..., Recipe]
SECTION = {"family": "jump", "begin": 1, "end": 2, "draft_vocab_size": 100}
SERVING = ServingSection((LawSection(0.0),), num_draft_tokens=3)
IDS = torch.arange(0, 400, 3)


@pytest.fixture
def make_jump(make_recipe: RecipeFactory) -> RecipeFactory:
    def make(**options: Any) -> Recipe:
        return replace(make_recipe(**options), drafter=SECTION)

    return make


def test_the_target_stays_as_it_is(
    fit: Callable[..., dict[str, Tensor]],
    make_jump: RecipeFactory,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    before = {n: t.clone() for n, t in tiny_target.model.state_dict().items()}
    fit(make_jump(samples=1), tmp_path / "run")
    assert all(torch.equal(t, before[n]) for n, t in tiny_target.model.state_dict().items())


def test_records_without_states(
    tiny_target: Target, store: RecordStore, make_jump: RecipeFactory, tmp_path: Path
) -> None:
    """The target computes them, in between of its layers' service to the drafter."""
    recipe = make_jump(steps=3)
    bare = RecordStore.create(tmp_path / "bare", {**store.settings, "distributions": "none"})
    bare.add("a", [replace(r, states=None) for r in store.records()])
    bare.finish({})
    for name, kept in (("kept", store), ("made", bare)):
        train(recipe, tiny_target, kept, tmp_path / name, quiet())
    losses = [[r["loss"] for r in log_of(tmp_path / n, "train")] for n in ("kept", "made")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_what_training_sees_is_what_decoding_accepts(
    tiny_target: Target,
    make_jump: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overfitted on twenty rows (B069, B070)."""
    store = answered(tiny_target, tmp_path / "records", 20, Law(0.0), taps=(1, 3))
    recipe = make_jump(
        steps=120, eval_every=120, unroll=3, tokens_per_batch=400, warmup_steps=10, log_every=20,
        save_every=1000,
    )  # fmt: skip
    recipe = replace(
        recipe, drafter={**SECTION, "end": 3, "draft_vocab_size": 400}, serving=SERVING
    )
    seen = watch(monkeypatch)
    saved = train(recipe, tiny_target, store, tmp_path / "run", quiet())
    rows = list(store.records("train"))
    served = load_drafter(saved, tiny_target)
    found = parity(tiny_target, served, rows, SERVING, LIMIT, seen.drafter)
    assert found.ok and found.warnings == (), found.lines
    figures = found.figures
    assert figures["agreement"] > 0.9 and figures["first_accepted"] > 0.9, found.lines
    assert abs(figures["agreement"] - figures["first_accepted"]) < 0.05
    assert figures["tokens_per_round"] == pytest.approx(figures["expected_tokens_per_round"])
    assert figures["tokens_per_round"] > 2.5


# ---- layers computed again


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_layers_computed_again_change_nothing(packed: bool, tiny_target: Target) -> None:
    """Loss and gradients bit for bit, of what is kept little."""
    drafter = JumpDrafter.from_target(tiny_target, JumpConfig(begin=1), IDS).train()
    section = ObjectiveSection()
    bound = bind_objective(section, ServingSection((LawSection(1.0),), num_draft_tokens=4))
    p = DraftVocabularyP(tiny_target, drafter.draft_ids, bound.law)
    scorer = Scorer(drafter, section, bound, p)
    batch = collate(conversations(tiny_target, drafter.taps), ["chat"], packed)
    found = []
    for again in (False, True):
        drafter.checkpoint(again)
        drafter.zero_grad()
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = scorer(batch, 4, scored_tokens(batch, 4).float()).loss
        loss.backward()
        grads = [p.grad.clone() for p in drafter.trainable() if p.grad is not None]
        found.append((loss.detach(), grads, kept))
    (loss, grads, kept), (same, others, less) = found
    assert torch.equal(loss, same) and any(g.any() for g in grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert less < kept / 2
