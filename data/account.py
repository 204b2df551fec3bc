"""What a collection tells: its progress, the disk it needs, what came of it."""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from .plan import Ask, Batch, is_dropped
from .shards import RowInfo
from .target import Target
from .work import Work


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
def progress_of(console: Console, total: int) -> Iterator[_Count]:
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


def room(work: Work, batches: Sequence[Batch], processes: int) -> Text:
    """Bytes per token, about the disk that the rest may need at most, and what is free."""
    of_prompt, of_reply = bytes_per_token(work)
    need = sum(_most_bytes(work, a, of_prompt, of_reply) for b in batches for a in b.asks)
    need, free = need * processes, shutil.disk_usage(work.folder).free
    line = (
        f"{of_prompt:,} bytes per prompt token, {of_reply:,} per reply token: about "
        f"{need / 1e9:.2f} GB at most, {free / 1e9:.1f} GB are free"
    )
    return Text(f"{line}; this may not fit", style="yellow") if need > free else Text(line)


def _most_bytes(work: Work, ask: Ask, of_prompt: int, of_reply: int) -> int:
    """Of a conversation whose replies are as long as they may be; each turn has all before it."""
    turns, reply = ask.turns, work.recipe.collect.max_new_tokens
    if ask.origin == "given":
        prompt = work.prepared.prompt(ask.row)
        said = (str(prompt.messages[place]["content"]) for place in prompt.turns)
        reply = max((len(text) for text in said), default=0) // 2  # characters, at least 2 a token
    before = turns * ask.tokens + turns * (turns - 1) // 2 * reply
    return before * of_prompt + turns * reply * of_reply


def summary(
    work: Work, asks: Sequence[Ask], found: Sequence[tuple[RowInfo, Ask]]
) -> dict[str, Any]:
    """Counts of what was collected, per split, domain and law, and of the prompts behind it.

    Of a cell: records that are kept with their tokens, how many of its replies stopped by
    themselves or were cut by length, how many were dropped for that, and how many were tokenised
    anew from text. replies_left_out: turns that were not asked, or do not fit.
    """
    cells: dict[tuple[str, str, str], Counter[str]] = {}
    told: Counter[str] = Counter()
    for row, ask in found:
        law = row.law.label if row.origin == "target" else "given"
        counts = cells.setdefault((ask.split, ask.domain, law), Counter())
        told[ask.key] += 1
        counts["stopped"] += row.finish == "stop"
        counts["cut_by_length"] += row.finish == "length"
        counts["retokenised"] += not row.exact
        dropped = is_dropped(work.recipe, row, ask)
        counts["dropped"] += dropped
        counts["records"] += not dropped
        counts["tokens"] += 0 if dropped else row.tokens - row.prompt_len
    names = ("records", "tokens", "stopped", "cut_by_length", "dropped", "retokenised")
    return {
        "cells": [
            {"split": cell[0], "domain": cell[1], "law": cell[2]}
            | {name: counts[name] for name in names}
            for cell, counts in sorted(cells.items())
        ],
        "conversations": len(asks),
        "replies_left_out": sum(max(0, a.turns - told[a.key]) for a in asks),
        "prompts": work.prepared.counts,
    }


def in_words(about: dict[str, Any]) -> str:
    """A summary's totals in a line."""

    def total(name: str) -> int:
        return sum(int(cell[name]) for cell in about["cells"])

    line = (
        f"{total('records')} replies of {total('tokens')} tokens: {total('stopped')} ended by "
        f"themselves, {total('cut_by_length')} were cut by length"
    )
    also = {
        "dropped from training": total("dropped"),
        "tokenised anew from text": total("retokenised"),
        "later turns not asked": about["replies_left_out"],
    }
    return line + "".join(f", {n} {what}" for what, n in also.items() if n)
