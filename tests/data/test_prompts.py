"""Prompts: what the target is asked of each row, rejections with their place, and the split."""

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.collection import PACKAGED_DOMAINS, CollectSection, DomainSection
from draftsmith.data.layouts import Unusable, parse
from draftsmith.data.prompts import Prompt, Rejection, normalised, read_prompts, to_prompt
from draftsmith.data.sources import Place, packaged_domains

ALL = CollectSection()
LAST = CollectSection(turns="last")
GIVEN = CollectSection(replies="given")
GIVEN_LAST = CollectSection(replies="given", turns="last")
TRAIN = DomainSection(name="d", source="rows.jsonl", holdout=0.0)
HELDOUT = replace(TRAIN, holdout=1.0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


SYSTEM = {"role": "system", "content": "Be kind."}
CALL = assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])
TALK = [user("a"), assistant("b"), user("c"), assistant("d")]
GOOD = [{"prompt": f"good prompt {number}"} for number in range(5)]


def asked(
    row: Any, collect: CollectSection = ALL, section: DomainSection = TRAIN, line: int = 1
) -> Prompt:
    parsed = parse(row, section.kind, section.by)
    return to_prompt(parsed, Place(section.source, line), section, collect)


def read(
    folder: Path, rows: list[Any], collect: CollectSection = ALL, **options: Any
) -> tuple[list[Prompt], list[Rejection]]:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    section = DomainSection(name="d", source=str(source), **options)
    items = list(read_prompts(section, collect))
    assert len(items) == len(rows)
    assert all(item.source == str(source) for item in items)
    return (
        [item for item in items if isinstance(item, Prompt)],
        [item for item in items if isinstance(item, Rejection)],
    )


# ---- what is asked


def test_earlier_replies_are_made_anew_or_kept() -> None:
    row = {"messages": [SYSTEM, *TALK]}
    anew = asked(row)
    assert anew.messages == (SYSTEM, user("a"), assistant(None), user("c"))
    assert anew.turns == (2, 4)
    kept = asked(row, LAST)
    assert kept.messages == (SYSTEM, *TALK[:3])
    assert kept.turns == (4,)
    single = asked({"prompt": "a", "response": "b"})
    assert (single.messages, single.turns, single.given) == ((user("a"),), (1,), False)
    assert not anew.last_only and not kept.last_only


@pytest.mark.parametrize("collect", [ALL, LAST])
def test_replies_that_nobody_gave_are_always_made(collect: CollectSection) -> None:
    """Spec-Bench: the second turn answers what the target said to the first."""
    prompt = asked({"turns": ["a", "b"]}, collect)
    assert prompt.messages == (user("a"), assistant(None), user("b"))
    assert prompt.turns == (1, 3)


def test_calls_stay_for_their_results_answer_them() -> None:
    """B005."""
    row = {"messages": [user("a"), CALL, tool("4"), assistant("b"), user("c"), assistant("d")]}
    row["tools"] = [{"name": "f"}]
    prompt = asked(row)
    assert prompt.messages[0] == user("a") and prompt.messages[2] == tool("4")
    assert prompt.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert prompt.messages[3:] == (assistant(None), user("c"))
    assert prompt.turns == (3, 5)
    assert prompt.tools == ({"type": "function", "function": {"name": "f"}},)
    asked_last = asked({"messages": [user("a"), CALL, tool("4")]})
    assert asked_last.turns == (3,)


def test_what_answers_nothing_is_not_made_anew() -> None:
    greeting = {"messages": [assistant("Hello"), user("a"), assistant("b")]}
    assert asked(greeting).messages == (assistant("Hello"), user("a"))
    twice = {"messages": [user("a"), assistant("b"), assistant("c"), user("d")]}
    with pytest.raises(Unusable, match=r"^message 3 \(assistant\) follows another reply"):
        asked(twice)
    assert asked(twice, LAST).messages == tuple(twice["messages"])
    assert asked({"messages": twice["messages"][:3]}).messages == (user("a"),)


def test_given_replies_are_kept_for_training() -> None:
    """B044: one setting, and what is held out is answered by the target all the same."""
    row = {"messages": [SYSTEM, *TALK]}
    given = asked(row, GIVEN)
    assert given.given and not given.last_only
    assert given.messages == (SYSTEM, *TALK) and given.turns == (2, 4)
    last = asked(row, GIVEN_LAST)
    assert last.given and last.last_only
    assert last.messages == given.messages and last.turns == (4,)
    for collect, plain in ((GIVEN, ALL), (GIVEN_LAST, LAST)):
        assert asked(row, collect, HELDOUT) == asked(row, plain, HELDOUT)
    greeting = asked({"messages": [assistant("Hello"), *TALK[:2]]}, GIVEN)
    assert greeting.turns == (2,)
    raw = asked({"prompt": "a", "response": "b"}, GIVEN, replace(TRAIN, kind="raw"))
    assert (raw.messages, raw.turns) == ((user("a"), assistant("b")), (1,))
    rendered = asked({"text": "<x>"}, GIVEN, replace(TRAIN, kind="rendered"))
    assert (rendered.given, rendered.messages, rendered.turns) == (True, (user("<x>"),), ())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "no reply is given"),
        ({"messages": [assistant("Hello"), user("a")]}, "no reply is given"),
        ({"turns": ["a", "b"]}, "no reply is given as message 2"),
        (
            {"prompt": "a", "response": "b", "finish_reason": "length"},
            "the reply given was cut off before its end",
        ),
    ],
)
def test_rows_without_whole_replies_teach_nothing(row: dict[str, Any], reason: str) -> None:
    """B031, B044: but the target may answer them."""
    with pytest.raises(Unusable) as caught:
        asked(row, GIVEN)
    assert str(caught.value) == reason
    asked(row, ALL)
    asked(row, GIVEN, HELDOUT)


def test_reasoning_is_left_to_the_template_or_put_before_the_content() -> None:
    """B016."""
    row = {"messages": [user("a"), assistant("b", reasoning_content="\nr\n")]}
    assert asked(row, GIVEN).messages[1] == assistant("b", reasoning_content="\nr\n")
    inline = asked(row, GIVEN, replace(TRAIN, reasoning="inline"))
    assert inline.messages == (user("a"), assistant("<think>\nr\n</think>\n\nb"))
    history = {"messages": [*row["messages"], user("c")]}
    kept = asked(history, LAST, replace(TRAIN, reasoning="inline"))
    assert kept.messages == (*inline.messages, user("c"))


# ---- rows and their place


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": [SYSTEM]}, "no user turn"),
        ({"messages": [user("a"), assistant("")]}, "message 2 (assistant) is empty"),
        ({"id": 7}, "none of the keys"),
        ({"messages": [user("a"), assistant(None)]}, "message 2 (assistant) is null"),
        ({"conversations": [{"from": "human", "value": None}]}, "message 1 (user) is null"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "a", "id": "\ud800"}, "half of a surrogate pair"),
        ({"messages": [user("a"), assistant("\udc00"), user("b")]}, "half of a surrogate pair"),
        (None, "not a JSON object"),
    ],
)
def test_bad_rows_are_named_and_the_good_ones_stay(tmp_path: Path, row: Any, reason: str) -> None:
    """B001, B002: a bad row ends nothing, and none vanishes."""
    collect = LAST if "surrogate" in reason else ALL
    prompts, rejections = read(tmp_path, [*GOOD[:3], row, *GOOD[3:]], collect)
    assert [p.messages[0]["content"] for p in prompts] == [r["prompt"] for r in GOOD]
    assert [p.line for p in prompts] == [1, 2, 3, 5, 6]
    assert [r.line for r in rejections] == [4]
    assert rejections[0].reason.startswith(reason)
    assert str(rejections[0]).startswith(f"{tmp_path / 'rows.jsonl'}:4: {reason}")
    assert not any("None" in str(p.messages) or "null" in str(p.messages) for p in prompts)


@pytest.mark.parametrize("count", [999, 1000, 1001])
def test_rendered_rows_all_come_out(tmp_path: Path, count: int) -> None:
    """B008: rows in = prompts + rejections, at any number of rows."""
    text = "<|im_start|>user\n{}<|im_end|>\n"
    rows: list[Any] = [{"text": text.format(n)} for n in range(count)]
    rows[500] = {"text": None}
    prompts, rejections = read(tmp_path, rows, kind="rendered")
    assert (len(prompts), len(rejections)) == (count - 1, 1)
    assert prompts[-1].messages == (user(text.format(count - 1)),)
    assert {p.kind for p in prompts} == {"rendered"}


def test_values_that_json_cannot_say_are_rejected() -> None:
    """As a table may hold them, in the arguments of a call."""
    call = {"function": {"name": "f", "arguments": {"day": Path("x")}}}
    with pytest.raises(Unusable, match=r"^holds what JSON cannot say"):
        asked({"messages": [user("a"), assistant("", tool_calls=[call]), tool("4")]})


def test_ignored_fields_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B016."""
    rows = [{"messages": [user("a") | {"mood": "good"}, assistant("b", weight=0)]}] * 3
    rows[0] = {"messages": [user("a") | {"mood": "good"}]}
    with caplog.at_level(logging.WARNING):
        read(tmp_path, rows)
    source = tmp_path / "rows.jsonl"
    said = [f"{source}: '{field}' of its messages is ignored" for field in ("mood", "weight")]
    assert [record.getMessage() for record in caplog.records] == said


# ---- domains


def test_a_key_may_name_the_domain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B116."""
    labels = ["code", "chat", None, "Code", "math/algebra", " code "]
    rows = [{"prompt": f"p{n}", "kind": label} for n, label in enumerate(labels)]
    prompts, _ = read(tmp_path, [*rows, {"prompt": "p"}], by="kind")
    assert [p.domain for p in prompts] == ["code", "chat", "d", "Code", "math/algebra", "code", "d"]
    prompts, _ = read(tmp_path, rows)
    assert {p.domain for p in prompts} == {"d"}
    assert not caplog.records
    read(tmp_path, rows, by="knid")
    assert "no usable row says its domain as 'knid': all are called 'd'" in caplog.text


def test_the_packaged_domains() -> None:
    assert set(packaged_domains()) == {section.source for section in PACKAGED_DOMAINS}
    for section in PACKAGED_DOMAINS:
        prompts = [p for p in read_prompts(section, ALL) if isinstance(p, Prompt)]
        assert [p.line for p in prompts] == list(range(1, len(prompts) + 1))
        assert all(p.domain == p.source == section.name for p in prompts)
        assert prompts[0].own_id == f"{section.name}-001"
        splits = [p.split for p in prompts]
        assert splits.count("heldout") >= 8 and splits.count("train") >= 32, section.name


# ---- split


def test_the_split_is_by_hash_of_the_key(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "template": f"t{n % 40}"} for n in range(200)]
    rows += [{"prompt": f"q{n}"} for n in range(200)]
    prompts, _ = read(tmp_path, rows, holdout=0.3)
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
    all_rows = {p.id: p.split for p in read(tmp_path, rows)[0]}
    fewer = {p.id: p.split for p in read(tmp_path, rows[::-2])[0]}
    assert fewer.items() <= all_rows.items()


def test_all_or_none_held_out(tmp_path: Path) -> None:
    for holdout, split in ((0.0, "train"), (1.0, "heldout")):
        prompts, _ = read(tmp_path, GOOD, holdout=holdout)
        assert {p.split for p in prompts} == {split}


# ---- identity


def test_the_id_follows_the_content_alone(tmp_path: Path) -> None:
    """B030: neither the place nor the domain nor other rows."""
    prompts, _ = read(tmp_path, [*GOOD, GOOD[0]])
    ids = [p.id for p in prompts]
    assert all(len(name) == 16 for name in ids)
    assert len(set(ids)) == 5 and ids[5] == ids[0]
    copy = tmp_path / "moved"
    copy.mkdir()
    shutil.copy(tmp_path / "rows.jsonl", copy / "rows.jsonl")
    section = DomainSection(name="e", source=str(copy / "rows.jsonl"), holdout=1.0)
    assert [p.id for p in read_prompts(section, ALL) if isinstance(p, Prompt)] == ids
    shuffled, _ = read(tmp_path, [{"prompt": "new"}, *GOOD[::-1]])
    assert [p.id for p in shuffled[1:]] == ids[4::-1]
    named, _ = read(tmp_path, [row | {"id": n, "response": "r"} for n, row in enumerate(GOOD)])
    assert [p.id for p in named] == ids[:5]


def test_what_is_asked_otherwise_has_another_id() -> None:
    tools = [{"name": "f"}]
    messages = {"messages": TALK}
    prompts = [
        asked({"prompt": "a"}),
        asked({"prompt": "a "}),
        asked({"text": "a"}, section=replace(TRAIN, kind="raw")),
        asked({"text": "a"}, section=replace(TRAIN, kind="rendered")),
        asked({"text": "a"}, GIVEN, replace(TRAIN, kind="rendered")),
        asked({"prompt": [user("a")], "tools": tools}),
        asked({"prompt": "a", "system": "Be kind."}),
        asked({"prompt": "a", "response": "b"}, GIVEN),
        asked(messages),
        asked(messages, LAST),
        asked(messages, GIVEN),
    ]
    assert len({p.id for p in prompts}) == len(prompts)


def test_normalised() -> None:
    assert normalised(" Tell  me\n") == normalised("tell me") != normalised("tellme")
    assert normalised("\ufb01ne") == "fine"
