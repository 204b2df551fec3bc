"""Prompts by domain: every row of a source becomes a prompt or a rejection with its reason.

Layouts are recognised by their keys. Of a chat the prompt is everything the target is to
answer: the turns up to the last one of a user or tool. Replies in the data are not used, for
the target writes its own; but a row with a broken reply is rejected all the same.
"""

import hashlib
import json
import logging
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..configs.errors import UserError
from ..configs.recipe import DomainSection
from .sources import read_rows

LOG = logging.getLogger(__name__)

Message = dict[str, Any]
Split = Literal["train", "heldout"]

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"},
    **{"function": "tool", "observation": "tool"},
}
ANSWERED = ("user", "tool")
KEPT_FIELDS = ("name", "tool_call_id", "reasoning_content")
RENDERED = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]")


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, and on which side of the split it stands."""

    id: str
    """Identity of the content, 16 hex digits over domain and messages."""
    domain: str
    """Name of its section in the recipe."""
    messages: tuple[Message, ...]
    """Roles and contents as a chat template takes them, ending with the turn to answer."""
    source: str
    """Where it was read, as the recipe spells it."""
    line: int
    """Its line there, from 1."""
    split: Split
    """Prompts with one key are all on one side."""
    key: str
    """What the split is drawn from: the row's template, or the first user's text."""
    raw: bool = False
    """The one message is sent as bare text, without the chat template."""


@dataclass(frozen=True)
class Rejection:
    """A row that is not used, and why."""

    source: str
    """Where it was read, as the recipe spells it."""
    line: int
    """Its line there, from 1."""
    reason: str
    """For people, and starting alike for one kind of fault."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


class _Unusable(Exception):
    """The reason why a row cannot become a prompt."""


# ---- sources to prompts


def load_domains(sections: Sequence[DomainSection]) -> tuple[list[Prompt], list[Rejection]]:
    """All prompts of a recipe, none of them twice and no held-out one in training.

    Raises:
        UserError: as `load_prompts`.
    """
    prompts: list[Prompt] = []
    rejections: list[Rejection] = []
    for section in sections:
        kept, rejected = load_prompts(section)
        prompts += kept
        rejections += rejected
    kept, rejected = _separate(prompts)
    assert len(kept) + len(rejected) == len(prompts)
    return kept, rejections + rejected


def load_prompts(section: DomainSection) -> tuple[list[Prompt], list[Rejection]]:
    """The prompts of one domain in the order of their lines, and the rows that are not used.

    Raises:
        UserError: no such source, a line that is not JSON, or no usable row at all.
    """
    prompts: list[Prompt] = []
    rejections: list[Rejection] = []
    for line, row in read_rows(section.source):
        try:
            prompts.append(_prompt(row, line, section))
        except _Unusable as fault:
            rejections.append(Rejection(section.source, line, str(fault)))
    rows = len(prompts) + len(rejections)
    if not prompts:
        first = f", the first being {rejections[0]}" if rejections else ""
        raise UserError(f"no usable prompt among the {rows} rows of '{section.source}'{first}")
    if len(rejections) > rows / 2:
        LOG.warning("%s: %d of %d rows are unusable", section.source, len(rejections), rows)
    prompts, rejected = _separate(prompts)
    rejections += rejected
    if section.max_rows is not None:
        first_ids = {p.id for p in sorted(prompts, key=lambda p: p.id)[: section.max_rows]}
        reason = f"beyond max_rows {section.max_rows}"
        rejections += [
            Rejection(p.source, p.line, reason) for p in prompts if p.id not in first_ids
        ]
        prompts = [p for p in prompts if p.id in first_ids]
    assert rows == len(prompts) + len(rejections)
    return prompts, sorted(rejections, key=lambda rejection: rejection.line)


def prompts_sha256(prompts: Iterable[Prompt]) -> str:
    """Hash of a set of prompts and their split, whatever their order."""
    lines = sorted(f"{prompt.id} {prompt.split}" for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def normalised(text: str) -> str:
    """Text without the differences that do not make another prompt: case, spaces, forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _separate(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Rejection]]:
    """Drop training prompts that are held out too, then all but the first of equal prompts.

    Within one domain equal keys are on one side by themselves. Not so across domains with
    different shares, or where the texts differ only in case or spaces.
    """
    heldout = [p for p in prompts if p.split == "heldout"]
    keys = {p.key: p for p in heldout}
    texts = {_text(p): p for p in heldout}
    seen: dict[str, Prompt] = {}
    kept: list[Prompt] = []
    rejections: list[Rejection] = []
    for prompt in prompts:
        twin = keys.get(prompt.key) or texts.get(_text(prompt))
        content = json.dumps(prompt.messages, sort_keys=True)
        if prompt.split == "train" and twin:
            reason = f"held out as {twin.source}:{twin.line}"
        elif content in seen:
            reason = f"duplicate of {seen[content].source}:{seen[content].line}"
        else:
            seen[content] = prompt
            kept.append(prompt)
            continue
        rejections.append(Rejection(prompt.source, prompt.line, reason))
    return kept, rejections


def _text(prompt: Prompt) -> str:
    return normalised(_first_user_text(prompt.messages))


def _first_user_text(messages: Sequence[Message]) -> str:
    return next(str(m["content"]) for m in messages if m["role"] == "user")


# ---- rows to prompts


def _prompt(row: object, line: int, section: DomainSection) -> Prompt:
    """One row as a prompt.

    Raises:
        _Unusable: with the reason.
    """
    if not isinstance(row, Mapping):
        raise _Unusable("not a JSON object")
    messages = _messages(row, section.raw)
    if section.raw and len(messages) != 1:
        raise _Unusable("a raw domain takes single texts, not chats")
    template = row.get("template")
    if template is not None and not (isinstance(template, str) and template.strip()):
        raise _Unusable("'template' is not a text")
    key = template or _first_user_text(messages)
    identity: list[object] = [section.name, messages]
    if section.raw:
        identity.append("raw")
    try:
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _Unusable("half of a surrogate pair, which is not valid text") from None
    return Prompt(
        id=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16],
        domain=section.name,
        messages=messages,
        source=section.source,
        line=line,
        split="heldout" if drawn < section.holdout * 2**64 else "train",
        key=key,
        raw=section.raw,
    )


def _messages(row: Mapping[str, Any], raw: bool) -> tuple[Message, ...]:
    """The messages of a row, by the first of the known keys that has a value."""
    layouts = ("messages", "conversations", "turns", "prompt", "question", "instruction", "text")
    layout = next((key for key in layouts if row.get(key) is not None), None)
    if layout is None:
        null = next((key for key in layouts if key in row), None)
        raise _Unusable(f"'{null}' is null" if null else f"none of the keys {', '.join(layouts)}")
    value = row[layout]
    if layout in ("messages", "conversations") or (layout == "prompt" and isinstance(value, list)):
        if row.get("tools"):
            raise _Unusable("'tools' are not supported: the template would have to print them")
        return _chat(value, layout)
    if layout == "turns":
        # The first turn alone: later ones belong to answers that the target has not given.
        if not isinstance(value, list) or not value:
            raise _Unusable("'turns' is not a list of texts")
        value = value[0]
    text = _text_of(value, layout)
    if layout == "text" and not raw and RENDERED.search(text):
        raise _Unusable("'text' holds a chat already rendered: give it as 'messages'")
    if layout == "instruction" and row.get("input") is not None:
        more = _text_of(row["input"], "input", empty=True)
        text = f"{text}\n\n{more}" if more.strip() else text
    return ({"role": "user", "content": text},)


def _text_of(value: object, name: str, empty: bool = False) -> str:
    """A text as it stands; of a list of parts, those of type text.

    Raises:
        _Unusable: not a text, or nothing in it unless `empty`.
    """
    if isinstance(value, list):
        parts = [p for p in value if isinstance(p, Mapping) and p.get("type") == "text"]
        if len(parts) < len(value):
            raise _Unusable(f"{name} has parts that are not text")
        value = "".join(_text_of(part.get("text"), name, True) for part in parts)
    if value is None:
        raise _Unusable(f"{name} is null")
    if not isinstance(value, str):
        raise _Unusable(f"{name} is not a text")
    if not empty and not value.strip():
        raise _Unusable(f"{name} is empty")
    return value


def _chat(value: object, layout: str) -> tuple[Message, ...]:
    """The turns to answer; all turns are checked, those after them too."""
    if not isinstance(value, list) or not value:
        raise _Unusable(f"'{layout}' is not a list of messages")
    messages = [_message(message, place) for place, message in enumerate(value, start=1)]
    if all(message["role"] != "user" for message in messages):
        raise _Unusable("no user turn")
    while messages[-1]["role"] not in ANSWERED:
        messages.pop()
    if all(message["role"] != "user" for message in messages):
        raise _Unusable("no user turn")
    return tuple(messages)


def _message(value: object, place: int) -> Message:
    """One turn, whether it says role and content or from and value."""
    if not isinstance(value, Mapping):
        raise _Unusable(f"message {place} is not a mapping")
    said = value.get("role") or value.get("from")
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise _Unusable(f"message {place} has the unknown role {said!r}")
    calls = value.get("tool_calls") or []
    content = value.get("content") if "content" in value else value.get("value")
    if calls and content is None:
        content = ""
    # A system prompt or a tool's result may be empty on purpose, a turn of talk may not.
    empty = bool(calls) or role in ("system", "developer", "tool")
    message: Message = {
        "role": role,
        "content": _text_of(content, f"message {place} ({role})", empty),
    }
    message |= {field: value[field] for field in KEPT_FIELDS if value.get(field) is not None}
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"message {place} ({role})")
    return message


def _tool_calls(calls: object, name: str) -> list[Message]:
    """Tool calls with their arguments as a mapping, for templates print those as JSON."""
    if not isinstance(calls, list):
        raise _Unusable(f"{name} has tool_calls that are not a list")
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _Unusable(f"{name} has a tool call without a function name")
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            raise _Unusable(f"{name} has tool call arguments that are not JSON") from None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise _Unusable(f"{name} has tool call arguments that are not an object")
        result.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return result
