"""Given replies as ids to learn from, and the check that every prompt has to pass.

Nothing here searches for the markers of a model family. A reply is what the target's own chat
template prints behind the prompt that a server would be sent, up to the end of the turn. Prompt and
reply are tokenised each by itself: at serving no token spans the two, however a reply begins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from .chat import (
    ANSWER,
    QUESTION,
    Options,
    RefusedError,
    only_text,
    open_prompt,
    render_prompt,
    render_text,
    reply_closing,
    reply_header,
    reply_starts,
    text_ids,
    tokenizer_name,
    turn_between,
    warn_ignored,
)
from .layouts import Unusable
from .prompts import Prompt

_SHORTEST = 2  # reply tokens: the first is never drafted


@dataclass(frozen=True)
class Turn:
    """One reply to learn from and what it answers; only `reply` is supervised."""

    number: int
    """Which reply of the conversation, from 0."""
    prompt: tuple[int, ...]
    """Ids exactly as a server gets them."""
    reply: tuple[int, ...]
    """Ids up to and with the token that ends the turn."""
    finish: str
    """stop, or length where the reply was cut or has no end."""


# ---- given replies


def given_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    eos_ids: Sequence[int],
    max_length: int | None,
    options: Options | None = None,
) -> list[Turn]:
    """The supervised replies of a row whose replies are given, in their order.

    A raw reply ends with the tokenizer's end token, which its text does not spell; any other ends
    as the chat template ends it.

    Args:
        eos_ids: the tokens that end the target's turns.
        max_length: of prompt and reply together, in tokens. The first reply beyond it is cut, or
            left out if it keeps no two tokens; so are those after it.
        options: variables of the chat template.
    Raises:
        Unusable: nothing to supervise, no end of a turn, a reply that the template prints in part
            or not where it is asked for one, or no reply within `max_length`.
        UserError: as `render_prompt`.
    """
    spelled = ((str(tokenizer.decode([token])), token) for token in eos_ids)
    # An id that the tokenizer does not know spells nothing, which would be found everywhere.
    ends = {text: token for text, token in spelled if text}
    turns: list[Turn] = []
    try:
        for turn in _all_turns(tokenizer, prompt, ends, options):
            fitting = _cut(turn, max_length)
            if fitting is None:
                if not turns:
                    raise Unusable(
                        f"too long for max_length {max_length}: reply {turn.number + 1} begins "
                        f"after {len(turn.prompt)} tokens"
                    )
                break
            turns.append(fitting)
    except RefusedError as refusal:
        raise Unusable(str(refusal)) from None
    if not turns:
        raise Unusable("no reply is given")
    return turns


def _all_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    ends: Mapping[str, int],
    options: Options | None,
) -> Iterator[Turn]:
    if prompt.kind == "rendered":
        yield from _rendered_turns(tokenizer, prompt, ends, options)
        return
    if prompt.kind == "chat":
        warn_ignored(tokenizer, prompt.messages, prompt.tools, options)
    roles = [message["role"] for message in prompt.messages]
    for place in prompt.turns:
        number = roles[roles.index("user") : place].count("assistant")
        if prompt.kind == "raw":
            yield _raw_turn(tokenizer, prompt, number, place, ends)
        else:
            yield _chat_turn(tokenizer, prompt, number, place, ends, options)


def _cut(turn: Turn, max_length: int | None) -> Turn | None:
    """The turn as far as it fits, None where too little does."""
    room = len(turn.reply) if max_length is None else max_length - len(turn.prompt)
    if room >= len(turn.reply):
        return turn
    if room < _SHORTEST:
        return None
    return replace(turn, reply=turn.reply[:room], finish="length")


def _raw_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    number: int,
    place: int,
    ends: Mapping[str, int],
) -> Turn:
    text = only_text(prompt.messages[:place], "raw")
    asked = render_prompt(tokenizer, prompt.messages[:place], "raw")
    end = tokenizer.eos_token_id
    if end not in ends.values():
        end = next(iter(ends.values()), None)
    if end is None:
        raise Unusable("no end-of-turn token: neither the target nor its tokenizer names one")
    reply = _reply_ids(tokenizer, text, prompt.messages[place]["content"])
    return _whole(number, asked, [*reply, end], ends)


def _chat_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    number: int,
    place: int,
    ends: Mapping[str, int],
    options: Options | None,
) -> Turn:
    messages, tools = prompt.messages, prompt.tools
    before = render_text(tokenizer, messages[:place], tools, options)
    through = render_text(tokenizer, messages[: place + 1], tools, options, generate=False)
    if not through.startswith(before):
        raise Unusable(
            "the chat template renders a reply differently from its own generation prompt "
            f"(thinking mode?): reply {number + 1} does not begin as it is asked for; see "
            "target.template_options, and reasoning of the domain"
        )
    past = _past_content(tokenizer, prompt, place, through, len(before), options)
    end = _first_end(through, past, ends)
    text = through[len(before) : end]
    if end is None:
        role = "tool" if messages[place].get("tool_calls") else "user"
        text += _closed_by_next(tokenizer, role, ends, options)
    reply = _reply_ids(tokenizer, before, text)
    return _whole(number, text_ids(tokenizer, before), reply, ends)


def _past_content(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    place: int,
    through: str,
    begin: int,
    options: Options | None,
) -> int:
    """Where in `through` all of the reply's content has been printed; `begin` where it may begin.

    Raises `Unusable` if the template leaves out some of it, or calls of tools.
    """
    message = prompt.messages[place]
    name = f"message {place + 1} (assistant)"
    if message.get("tool_calls"):
        rest = {field: value for field, value in message.items() if field != "tool_calls"}
        without = [*prompt.messages[:place], {"content": "", **rest}]
        try:
            bare = render_text(tokenizer, without, prompt.tools, options, generate=False)
        except RefusedError:  # it takes the turn for its calls alone
            bare = None
        if through == bare:
            raise Unusable(f"the chat template does not print the tool calls of {name}")
    content = str(message.get("content") or "")
    if not content.strip():
        if not message.get("tool_calls"):
            raise Unusable(f"{name} is empty")
        return begin
    at = through.find(content, begin)
    past = at + len(content) if at >= 0 else _past_but_blanks(through, begin, content)
    if past is None:
        raise Unusable(f"the chat template does not print all of the content of {name}")
    return past


def _past_but_blanks(text: str, begin: int, content: str) -> int | None:
    """The end of `content` in a text that may print it with other blanks, behind `begin`.

    It may begin before: the prompt can open what the content opens too.
    """
    bare = "".join(content.split())
    window = range(max(0, begin - len(content)), len(text))
    places = [place for place in window if not text[place].isspace()]
    printed = "".join(text[place] for place in places)
    inside = sum(place < begin for place in places)
    at = printed.find(bare, max(0, inside - len(bare) + 1))
    return places[at + len(bare) - 1] + 1 if at >= 0 else None


def _first_end(text: str, start: int, ends: Mapping[str, int]) -> int | None:
    """Where the first end token from `start` on ends."""
    found = [(text.find(end, start), -len(end)) for end in ends]
    at, length = min(((at, n) for at, n in found if at >= 0), default=(-1, 0))
    return at - length if at >= 0 else None


def _closed_by_next(
    tokenizer: PreTrainedTokenizerBase, role: str, ends: Mapping[str, int], options: Options | None
) -> str:
    """What a reply lacks that ends with the header of the next turn, by someone of that role."""
    closing = reply_closing(tokenizer, options)
    between = turn_between(tokenizer, options, role).removeprefix(closing)
    lacking = between[: _first_end(between, 0, ends)]
    if lacking.strip() not in ends:
        raise Unusable(
            "no end-of-turn token after a reply: the chat template of "
            f"{tokenizer_name(tokenizer)} prints {_none_of(ends)}"
        )
    return lacking


def _none_of(ends: Mapping[str, int]) -> str:
    return f"none of {', '.join(map(repr, ends))}" if ends else "none, as the target names none"


def _rendered_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    ends: Mapping[str, int],
    options: Options | None,
) -> Iterator[Turn]:
    text = only_text(prompt.messages, "rendered")
    header = reply_header(tokenizer, options)
    starts = reply_starts(text, header)
    stops = [start - len(header) for start in starts[1:]] + [len(text)]
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        last = number == len(starts) - 1
        if prompt.last_only and not last:
            continue
        end = _first_end(text[:stop], start, ends)
        if end is None and not (last and not reply_closing(tokenizer, options).strip()):
            raise Unusable(
                f"no end-of-turn token after a reply: reply {number + 1} of the rendered text has "
                f"{_none_of(ends)}"
            )
        reply = text[start : stop if end is None else end]
        if not reply.strip() or reply.strip() in ends:
            raise Unusable(f"reply {number + 1} of the rendered text is empty")
        ids = _reply_ids(tokenizer, text[:start], reply)
        asked = text_ids(tokenizer, text[:start])
        yield _whole(number, asked, ids, ends if end is not None else None)


def _whole(
    number: int, prompt: Sequence[int], reply: Sequence[int], ends: Mapping[str, int] | None
) -> Turn:
    """A turn that ends with one of `ends`; None for one that has no end."""
    if not prompt:
        raise Unusable("the prompt has no token: all of the row would be supervised")
    if ends is not None and reply[-1] not in ends.values():
        raise Unusable(f"no end-of-turn token after a reply: reply {number + 1} spells none")
    return Turn(number, tuple(prompt), tuple(reply), "length" if ends is None else "stop")


def _reply_ids(tokenizer: PreTrainedTokenizerBase, before: str, reply: str) -> list[int]:
    """Ids of what follows `before`, none of them begun there.

    Some tokenizers mark the beginning of a text, which a reply is not: those get both.
    """
    alone = text_ids(tokenizer, reply)
    if text_ids(tokenizer, "\na") == [*text_ids(tokenizer, "\n"), *text_ids(tokenizer, "a")]:
        return alone
    asked, whole = text_ids(tokenizer, before), text_ids(tokenizer, before + reply)
    if whole[: len(asked)] != asked:
        raise Unusable("the tokenizer merges the beginning of a reply with its prompt")
    return whole[len(asked) :]


# ---- prompts


def check_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Options | None = None
) -> list[int]:
    """Ids of the prompt of the first reply, which are as they should be.

    Raises:
        Unusable: a message spells a control token, the template refuses the turns (also those that
            follow later replies), or the beginning has two start tokens or lacks the template's.
        UserError: as `render_prompt`.
    """
    if prompt.kind != "rendered":
        _check_spelling(tokenizer, prompt)
    try:
        ids = _first_prompt(tokenizer, prompt, options)
    except RefusedError as refusal:
        raise Unusable(str(refusal)) from None
    start = tokenizer.bos_token_id
    if start is not None and ids[:2] == [start] * 2:
        raise Unusable(f"two start tokens {tokenizer.bos_token!r} at the beginning")
    return ids


def _first_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: Options | None
) -> list[int]:
    messages, kind = prompt.messages, prompt.kind
    if kind == "rendered":
        text = only_text(messages, kind)
        if prompt.given:
            text = text[: reply_starts(text, reply_header(tokenizer, options))[0]]
        else:
            text = open_prompt(tokenizer, text, options)
        opening = render_text(tokenizer, [QUESTION], options=options)
        start = tokenizer.bos_token
        if start and opening.startswith(start) and not text.startswith(start):
            raise Unusable(f"no start token {start!r}, with which the chat template begins")
        return text_ids(tokenizer, text)
    first, last = prompt.turns[0], prompt.turns[-1]
    if kind == "chat":
        warn_ignored(tokenizer, messages, prompt.tools, options)
    if first != last and kind == "chat":
        filled = [ANSWER if m["content"] is None else m for m in messages[:last]]
        render_text(tokenizer, filled, prompt.tools, options)
    return render_prompt(tokenizer, messages[:first], kind, prompt.tools, options)


def _check_spelling(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Refuse text of a user, tool or reply that would be read as the template's own tokens."""
    tokens = control_tokens(tokenizer)
    for number, message in enumerate(prompt.messages, 1):
        for text in _texts(message):
            if prompt.kind == "raw" and number == 1 and tokenizer.bos_token:
                text = text.removeprefix(tokenizer.bos_token)
            _refuse_control(tokens, text, f"message {number} ({message['role']})")
    for text in _texts(prompt.tools):
        _refuse_control(tokens, text, "a tool's description")


def _refuse_control(tokens: Sequence[str], text: str, name: str) -> None:
    for token in tokens:
        if token in text:
            raise Unusable(f"{name} spells the control token {token!r}")


def _texts(value: object) -> Iterator[str]:
    """All texts in a message or its calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The special tokens as text spells them."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted({token.content for token in added if token.special})
