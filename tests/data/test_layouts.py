"""Layouts: what each row says, and the reason where it says nothing usable."""

import json
from typing import Any

import pytest

from draftsmith.data.layouts import Parsed, Unusable, parse


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(row: Any, kind: Any = "chat") -> list[dict[str, Any]]:
    return list(parse(row, kind).messages)


def refused(row: Any, kind: Any = "chat", by: str | None = None) -> str:
    with pytest.raises(Unusable) as caught:
        parse(row, kind, by)
    return str(caught.value)


CHOICE = {"message": {"role": "assistant", "content": "b"}, "finish_reason": "stop"}

# ---- layouts


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": " keep spaces \n"}, [user(" keep spaces \n")]),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n"}, [user("def f():\n")]),
        ({"question": "2 + 2?", "answer": "4"}, [user("2 + 2?"), assistant("4")]),
        ({"question": "2 + 2?", "answer": 4}, [user("2 + 2?"), assistant("4")]),
        ({"text": "Write f.", "code": "f = 1"}, [user("Write f."), assistant("f = 1")]),
        ({"prompt": "a", "completion": "b"}, [user("a"), assistant("b")]),
        ({"prompt": "a", "response": None}, [user("a")]),
        ({"prompt": None, "messages": [user("a")]}, [user("a")]),
        ({"prompt": [user("a")], "response": "b"}, [user("a"), assistant("b")]),
        ({"prompt": [user("a")], "completion": [assistant("b")]}, [user("a"), assistant("b")]),
        (
            {"messages": [user("a"), assistant("b")], "answer": "42"},
            [user("a"), assistant("b")],
        ),
        (
            {"conversation": [user("a"), assistant("b"), user("c")]},
            [user("a"), assistant("b"), user("c")],
        ),
        ({"messages": json.dumps([user("a")])}, [user("a")]),
        (
            {"messages": [user("x") | {"content": [{"type": "text", "text": "part"}]}]},
            [user("part")],
        ),
        (
            {"messages": [{"role": "developer", "content": "Be kind."}, user("a")]},
            [{"role": "developer", "content": "Be kind."}, user("a")],
        ),
    ],
)
def test_chats_and_texts(row: dict[str, Any], messages: list[Any]) -> None:
    assert said(row) == messages


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"input": ""}, "Sum up."),
        ({"input": None, "output": "b"}, "Sum up."),
        ({"input": "A text.", "output": "b"}, "Sum up.\n\nA text."),
        ({"context": "A text.", "response": "b"}, "Sum up.\n\nA text."),
    ],
)
def test_alpaca(more: dict[str, Any], text: str) -> None:
    reply = [assistant("b")] if "b" in more.values() else []
    assert said({"instruction": "Sum up.", **more}) == [user(text), *reply]


def test_sharegpt() -> None:
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert said({"conversations": talk}) == [user("a"), assistant("b")]
    for ours in ({"system": "Be kind."}, {"system_prompt": "Be kind."}):
        assert said({"conversations": talk, **ours}) == [
            system("Be kind."),
            user("a"),
            assistant("b"),
        ]
    assert said({"conversations": talk, "system": ""}) == [user("a"), assistant("b")]
    turn = {"from": "system", "value": ""}  # silences a template's default system turn
    assert said({"conversations": [turn, *talk]})[0] == system("")
    turn = {"from": "system", "value": "Be kind."}
    row = {"conversations": [turn, *talk], "system": "Be kind."}
    assert said(row) == [system("Be kind."), user("a"), assistant("b")]
    assert refused(row | {"system": "Be rude."}) == "'system' stands beside another system turn"


def test_turns_leave_places_for_the_replies() -> None:
    """Spec-Bench and MT-bench: all turns, in their order, and references are no replies."""
    row = {"question_id": 81, "category": "writing", "turns": ["a", "b", "c"], "reference": ["r"]}
    assert said(row) == [user("a"), assistant(None), user("b"), assistant(None), user("c")]
    assert said({"turns": ["a"], "system": "s"}) == [system("s"), user("a")]


@pytest.mark.parametrize(
    "row",
    [
        {"request": {"messages": [user("a")]}, "response": {"choices": [CHOICE]}},
        {"request": {"messages": [user("a")]}, "response": {"body": {"choices": [CHOICE]}}},
        {"request": {"body": {"messages": [user("a")]}}, "response": {"choices": [CHOICE]}},
        {"body": {"messages": [user("a")]}, "response": {"body": {"choices": [CHOICE]}}},
        {"request": {"messages": [user("a")]}, "response": "b"},
        {"request": {"messages": [user("a")]}, "response": {"role": "assistant", "content": "b"}},
        {"request": {"prompt": "a"}, "response": {"choices": [{"text": "b"}]}},
        {"prompt": "a", "response": "b", "finish_reason": "stop"},
    ],
)
def test_request_logs(row: dict[str, Any]) -> None:
    assert said(row) == [user("a"), assistant("b")]
    assert not parse(row, "chat").cut


def test_request_logs_keep_the_tools_and_the_call() -> None:
    """B005: as the batch interface of OpenAI writes them."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    row = {
        "custom_id": "r-1",
        "method": "POST",
        "body": {"model": "m", "messages": [user("a")], "tools": [{"name": "f"}]},
        "response": {"status_code": 200, "body": {"choices": [{"message": message}]}},
    }
    parsed = parse(row, "chat")
    assert parsed.own_id == "r-1"
    assert parsed.tools == ({"type": "function", "function": {"name": "f"}},)
    call["function"] = {"name": "f", "arguments": {"x": 1}}
    assert parsed.messages[1] == assistant("", tool_calls=[call])
    assert parsed.unread == frozenset()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "response": {"choices": [{**CHOICE, "finish_reason": "length"}]}},
        {"prompt": "a", "response": "b", "finish_reason": "length"},
    ],
)
def test_a_cut_reply_in_a_log_is_told(row: dict[str, Any]) -> None:
    """B031: it must not be learnt from as if it ended there."""
    assert parse(row, "chat").cut


def test_raw_texts_are_one_text_and_perhaps_a_reply() -> None:
    """B041: raw text must be asked for."""
    text = "<|im_start|>x"
    assert said({"text": text}, "raw") == [user(text)]
    assert said({"prompt": "a", "completion": " b"}, "raw") == [user("a"), assistant(" b")]
    assert said({"request": {"prompt": "a"}, "response": "b"}, "raw") == [user("a"), assistant("b")]
    for row in (
        {"messages": [user("a"), assistant("b"), user("c")]},
        {"messages": [system("s"), user("a")]},
        {"turns": ["a", "b"]},
        {"prompt": "a", "system": "s"},
        {"prompt": "a", "tools": [{"name": "f"}]},
        {"messages": [user("a"), assistant("b", reasoning="r")]},
    ):
        assert refused(row, "raw") == "a raw domain takes single texts, not chats"


def test_rendered_texts_are_taken_whole() -> None:
    """B008: other columns, such as the tools that the text has printed already, change nothing."""
    text = "<|im_start|>user\nhi<|im_end|>\n"
    for row in (
        {"text": text},
        {"rendered": text},
        {"rendered": text, "text": "hi"},
        {"text": text, "tools": "x", "messages": [], "response": ""},
    ):
        assert said(row, "rendered") == [user(text)]
        assert parse(row, "rendered").tools == ()
    assert refused({"messages": [user("a")]}, "rendered") == "text is null"


def test_what_a_row_says_of_itself() -> None:
    row = {"prompt": "a", "task_id": 7, "uuid": "u", "template": "t", "domain": " Code/Rust "}
    parsed = parse(row, "chat", by="domain")
    assert (parsed.own_id, parsed.template, parsed.label) == ("7", "t", "Code/Rust")
    assert parse(row, "chat").label is None
    assert parse({"id": "x", **row}, "raw").own_id == "x"


@pytest.mark.parametrize(
    ("value", "label"), [("code", "code"), ("Code", "Code"), (None, None), (" ", None), (3, "3")]
)
def test_labels_keep_their_spelling(value: Any, label: str | None) -> None:
    """B116."""
    assert parse({"prompt": "a", "d": value}, "chat", by="d").label == label
    assert parse({"prompt": "a"}, "chat", by="d").label is None


# ---- rows that cannot be used


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": "hello"}, "'messages' is not a list of messages"),
        ({"messages": [system("Be kind.")]}, "no user turn"),
        ({"messages": [assistant("a")]}, "no user turn"),
        ({"messages": [user("a"), assistant("")]}, "message 2 (assistant) is empty"),
        ({"prompt": "a", "response": " "}, "response is empty"),
        ({"id": 7}, "none of the keys messages, conversation, conversations, turns"),
        ({"prompt": "  \n"}, "prompt is empty"),
        ({"prompt": 3}, "prompt is not a text"),
        ({"prompt": "a", "response": True}, "response is not a text"),
        ({"prompt": "a", "response": {"error": "busy"}}, "'response' holds no reply"),
        ({"prompt": "a", "response": {"choices": []}}, "'response' holds no reply"),
        ({"turns": []}, "'turns' is not a list of texts"),
        ({"messages": ["a"]}, "message 1 is not a mapping"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "message 1 has the unknown role"),
        ({"messages": [user("a") | {"name": 3}]}, "'name' of message 1 (user) is not a text"),
        (
            {"messages": [user("x") | {"content": [{"type": "image"}]}]},
            "message 1 (user) has parts that are not text",
        ),
        ({"instruction": "a", "history": [["b", "c"]]}, "'history' is not supported"),
        ({"prompt": "a", "template": 3}, "'template' is not a text"),
        ({"prompt": "a", "d": ["x"]}, "'d', which names the domain, is not a text"),
        ({"prompt": [user("a")], "tools": {"name": "f"}}, "'tools' is not a list"),
        ({"prompt": [user("a")], "tools": "[{"}, "'tools' is not a list"),
        ({"prompt": [user("a")], "functions": [{}]}, "'functions' has an entry without a function"),
        (["a"], "not a JSON object"),
        (None, "not a JSON object"),
    ],
)
def test_reasons(row: Any, reason: str) -> None:
    """B002."""
    assert refused(row, by="d").startswith(reason)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("q"), assistant(None)]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user"}]},
        {"messages": [system(None), user("q")]},  # type: ignore[arg-type]
        {"messages": [user("q") | {"content": [{"type": "text", "text": None}]}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": None}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"prompt": None},
        {"turns": ["q", None]},
        {"request": {"messages": [user("q")]}, "response": {"choices": [{"message": {}}]}},
        {"prompt": "q", "response": {"choices": [{"message": assistant(None, reasoning="r")}]}},
    ],
)
def test_null_never_becomes_text(row: dict[str, Any]) -> None:
    """B001: in no layout."""
    assert refused(row).endswith("is null")


def test_null_beside_the_turns_is_a_missing_value() -> None:
    """B001: as tables write what a row does not have."""
    row = {"system": None, "tools": None, "id": None, "template": None, "input": None, "d": None}
    fields = dict.fromkeys(("name", "tool_call_id", "tool_calls", "reasoning_content", "weight"))
    message = user("a") | fields
    assert parse({**row, "messages": [message]}, "chat", by="d") == Parsed("chat", (user("a"),))


# ---- tools and reasoning


def weather(arguments: Any, **content: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": arguments}
    return {
        "messages": [
            user("Weather in Oslo?"),
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "4 degrees"},
            assistant("It is 4 degrees."),
        ]
    }


def test_tool_turns_survive() -> None:
    """B005: all turns, with ids and arguments."""
    asked, called, result, answer = said(weather({"city": "Oslo"}, content=""))
    assert asked == user("Weather in Oslo?")
    assert called == assistant(
        "",
        tool_calls=[
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
            }
        ],
    )
    assert result == {
        **{"role": "tool", "content": "4 degrees"},
        **{"name": "get_weather", "tool_call_id": "c1"},
    }
    assert answer == assistant("It is 4 degrees.")


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_tool_arguments_are_mappings(content: dict[str, Any]) -> None:
    """B006: a mapping and its JSON are one; anything else names the message."""
    expected = said(weather({"city": "Oslo"}, content=""))
    assert said(weather({"city": "Oslo"}, **content)) == expected
    assert said(weather('{"city": "Oslo"}', **content)) == expected
    assert refused(weather("[1]", **content)) == (
        "message 2 (assistant) has tool call arguments that are not an object"
    )
    assert refused(weather("{", **content)) == (
        "message 2 (assistant) has tool call arguments that are not JSON"
    )
    for nothing in (None, "", "null", {}):
        call = said(weather(nothing, **content))[1]["tool_calls"][0]
        assert call["function"]["arguments"] == {}


def test_other_spellings_of_calls_and_tools() -> None:
    expected = said(weather({"city": "Oslo"}, content=""))[1]["tool_calls"][0]
    bare = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    row = {"messages": [user("a"), assistant(None, function_call=bare)]}
    del expected["id"]
    assert said(row)[1]["tool_calls"] == [expected]
    row = {"messages": [user("a"), assistant(None, tool_calls=[bare])]}
    assert said(row)[1]["tool_calls"] == [expected]
    for calls, reason in ((["f"], "a tool call without a function name"), ("f", "tool_calls that")):
        row = {"messages": [user("a"), assistant(None, tool_calls=calls)]}
        assert refused(row).startswith(f"message 2 (assistant) has {reason}")
    wrapped = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for key, tool in (
        ("tools", wrapped),
        ("tools", {"function": wrapped["function"]}),
        ("tools", wrapped["function"]),
        ("tools", {"type": "function", **wrapped["function"]}),  # type: ignore[dict-item]
        ("functions", wrapped["function"]),
    ):
        for value in ([tool], json.dumps([tool])):
            assert parse({"messages": [user("a")], key: value}, "chat").tools == (wrapped,)
    for empty in ([], "", "[]"):
        assert parse({"messages": [user("a")], "tools": empty}, "chat").tools == ()


def test_reasoning_is_kept_and_other_fields_are_named() -> None:
    """B016."""
    for field in ("reasoning_content", "reasoning", "thinking"):
        assert said({"messages": [user("a"), assistant("b", **{field: "r"})]})[1] == assistant(
            "b", reasoning_content="r"
        )
    message = assistant("b", reasoning="", weight=0, logprobs=None, annotations=[])
    parsed = parse({"messages": [user("a") | {"mood": "good"}, message]}, "chat")
    assert parsed.unread == {"'weight' of its messages", "'mood' of its messages"}
    assert parsed.messages == (user("a"), assistant("b"))
