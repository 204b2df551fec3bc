"""An engine measured on held-out prompts: acceptance per domain, and speed against itself.

Acceptance is counted one prompt at a time, so that every round belongs to a conversation and
intervals can be taken over conversations. Speed is that of all prompts of a domain together, at
each of several concurrencies, with the drafter and without, prefill included.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ...configs.collection import ServerSection
from ...data.gather import GatherSettings, Request, last_turn, request_of
from ...data.records import Record
from ...data.remote import ServerBackend
from ...data.served import started
from ...data.target import TargetInfo
from ..cells import Cell
from ..intervals import Interval, ratio_interval, speedup_interval
from .counters import NOTHING, Counts, of_reply, scraped
from .engine import START, Engine, Serving
from .expected import Rounds, deviations

_WARM = 4  # tokens of the reply before each measurement: it meets the server


@dataclass(frozen=True)
class Answer:
    """A reply of the engine, the rounds behind it, and its seconds."""

    record: Record
    counts: Counts
    seconds: float

    def rounds(self, overruns: bool) -> int:
        """All rounds behind the first token, those without a draft included.

        An engine that drafts to the end has none of those. Another has them only at the limit,
        where all that is accepted is also said.
        """
        if overruns or self.record.finish == "stop":
            return self.counts.rounds
        return len(self.record.reply) - 1 - self.counts.accepted


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
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The entry of a report. `expected` is of each cell.

    Raises `UserError` if the engine does not run, breaks off, or tells no counters.
    """
    version, fast, crowds = _served(engine, serving, target, plan, say)
    rows = [
        _row(engine, serving, plan, cell, foretold, answers) | {"speed": []}
        for cell, foretold, answers in zip(plan.cells, expected, fast, strict=True)
    ]
    if plan.concurrencies:
        bare = replace(serving, drafter=None)
        _, plain, plain_crowds = _served(engine, bare, target, plan, say)
        every = zip(rows, fast, plain, crowds, plain_crowds, strict=True)
        for row, one, other, crowd, plain_crowd in every:
            row["speed"] = _speeds(plan, one, other, crowd, plain_crowd)
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


# ---- comparing


def _row(
    engine: Engine,
    serving: Serving,
    plan: Plan,
    cell: Cell,
    expected: Rounds,
    answers: Sequence[Answer],
) -> dict[str, Any]:
    """A cell's acceptance beside the expected one."""
    gamma, counts = serving.num_draft_tokens, sum((a.counts for a in answers), NOTHING)
    reached = [(a.counts.by_position + (0,) * gamma)[:gamma] for a in answers]
    by_position = np.array(reached, np.float64).reshape(len(answers), gamma)
    measured = Rounds(
        tuple(a.record.prompt_id for a in answers),
        np.array([len(a.record.reply) - 1.0 for a in answers]),
        np.array([float(a.rounds(engine.overruns)) for a in answers]),
        by_position, by_position,
    )  # fmt: skip
    same = None
    if cell.law.temperature == 0:
        pairs = zip(cell.records, answers, strict=True)
        same = np.array([r.reply.tolist() == a.record.reply.tolist() for r, a in pairs])
    return {
        "domain": cell.domain,
        "law": cell.law.label,
        "prompts": len(set(measured.ids)),
        "replies": len(answers),
        "same_replies": None if same is None else int(same.sum()),
        "tokens": int(measured.tokens.sum()),
        "rounds": int(measured.rounds.sum()),
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "tokens_per_round": _tau(measured, plan.bootstrap),
        "tokens_per_round_expected": _tau(expected, plan.bootstrap),
        "positions": [_position(measured, expected, k, plan.bootstrap) for k in range(gamma)],
        "deviations": deviations(measured, expected, same),
    }


def _tau(rounds: Rounds, bootstrap: int) -> dict[str, Any]:
    return ratio_interval(rounds.tokens, rounds.rounds, bootstrap, rounds.ids).to_dict()


def _position(measured: Rounds, expected: Rounds, k: int, bootstrap: int) -> dict[str, Any]:
    def share(accepted: Any, rounds: Rounds) -> Interval:
        return ratio_interval(accepted[:, k], rounds.rounds, bootstrap, rounds.ids)

    return {
        "position": k + 1,
        "accepted": int(measured.most[:, k].sum()),
        "share": share(measured.most, measured).to_dict(),
        "least": share(expected.least, expected).to_dict(),
        "most": share(expected.most, expected).to_dict(),
    }


def _speeds(
    plan: Plan,
    fast: Sequence[Answer],
    plain: Sequence[Answer],
    crowd: dict[int, float],
    plain_crowd: dict[int, float],
) -> list[dict[str, Any]]:
    """One entry for each concurrency; only at 1 there is an interval, over prompts."""
    found = []
    for concurrency in plan.concurrencies:
        if concurrency == 1:
            sides = [
                (np.array([a.seconds for a in side]),
                 np.array([float(len(a.record.reply)) for a in side]))
                for side in (plain, fast)
            ]  # fmt: skip
            bare, with_draft = (float(tokens.sum() / seconds.sum()) for seconds, tokens in sides)
            ratio = speedup_interval(*sides[0], *sides[1])
        else:
            bare, with_draft = plain_crowd[concurrency], crowd[concurrency]
            ratio = Interval(with_draft / bare, None, None)
        found.append(
            {
                "concurrency": concurrency,
                "plain_tokens_per_s": bare,
                "speculative_tokens_per_s": with_draft,
                "speedup": asdict(ratio),
            }
        )
    return found
