"""A collection: prompts in, record shards out. A killed run goes on where it stopped.

Several processes may work on one folder: each asks its share of the plan's batches, and the first
of them writes what concerns all.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..configs.errors import Unfinished, UserError
from ..configs.recipe import Recipe
from .gather import Backend, GatherSettings, TargetBackend, recompute_states
from .plan import Ask, Batch, make_asks, make_plan, selection
from .prepare import Prepared
from .records import Record, Top
from .remote import ServerBackend
from .replies import Turn, given_turns
from .served import serving
from .store import RecordStore
from .target import Target, TargetInfo
from .top import top_of
from .turns import Conversations

_KNOWN = (
    *("name", "revision", "quantisation", "weights", "dtype", "vocab_size"),
    *("tokenizer", "rules", "template"),
)


def collect_settings(
    recipe: Recipe, target: Target | TargetInfo, taps: tuple[int, ...]
) -> dict[str, Any]:
    """Everything a record depends on besides what it is asked; others mean another store."""
    section = recipe.collect
    return {
        "target": {name: target.provenance[name] for name in _KNOWN},
        "seed": recipe.seed,
        "taps": list(taps) if section.distributions == "hidden" else [],
        "max_new_tokens": section.max_new_tokens,
        "max_length": section.max_length,
        "cut": section.cut,
        "distributions": section.distributions,
        "top": section.top if section.distributions == "top" else 0,
        "store_dtype": section.store_dtype,
        "answered_by": "this process" if section.server is None else "a server",
        "torch": torch.__version__,
    }


@dataclass(frozen=True)
class Work:
    """What a collection needs besides its recipe."""

    recipe: Recipe
    target: Target | TargetInfo
    taps: tuple[int, ...]
    prepared: Prepared
    folder: Path
    console: Console
    deadline: float | None = None
    """Seconds from the start after which no further batch is begun."""


def collect(work: Work) -> RecordStore:
    """Ask what the store in the folder does not hold yet.

    Raises:
        Unfinished: the deadline came first.
        UserError: nothing to ask, or what backends and stores raise.
    """
    begun = time.monotonic()
    state = _Processes.here()
    server = work.recipe.collect.server
    if server is not None and server.command and state.count > 1:
        raise UserError(
            "collect.server.command starts a server, and this is one of several processes; start "
            "the servers yourself and name them in collect.server.addresses, or use one process"
        )
    settings = collect_settings(work.recipe, work.target, work.taps)
    asks = make_asks(work.recipe, work.prepared)
    if not asks:
        raise UserError("no prompt is left to collect")
    if state.first:
        for path in RecordStore.create(work.folder, settings).drop_damaged():
            work.console.print(f"{path.name} was damaged and is collected again")
        _plan(work, _everything(work, settings), asks)
    state.wait()
    store = _everything(work, settings)
    batches = _plan(work, store, asks)[state.rank :: state.count]
    state.wait()  # all have read the plan before anyone adds to what is held
    if batches:
        if state.first:
            work.console.print(_room(work, batches, state.count))
        _ask(work, store, batches, begun)
    else:
        work.console.print(f"all {len(asks)} conversations are in {work.folder.name}")
    whole = store.held()
    late = state.any(any(batch.name not in whole for batch in batches))
    if late:
        missing = sum(len(b.asks) for b in _plan(work, store, asks))
        raise Unfinished(
            f"stopped at the time limit: {len(asks) - missing} of {len(asks)} conversations are in "
            f"{work.folder}; the same command goes on"
        )
    if state.first:
        chosen = selection(asks, work.recipe, store.index())
        store.finish(summary(store, asks, work), chosen)
    state.wait()
    return RecordStore.open(work.folder)


def _everything(work: Work, settings: dict[str, Any]) -> RecordStore:
    """All that lies in the folder, whatever the last plan asked for."""
    return replace(RecordStore.create(work.folder, settings), complete=False, selection=None)


def _plan(work: Work, store: RecordStore, asks: Sequence[Ask]) -> list[Batch]:
    held = {row.key for row in store.index() if row.turn == 0}
    return make_plan(work.folder, asks, held, store.held(), work.recipe.collect.shard_size)


@dataclass(frozen=True)
class _Processes:
    """The processes of `accelerate launch` that share the work; one where there is no launcher."""

    rank: int
    count: int
    _state: PartialState

    @classmethod
    def here(cls) -> "_Processes":
        state = PartialState()
        return cls(state.process_index, state.num_processes, state)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        if self.count == 1:
            return flag
        found = torch.tensor([float(flag)], device=self._state.device)
        torch.distributed.all_reduce(found)
        return bool(found.item())


# ---- asking


def _ask(work: Work, store: RecordStore, batches: Sequence[Batch], begun: float) -> None:
    """Ask the batches one after the other, none that is not expected to end in time."""
    section = work.recipe.collect
    settings = GatherSettings(
        max_new_tokens=section.max_new_tokens,
        batch_size=section.batch_size,
        taps=work.taps,
        keep=section.distributions,
        top=section.top,
    )
    limit = _limit(work) - section.max_new_tokens
    options = dict(work.recipe.target.template_options)
    talks = Conversations(
        work.prepared, work.target.tokenizer, options, work.recipe.seed, limit,
        section.cut == "drop",
    )  # fmt: skip
    total = sum(len(b.asks) for b in batches)
    with _backend(work) as backend, _progress(work.console, total) as count:
        started = time.monotonic()
        for done, batch in enumerate(batches):
            now = time.monotonic()
            each = (now - started) / max(1, done)
            if work.deadline is not None and now + each > begun + work.deadline:
                return
            said = [talks.first(ask) for ask in batch.asks if ask.origin == "target"]
            records = backend.answer(said, settings, count.tokens, talks.after) if said else []
            records += _given(work, batch, settings)
            store.add(batch.name, records)
            count.conversations(len(batch.asks))


def _limit(work: Work) -> int:
    own, chosen = work.target.max_positions, work.recipe.collect.max_length
    return min(own or 1 << 30, chosen or 1 << 30)


@contextmanager
def _backend(work: Work) -> Iterator[Backend]:
    """Whoever answers, for as long as the block runs."""
    section, target = work.recipe.collect, work.target
    if section.server is None:
        assert isinstance(target, Target)
        yield TargetBackend(target)
        return
    assert isinstance(target, TargetInfo)
    with serving(section.server, target.place) as addresses:
        server = replace(section.server, addresses=addresses, command=())
        yield ServerBackend(server, target.tokenizer, target.eos_ids, target.vocab_size)


def _given(work: Work, batch: Batch, settings: GatherSettings) -> list[Record]:
    """Records of the replies that the data holds, with what the target thinks of them."""
    options = dict(work.recipe.target.template_options)
    limit, tokenizer, ends = _limit(work), work.target.tokenizer, work.target.eos_ids
    records = [
        _as_given(ask, turn)
        for ask in batch.asks
        if ask.origin == "given"
        for turn in given_turns(tokenizer, work.prepared.prompt(ask.row), ends, limit, options)
    ]
    if settings.keep == "none" or not records:
        return records
    if not isinstance(work.target, Target):
        raise UserError(
            "servers do not tell what they think of given replies: set collect.distributions: "
            "none, or collect.server: null"
        )
    records.sort(key=lambda r: len(r.ids))
    size = settings.batch_size
    parts = [records[i : i + size] for i in range(0, len(records), size)]
    return [r for part in parts for r in _judged(work.target, part, settings)]


def _as_given(ask: Ask, turn: Turn) -> Record:
    return Record(
        ask.prompt_id, ask.domain, ask.split, ask.law, ask.seed, turn.finish,
        torch.tensor([*turn.prompt, *turn.reply]), len(turn.prompt), None, turn.number, "given",
    )  # fmt: skip


def _judged(target: Target, records: list[Record], settings: GatherSettings) -> Iterator[Record]:
    for record in recompute_states(target, records, settings.taps):
        if settings.keep == "hidden":
            yield record
            continue
        assert record.states is not None
        found = top_of(target.logits(record.states.hidden.to(target.device)), settings.top)
        yield replace(record, states=None, top=Top(found.ids.cpu(), found.log_probs.cpu()))


# ---- what is told


@dataclass(frozen=True)
class _Count:
    progress: Progress
    task: Any
    seen: list[int]

    def tokens(self, new: int) -> None:
        self.seen[0] += new
        elapsed = max(1e-9, self.progress.tasks[0].elapsed or 0.0)
        self.progress.update(self.task, tokens=self.seen[0], rate=self.seen[0] / elapsed)

    def conversations(self, new: int) -> None:
        self.progress.advance(self.task, new)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[_Count]:
    columns = (
        TextColumn("collect"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Count(progress, progress.add_task("", total=total, tokens=0, rate=0.0), [0])


def bytes_per_token(work: Work) -> tuple[int, int]:
    """What is stored of a prompt's token and of a reply's."""
    section = work.recipe.collect
    ids = 8
    if section.distributions == "top":
        return ids, ids + 8 * section.top
    if section.distributions == "none":
        return ids, ids
    assert isinstance(work.target, Target)
    width, half = work.target.hidden_size, section.store_dtype != "float32"
    taps = len(work.taps) * width * (2 if half else 4)
    return ids + taps, ids + taps + 4 * width + 4


def _room(work: Work, batches: Sequence[Batch], processes: int) -> str:
    """Bytes per token, the disk that the rest may need at most, and what is free."""
    of_prompt, of_reply = bytes_per_token(work)
    asks = [ask for batch in batches for ask in batch.asks]
    longest = work.recipe.collect.max_new_tokens
    need = processes * sum(a.tokens * of_prompt + longest * of_reply for a in asks)
    free = shutil.disk_usage(work.folder).free
    line = (
        f"{of_prompt:,} bytes per prompt token, {of_reply:,} per reply token: at most "
        f"{need / 1e9:.2f} GB for replies of one turn, {free / 1e9:.1f} GB are free"
    )
    return f"[yellow]{line}; this may not fit[/yellow]" if need > free else line


def _turns(prepared: Prepared, ask: Ask) -> int:
    """Replies of a conversation, were none cut or too long; those of rendered text as one."""
    return max(1, len(prepared.prompt(ask.row).turns))


def summary(store: RecordStore, asks: Sequence[Ask], work: Work) -> dict[str, Any]:
    """Counts of what was collected, per split, domain and law, and of the prompts behind it.

    replies_left_out: turns that were not asked or do not fit, and cut replies where those are
    dropped.
    """
    chosen = selection(asks, work.recipe, store.index())
    counts: Counter[tuple[str, ...]] = Counter()
    for row in store.index():
        if row.key in chosen:
            split, domain = chosen[row.key]
            law = row.law.label if row.origin == "target" else "given"
            cell = (split, domain, law)
            counts[*cell, "records"] += 1
            counts[*cell, "tokens"] += row.tokens - row.prompt_len
            counts[*cell, "stopped"] += row.finish == "stop"
            counts[*cell, "cut_by_length"] += row.finish == "length"
    fields = ("records", "tokens", "stopped", "cut_by_length")
    turns = sum(_turns(work.prepared, ask) for ask in asks)
    return {
        "cells": [
            {"split": cell[0], "domain": cell[1], "law": cell[2]}
            | {name: counts[*cell, name] for name in fields}
            for cell in sorted({key[:3] for key in counts})
        ],
        "conversations": len(asks),
        "replies": len(chosen),
        "replies_left_out": turns - len(chosen),
        "prompts": work.prepared.counts,
    }
