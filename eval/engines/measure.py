"""An engine measured on held-out prompts: acceptance per domain, and speed against itself.

Acceptance is counted one prompt at a time, so that every round belongs to a conversation and
intervals can be taken over conversations. Speed is that of all prompts of a domain together, at
each of several concurrencies, with the drafter and without, prefill included.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...configs.collection import ServerSection
from ...data.gather import GatherSettings, Request, last_turn, request_of
from ...data.records import Record
from ...data.remote import ServerBackend
from ...data.served import started
from ...data.target import TargetInfo
from ..cells import Cell
from .compare import Answer, cell_row, speeds
from .counters import NOTHING, Counts, of_reply, scraped
from .engine import START, Engine, Serving
from .expected import Judge, Rounds

_WARM = 4  # tokens of the reply before each measurement: it meets the server


@dataclass(frozen=True)
class Plan:
    """What is asked.

    cells: whose records have the prompts, and two tokens of reply or more; limit: the longest
    reply; concurrencies: requests at a time for which speed is measured, if any; bootstrap:
    resamples behind an interval.
    """

    cells: Sequence[Cell]
    limit: int
    concurrencies: tuple[int, ...]
    bootstrap: int


def measure(
    engine: Engine,
    serving: Serving,
    target: TargetInfo,
    plan: Plan,
    expected: Sequence[Rounds],
    judge: Judge,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The entry of a report. `expected` is of each cell, `judge` tells log p of replies, and is
    asked when no server runs any longer.

    Raises `UserError` if the engine does not run, breaks off, or tells no counters.
    """
    version, fast, crowds = _served(engine, serving, target, plan, say)
    plain, plain_crowds = fast, crowds
    if plan.concurrencies:
        _, plain, plain_crowds = _served(engine, replace(serving, drafter=None), target, plan, say)
    rows = [
        cell_row(cell, answers, foretold, engine.overruns, judge, plan.bootstrap)
        for cell, foretold, answers in zip(plan.cells, expected, fast, strict=True)
    ]
    every = zip(rows, fast, plain, crowds, plain_crowds, strict=True)
    for row, one, other, crowd, plain_crowd in every:
        row["speed"] = speeds(plan.concurrencies, one, other, crowd, plain_crowd)
    return {
        "engine": engine.name,
        "version": version,
        "method": engine.methods[serving.layout],
        "layout": serving.layout,
        "num_draft_tokens": serving.num_draft_tokens,
        "draft_sampling": "probabilistic" if serving.sampled else "greedy",
        "dtype": serving.dtype,
        "max_new_tokens": plan.limit,
        "cells": rows,
    }


# ---- asking


def _served(
    engine: Engine,
    serving: Serving,
    target: TargetInfo,
    plan: Plan,
    say: Callable[[str], None],
) -> tuple[str | None, list[list[Answer]], list[dict[int, float]]]:
    """The engine's version, and of each cell its answers and its speed in a crowd."""
    say(f"start     {engine.name}")
    with started(engine.program(serving)) as root:
        version = _version(root, engine)
        answers = [_answered(root, engine, serving, target, plan, cell, say) for cell in plan.cells]
        crowds = [_crowded(root, target, plan, cell, say) for cell in plan.cells]
    return version, answers, crowds


def _backend(
    root: str,
    target: TargetInfo,
    plan: Plan,
    concurrency: int,
    seen: Callable[[Request, dict[str, Any]], None],
) -> ServerBackend:
    """One that asks nothing twice: what is asked again would be counted again."""
    section = ServerSection(
        addresses=(f"{root}/v1",), concurrency=concurrency, retries=0, timeout=START
    )
    longest = max(r.prompt_len for cell in plan.cells for r in cell.records) + plan.limit
    return ServerBackend(
        section, target.tokenizer, target.eos_ids, target.vocab_size, longest, seen
    )


def _ask(backend: ServerBackend, requests: Sequence[Request], limit: int) -> list[Record]:
    settings = GatherSettings(limit, len(requests), (), keep="none")
    return backend.answer(requests, settings, lambda tokens: None, last_turn)


def _answered(
    root: str,
    engine: Engine,
    serving: Serving,
    target: TargetInfo,
    plan: Plan,
    cell: Cell,
    say: Callable[[str], None],
) -> list[Answer]:
    """A cell's prompts answered one after the other, with the counters before and after each."""

    def rounds_so_far(reply: dict[str, Any]) -> Counts:
        if serving.drafter is None:
            return NOTHING
        if engine.counters is not None:
            return scraped(root, engine.counters)
        return counts[-1] + of_reply(reply, serving.num_draft_tokens)

    def seen(request: Request, reply: dict[str, Any]) -> None:
        seconds.append(time.perf_counter() - begun[-1])
        counts.append(rounds_so_far(reply))
        begun.append(time.perf_counter())

    how = "plain" if serving.drafter is None else "with the drafter"
    say(f"serve     {cell.name}: {len(cell.records)} prompts, {how}")
    seconds: list[float] = []
    counts: list[Counts] = [NOTHING]
    begun = [time.perf_counter()]
    backend = _backend(root, target, plan, 1, seen)
    requests = [request_of(r) for r in cell.records]
    _ask(backend, requests[:1], _WARM)
    seconds, counts, begun = [], counts[-1:], [time.perf_counter()]
    records = _ask(backend, requests, plan.limit)
    steps = [after - before for before, after in pairwise(counts)]
    return [Answer(*found) for found in zip(records, steps, seconds, strict=True)]


def _crowded(
    root: str, target: TargetInfo, plan: Plan, cell: Cell, say: Callable[[str], None]
) -> dict[int, float]:
    """Tokens per second of a cell's prompts asked together, by concurrency above 1."""
    found = {}
    for concurrency in (c for c in plan.concurrencies if c > 1):
        say(f"serve     {cell.name}: {concurrency} at a time")
        backend = _backend(root, target, plan, concurrency, lambda request, reply: None)
        requests = [request_of(r) for r in cell.records]
        _ask(backend, requests[:1], _WARM)
        start = time.perf_counter()
        records = _ask(backend, requests, plan.limit)
        tokens = sum(len(r.reply) for r in records)
        found[concurrency] = tokens / (time.perf_counter() - start)
    return found


def _version(root: str, engine: Engine) -> str | None:
    """The engine's own, if it tells it."""
    path, key = engine.version
    try:
        with urllib.request.urlopen(root + path, timeout=START) as reply:
            return str(json.load(reply)[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
