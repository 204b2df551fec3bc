"""A collection: prompts in, record shards out. A killed run goes on where it stopped.

Several processes may work on one folder: each asks its share of the plan's batches, and the first
of them writes what concerns all.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

from ..configs.errors import Unfinished, UserError
from ..configs.recipe import Recipe
from .account import in_words, progress_of, room, summary
from .gather import Backend, GatherSettings, TargetBackend, recompute_states
from .plan import Ask, Batch, asked_for, conversation_key, is_dropped, make_asks, make_plan
from .records import Record, Top
from .remote import ServerBackend
from .replies import Turn, given_turns
from .served import serving
from .store import RecordStore
from .target import Target, TargetInfo
from .top import top_of
from .turns import Conversations
from .work import Processes, Work

_TOKENS = 32_768  # of given replies that the target reads at a time, padding included
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
        "end_tokens": sorted(target.eos_ids),
        "answered_by": "this process" if section.server is None else "a server",
        "served_model": None if section.server is None else section.server.model,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def collect(work: Work) -> RecordStore:
    """Ask what the store in the folder does not hold yet.

    Raises:
        Unfinished: the deadline came first.
        UserError: nothing to ask, or what backends and stores raise.
    """
    state = Processes.here()
    server = work.recipe.collect.server
    if server is not None and server.command and state.count > 1:
        raise UserError(
            "collect.server.command starts a server, and this is one of several processes; start "
            "the servers yourself and name them in collect.server.addresses, or use one process"
        )
    asks = make_asks(work.recipe, work.prepared)
    if not asks:
        raise UserError("no prompt is left to collect")
    with _alone(work.folder, state):
        return _collect(work, asks, state)


def _collect(work: Work, asks: Sequence[Ask], state: Processes) -> RecordStore:
    settings = collect_settings(work.recipe, work.target, work.taps)
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
            work.console.print(room(work, batches, state.count))
        _ask(work, store, batches, state.count)
    else:
        work.console.print(f"all {len(asks)} conversations are in {work.folder.name}")
    whole = store.held()
    late = state.any(any(batch.name not in whole for batch in batches))
    lacking = sum(len(batch.asks) for batch in _plan(work, store, asks))
    if late:
        raise Unfinished(
            f"stopped at the time limit: {len(asks) - lacking} of {len(asks)} conversations are in "
            f"{work.folder}; the same command goes on"
        )
    if lacking:
        raise UserError(
            f"{work.folder} lacks {lacking} conversations that were answered: all processes must "
            "write to one folder, which every machine shares; run the same command again"
        )
    if state.first:
        _finish(work, store, asks)
    state.wait()
    return RecordStore.open(work.folder)


def _finish(work: Work, store: RecordStore, asks: Sequence[Ask]) -> None:
    """Say in the manifest what is there and what of it is asked for, unless it says so already."""
    found = asked_for(asks, work.recipe, store.index())
    kept = [(row, ask) for row, ask in found if not is_dropped(work.recipe, row, ask)]
    chosen = {row.key: (ask.split, ask.domain) for row, ask in kept}
    about = summary(work, asks, found)
    known = RecordStore.create(work.folder, store.settings)
    if not (known.complete and known.selection == chosen and set(known.listed) == store.held()):
        store.finish(about, chosen)
    work.console.print(in_words(about))


@contextmanager
def _alone(folder: Path, state: Processes) -> Iterator[None]:
    """One collection at a time; the lock goes with its process, however that ends."""
    lock = FileLock(folder / ".lock")
    if state.first:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another command is collecting into {folder}") from None
    try:
        yield
    finally:
        lock.release()


def _everything(work: Work, settings: dict[str, Any]) -> RecordStore:
    """All that lies in the folder, whatever the last plan asked for."""
    return replace(RecordStore.create(work.folder, settings), complete=False, selection=None)


def _plan(work: Work, store: RecordStore, asks: Sequence[Ask]) -> list[Batch]:
    held = {
        conversation_key(work.recipe, row)
        for row in store.index()
        if row.turn == 0 or row.origin == "given"  # which may be the last reply alone
    }
    return make_plan(work.folder, asks, held, store.held(), work.recipe.collect.shard_size)


# ---- asking


def _ask(work: Work, store: RecordStore, batches: Sequence[Batch], processes: int) -> None:
    """Ask the batches one after the other, none that is not expected to end in time."""
    section = work.recipe.collect
    settings = GatherSettings(
        max_new_tokens=section.max_new_tokens,
        batch_size=section.batch_size,
        taps=work.taps if section.distributions == "hidden" else (),
        keep=section.distributions,
        top=section.top,
    )
    limit = work.limit - section.max_new_tokens
    options = work.recipe.target.template_options
    total = sum(len(b.asks) for b in batches)
    with _backend(work, processes) as backend, progress_of(work.console, total) as count:
        longest, before = 0.0, time.monotonic()
        for batch in batches:  # ever longer ones
            now = time.monotonic()
            longest, before = max(longest, now - before), now
            if work.ends is not None and now + longest > work.ends:
                return
            talks = Conversations(
                work.prepared, work.target.tokenizer, options, work.recipe.seed, limit,
                section.cut == "drop",
            )  # fmt: skip
            said = [talks.first(ask) for ask in batch.asks if ask.origin == "target"]
            records = backend.answer(said, settings, count.tokens, talks.after) if said else []
            store.add(batch.name, records + _given(work, batch, settings))
            count.conversations(len(batch.asks))


@contextmanager
def _backend(work: Work, processes: int) -> Iterator[Backend]:
    """Whoever answers, for as long as the block runs."""
    section, target = work.recipe.collect, work.target
    if section.server is None:
        assert isinstance(target, Target)
        yield TargetBackend(target)
        return
    assert isinstance(target, TargetInfo)
    with serving(section.server, target.place) as addresses:
        each = max(1, section.server.concurrency // processes)
        server = replace(section.server, addresses=addresses, command=(), concurrency=each)
        yield ServerBackend(server, target.tokenizer, target.eos_ids, target.vocab_size, work.limit)


def _given(work: Work, batch: Batch, settings: GatherSettings) -> list[Record]:
    """Records of the replies that the data holds, with what the target thinks of them."""
    options = work.recipe.target.template_options
    limit, tokenizer, ends = work.limit, work.target.tokenizer, work.target.eos_ids
    records = [
        _as_given(ask, turn)
        for ask in batch.asks
        if ask.origin == "given"
        for turn in given_turns(tokenizer, work.prepared.prompt(ask.row), ends, limit, options)
    ]
    if settings.keep == "none" or not records:
        return records
    assert isinstance(work.target, Target)
    return [
        record
        for part in _parts(records, settings.batch_size)
        for record in _judged(work.target, part, settings)
    ]


def _parts(records: Sequence[Record], size: int) -> Iterator[list[Record]]:
    """Records of like length, as many together as fit."""
    part: list[Record] = []
    for record in sorted(records, key=lambda r: len(r.ids)):
        if part and (len(part) == size or (len(part) + 1) * len(record.ids) > _TOKENS):
            yield part
            part = []
        part.append(record)
    yield part


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
