"""A tiny target that answers the prompts of a file, as often as a test likes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.recipe import LawSection, Recipe, ServingSection, TargetSection
from draftsmith.data import collection
from draftsmith.data.collection import collect
from draftsmith.data.gather import After, GatherSettings, Request, TargetBackend
from draftsmith.data.prepare import Prepared, prepare
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.work import Work

TAPS = (0, 1, 2)
COLLECT: dict[str, Any] = {
    "temperatures": (0.0, 1.0),
    "max_new_tokens": 5,
    "batch_size": 2,
    "shard_size": 3,
}
LAWS = (LawSection(1.0),)
QUIET = Console(quiet=True)

Row = dict[str, Any]


def rows(count: int) -> list[Row]:
    return [{"prompt": f"Solve step {n}." + " Maya has stickers." * (n % 3)} for n in range(count)]


def chat(*turns: str) -> Row:
    return {"turns": list(turns)}


class World:
    """A file of prompts, a tiny target, and collections of the one by the other."""

    def __init__(self, target: Target, root: Path):
        self.target, self.root = target, root

    def prepared(
        self, content: Sequence[Row], holdout: float = 0.25, section: CollectSection | None = None
    ) -> Prepared:
        path = self.root / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        domain = DomainSection("math", str(path), holdout=holdout)
        return prepare(
            [domain], section or CollectSection(**COLLECT), self.target.tokenizer,
            self.target.eos_ids, self.target.max_positions, {}, QUIET,
        )  # fmt: skip

    def work(
        self,
        content: Sequence[Row],
        name: str = "records",
        laws: Sequence[LawSection] = LAWS,
        holdout: float = 0.25,
        **changes: Any,
    ) -> Work:
        section = CollectSection(**{**COLLECT, **changes})
        recipe = Recipe(
            "tiny", target=TargetSection("tiny"), serving=ServingSection(tuple(laws)),
            collect=section,
        )  # fmt: skip
        prepared = self.prepared(content, holdout, section)
        return Work(recipe, self.target, TAPS, prepared, self.root / name, QUIET)

    def collect(self, content: Sequence[Row], name: str = "records", **options: Any) -> RecordStore:
        return collect(self.work(content, name, **options))


class Answers:
    """Stands for the backend: notes what is asked, stops the run in batch `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop: int | None = None):
        self.asked: list[Request] = []
        self.calls, self.stop = 0, stop
        monkeypatch.setattr(collection, "TargetBackend", self._with)

    def _with(self, target: Target) -> "Answers":
        self.target = target
        return self

    def answer(
        self,
        requests: Sequence[Request],
        settings: GatherSettings,
        progress: Callable[[int], None],
        after: After,
    ) -> list[Record]:
        self.asked += requests
        self.calls += 1

        def count(tokens: int) -> None:
            if self.calls - 1 == self.stop:
                raise KeyboardInterrupt
            progress(tokens)

        return TargetBackend(self.target).answer(requests, settings, count, after)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}
