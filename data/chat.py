"""From messages to the ids the target is served with, and what those ids depend on."""

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..configs.errors import UserError
from .layouts import Kind, Message, Unusable

LOG = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]

# How a template may spell what transformers hands it under several names.
_SPELLINGS = {"reasoning_content": ("reasoning_content", ".thinking", "'thinking'", '"thinking"')}
_TAKEN = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "documents"
}
# What templates are tried with; none prints such words by itself.
QUESTION: Message = {"role": "user", "content": "sentinel question"}
ANSWER: Message = {"role": "assistant", "content": "sentinel answer"}


class RefusedError(UserError):
    """The chat template refuses these messages; it may take others."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    kind: Kind = "chat",
    tools: Tools = (),
    options: Options | None = None,
) -> list[int]:
    """Ids of a prompt as a server makes them: the chat template with its generation prompt.

    The template alone decides on the start token; none is added to it.

    Args:
        kind: of the one message of a raw prompt, the text is tokenised as it is, with the
            tokenizer's own start token; of a rendered one up to where its last reply begins, the
            special tokens in it parsed and none added.
        tools: what the assistant may call, in OpenAI's form.
        options: variables of the template, such as enable_thinking.
    Raises:
        UserError: the tokenizer has no chat template or an option is no variable of templates; as
            `RefusedError`, its template refuses the messages.
        Unusable: a rendered prompt without the header of a reply.
    """
    if kind == "raw":
        return _raw_ids(tokenizer, only_text(messages, kind))
    if kind == "rendered":
        return text_ids(tokenizer, open_prompt(tokenizer, only_text(messages, kind), options))
    warn_ignored(tokenizer, messages, tools, options)
    return text_ids(tokenizer, render_text(tokenizer, messages, tools, options))


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = (),
    options: Options | None = None,
    *,
    generate: bool = True,
) -> str:
    """What the chat template prints, with its generation prompt unless `generate` is false.

    Raises `UserError` as `render_prompt`.
    """
    template = _template(tokenizer, tools)
    name = tokenizer_name(tokenizer)
    if template is None:
        raise UserError(
            f"the tokenizer of {name} has no chat template: take an instruction-tuned target, or "
            "set kind: raw on each domain of a completion model"
        )
    options = options or {}
    if taken := sorted(_TAKEN & options.keys()):
        raise UserError(
            f"target.template_options holds '{taken[0]}', which is no variable of chat templates; "
            "name variables such as enable_thinking"
        )
    for number, message in enumerate(messages, 1):
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {number} of {len(messages)} has no content yet")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=generate,
            tokenize=False,
            **options,
        )
    except (TemplateError, TypeError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise RefusedError(
            f"the chat template of {name} refuses messages with the roles {roles}: {error}"
        ) from None
    return str(text)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a rendered text: its special tokens are parsed, none is added."""
    return list(cast(list[int], tokenizer(text, add_special_tokens=False)["input_ids"]))


def only_text(messages: Messages, kind: Kind) -> str:
    """The text of a prompt that is no chat."""
    if len(messages) != 1:
        raise UserError(f"a {kind} prompt is one text, not {len(messages)} messages")
    return str(messages[0]["content"])


def _raw_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    # A text that spells the start token would begin with it twice.
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


# ---- rendered text


def reply_header(tokenizer: PreTrainedTokenizerBase, options: Options | None = None) -> str:
    """What the chat template prints before every reply, found by rendering one question.

    Raises `UserError` if there is no chat template, or it prints nothing there.
    """
    closed = render_text(tokenizer, [QUESTION], options=options, generate=False)
    opened = render_text(tokenizer, [QUESTION], options=options)
    behind = closed.rpartition(QUESTION["content"])[2]
    if opened.startswith(closed):
        # Where nothing is added for generation, the end of the question opens the reply.
        header = opened[len(closed) :] or behind
    else:
        header = opened.rpartition(QUESTION["content"])[2]
    if not header.strip():
        raise UserError(
            f"the chat template of {tokenizer_name(tokenizer)} prints nothing between a question "
            "and its reply, so replies in rendered text cannot be found; give chats instead"
        )
    return header


def reply_closing(tokenizer: PreTrainedTokenizerBase, options: Options | None = None) -> str:
    """What the chat template prints behind the last reply of a conversation; may be nothing."""
    text = render_text(tokenizer, [QUESTION, ANSWER], options=options, generate=False)
    return text.rpartition(ANSWER["content"])[2]


def turn_between(
    tokenizer: PreTrainedTokenizerBase, options: Options | None = None, role: str = "user"
) -> str:
    """What the chat template prints between a reply and the next turn, of that role."""
    chat = [QUESTION, ANSWER, {**QUESTION, "role": role}]
    text = render_text(tokenizer, chat, options=options, generate=False)
    return text.rpartition(ANSWER["content"])[2].partition(QUESTION["content"])[0]


def reply_starts(text: str, header: str) -> list[int]:
    """Where in a rendered text each reply begins, behind its header.

    Raises `Unusable` if there is no such header, or some are spelled with other blanks: what is
    not told as a reply would pass for part of a prompt.
    """
    starts: list[int] = []
    at = text.find(header)
    while at >= 0:
        starts.append(at + len(header))
        at = text.find(header, starts[-1])
    if not starts:
        raise Unusable(f"no assistant header {header!r}, as the target's chat template prints it")
    alike = text.count(header.strip())
    if alike != len(starts):
        raise Unusable(
            f"assistant header with other blanks than in {header!r}, as the target's chat template "
            f"prints it: {alike - len(starts)} of {alike}"
        )
    return starts


def open_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, options: Options | None = None
) -> str:
    """A rendered text up to where its last reply begins; that reply is left out.

    Raises `Unusable` if it has no header of a reply, or goes on with another turn.
    """
    header = reply_header(tokenizer, options)
    start = reply_starts(text, header)[-1]
    closing = reply_closing(tokenizer, options).strip()
    closing = closing or turn_between(tokenizer, options).strip()
    if closing and text[start:].partition(closing)[2].strip():
        raise Unusable(
            f"a turn after the last assistant header {header!r}: nothing opens its reply"
        )
    return text[:start]


# ---- what a template reads


def template_text(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source of the chat template, or None where there is none."""
    return _template(tokenizer, ())


def _template(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> str | None:
    """The template that `apply_chat_template` takes, of those that a tokenizer may have."""
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None))
    except ValueError as error:
        raise UserError(f"{tokenizer_name(tokenizer)}: {error}") from None


def warn_ignored(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = (),
    options: Options | None = None,
) -> None:
    """Say once of each field, of the tools and of each option that the template has no word of it.

    Of a field that it reads in some places only nothing is said: so will it be in serving.
    """
    template = _template(tokenizer, tools) or ""
    given = {field for message in messages for field, value in message.items() if value is not None}
    for field in unmentioned(
        template, given | {*(options or ())} | ({"tools"} if tools else set())
    ):
        _warn_ignored(tokenizer_name(tokenizer), field)


def unmentioned(template: str, names: Collection[str]) -> list[str]:
    """Those of the fields and variables that the template has no word of, in order."""
    return [
        name
        for name in sorted(names)
        if not any(spelling in template for spelling in _SPELLINGS.get(name, (name,)))
    ]


@functools.cache
def _warn_ignored(name: str, field: str) -> None:
    """Say it once for each tokenizer, not for each prompt."""
    LOG.warning("the chat template of %s does not print '%s': it is ignored", name, field)


# ---- identity


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where it was loaded from, or what it is."""
    return str(tokenizer.name_or_path or type(tokenizer).__name__)


def template_hash(tokenizer: PreTrainedTokenizerBase, options: Options | None = None) -> str | None:
    """16 hex digits over the chat template and what it is told, or None where there is none."""
    template = template_text(tokenizer)
    if template is None:
        return None
    told: list[Any] = [dict(options)] if options else []
    if isinstance(tokenizer.chat_template, dict) and "tool_use" in tokenizer.chat_template:
        told.append(tokenizer.chat_template["tool_use"])
    return _hash(json.dumps([template, *told], sort_keys=True) if told else template)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over all tokens, their ids, and how the added ones are matched."""
    added = [
        (token_id, t.content, t.special, t.normalized, t.lstrip, t.rstrip, t.single_word)
        for token_id, t in sorted(tokenizer.added_tokens_decoder.items())
    ]
    return _hash(json.dumps([sorted(tokenizer.get_vocab().items()), added]))


def rules_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over how text is cut into tokens, and which of them have which role.

    Two tokenizers with the same tokens may differ in this, and then read prompts differently.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # none in one written in Python
    rules = {} if backend is None else json.loads(backend.to_str())
    for name in ("truncation", "padding"):  # set anew by every call
        rules.pop(name, None)
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return _hash(json.dumps([rules, roles], sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
