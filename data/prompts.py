"""Prompts: every row of a source becomes a prompt or a rejection with its reason.

Where the target answers, the replies of a row give way to its own: the last one is left out, and
with `collect.turns: all` each earlier one is only a place to be filled. A row with a broken reply
is rejected all the same. Where the replies are given (`collect.replies: given`), training takes
them as they are; prompts held out are answered by the target even so.
"""

import hashlib
import json
import logging
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..configs.collection import CollectSection, DomainSection
from .layouts import Kind, Message, Parsed, Unusable, parse
from .sources import Place, read_rows

LOG = logging.getLogger(__name__)

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, and on which side of the split it stands."""

    id: str
    """Identity of the content, 16 hex digits: whatever its domain, source or line."""
    domain: str
    """The row's own label, or the name of its section in the recipe."""
    messages: tuple[Message, ...]
    """Roles and contents as a chat template takes them, ending with the turn to answer (or a system
    turn behind it). An earlier reply that the target is to make has the content None. If `given`,
    all turns of the row."""
    source: str
    """Where it was read: the packaged domain, file, URL or data set."""
    line: int
    """Its line there, from 1."""
    split: Split
    """Prompts with one key are all on one side."""
    key: str
    """What the split is drawn from: the row's template, or the first user's text."""
    kind: Kind = "chat"
    """raw and rendered are one text, and do without the chat template."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the assistant may call, in OpenAI's form."""
    own_id: str | None = None
    """The row's own name."""
    given: bool = False
    """The replies are the row's, not the target's."""
    last_only: bool = False
    """Of given replies only the last is supervised."""

    @property
    def turns(self) -> tuple[int, ...]:
        """Places of the replies in order: `messages[:place]` is what one answers.

        Of given replies those that are supervised; what a rendered text holds is not told here.
        """
        if self.kind == "rendered" and self.given:
            return ()
        if self.given:
            places = tuple(_reply_places(self.messages))
            return places[-1:] if self.last_only else places
        made = (n for n, message in enumerate(self.messages) if message["content"] is None)
        return (*made, len(self.messages))


@dataclass(frozen=True)
class Rejection:
    """A row that is not used, and why."""

    source: str
    """Where it was read: the packaged domain, file, URL or data set."""
    line: int
    """Its line there, from 1."""
    reason: str
    """For people, and starting alike for one kind of fault."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def read_prompts(section: DomainSection, collect: CollectSection) -> Iterator[Prompt | Rejection]:
    """One item for each row of a source between its lines, in its order and while it is read.

    What of the rows is not understood is warned of, each thing once.

    Raises:
        UserError: no such source, or a line that cannot be read.
    """
    warned: set[str] = set()
    unlabelled = section.by is not None
    for place, row in read_rows(section):
        item: Prompt | Rejection
        try:
            parsed = parse(row, section.kind, section.by)
            item = to_prompt(parsed, place, section, collect)
        except Unusable as fault:
            item = Rejection(place.source, place.line, str(fault))
        else:
            for what in sorted(parsed.unread - warned):
                LOG.warning("%s: %s is ignored", section.source, what)
            warned |= parsed.unread
            unlabelled = unlabelled and parsed.label is None
        yield item
    if unlabelled:
        LOG.warning(
            "%s: no usable row says its domain as '%s': all are called '%s'",
            *(section.source, section.by, section.name),
        )


def to_prompt(
    parsed: Parsed, place: Place, section: DomainSection, collect: CollectSection
) -> Prompt:
    """What the target is asked of a row, or the row's replies to learn from.

    Raises:
        Unusable: with the reason.
    """
    key = parsed.template or _first_user_text(parsed.messages)
    domain = parsed.label or section.name
    _must_be_text([key, domain, parsed.own_id])
    drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    split: Split = "heldout" if drawn < section.holdout * 2**64 else "train"
    given = split == "train" and collect.replies == "given"
    messages = parsed.messages
    if section.reasoning == "inline":
        messages = tuple(_inlined(message) for message in messages)
    if given:
        _check_given(parsed)
    else:
        messages = _asked(messages, anew=collect.turns == "all")
    last_only = given and collect.turns == "last"
    return Prompt(
        id=_identity(messages, parsed, given, last_only),
        domain=domain,
        messages=messages,
        source=place.source,
        line=place.line,
        split=split,
        key=key,
        kind=parsed.kind,
        tools=parsed.tools,
        own_id=parsed.own_id,
        given=given,
        last_only=last_only,
    )


def normalised(text: str) -> str:
    """Text without the differences that do not make another prompt: case, spaces, forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _identity(messages: Sequence[Message], parsed: Parsed, given: bool, last_only: bool) -> str:
    """16 hex digits over what is asked; a plain chat's do not depend on what else there is."""
    content: dict[str, Any] = {"messages": messages}
    if parsed.kind != "chat":
        content["kind"] = parsed.kind
    if parsed.tools:
        content["tools"] = parsed.tools
    if given:
        content["given"] = True
    if last_only and len(_reply_places(messages)) != 1:  # rendered text has no places
        content["last_only"] = True
    return hashlib.sha256(_must_be_text(content)).hexdigest()[:16]


def _must_be_text(content: object) -> bytes:
    """Its JSON."""
    try:
        return json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unusable("half of a surrogate pair, which is not valid text") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable(f"holds what JSON cannot say: {error}") from None


def _first_user_text(messages: Sequence[Message]) -> str:
    return next(str(m["content"]) for m in messages if m["role"] == "user")


def _reply_places(messages: Sequence[Message]) -> list[int]:
    """Where the assistant speaks; a greeting before the first user's turn answers nothing."""
    roles = [message["role"] for message in messages]
    return [n for n, role in enumerate(roles) if role == "assistant" and "user" in roles[:n]]


def _asked(messages: tuple[Message, ...], anew: bool) -> tuple[Message, ...]:
    """The turns before the last reply, or all where none stands last.

    Args:
        anew: earlier replies give way to the target's, save those that call tools: the result that
            follows answers just that call.
    """
    last = max(n for n, message in enumerate(messages) if message["role"] != "assistant")
    asked = list(messages[: last + 1])
    for place in _reply_places(asked) if anew else ():
        if "tool_calls" in asked[place]:
            continue
        if asked[place - 1]["role"] == "assistant":
            raise Unusable(f"message {place + 1} (assistant) follows another reply")
        asked[place] = {"role": "assistant", "content": None}
    return tuple(asked)


def _check_given(parsed: Parsed) -> None:
    """Refuse a row whose replies cannot be learnt from."""
    if parsed.kind == "rendered":
        return
    places = _reply_places(parsed.messages)
    if not places:
        raise Unusable("no reply is given")
    missing = next((n for n in places if parsed.messages[n]["content"] is None), None)
    if missing is not None:
        raise Unusable(f"no reply is given as message {missing + 1}")
    if parsed.cut:
        raise Unusable("the reply given was cut off before its end")


def _inlined(message: Message) -> Message:
    """A message that says its reasoning before its content, marked as most templates do."""
    rest = {field: value for field, value in message.items() if field != "reasoning_content"}
    if len(rest) == len(message):
        return message
    thought = message["reasoning_content"].strip("\n")
    return {**rest, "content": f"<think>\n{thought}\n</think>\n\n{message['content']}"}
