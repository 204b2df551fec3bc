"""Rows that meet in what is asked, evidence beside a question, sources that fail in their own way,
and other things that one reading of the data side brought to light."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
from conftest import CHATML
from preparing import GOOD, Load, prompts, reasons, section
from rich.console import Console
from templates import AGENT, given, reply, user, with_template
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.errors import OptionError, UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data import sources
from draftsmith.data.layouts import Unusable, parse
from draftsmith.data.prompts import Prompt, read_prompts, to_prompt
from draftsmith.data.replies import given_turns
from draftsmith.data.sources import Place, read_rows
from draftsmith.data.tally import tell
from draftsmith.data.target import load_target, target_info

GIVEN = CollectSection(replies="given")
LAST = CollectSection(turns="last")
SYSTEM = {"role": "system", "content": "Be kind."}


def parsed(**row: Any) -> list[dict[str, Any]]:
    return list(parse(row, "chat").messages)


def refused(**row: Any) -> str:
    with pytest.raises(Unusable) as caught:
        parse(row, "chat")
    return str(caught.value)


def chatml(*turns: str) -> str:
    """Rendered turns of a user and an assistant in turn, or of whom a turn names."""
    roles = ["user", "assistant"] * len(turns)
    pairs = zip(roles, turns, strict=False)
    said = (turn if ":" in turn else f"{role}:{turn}" for role, turn in pairs)
    return "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (t.split(":", 1) for t in said)
    )


def rendered(folder: Path, texts: list[str], name: str, **options: Any) -> DomainSection:
    return section(folder, [{"text": text} for text in texts], name, kind="rendered", **options)


# ---- what is asked is compared


@pytest.mark.parametrize("collect", [CollectSection(), GIVEN, LAST])
def test_rendered_rows_meet_in_what_they_ask(
    tmp_path: Path, ready: Load, collect: CollectSection
) -> None:
    """Whatever is replied: no exam with its answers."""
    held = rendered(tmp_path, [chatml("What is 2+2?", "Four.")], "held", holdout=1.0)
    texts = [chatml("What is 2+2?", "4"), chatml("What is 2+3?", "5")]
    train = rendered(tmp_path, texts, "train", holdout=0.0)
    for sections in ((held, train), (train, held)):
        prepared = ready(sections, collect)
        assert reasons(prepared) == [(1, f"held out as {held.source}:1")]
        assert {p.split for p in prompts(prepared)} == {"train", "heldout"}


@pytest.mark.parametrize(
    ("held", "train", "met"),
    [
        # The replies differ, and what is asked then too; the first question is one.
        (("a", "b", "c", "d"), ("a", "x", "c", "y"), True),
        (("a", "b", "c", "d"), ("a", "x"), True),
        (("a", "b"), ("a", "b", "c", "d"), True),
        (("a", "b", "c", "d"), ("a", "b", "c", "d", "e", "f"), True),
        (("a", "b", "c", "d"), ("e", "b", "c", "d"), False),
        (("a", "b"), ("system:Be kind.", "user:a", "assistant:b"), False),
        # A greeting asks nothing, and may open all rows there are.
        (("assistant:Hello", "user:a", "assistant:b"), ("assistant:Hello", "user:c", "x:y"), False),
        (("assistant:Hello", "user:a", "assistant:b"), ("assistant:Hello", "user:a", "x:y"), True),
    ],
)
def test_rendered_conversations_meet_in_their_first_question(
    tmp_path: Path, ready: Load, held: tuple[str, ...], train: tuple[str, ...], met: bool
) -> None:
    text = chatml(*train).replace("<|im_start|>x", "<|im_start|>assistant")
    sections = (
        rendered(tmp_path, [chatml(*held)], "held", holdout=1.0),
        rendered(tmp_path, [text], "train", holdout=0.0),
    )
    for collect in (GIVEN, CollectSection(replies="given", turns="last"), CollectSection()):
        found = [reason for _, reason in reasons(ready(sections, collect))]
        assert found == ([f"held out as {sections[0].source}:1"] if met else [])


@pytest.mark.parametrize("collect", [CollectSection(), GIVEN, LAST])
@pytest.mark.parametrize("turned", [False, True])
def test_a_chat_and_a_rendered_text_meet(
    tmp_path: Path, ready: Load, collect: CollectSection, turned: bool
) -> None:
    chat = [SYSTEM, user("a"), reply("b"), user("c"), reply("d")]
    text = chatml("system:Be kind.", "user:a", "assistant:x", "user:c", "assistant:y")
    of_chat, of_text = (1.0, 0.0) if turned else (0.0, 1.0)
    talk = section(tmp_path, [{"messages": chat}], "talk", holdout=of_chat)
    texts = rendered(tmp_path, [text], "texts", holdout=of_text)
    prepared = ready((talk, texts), collect)
    held = talk if turned else texts
    assert reasons(prepared) == [(1, f"held out as {held.source}:1")]


def test_what_is_asked_twice_on_one_side_stands_once(tmp_path: Path, ready: Load) -> None:
    """To be answered by the target; given replies are two to learn from."""
    opening = "system:You are a helpful assistant"
    texts = [chatml(opening, "user:a", f"assistant:{said}") for said in ("b", "c", "b ")]
    talk = section(tmp_path, [{"prompt": "a", "response": "b"}], "talk", holdout=0.0)
    for holdout, collect, lines in (
        (0.0, CollectSection(), [1, 2, 3]),
        (1.0, GIVEN, [1, 2, 3]),
        (0.0, GIVEN, [1]),
    ):
        sections = (
            section(tmp_path, [{"prompt": "a", "response": "b"}], "talk", holdout=holdout),
            rendered(tmp_path, texts, "texts", holdout=holdout),
        )
        assert reasons(ready(sections, collect)) == [
            (line, f"duplicate of {talk.source}:1") for line in lines
        ]


def test_conversations_of_one_first_question_are_no_duplicates(tmp_path: Path, ready: Load) -> None:
    """The ids that are kept of them are those of the first question alone."""
    rows = [{"turns": ["a", "b"]}, {"turns": ["a", "c"]}, {"prompt": "a"}]
    assert len(ready(section(tmp_path, rows, holdout=0.0))) == 3


def test_what_the_template_prints_makes_no_near_duplicates(tmp_path: Path, ready: Load) -> None:
    """Most of a short question's rendered text is its system turn."""
    long = "system:" + " ".join(f"word{n}" for n in range(60))
    texts = [chatml(long, f"user:{q}", "assistant:yes") for q in ("Is it hot?", "Is it cold?")]
    held = rendered(tmp_path, texts[:1], "held", holdout=1.0)
    train = rendered(tmp_path, texts[1:], "train", holdout=0.0)
    assert len(ready((held, train))) == 2


# ---- layouts


@pytest.mark.parametrize("ending", ["length", "content_filter"])
def test_a_chat_may_say_that_a_reply_is_cut(ending: str) -> None:
    """B031: on the message, on the row, and in the middle."""
    talk = [user("a"), reply("b")]
    cut = [user("a"), reply("b", finish_reason=ending)]
    for row in (
        {"messages": cut},
        {"messages": talk, "finish_reason": ending},
        {"messages": [*cut, user("go on"), reply("c", finish_reason="stop")]},
    ):
        found = parse(row, "chat")
        assert found.cut and not found.unread
        with pytest.raises(Unusable, match="cut off before its end"):
            to_prompt(found, Place("s", 1), DomainSection("d", "s", holdout=0.0), GIVEN)
    assert not parse({"messages": talk, "finish_reason": "stop"}, "chat").cut


def test_a_request_that_begins_the_reply_itself() -> None:
    """What is logged as the response is the rest of a reply."""
    prefilled = [user("a"), reply("It is")]
    answer = {"choices": [{"message": reply(" b")}]}
    reason = "the request ends with a reply already begun (prefill)"
    assert refused(request={"messages": prefilled}, response=answer) == reason
    assert refused(body={"messages": prefilled}, response={"body": answer}) == reason
    assert parsed(request={"messages": prefilled}) == prefilled
    assert parsed(messages=prefilled, answer="42") == prefilled


@pytest.mark.parametrize("layout", ["question", "prompt", "instruction"])
@pytest.mark.parametrize("key", ["context", "input"])
def test_evidence_stands_behind_the_question(layout: str, key: str) -> None:
    passage = "Oslo is the capital of Norway."
    assert parsed(**{layout: "Where?", key: passage}) == [user(f"Where?\n\n{passage}")]
    assert parsed(**{layout: "Where?", key: None}) == [user("Where?")]
    assert parsed(**{layout: "Where?", key: " "}) == [user("Where?")]
    both = parsed(**{layout: "Where?", "input": "x", "context": "y"})
    assert both == [user("Where?\n\ny\n\nx")]
    assert refused(**{layout: "Where?", key: {"title": [passage]}}) == f"{key} is not a text"


def test_long_texts_that_nobody_reads_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each column once: a question may be about one. Not those of a chat, which says it all."""
    row = {"question": "Where?", "passage": "Oslo " * 50, "answer": "x" * 900, "topic": "short"}
    rows = [row, row, {"messages": [user("a")], "notes": "n" * 900}]
    with caplog.at_level(logging.WARNING):
        source = section(tmp_path, rows)
        assert len(list(read_prompts(source, CollectSection()))) == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{source.source}: 'passage', a long text, is ignored"]


def test_of_several_choices_the_first_is_read_and_the_rest_named() -> None:
    choices = [{"message": reply(text)} for text in ("b", "c")]
    found = parse({"prompt": "a", "response": {"choices": choices}}, "chat")
    assert list(found.messages) == [user("a"), reply("b")]
    assert found.unread == {"every choice but the first of a reply"}
    one = parse({"prompt": "a", "response": {"choices": choices[:1]}}, "chat")
    assert one.unread == frozenset()


def test_a_system_turn_behind_the_question_is_asked_too(tmp_path: Path, ready: Load) -> None:
    """What it demands would vanish otherwise."""
    late = {"role": "system", "content": "Answer in French."}
    talk = [user("a"), reply("b"), user("c"), late]
    rows = [{"messages": [*talk, reply("d")]}, {"messages": talk[2:], "response": "d"}]
    for collect in (CollectSection(), LAST):
        first, second = prompts(ready(section(tmp_path, rows, holdout=0.0), collect))
        assert first.messages[2:] == (user("c"), late) and first.turns[-1] == 4
        assert (second.messages, second.turns) == ((user("c"), late), (2,))
    both = prompts(ready(section(tmp_path, rows, holdout=0.0), GIVEN))
    assert [p.messages[-1] for p in both] == [reply("d")] * 2
    prepared = ready(section(tmp_path, rows, holdout=1.0), LAST)
    assert [p.messages[-1] for p in prompts(prepared)] == [late] * 2


# ---- sources


def lines(source: object, **options: Any) -> list[int]:
    return [place.line for place, _ in read_rows(DomainSection("d", str(source), **options))]


def test_nothing_behind_the_last_line_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later lines may be broken, or come from far away."""
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in GOOD) + "{broken\n")
    assert lines(path, first_line=2, last_line=4) == [2, 3, 4]
    assert lines(tmp_path / "*.jsonl", first_line=5, last_line=5) == [5, 5]
    with pytest.raises(UserError, match=r"b.jsonl:6"):
        lines(path, first_line=5, last_line=6)
    blank = tmp_path / "c.jsonl"
    blank.write_text(path.read_text().replace("{broken", "") + json.dumps(GOOD[0]))
    assert (lines(blank, first_line=5, last_line=6), lines(blank)[-1]) == ([5], 7)
    prompted = read_prompts(DomainSection("d", str(path), last_line=5), CollectSection())
    assert [item.line for item in prompted if isinstance(item, Prompt)] == [1, 2, 3, 4, 5]
    taken = []

    def stream(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        for row in GOOD:
            taken.append(row)
            yield row

    monkeypatch.setattr(datasets, "load_dataset", stream)
    assert lines("datasets:x", first_line=2, last_line=3) == [2, 3]
    assert len(taken) == 3


class Forbidden(Exception):
    """As aiohttp and botocore have them: of no type that the others have."""


def test_storage_fails_in_its_own_way(
    tmp_path: Path, ready: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = section(tmp_path, GOOD).source
    ready(section(tmp_path, GOOD))

    def fails(*_: Any, **__: Any) -> Any:
        raise Forbidden("403, message='Forbidden'")

    told = "cannot read the prompts in '{}': 403, message='Forbidden'"
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_open", fails)
        with pytest.raises(UserError) as caught:
            lines(path)
        assert str(caught.value) == told.format(path)
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.core, "url_to_fs", fails)
        with pytest.raises(UserError) as caught:
            ready(section(tmp_path, GOOD))
        assert str(caught.value) == told.format(path)
    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(UserError, match=r"^cannot load 'datasets:x/y', read as .*: 403, message="):
        lines("datasets:x/y")
    monkeypatch.setattr(datasets, "load_dataset_builder", fails)
    with pytest.raises(UserError, match=r"^cannot load 'datasets:x/y': 403, message="):
        ready(DomainSection("d", "datasets:x/y"))


def test_options_of_data_sets_alone(tmp_path: Path) -> None:
    for option, value in (("revision", "v1"), ("streaming", True)):
        DomainSection("d", "datasets:x/y", **{option: value})
        with pytest.raises(OptionError, match=f"{option}.*where source is no data set"):
            DomainSection("d", str(tmp_path / "rows.jsonl"), **{option: value})


# ---- what is printed, and what ends a turn


def test_rows_are_printed_as_they_are(tmp_path: Path) -> None:
    """Tokens of templates look like the markup of the console, or like its pictures."""
    console = Console(width=200, record=True, file=StringIO())
    row = {"domain": "[gMASK]", "rows": 3, "reason": "spells '[/INST]'", "first": "[x]:1:smile:"}
    counts = {"rows": 3, "kept": 0, "rejected": 3, "domains": {}, "sections": [], "reasons": [row]}
    tell(counts, tmp_path / "[/INST]", console)
    printed = console.export_text()
    for text in ("[gMASK]", "spells '[/INST]'", "[x]:1:smile:", "[/INST]/rejected.jsonl"):
        assert text in printed


def test_a_cache_folder_may_look_like_markup(
    tmp_path: Path, ready: Load, monkeypatch: pytest.MonkeyPatch, out: Console
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "[/a]"))
    for _ in range(2):
        ready(section(tmp_path, GOOD))
    assert "prompts found in" in out.export_text()


def test_a_template_that_demands_content_or_calls(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The turn without its calls is refused: then the calls are what is printed."""
    refuses = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and not m['content'] and "
        "not m.tool_calls %}{{ raise_exception('content or calls') }}{% endif %}{% endfor %}"
    )
    function = {"name": "f", "arguments": {}}
    calls = [{"id": "c", "type": "function", "function": function}]
    chat = given(user("a"), reply("", tool_calls=calls))
    tokenizer = with_template(tiny_tokenizer, refuses + AGENT)
    (turn,) = given_turns(tokenizer, chat, (2,), None)
    assert '"name": "f"' in tokenizer.decode(turn.reply)


def test_an_end_that_spells_nothing_is_none(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """An id beyond the vocabulary, as a target's configuration may name one."""
    assert tiny_tokenizer.decode([5000]) == ""
    more = CHATML.replace("['content'] + '<", "['content'] + ' Over.<")
    tokenizer = with_template(tiny_tokenizer, more)
    chat = given(user("a"), reply("long enough"))
    (turn,) = given_turns(tokenizer, chat, (5000, 2), None)
    assert tokenizer.decode(turn.reply) == "long enough Over.<|im_end|>"
    with pytest.raises(Unusable, match="no end-of-turn token"):
        given_turns(tokenizer, chat, (5000,), None)


def test_both_ways_to_load_a_target_know_the_same_ends(
    target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a generation configuration the model's own says what ends a turn."""
    folder = shutil.copytree(target_folder(), tmp_path / "target")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    section_ = TargetSection(name=str(folder), device="cpu")
    for ends, known in ((0, (0,)), ([0, 1], (0, 1)), (None, (2,))):
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
        assert target_info(section_).eos_ids == load_target(section_, few_rows=False).eos_ids
        assert target_info(section_).eos_ids == known
