"""Prompts: layouts, rejections with file and line, and a split without leaks."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import PACKAGED_DOMAINS, DomainSection
from draftsmith.data.prompts import (
    Prompt,
    Rejection,
    load_domains,
    load_prompts,
    normalised,
    prompts_sha256,
)
from draftsmith.data.sources import packaged_domains


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str | None) -> dict[str, str | None]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(
    folder: Path, rows: list[Any], **options: Any
) -> tuple[list[Prompt], list[tuple[int, str]]]:
    source = write(folder / "rows.jsonl", rows)
    section = DomainSection(name="d", source=source, **options)
    prompts, rejections = load_prompts(section)
    assert len(rows) == len(prompts) + len(rejections)
    assert all(r.source == source for r in rejections)
    return prompts, [(r.line, r.reason) for r in rejections]


GOOD = [{"prompt": f"good prompt {number}"} for number in range(5)]


# ---- layouts


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": " keep spaces \n"}, [user(" keep spaces \n")]),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n"}, [user("def f():\n")]),
        ({"question": "2 + 2?", "answer": "4"}, [user("2 + 2?")]),
        ({"text": "Write f.", "code": "def f(): ..."}, [user("Write f.")]),
        ({"text": "Write f."}, [user("Write f.")]),
        ({"instruction": "Sum up.", "input": ""}, [user("Sum up.")]),
        ({"instruction": "Sum up.", "input": "A text."}, [user("Sum up.\n\nA text.")]),
        ({"turns": ["first", "second"]}, [user("first")]),
        ({"messages": [user("a"), assistant("b")]}, [user("a")]),
        (
            {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]},
            [user("a"), assistant("b"), user("c")],
        ),
        ({"prompt": [user("a")]}, [user("a")]),
        ({"prompt": None, "messages": [user("a")]}, [user("a")]),
        (
            {
                "conversations": [
                    {"from": "system", "value": ""},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            [{"role": "system", "content": ""}, user("a")],
        ),
        (
            {"messages": [user("x") | {"content": [{"type": "text", "text": "part"}]}]},
            [user("part")],
        ),
    ],
)
def test_layouts(tmp_path: Path, row: dict[str, Any], messages: list[Any]) -> None:
    prompts, rejected = load(tmp_path, [row])
    assert rejected == []
    assert list(prompts[0].messages) == messages
    assert (prompts[0].domain, prompts[0].line) == ("d", 1)


def test_the_section_names_the_domain(tmp_path: Path) -> None:
    prompts, _ = load(tmp_path, [{"prompt": "a", "domain": "other"}])
    assert prompts[0].domain == "d"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "no user turn"),
        ({"messages": [user("a"), assistant("")]}, "message 2 (assistant) is empty"),
        ({"id": 7}, "none of the keys messages, conversations, turns"),
        ({"prompt": None}, "'prompt' is null"),
        ({"prompt": "  \n"}, "prompt is empty"),
        ({"prompt": 3}, "prompt is not a text"),
        ({"turns": []}, "'turns' is not a list of texts"),
        ({"turns": [None]}, "turns is null"),
        ({"messages": [assistant("a")]}, "no user turn"),
        ({"messages": ["a"]}, "message 1 is not a mapping"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "message 1 has the unknown role"),
        (
            {"messages": [user("x") | {"content": [{"type": "image"}]}]},
            "message 1 (user) has parts that are not text",
        ),
        ({"text": "<|im_start|>user\nhi<|im_end|>"}, "'text' holds a chat already rendered"),
        ({"messages": [user("a")], "tools": [{"name": "f"}]}, "'tools' are not supported"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "a", "template": 3}, "'template' is not a text"),
        (["a"], "not a JSON object"),
        (None, "not a JSON object"),
    ],
)
def test_bad_rows_are_counted_and_the_good_ones_stay(tmp_path: Path, row: Any, reason: str) -> None:
    """B002, B008: a bad row ends nothing, and none vanishes."""
    prompts, rejected = load(tmp_path, [*GOOD[:3], row, *GOOD[3:]])
    assert [p.messages[0]["content"] for p in prompts] == [r["prompt"] for r in GOOD]
    assert [line for line, _ in rejected] == [4]
    assert rejected[0][1].startswith(reason)


@pytest.mark.parametrize(
    "bad",
    [
        {"messages": [user("q"), assistant(None)]},
        {"messages": [{"role": "user", "content": None}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": None}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"messages": [{"role": "user"}]},
    ],
)
def test_null_never_becomes_text(tmp_path: Path, bad: dict[str, Any]) -> None:
    """B001, in both chat layouts."""
    prompts, rejected = load(tmp_path, [*GOOD[:2], bad])
    assert len(prompts) == 2
    assert [line for line, _ in rejected] == [3] and rejected[0][1].endswith("is null")
    assert not any("None" in str(p.messages) or "null" in str(p.messages) for p in prompts)


def weather(arguments: Any, **content: Any) -> dict[str, Any]:
    call = {"id": "c1", "function": {"name": "get_weather", "arguments": arguments}}
    return {
        "messages": [
            user("Weather in Oslo?"),
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "4 degrees"},
            assistant("It is 4 degrees."),
        ]
    }


def test_tool_turns_survive(tmp_path: Path) -> None:
    """B005: what the target answers last is the tool's result."""
    prompts, _ = load(tmp_path, [weather({"city": "Oslo"}, content="")])
    asked, called, result = prompts[0].messages
    assert asked == user("Weather in Oslo?")
    assert called["tool_calls"] == [
        {"id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    ]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "4 degrees"}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_tool_arguments_are_mappings(tmp_path: Path, content: dict[str, Any]) -> None:
    """B006: a mapping and its JSON are one prompt; anything else names the message."""
    rows = [weather(a, **content) for a in ({"city": "Oslo"}, '{"city": "Oslo"}', "[1]", "{")]
    prompts, rejected = load(tmp_path, rows)
    assert len(prompts) == 1
    assert rejected == [
        (2, f"duplicate of {tmp_path / 'rows.jsonl'}:1"),
        (3, "message 2 (assistant) has tool call arguments that are not an object"),
        (4, "message 2 (assistant) has tool call arguments that are not JSON"),
    ]


def test_raw_domains_take_single_texts(tmp_path: Path) -> None:
    """B041: raw text must be asked for."""
    rows = [{"text": "<|im_start|>x"}, {"messages": [user("a"), assistant("b"), user("c")]}]
    prompts, rejected = load(tmp_path, rows, raw=True)
    assert prompts[0].raw and prompts[0].messages == (user("<|im_start|>x"),)
    assert rejected == [(2, "a raw domain takes single texts, not chats")]
    chat, _ = load(tmp_path, [{"prompt": "a"}])
    raw, _ = load(tmp_path, [{"prompt": "a"}], raw=True)
    assert not chat[0].raw and chat[0].id != raw[0].id


def test_no_usable_row(tmp_path: Path) -> None:
    """B002: it stops with the first reason, before any model is loaded."""
    source = write(tmp_path / "rows.jsonl", [{"prompt": ""}, {"id": 1}])
    with pytest.raises(UserError) as caught:
        load_prompts(DomainSection(name="d", source=source))
    assert str(caught.value) == (
        f"no usable prompt among the 2 rows of '{source}', "
        f"the first being {source}:1: prompt is empty"
    )
    with pytest.raises(UserError, match="among the 0 rows"):
        load_prompts(DomainSection(name="d", source=write(tmp_path / "empty.jsonl", [])))


def test_most_rows_vanishing_is_said_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B008."""
    with caplog.at_level(logging.WARNING):
        load(tmp_path, [{"prompt": "a"}, {"id": 1}, {"id": 2}])
    assert "2 of 3 rows are unusable" in caplog.text


# ---- split


def test_the_split_is_by_hash_of_the_key(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "template": f"t{n % 40}"} for n in range(200)]
    rows += [{"prompt": f"q{n}"} for n in range(200)]
    prompts, _ = load(tmp_path, rows, holdout=0.3)
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.key == row.get("template", row["prompt"])
        drawn = int.from_bytes(hashlib.sha256(prompt.key.encode()).digest()[:8], "big") / 2**64
        assert prompt.split == ("heldout" if drawn < 0.3 else "train")
    share = sum(p.split == "heldout" for p in prompts[200:]) / 200
    assert 0.2 < share < 0.4
    sides = {(p.key, p.split) for p in prompts[:200]}
    assert len(sides) == 40


def test_the_split_does_not_move_with_other_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}"} for n in range(60)]
    all_rows = {p.id: p.split for p in load(tmp_path, rows)[0]}
    fewer = {p.id: p.split for p in load(tmp_path, rows[::-2])[0]}
    assert fewer.items() <= all_rows.items()


@pytest.mark.parametrize(("holdout", "split"), [(0.0, "train"), (1.0, "heldout")])
def test_all_or_none_held_out(tmp_path: Path, holdout: float, split: str) -> None:
    assert {p.split for p in load(tmp_path, GOOD, holdout=holdout)[0]} == {split}


def test_max_rows_are_the_first_by_hash(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}"} for n in range(50)]
    all_prompts, _ = load(tmp_path, rows)
    some, rejected = load(tmp_path, rows, max_rows=20)
    assert {p.id for p in some} == set(sorted(p.id for p in all_prompts)[:20])
    assert [p.line for p in some] == sorted(p.line for p in some)
    assert {reason for _, reason in rejected} == {"beyond max_rows 20"}
    assert len({p.split for p in some}) == 2
    shuffled, _ = load(tmp_path, rows[::-1], max_rows=20)
    assert {p.id for p in shuffled} == {p.id for p in some}


def test_duplicates_are_dropped_across_domains(tmp_path: Path) -> None:
    a = DomainSection(name="a", source=write(tmp_path / "a.jsonl", [*GOOD, GOOD[0]]))
    b = DomainSection(name="b", source=write(tmp_path / "b.jsonl", [{"prompt": "b"}, *GOOD]))
    prompts, rejections = load_domains([a, b])
    assert len(prompts) + len(rejections) == 12
    assert [(p.domain, p.line) for p in prompts] == [("a", n) for n in range(1, 6)] + [("b", 1)]
    assert rejections[0] == Rejection(a.source, 6, f"duplicate of {a.source}:1")
    assert [str(r) for r in rejections[1:]] == [
        f"{b.source}:{n + 1}: duplicate of {a.source}:{n}" for n in range(1, 6)
    ]


def no_leak(prompts: list[Prompt]) -> bool:
    keys: dict[str, set[str]] = {"train": set(), "heldout": set()}
    texts: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for prompt in prompts:
        keys[prompt.split].add(prompt.key)
        first = next(m["content"] for m in prompt.messages if m["role"] == "user")
        texts[prompt.split].add(normalised(first))
    return not keys["train"] & keys["heldout"] and not texts["train"] & texts["heldout"]


def test_what_one_domain_holds_out_no_other_trains_on(tmp_path: Path) -> None:
    """With different shares one key falls on both sides, and the training side gives way."""
    rows = [{"prompt": f"p{n}"} for n in range(20)]
    train = DomainSection(name="a", source=write(tmp_path / "a.jsonl", rows), holdout=0.0)
    test = DomainSection(name="b", source=write(tmp_path / "b.jsonl", rows[:5]), holdout=1.0)
    prompts, rejections = load_domains([train, test])
    assert sum(p.split == "heldout" for p in prompts) == 5
    assert no_leak(prompts) and len(prompts) == 20
    assert {r.reason for r in rejections} == {f"held out as {test.source}:{n}" for n in range(1, 6)}


def test_case_and_spaces_do_not_make_another_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": text} for n in range(30) for text in (f"Tell me  {n}\n", f"tell me {n}")]
    prompts, rejected = load(tmp_path, rows, holdout=0.5)
    assert {p.split for p in prompts} == {"train", "heldout"}
    assert no_leak(prompts)
    assert rejected and all(reason.startswith("held out as ") for _, reason in rejected)


def test_the_packaged_domains() -> None:
    assert set(packaged_domains()) == {section.source for section in PACKAGED_DOMAINS}
    prompts, rejections = load_domains(PACKAGED_DOMAINS)
    assert rejections == []
    assert no_leak(prompts)
    for section in PACKAGED_DOMAINS:
        splits = [p.split for p in prompts if p.domain == section.name]
        assert splits.count("heldout") >= 8 and splits.count("train") >= 32, section.name


# ---- identity


def test_id_and_hash_follow_the_content(tmp_path: Path) -> None:
    prompts, _ = load(tmp_path, GOOD)
    copy = tmp_path / "moved"
    copy.mkdir()
    shutil.copy(tmp_path / "rows.jsonl", copy / "rows.jsonl")
    moved, _ = load_prompts(DomainSection(name="d", source=str(copy / "rows.jsonl")))
    assert [p.id for p in moved] == [p.id for p in prompts]
    assert all(len(p.id) == 16 for p in prompts)
    other, _ = load_prompts(DomainSection(name="e", source=str(copy / "rows.jsonl")))
    assert not {p.id for p in other} & {p.id for p in prompts}
    assert prompts_sha256(moved[::-1]) == prompts_sha256(prompts)
    assert prompts_sha256(prompts[1:]) != prompts_sha256(prompts)
    resplit, _ = load(tmp_path, GOOD, holdout=1.0)
    assert prompts_sha256(resplit) != prompts_sha256(prompts)
