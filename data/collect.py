"""Collect: prompts in, record shards out. A killed run goes on where it stopped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..configs.errors import UserError
from ..configs.recipe import LawSection, Recipe
from .chat import render_prompt
from .gather import GatherSettings, Request, answer
from .prompts import Prompt, prompts_sha256
from .records import Record, request_key, request_seed
from .store import RecordStore
from .target import Target
from .warp import Law


def law_of(section: LawSection) -> Law:
    return Law(**asdict(section))


def collect_settings(
    recipe: Recipe, target: Target, taps: tuple[int, ...], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Everything the records depend on; other settings mean another store."""
    known = target.provenance
    names = ("name", "revision", "quantisation", "weights", "tokenizer", "template", "dtype")
    return {
        "target": {name: known[name] for name in names},
        "prompts": prompts_sha256(prompts),
        "seed": recipe.seed,
        "taps": list(taps),
        "max_new_tokens": recipe.collect.max_new_tokens,
        "batch_size": recipe.collect.batch_size,
        "temperatures": list(recipe.collect.temperatures),
        "laws": [law_of(law).label for law in recipe.serving.laws],
        "distributions": recipe.collect.distributions,
        "store_dtype": recipe.collect.store_dtype,
    }


def plan_requests(
    recipe: Recipe, target: Target, prompts: Sequence[Prompt]
) -> tuple[list[Request], list[str]]:
    """What to ask: training prompts at every temperature and under the served laws that truncate,
    held-out ones once per served law.

    Held-out answers are samples of exactly the law they are evaluated under, because estimators
    are valid on no others. Returns the requests in order of length, and why others were left out.
    """
    served = list(dict.fromkeys(law_of(law) for law in recipe.serving.laws))
    training = [Law(t) for t in recipe.collect.temperatures]
    training += [law for law in served if law.truncates]
    training = list(dict.fromkeys(training))
    limit = (target.max_positions or 1 << 30) - recipe.collect.max_new_tokens
    requests, skipped = [], []
    for prompt in prompts:
        ids = tuple(render_prompt(target.tokenizer, prompt.messages, raw=prompt.raw))
        if len(ids) > limit:
            skipped.append(f"{prompt.source}:{prompt.line}: {len(ids)} tokens, at most {limit} fit")
            continue
        for law in training if prompt.split == "train" else served:
            seed = request_seed(recipe.seed, prompt.id, law)
            requests.append(Request(prompt.id, prompt.domain, prompt.split, ids, law, seed))
    requests.sort(key=lambda r: (len(r.ids), r.prompt_id, r.law.label))
    return requests, skipped


def collect(
    recipe: Recipe,
    target: Target,
    taps: tuple[int, ...],
    prompts: Sequence[Prompt],
    folder: Path,
    console: Console,
) -> RecordStore:
    """Answer what the store in `folder` does not hold yet.

    Shards are filled in a fixed order from the requests still missing, so a run that was killed
    computes the same batches, and the same records, as one that was not.
    """
    store = RecordStore.create(folder, collect_settings(recipe, target, taps, prompts))
    damaged = store.drop_damaged()
    for path in damaged:
        console.print(f"{path.name} was damaged and is collected again")
    requests, skipped = plan_requests(recipe, target, prompts)
    if not requests:
        raise UserError("no prompt is left to collect: " + "; ".join(skipped or ["none given"]))
    for reason in skipped:
        console.print(f"left out: {reason}", style="yellow")
    done = store.keys()
    missing = [r for r in requests if request_key(r.prompt_id, r.law, r.seed) not in done]
    if not missing:
        console.print(f"{len(requests)} records in {folder.name} are complete")
        whole = store.complete and not damaged
        return store if whole else store.finish(summary(store))
    _fill(store, target, missing, len(requests), _settings(recipe, taps), recipe, console)
    return store.finish(summary(store))


def _settings(recipe: Recipe, taps: tuple[int, ...]) -> GatherSettings:
    return GatherSettings(
        max_new_tokens=recipe.collect.max_new_tokens,
        batch_size=recipe.collect.batch_size,
        taps=taps,
        keep_states=recipe.collect.distributions == "hidden",
        store_dtype=getattr(torch, recipe.collect.store_dtype),
    )


def _fill(
    store: RecordStore,
    target: Target,
    missing: Sequence[Request],
    total: int,
    settings: GatherSettings,
    recipe: Recipe,
    console: Console,
) -> None:
    columns = (
        TextColumn("collect"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        held = total - len(missing)
        task = progress.add_task("", total=total, completed=held, tokens=0, rate=0.0)
        tokens = 0

        def count(new: int) -> None:
            nonlocal tokens
            tokens += new
            elapsed = max(1e-9, progress.tasks[0].elapsed or 0.0)
            progress.update(task, tokens=tokens, rate=tokens / elapsed)

        for start in range(0, len(missing), recipe.collect.shard_size):
            shard = missing[start : start + recipe.collect.shard_size]
            store.add(answer(target, shard, settings, count))
            progress.advance(task, len(shard))


def summary(store: RecordStore) -> dict[str, Any]:
    """Counts of what was collected, per split, domain and law."""
    counts: Counter[tuple[str, str, str]] = Counter()
    finishes: Counter[tuple[str, str, str, str]] = Counter()
    tokens: Counter[tuple[str, str, str]] = Counter()
    for record in store.records():
        cell = (record.split, record.domain, record.law.label)
        counts[cell] += 1
        tokens[cell] += len(record.reply)
        finishes[(*cell, record.finish)] += 1
    return {
        "cells": [
            {
                "split": cell[0],
                "domain": cell[1],
                "law": cell[2],
                "records": counts[cell],
                "tokens": tokens[cell],
                "stopped": finishes[(*cell, "stop")],
                "cut_by_length": finishes[(*cell, "length")],
            }
            for cell in sorted(counts)
        ]
    }


def held_out(records: Sequence[Record], law: Law, domain: str) -> list[Record]:
    """The records an evaluation of one cell may use."""
    return [r for r in records if r.split == "heldout" and r.law == law and r.domain == domain]
