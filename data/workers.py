"""Prompts to rows of a table with their ids, in as many processes as pay.

Workers are forked from a server process that has no threads and no model (or started anew where
there is none), never from this one: a fork of a process whose torch or tokenizer threads hold
locks would hang. Rows come back in their order, so that their number changes nothing.
"""

import itertools
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from ..configs.errors import UserError
from .chat import (
    RefusedError,
    only_text,
    render_prompt,
    reply_closing,
    reply_header,
    reply_starts,
    text_ids,
    turn_between,
)
from .duplicates import MARKS, Asked, Sketch, marks
from .layouts import Unusable
from .prompts import Prompt, Rejection
from .replies import check_prompt, given_turns

CHUNK = 200  # rows that a worker takes at a time
FEW = 20_000  # rows that are done here before the start of workers pays

ROWS = pa.schema(
    [(name, pa.string()) for name in ("id", "domain", "split", "source")]
    + [("line", pa.int64())]
    + [(name, pa.string()) for name in ("key", "kind", "own_id")]
    + [("given", pa.bool_()), ("last_only", pa.bool_())]
    + [("messages", pa.string()), ("tools", pa.string())]  # as JSON
    + [("ids", pa.list_(pa.int32())), ("tokens", pa.int32()), ("turns", pa.int32())]
)
MARKED = pa.schema([*ROWS, *MARKS, ("section", pa.int32())])

Item = tuple[int, Prompt | Rejection]
"""What became of a row, and the number of the section that it belongs to."""
Rejected = list[tuple[int, Rejection]]


@dataclass(frozen=True)
class Renderer:
    """All that a prompt's row depends on besides the prompt.

    limit: tokens of the longest conversation, or None; sketch: None compares prompts whole.
    """

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    options: Mapping[str, Any]
    limit: int | None
    max_new_tokens: int
    sketch: Sketch | None

    def chunk(self, items: Iterable[Item]) -> tuple[pa.RecordBatch, Rejected]:
        """Rows of `MARKED`, and what is no use after all.

        Raises:
            UserError: what is wrong with more than a row, such as no chat template.
            RuntimeError: a fault of the program, naming the row.
        """
        rows, rejected = [], []
        for section, item in items:
            if isinstance(item, Rejection):
                rejected.append((section, item))
                continue
            try:
                rows.append({**self._row(item), "section": section})
            except Unusable as fault:
                rejected.append((section, Rejection(item.source, item.line, str(fault))))
            except UserError:
                raise
            except Exception as error:
                told = f"{item.source}:{item.line}: {type(error).__name__}: {error}"
                raise RuntimeError(told) from error
        return pa.RecordBatch.from_pylist(rows, schema=MARKED), rejected

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        ids = check_prompt(self.tokenizer, prompt, self.options)
        asked: list[Asked] = [(ids, ())]
        if prompt.given:
            turns = given_turns(self.tokenizer, prompt, self.eos_ids, self.limit, self.options)
            asked = [(turn.prompt, turn.reply) for turn in turns]
            ids = list(turns[0].prompt)
        elif self.limit is not None and len(ids) + self.max_new_tokens > self.limit:
            raise Unusable(
                f"too long: {len(ids)} tokens and max_new_tokens {self.max_new_tokens}, "
                f"at most {self.limit} fit"
            )
        return {
            **{name: getattr(prompt, name) for name in ROWS.names if hasattr(prompt, name)},
            **{name: json.dumps(getattr(prompt, name)) for name in ("messages", "tools")},
            "ids": ids,
            "tokens": len(ids),
            "turns": max(1, len(prompt.turns)),  # a rendered text tells none
            **marks(prompt, asked, self._opening(prompt), self.sketch),
        }

    def _opening(self, prompt: Prompt) -> list[int] | None:
        """Ids before the first reply to a user; None where they are not told, or asked anyway."""
        messages = prompt.messages
        if prompt.given and not prompt.last_only:
            return None  # among the prompts of all replies
        try:
            if prompt.kind == "rendered":
                return self._opening_of(only_text(messages, "rendered"))
            roles = [message["role"] for message in messages]
            user = roles.index("user")
            first = roles.index("assistant", user) if "assistant" in roles[user:] else len(roles)
            if first >= prompt.turns[0]:
                return None
            chat = messages[:first]
            return render_prompt(self.tokenizer, chat, prompt.kind, prompt.tools, self.options)
        except RefusedError:  # a template that asks for more than one question
            return None

    def _opening_of(self, text: str) -> list[int] | None:
        """A greeting before the first question opens many texts, and asks nothing."""
        tokenizer, options = self.tokenizer, self.options
        *earlier, _ = reply_starts(text, reply_header(tokenizer, options))
        if not earlier:
            return None
        between = turn_between(tokenizer, options)
        user = between.removeprefix(reply_closing(tokenizer, options)).strip()
        start = next((start for start in earlier if user in text[:start]), None)
        return text_ids(tokenizer, text[:start]) if user and start is not None else None


def parse_row(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a row of `ROWS`."""
    names = [name for name in Prompt.__dataclass_fields__ if name not in ("messages", "tools")]
    return Prompt(
        messages=tuple(json.loads(row["messages"])),
        tools=tuple(json.loads(row["tools"])),
        **{name: row[name] for name in names},
    )


def render_all(
    renderer: Renderer, items: Iterator[Item], workers: int | None
) -> Iterator[tuple[pa.RecordBatch, Rejected]]:
    """All chunks in order, while the items are read.

    Args:
        workers: processes; 1 is this one. None takes this one for few rows, and for those beyond
            as many as there are processors.
    Raises:
        UserError, RuntimeError: as `Renderer.chunk`, wherever it ran; a worker was killed.
    """
    if workers is None:
        yield from map(renderer.chunk, _chunks(itertools.islice(items, FEW)))
        workers = processors()
    chunks = _chunks(items)
    first = next(chunks, None)
    if first is None:
        return
    chunks = itertools.chain([first], chunks)
    if workers == 1:
        yield from map(renderer.chunk, chunks)
    else:
        yield from _in_pool(renderer, chunks, workers)


def processors() -> int:
    """Those that this process may use."""
    count = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    while chunk := list(itertools.islice(items, CHUNK)):
        yield chunk


def _in_pool(
    renderer: Renderer, chunks: Iterable[list[Item]], workers: int
) -> Iterator[tuple[pa.RecordBatch, Rejected]]:
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["__main__", __name__])
    waiting: deque[Future[tuple[pa.RecordBatch, Rejected]]] = deque()
    try:
        with ProcessPoolExecutor(workers, context, _start, (renderer,)) as pool:
            for chunk in chunks:
                waiting.append(pool.submit(_chunk, chunk))
                if len(waiting) > 2 * workers:  # enough that none idles, and no more in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker that prepares prompts ended without a word, perhaps for want of memory: "
            f"set collect.workers below {workers}"
        ) from None


_own: list[Renderer] = []  # a worker's one, so that it is not sent with each chunk


def _start(renderer: Renderer) -> None:
    _own.append(renderer)


def _chunk(items: list[Item]) -> tuple[pa.RecordBatch, Rejected]:
    return _own[0].chunk(items)
