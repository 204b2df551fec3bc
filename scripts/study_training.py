"""Training the runs of a study for equal times, and what that came to."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch

from draftsmith.configs.recipe import Recipe
from draftsmith.data.target import load_target
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.scripts.study import Study
from draftsmith.train.blueprint import drafter_shapes, target_shapes
from draftsmith.train.corpus import Data, load_data
from draftsmith.train.flops import TrainingFlops
from draftsmith.train.loop import train
from draftsmith.train.objective import bind_objective

TRIAL, WARM_UP = 40, 8
"""Optimiser steps that tell how many fit into the time; the first of them are not timed."""


def trained(study: Study, name: str) -> dict[str, Any]:
    """Train a run for the study's seconds by its shipped recipe; what that took.

    A few steps of a trial tell how many fit. Their number is kept, so that a killed run goes on to
    the same. seconds: within optimiser steps, evaluations and checkpoints apart; tokens: supervised
    ones; flops: of all forward and backward passes, by `train.flops`.
    """
    recipe, folder = _undisturbed(study.recipe(name)), study.place(name)
    kept = study.part(name, "steps", {}, lambda: {"steps": _fitting(study, recipe, folder)})
    steps = int(kept["steps"])
    section = replace(recipe.train, steps=steps, eval_every=steps, save_every=max(1, steps // 4))
    recipe = replace(recipe, train=section)
    _train(study, recipe, folder / "run")
    course = _Course.of(study, recipe, steps)
    tokens = sum(map(course.supervised, course.batches))
    seconds = sum(spent for _, spent in course.times(folder / "run"))
    return {
        "steps": steps,
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "epochs": round(len(course.batches) / len(course.data.plan().epoch(0)), 2),
        **_by_formula(recipe, course),
    }


def _undisturbed(recipe: Recipe) -> Recipe:
    """The recipe without what interrupts training or ends it early."""
    section = replace(recipe.train, samples=0, eval_conversations=8, log_every=10, patience=None)
    return replace(recipe, train=section)


def _train(study: Study, recipe: Recipe, folder: Path) -> None:
    torch.set_num_threads(study.args.train_threads)
    try:
        # Anew each time, as training may cut it down, and in the form for many rows.
        target = load_target(recipe.target, few_rows=False)
        train(recipe, target, study.store, folder, study.console)
    finally:
        torch.set_num_threads(study.args.threads)


def _fitting(study: Study, recipe: Recipe, folder: Path) -> int:
    """How many optimiser steps fit into the study's seconds."""
    never = TRIAL + 1
    section = replace(
        recipe.train, steps=TRIAL, log_every=1, eval_every=never, save_every=never,
        eval_conversations=1,
    )  # fmt: skip
    trial = replace(recipe, train=section)
    _train(study, trial, folder / "trial")
    course = _Course.of(study, trial, TRIAL)
    times = course.times(folder / "trial")[WARM_UP:]
    shutil.rmtree(folder / "trial")
    rate = sum(tokens for tokens, _ in times) / sum(seconds for _, seconds in times)
    epoch = course.data.plan().epoch(0)
    mean = sum(map(course.supervised, epoch)) / len(epoch) * recipe.train.accumulation
    return max(1, round(study.args.seconds * rate / mean))


@dataclass(frozen=True)
class _Course:
    """The batches of a run in their order; `sizes` are the supervised tokens of each record."""

    data: Data
    batches: list[list[int]]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, study: Study, recipe: Recipe, steps: int) -> "_Course":
        objective = bind_objective(recipe.objective, recipe.serving)
        data = load_data(recipe, study.target, study.store, objective)
        plan = data.plan(weights=recipe.train.domain_weights)
        batches = chain.from_iterable(plan.epoch(number) for number in count())
        first = list(islice(batches, steps * recipe.train.accumulation))
        return cls(data, first, plan.supervised)

    def supervised(self, batch: Sequence[int]) -> int:
        return sum(self.sizes[row] for row in batch)

    def times(self, run: Path) -> list[tuple[int, float]]:
        """(tokens, seconds) of each stretch between two lines of a run's log."""
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"]
        found, begin = [], 0
        for line in lines:
            end = line["step"] * self.data.section.accumulation
            tokens = sum(map(self.supervised, self.batches[begin:end]))
            found.append((tokens, tokens / line["tokens_per_s"]))
            begin = end
        return found


def _by_formula(recipe: Recipe, course: _Course) -> dict[str, Any]:
    target = target_shapes(recipe)
    drafter = drafter_shapes(recipe, target)
    rows = [course.data.training.rows[row] for batch in course.batches for row in batch]
    p = DraftVocabularyP(target, drafter.draft_ids, course.data.law)
    flops = TrainingFlops.of(drafter, p, recipe.train.unroll).conversations(
        torch.tensor([row.tokens for row in rows]),
        torch.tensor([row.prompt_len for row in rows]),
        states=True,
    )
    return {
        "flops": float(f"{float(flops.sum()):.4g}"),
        "trained_parameters": sum(p.numel() for p in drafter.trainable()),
    }
