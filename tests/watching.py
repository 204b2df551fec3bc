"""What passes through training, batch by batch, and stores of a target's own answers."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.configs.collection import CollectSection
from draftsmith.configs.recipe import Recipe
from draftsmith.data.collection import collect_settings
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.train.step import Scorer

TAPS = (1, 1, 2)
LIMIT = 14


@dataclass
class Watched:
    """Of every batch that went through a drafter in training: its records' keys; the drafter."""

    keys: list[tuple[str, ...]] = field(default_factory=list)
    drafter: Any = None


def watch(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[int, Any, Any], None] = lambda number, drafter, batch: None,
) -> Watched:
    """Note all batches from here on; `before(number, drafter, batch)` is called ahead of each."""
    seen, inner = Watched(), Scorer.forward

    def forward(self: Scorer, batch: Any, *args: Any, **options: Any) -> Any:
        before(len(seen.keys), self.drafter, batch)
        seen.keys.append(batch.keys)
        seen.drafter = self.drafter
        return inner(self, batch, *args, **options)

    monkeypatch.setattr(Scorer, "forward", forward)
    return seen


class PowerCut(RuntimeError):
    """The machine fails, with no time to save."""


def cut_at(batch: int) -> Callable[[int, Any, Any], None]:
    """For `watch`: the machine fails when this many batches are through."""

    def before(number: int, drafter: Any, held: Any) -> None:
        if number == batch:
            raise PowerCut

    return before


def answered(
    target: Target,
    folder: Path,
    count: int,
    law: Law = Law(1.0),  # noqa: B008
    limit: int = LIMIT,
    held_out: int = 4,
    taps: tuple[int, ...] = TAPS,
) -> RecordStore:
    """A store of `count` training answers of two domains, and some held-out ones."""
    generator = torch.Generator().manual_seed(5)
    requests = []
    for i in range(count + held_out):
        ids = torch.randint(3, target.vocab_size, (3 + i % 7,), generator=generator).tolist()
        split = "train" if i < count else "heldout"
        requests.append(Request(f"p{i}", "ab"[i % 2], split, tuple(ids), law, i))
    recipe = Recipe(name="tiny", collect=CollectSection(max_new_tokens=limit, batch_size=8))
    store = RecordStore.create(folder, collect_settings(recipe, target, taps))
    store.add("all", answer(target, requests, GatherSettings(limit, 8, taps, keep="hidden")))
    return store.finish({})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, but for what the clock says."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        for name in ("tokens_per_s", "data_wait", "mfu"):
            row.pop(name, None)
    return [row for row in rows if row["kind"] == kind]
