"""Preparation and collection as the tests of data call them."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from collecting import World
from preparing import Load, rejected
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.data.prepare import Prepared, prepare
from draftsmith.data.target import Target

COLLECT = CollectSection()


@pytest.fixture
def out() -> Console:
    """A console that keeps what it prints: `out.export_text()`."""
    return Console(record=True, width=300, file=StringIO())


@pytest.fixture
def ready(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_tokenizer: PreTrainedTokenizerFast,
    out: Console,
) -> Load:
    """`ready(sections, collect, tokenizer, limit, **options)` in a cache of its own."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))

    def load(
        sections: DomainSection | tuple[DomainSection, ...],
        collect: CollectSection = COLLECT,
        tokenizer: PreTrainedTokenizerFast = tiny_tokenizer,
        limit: int | None = None,
        **options: Any,
    ) -> Prepared:
        sections = sections if isinstance(sections, tuple) else (sections,)
        prepared = prepare(sections, collect, tokenizer, (2,), limit, options, out)
        counts = prepared.counts
        assert counts["rows"] == counts["kept"] + counts["rejected"]
        assert len(prepared) == counts["kept"] and len(rejected(prepared)) == counts["rejected"]
        assert sum(row["rows"] for row in counts["reasons"]) == counts["rejected"]
        return prepared

    return load


@pytest.fixture
def world(tiny_target: Target, tmp_path: Path) -> World:
    return World(tiny_target, tmp_path)
