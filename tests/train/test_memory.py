"""The estimate of memory is what training takes of it."""

import gc
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.configs.recipe import Recipe
from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.scripts.bench_losses import resident
from draftsmith.train.blueprint import drafter_shapes, target_shapes
from draftsmith.train.memory import extents, memory, saved, weights
from draftsmith.train.objective import bind_objective
from draftsmith.train.score import unrolled
from draftsmith.train.step import Scorer, scored_tokens

RecipeFactory = Callable[..., Recipe]
SMALL = {"family": "eagle3", "draft_vocab_size": 100}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "family", ["eagle3", "eagle3 shaped", "causal", "dflash", "jump", "medusa", "mlp", "mlp wide"]
)
def test_activations_are_what_autograd_saves(
    family: str, packed: bool, again: bool, load_tiny: Any, findable: RecipeFactory,
    records: list[Record],
) -> None:  # fmt: skip
    rows = [r for r in records if len(r.reply) > 1][:12]
    if family == "jump":
        rows = [with_last_taps(r, 2) for r in rows]
    if family.startswith(("medusa", "mlp")):
        rows = [with_last_taps(r, 1) for r in rows]
    section = {
        "eagle3": SMALL,
        "eagle3 shaped": {"family": "eagle3", "hidden_size": 48, "layers": 3, "head_rank": 8},
        "causal": {"family": "causal", "layers": [0, 1, 3]},
        "jump": {**SMALL, "family": "jump", "begin": 1, "end": 2},
        "dflash": {"family": "dflash", "taps": [0, 1, 2], "sequential": True},
        "medusa": {"family": "medusa", "num_layers": 2},
        "mlp": {"family": "mlp", "scale_input": True},
        "mlp wide": {"family": "mlp", "inner_dim": 80, "tie_weights": False},
    }[family]
    _, config = family_config(section, "test")
    target = load_tiny("llama", hidden_size=32)
    drafter: Any = new_drafter(config, target, records)
    drafter.train()
    drafter.checkpoint(again)
    batch = collate(rows, ("a", "b"), packed)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    weights_of = (*drafter.parameters(), *target.model.parameters())
    own = {t.untyped_storage().data_ptr() for t in weights_of}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        alive.append(unrolled(drafter, p, batch, 3, lambda z: z))
    shape = extents(
        [len(r.ids) for r in rows], [r.prompt_len for r in rows], 1 if drafter.one_pass else 3,
        packed,
    )  # fmt: skip
    kept_anyway, inside = saved(drafter, shape, again)
    said = 4 * (kept_anyway + (0 if again else sum(inside)))
    assert said == pytest.approx(sum(kept.values()), rel=0.15)


def with_last_taps(record: Record, count: int) -> Record:
    assert record.states is not None
    taps = record.states.taps.unflatten(1, (3, -1))[:, 3 - count :].flatten(1)
    return replace(record, states=replace(record.states, taps=taps))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory to read")
@pytest.mark.parametrize("again", [False, True])
def test_memory_is_what_a_step_takes(
    again: bool, load_tiny: Any, make_recipe: RecipeFactory
) -> None:
    """Two optimiser steps against the process's own peak, weights and batch beforehand."""
    target = load_tiny(
        "llama", hidden_size=256, intermediate_size=768, num_attention_heads=4, head_dim=64
    )
    batch, rows = _noise(24, 40, 100, target), [(140, 40)] * 24
    _, config = family_config({"family": "eagle3", "draft_vocab_size": 400}, "test")
    drafter: Any = drafter_of_noise(config, target)
    drafter.checkpoint(again)
    recipe = make_recipe(unroll=3, gradient_checkpointing=again)
    objective = bind_objective(recipe.objective, recipe.serving)
    p = DraftVocabularyP(target, drafter.draft_ids, objective.law)
    scorer = Scorer(drafter, recipe.objective, objective, p)
    optimizer = torch.optim.AdamW(drafter.trainable())
    shape = extents([n for n, _ in rows], [n for _, n in rows], 3, False)
    said = memory(drafter, target, "absent", recipe.train, shape, p, False, 1)
    wanted = sum(said[name] for name in ("gradients", "optimiser", "activations", "head"))
    gc.collect()
    CDLL("libc.so.6").malloc_trim(0)  # or what an earlier test let go of is taken first
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    for _ in range(2):
        scorer(batch, 3, scored_tokens(batch, 3).float()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    taken = resident("VmHWM") - before
    assert wanted > 5e7, "large enough to be told from the rest"
    assert taken / 2 < wanted < taken * 2, (taken, said)


def _noise(rows: int, prompt: int, reply: int, target: Target) -> TrainBatch:
    """A batch of conversations with states of noise."""
    length, h = prompt + reply, target.hidden_size
    records = [
        Record(
            f"p{i}", "a", "train", Law(1.0), i, "stop",
            torch.randint(3, target.vocab_size, (length,)), prompt,
            States(torch.randn(reply, h), torch.randn(reply) + 6, torch.randn(length - 1, 3 * h)),
        )
        for i in range(rows)
    ]  # fmt: skip
    return collate(records, ("a",))


def drafter_of_noise(config: Any, target: Target) -> Any:
    return Eagle3Drafter.from_target(target, config, torch.arange(400)).train()


SPREAD: dict[str, tuple[dict[str, str], float, float, float]] = {
    "DDP": ({}, 1, 0.5, 1),  # gradients twice: what is sent lies in buckets
    "ZeRO-1": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
        1,
        0.5,
        4,
    ),
    "ZeRO-2": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        1,
        4,
        4,
    ),
    "FSDP": ({"ACCELERATE_USE_FSDP": "true"}, 4, 4, 4),
}


@pytest.mark.parametrize("kind", SPREAD)
def test_what_is_spread_over_processes_is_divided(
    kind: str, findable: RecipeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients and moments to the byte, on one device and on each of four."""
    environment, *parts = SPREAD[kind]
    recipe = findable(ema=0.9)
    target = target_shapes(recipe)
    drafter = drafter_shapes(recipe, target)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    shape = extents([20, 20], [10, 10], 2, False)
    trained, frozen = weights(drafter)
    told = (drafter, target, "replicated", recipe.train, shape, p, False)
    alone = memory(*told, 1)  # type: ignore[arg-type]
    sizes = [4 * (trained + frozen), 4 * trained, 8 * trained]
    names = ("weights", "gradients", "optimiser")
    assert [alone[name] for name in names] == sizes
    assert alone["moving average"] == sizes[0]
    assert alone["target"] == 4 * sum(w.numel() for w in target.model.parameters())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spread = memory(*told, 4)  # type: ignore[arg-type]
    assert [spread[name] for name in names] == [s / n for s, n in zip(sizes, parts, strict=True)]


def test_an_absent_target_leaves_head_and_embedding(findable: RecipeFactory) -> None:
    recipe = findable(optimizer="adamw_8bit")
    target = target_shapes(recipe)
    drafter = drafter_shapes(recipe, target)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    shape = extents([20, 20], [10, 10], 2, False)
    sizes = {
        use: memory(drafter, target, use, recipe.train, shape, p, False, 2)
        for use in ("replicated", "sharded", "absent")  # type: ignore[arg-type]
    }
    norm = sum(
        w.numel() for n, w in target.model.named_parameters() if n.endswith("model.norm.weight")
    )
    assert sizes["absent"]["target"] == 4 * (target.embedding.numel() + norm), "the head is tied"
    whole, bare = sizes["replicated"]["target"], sizes["absent"]["target"]
    assert sizes["sharded"]["target"] == bare + (whole - bare) / 2
    trained, _ = weights(drafter)
    assert sizes["absent"]["optimiser"] < 2.1 * trained, "moments of 8 bits"
