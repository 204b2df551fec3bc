"""One row in any of the known layouts as a conversation, or the reason why it is none.

A layout is recognised by the first of its keys that has a value:

* messages, conversation, conversations: chats, with role and content or with from and value;
* request, body: logs of an OpenAI-compatible server, whose reply stands in response;
* turns: what a user says in turn, without the replies between (Spec-Bench, MT-bench);
* prompt (a text or a chat), question, instruction, text: the reply, where there is one, in
  response, completion, output, answer or code; save beside text, what stands in context and input
  belongs to the question (Alpaca, Dolly, Self-Instruct, SQuAD).

A null is a missing value everywhere and never becomes text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Kind = Literal["chat", "raw", "rendered"]

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"},
    **{"function": "tool", "observation": "tool"},
}
CHATS = ("messages", "conversation", "conversations")
LAYOUTS = (*CHATS, "turns", "prompt", "question", "instruction", "text")
LOGS = ("request", "body")
REPLIES = ("response", "completion", "output", "answer", "code")
EVIDENCE = ("context", "input")
UNFINISHED = ("length", "content_filter")
LONG = 200  # characters: a column of so much text may be what the question is about
NAMES = ("id", "task_id", "question_id", "uuid", "custom_id")
TEXT_FIELDS = ("name", "tool_call_id")
REASONING = ("reasoning_content", "reasoning", "thinking")
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How SPEED-Bench begins a turn whose text it may not hand on."""
READ = {"role", "from", "content", "value", "tool_calls", "function_call", "finish_reason"}
READ |= {*TEXT_FIELDS, *REASONING}
KNOWN = {*LAYOUTS, *LOGS, *REPLIES, *EVIDENCE, *NAMES, *REASONING}
KNOWN |= {"system", "system_prompt", "template", "tools", "functions"}


class Unusable(Exception):
    """The reason why a row cannot be used; reasons of one kind start alike."""


@dataclass(frozen=True)
class Parsed:
    """A row whatever its layout was."""

    kind: Kind
    """As the section says."""
    messages: tuple[Message, ...]
    """Every turn, replies included; one that is the target's to give has the content None. Of kind
    raw a user's text, perhaps with a reply; of kind rendered one user message with all the text."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the assistant may call, in OpenAI's form."""
    template: str | None = None
    """What the row was made from: rows of one template are on one side of the split."""
    own_id: str | None = None
    """The row's own name."""
    label: str | None = None
    """The domain the row says it is of."""
    cut: bool = False
    """The row says that a reply is unfinished."""
    unread: frozenset[str] = frozenset()
    """What of it is not understood, and left out, in words."""


def parse(row: object, kind: Kind, by: str | None = None) -> Parsed:
    """A row as read from its source.

    Args:
        by: the key whose value names the row's domain.
    Raises:
        Unusable: with the reason.
    """
    if not isinstance(row, Mapping):
        raise Unusable("not a JSON object")
    row = _logged(row)
    cut, unread = False, frozenset[str]()
    tools: tuple[dict[str, Any], ...] = ()
    if kind == "rendered":
        name = "text" if row.get("rendered") is None else "rendered"
        messages = [_said("user", _text_of(row.get(name), name))]
    else:
        messages, cut, unread = _conversation(row)
        tools = _tools(row)
    if kind == "raw" and (tools or not _single_text(messages)):
        raise Unusable("a raw domain takes single texts, not chats")
    return Parsed(
        kind=kind,
        messages=tuple(messages),
        tools=tools,
        template=_template(row),
        own_id=next((str(row[key]) for key in NAMES if row.get(key) is not None), None),
        label=None if by is None else _label(row.get(by), by),
        cut=cut,
        unread=unread,
    )


# ---- what a row says besides its turns


def _logged(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A log's request and its row in one; any other row as it is."""
    for key in LOGS:
        request = row.get(key)
        while isinstance(request, Mapping) and isinstance(request.get("body"), Mapping):
            request = request["body"]
        if isinstance(request, Mapping) and any(request.get(name) is not None for name in LAYOUTS):
            return {**row, **request}
    return row


def _template(row: Mapping[str, Any]) -> str | None:
    template = row.get("template")
    if template is not None and not (isinstance(template, str) and template.strip()):
        raise Unusable("'template' is not a text")
    return template


def _label(value: object, by: str) -> str | None:
    """A domain's name in its own spelling; None where there is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise Unusable(f"'{by}', which names the domain, is not a text")
    return None if value is None else str(value).strip() or None


def _tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools of a row in OpenAI's form; a bare function is put into it."""
    name = "tools" if row.get("tools") is not None else "functions"
    value = _decoded(row.get(name))
    if value is None or value == "":
        return ()
    if not isinstance(value, list):
        raise Unusable(f"'{name}' is not a list")
    tools = []
    for place, tool in enumerate(value, start=1):
        function = _function(tool)
        if function is None:
            raise Unusable(f"'{name}' has an entry without a function name: number {place}")
        if function is tool:
            tool = {"function": {key: item for key, item in tool.items() if key != "type"}}
        tools.append({"type": "function", **tool})
    return tuple(tools)


def _function(value: object) -> Mapping[str, Any] | None:
    """What holds the name of a tool or a call, whether it is wrapped or not."""
    if not isinstance(value, Mapping):
        return None
    function = value.get("function", value)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    return function


def _decoded(value: object) -> object:
    """What a text spells in JSON, as tables keep lists; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


# ---- turns


def _conversation(row: Mapping[str, Any]) -> tuple[list[Message], bool, frozenset[str]]:
    """The turns of a row, whether a reply is unfinished, and what is not understood."""
    layout = next((key for key in LAYOUTS if row.get(key) is not None), None)
    if layout is None:
        null = next((key for key in LAYOUTS if key in row), None)
        known = ", ".join((*LAYOUTS, *LOGS))
        raise Unusable(f"'{null}' is null" if null else f"none of the keys {known}")
    if layout == "turns":
        return _with_system(row, _turns(row["turns"])), False, frozenset()
    said: list[Any]
    unread: set[str] = set()
    if layout in CHATS or (layout == "prompt" and isinstance(row["prompt"], list)):
        value = _decoded(row[layout])
        if not isinstance(value, list) or not value:
            raise Unusable(f"'{layout}' is not a list of messages")
        said = value
    else:
        said = [_said("user", _single(row, layout))]
        unread = {f"'{key}', a long text," for key, value in row.items() if _may_matter(key, value)}
    messages = [_message(message, place) for place, message in enumerate(said, start=1)]
    if all(message["role"] != "user" for message in messages):
        raise Unusable("no user turn")
    reason = row.get("finish_reason")
    if messages[-1]["role"] != "assistant":
        replies, reason, more = _replies(row)
        messages += [_message(m, place) for place, m in enumerate(replies, len(said) + 1)]
        said = said + replies
        unread |= more
    elif _given_reply(row) and any(isinstance(row.get(key), Mapping) for key in LOGS):
        raise Unusable("the request ends with a reply already begun (prefill)")
    unread |= {
        f"'{field}' of its messages"
        for message in said
        for field, value in message.items()
        if field not in READ and value not in (None, "", [], {})
    }
    ends = [reason, *(message.get("finish_reason") for message in said)]
    cut = any(end in UNFINISHED for end in ends)
    return _with_system(row, messages), cut, frozenset(unread)


def _may_matter(key: str, value: object) -> bool:
    """Whether a column that no layout has a word of holds a long text, such as a passage."""
    return isinstance(value, str) and len(value) >= LONG and key not in KNOWN


def _single(row: Mapping[str, Any], layout: str) -> str:
    """The text of a layout that holds one."""
    text = _text_of(row[layout], layout)
    if layout == "text":
        return text
    if layout == "instruction" and row.get("history"):
        raise Unusable("'history' is not supported: give the turns as 'messages'")
    beside = [_text_of(row[key], key, True) for key in EVIDENCE if row.get(key) is not None]
    return "\n\n".join([text, *(more for more in beside if more.strip())])


def _turns(value: object) -> list[Message]:
    """What the user says in turn, and between that the replies which nobody has given yet."""
    if not isinstance(value, list) or not value:
        raise Unusable("'turns' is not a list of texts")
    messages = [_said("user", _text_of(text, "turns")) for text in value]
    if any(message["content"].startswith(WITHHELD) for message in messages):
        raise Unusable("'turns' is a placeholder: SPEED-Bench's prepare_data.py puts the text in")
    return [m for user in messages for m in (_said("assistant", None), user)][1:]


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The system turn that a row says beside its turns, put before them."""
    name = "system_prompt" if row.get("system") is None else "system"
    text = "" if row.get(name) is None else _text_of(row[name], name, empty=True)
    if not text.strip() or messages[0] == _said("system", text):
        return messages
    if messages[0]["role"] in ("system", "developer"):
        raise Unusable(f"'{name}' stands beside another system turn")
    return [_said("system", text), *messages]


def _given_reply(row: Mapping[str, Any]) -> str | None:
    """The key of a reply that stands beside the turns."""
    return next((key for key in REPLIES if row.get(key) is not None), None)


def _replies(row: Mapping[str, Any]) -> tuple[list[Any], object, set[str]]:
    """What a row gives as the reply to its last turn, why that ended, and what is not used."""
    name = _given_reply(row)
    if name is None:
        return [], None, set()
    value, reason, unread = row[name], row.get("finish_reason"), set[str]()
    if isinstance(value, Mapping):
        answer = value["body"] if isinstance(value.get("body"), Mapping) else value
        choices = answer.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            reason = choices[0].get("finish_reason")
            unread = {"every choice but the first of a reply"} if len(choices) > 1 else unread
            answer = choices[0].get("message") or {"content": choices[0].get("text")}
        if not isinstance(answer, Mapping) or not {"content", "tool_calls"} & answer.keys():
            raise Unusable(f"'{name}' holds no reply")
        value = [{"role": "assistant", **answer}]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = [_said("assistant", str(value))]
    elif not (isinstance(value, list) and value and all(_has_role(part) for part in value)):
        value = [_said("assistant", _text_of(value, name))]
    return value, reason, unread


def _has_role(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value.get("role") or value.get("from"))


def _said(role: str, content: str | None) -> Message:
    return {"role": role, "content": content}


def _single_text(messages: list[Message]) -> bool:
    """Whether it is one text, perhaps with what follows it."""
    roles = [message["role"] for message in messages]
    plain = all(message.keys() == {"role", "content"} for message in messages)
    return plain and roles in (["user"], ["user", "assistant"])


def _message(value: object, place: int) -> Message:
    """One turn, whether it says role and content or from and value."""
    if not isinstance(value, Mapping):
        raise Unusable(f"message {place} is not a mapping")
    said = value.get("role") or value.get("from")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise Unusable(f"message {place} has the unknown role {said!r}")
    name = f"message {place} ({role})"
    calls = value.get("tool_calls") or []
    if not calls and value.get("function_call"):
        calls = [value["function_call"]]
    content = value.get("content") if "content" in value else value.get("value")
    if calls and content is None:
        content = ""
    # A system prompt or a tool's result may be empty on purpose, a turn of talk may not.
    empty = bool(calls) or role in ("system", "developer", "tool")
    message = _said(role, _text_of(content, name, empty))
    for field in TEXT_FIELDS:
        if value.get(field) is not None:
            message[field] = _text_of(value[field], f"'{field}' of {name}", True)
    reasoning = next((field for field in REASONING if value.get(field)), None)
    if reasoning:
        text = _text_of(value[reasoning], f"'{reasoning}' of {name}", True)
        message["reasoning_content"] = text
    if calls:
        message["tool_calls"] = _tool_calls(calls, name)
    return message


def _text_of(value: object, name: str, empty: bool = False) -> str:
    """A text as it stands; of a list of parts, those of type text.

    Raises:
        Unusable: not a text, or nothing in it unless `empty`.
    """
    if isinstance(value, list):
        parts = [p for p in value if isinstance(p, Mapping) and p.get("type") == "text"]
        if len(parts) < len(value):
            raise Unusable(f"{name} has parts that are not text")
        value = "".join(_text_of(part.get("text"), name, True) for part in parts)
    if value is None:
        raise Unusable(f"{name} is null")
    if not isinstance(value, str):
        raise Unusable(f"{name} is not a text")
    if not empty and not value.strip():
        raise Unusable(f"{name} is empty")
    return value


def _tool_calls(calls: object, name: str) -> list[Message]:
    """Tool calls with their arguments as a mapping, for templates print those as JSON."""
    if not isinstance(calls, list):
        raise Unusable(f"{name} has tool_calls that are not a list")
    result = []
    for call in calls:
        function = _function(call)
        if function is None:
            raise Unusable(f"{name} has a tool call without a function name")
        arguments = function.get("arguments")
        try:
            # Some servers write no arguments at all as an empty text.
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise Unusable(f"{name} has tool call arguments that are not JSON") from None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise Unusable(f"{name} has tool call arguments that are not an object")
        told = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": dict(arguments)}
        result.append({**told, "type": "function", "function": function})
    return result
