"""Rows by prompt length: every reply in one of them, and nothing but the row's name is another."""

from dataclasses import replace
from pathlib import Path

import pytest
from worlds import World

from draftsmith.configs.errors import OptionError
from draftsmith.configs.recipe import EvalSection
from draftsmith.data.records import Record
from draftsmith.eval.lengths import by_length, in_order


def test_a_prompt_belongs_to_the_span_it_reaches(records: list[Record]) -> None:
    some = [replace(records[0], prompt_len=n) for n in (1, 4, 5, 8, 9, 100)]
    named = by_length(some, (5, 9))
    assert [r.domain for r in named] == ["a <5"] * 2 + ["a 5–8"] * 2 + ["a ≥9"] * 2
    assert [r.key for r in named] == [r.key for r in some]
    assert [r.domain for r in by_length(some, (5,))] == ["a <5"] * 2 + ["a ≥5"] * 4
    assert by_length(some, ()) == some


def test_rows_are_in_the_order_of_length() -> None:
    named = ["math ≥1024", "chat", "math 256–1023", "math <256", "is <3", "math 1023–1024"]
    assert sorted(named, key=in_order) == [
        "chat", "is <3", "math <256", "math 256–1023", "math 1023–1024", "math ≥1024",
    ]  # fmt: skip


def test_every_reply_is_in_one_row_of_the_report(world: World, tmp_path: Path) -> None:
    middle = max(r.prompt_len for r in world.store.records("heldout"))
    whole = world.evaluate(tmp_path / "whole", timing_prompts=0)
    split = world.evaluate(tmp_path / "split", timing_prompts=0, length_splits=(middle,))
    names = {c["domain"] for c in split["cells"]}
    assert names == {f"chat <{middle}", f"co/de ≥{middle}"}, "one has longer prompts"
    for key in ("replies", "rounds", "tokens"):
        for domain in ("chat", "co/de"):
            parts = [c[key] for c in split["cells"] if c["domain"].startswith(domain)]
            assert sum(parts) == sum(c[key] for c in whole["cells"] if c["domain"] == domain)


@pytest.mark.parametrize("splits", [(5, 5), (9, 5), (0, 4)])
def test_splits_must_grow(splits: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="ever larger"):
        EvalSection(length_splits=splits)
