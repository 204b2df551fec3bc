"""What to know of a target's tokenizer and template before it meets data; masks in colour."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .chat import (
    ANSWER,
    QUESTION,
    Messages,
    Options,
    RefusedError,
    Tools,
    render_text,
    template_text,
    tokenizer_name,
    turn_between,
    unmentioned,
)
from .layouts import Message, Unusable
from .prompts import Prompt
from .replies import Turn, control_tokens, given_turns

_MARK = "sentinel_mark"
_UNSET = 1 << 30  # model_max_length of a tokenizer that was told none is about 1e30
# Control characters as pictures of them; a line still ends where one ended.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32)} | {ord("\n"): "␊\n"}


def audit(
    tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], options: Options | None = None
) -> list[str]:
    """What the tokenizer and its chat template do, or cannot do, to any data: one sentence each.

    Raises `UserError` where an option is no variable of chat templates.
    """
    findings = _of_tokens(tokenizer, eos_ids)
    name = tokenizer_name(tokenizer)
    template = template_text(tokenizer)
    if template is None:
        return [f"{name} has no chat template: only domains of kind raw can be used", *findings]
    findings += [
        f"the chat template has no word of '{option}' in target.template_options: it is ignored"
        for option in unmentioned(template, options or {})
    ]
    if "strftime_now" in template:
        findings.append("the chat template prints the date: ids differ from one day to another")
    try:
        given_turns(tokenizer, _chat(QUESTION, ANSWER), eos_ids, None, options)
    except Unusable as fault:
        findings.append(f"given replies cannot be used: {fault}")
    if between := _before_content(tokenizer, options):
        findings.append(
            f"the chat template opens a reply's content with {between!r}, which is supervised as "
            "if the target had said it (thinking mode?); see target.template_options"
        )
    if own := _own_opening(tokenizer, options):
        findings.append(
            f"the chat template opens chats that have no system turn with its own: {own!r}"
        )
    return findings + _not_printed(tokenizer, options)


def _of_tokens(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> list[str]:
    findings = []
    if not eos_ids:
        findings.append("no end token is known: every answer runs into max_new_tokens")
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id in eos_ids:
        findings.append(
            f"padding and the end of a turn are one token, {tokenizer.pad_token!r}: harmless here, "
            "where padding is told by its position"
        )
    if tokenizer.model_max_length > _UNSET:
        findings.append(
            "the tokenizer tells no longest text: the limits of the target and collect.max_length "
            "hold"
        )
    return findings


def _chat(*messages: Message) -> Prompt:
    return Prompt("", "", messages, "", 0, "train", "", given=True)


def _before_content(tokenizer: PreTrainedTokenizerBase, options: Options | None) -> str:
    """What a reply without reasoning says before its content, behind the generation prompt."""
    try:
        asked = render_text(tokenizer, [QUESTION], options=options)
        text = render_text(tokenizer, [QUESTION, ANSWER], options=options, generate=False)
    except RefusedError:
        return ""
    before = text.partition(ANSWER["content"])[0]
    return before.removeprefix(asked).strip() if before.startswith(asked) else ""


def _own_opening(tokenizer: PreTrainedTokenizerBase, options: Options | None) -> str:
    """What is printed before the first user's turn, but not before a later one."""
    try:
        text = render_text(tokenizer, [QUESTION], options=options, generate=False)
        later = turn_between(tokenizer, options)
    except RefusedError:
        return ""
    opening = text.partition(QUESTION["content"])[0]
    if later.endswith(opening.removeprefix(tokenizer.bos_token or "")):
        return ""
    ends = zip(reversed(opening), reversed(later), strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    return opening[: len(opening) - alike]


def _not_printed(tokenizer: PreTrainedTokenizerBase, options: Options | None) -> list[str]:
    """Kinds of fields that leave no trace in the text, tried with a mark in each."""
    tools = [{"type": "function", "function": _function(_MARK)}]
    others = [{"type": "function", "function": _function("other")}]
    tried: list[tuple[str, Messages, Tools]] = [
        ("system turns", [{"role": "system", "content": _MARK}, QUESTION], ()),
        ("descriptions of tools", [QUESTION], tools),
        ("calls of tools", [QUESTION, _called(_MARK), _result("x")], others),
        ("results of tools", [QUESTION, _called("other"), _result(_MARK)], others),
        ("reasoning fields", [QUESTION, {**ANSWER, "reasoning_content": _MARK}], ()),
    ]
    return [
        f"the chat template has no place for {what}"
        for what, messages, given in tried
        if not _prints_mark(tokenizer, messages, given, options)
    ]


def _function(name: str) -> dict[str, Any]:
    return {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}


def _called(name: str) -> Message:
    function = {"name": name, "arguments": {}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(text: str) -> Message:
    return {"role": "tool", "name": "other", "content": text, "tool_call_id": "call00000"}


def _prints_mark(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools, options: Options | None
) -> bool:
    """Whether the mark leaves a trace; a template that refuses the messages prints nothing."""
    try:
        text = render_text(tokenizer, messages, tools, options, generate=False)
    except RefusedError:
        return False
    return _MARK in text


def coloured(tokenizer: PreTrainedTokenizerBase, turn: Turn) -> Text:
    """The prompt dimmed and the supervised reply in colour, with all tokens and line ends shown."""
    special = set(control_tokens(tokenizer))
    text = Text()
    for ids, style in ((turn.prompt, "dim"), (turn.reply, "bold green")):
        for token_ids in _runs(tokenizer, ids, special):
            piece = str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
            mark = " reverse" if piece in special else ""
            text.append(piece.translate(_VISIBLE), style + mark)
    return text


def _runs(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], special: set[str]
) -> list[list[int]]:
    """The ids in order, each special token by itself: one character may take several tokens."""
    runs: list[list[int]] = [[]]
    for token_id, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if token in special:
            runs += [[token_id], []]
        else:
            runs[-1].append(token_id)
    return [run for run in runs if run]
