"""Given replies become ids to learn from: by the template itself, whatever its habits are."""

import pytest
import torch
from conftest import CHATML, CORPUS
from templates import (
    AGENT,
    INSTRUCT,
    OPEN_ENDED,
    THINKER,
    asked,
    given,
    metaspace_tokenizer,
    reply,
    text_of,
    user,
    with_template,
)
from transformers import PreTrainedTokenizerFast

from draftsmith.data.chat import render_prompt
from draftsmith.data.layouts import Unusable
from draftsmith.data.records import Record, States
from draftsmith.data.replies import Turn, check_prompt, given_turns
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter

END = (2,)
CHAT = (user("hi"), reply("Hello."), user("and?"), reply("Five tips"))


def supervised(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> list[str]:
    return [tokenizer.decode(turn.reply) for turn in turns]


def test_turns_of_a_chat(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = given_turns(tiny_tokenizer, given(*CHAT), END, None)
    assert supervised(tiny_tokenizer, turns) == ["Hello.<|im_end|>", "Five tips<|im_end|>"]
    assert [(turn.number, turn.finish) for turn in turns] == [(0, "stop"), (1, "stop")]
    for turn, place in zip(turns, (1, 3), strict=True):
        assert list(turn.prompt) == render_prompt(tiny_tokenizer, CHAT[:place])


def test_the_last_reply_only(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """It keeps its number; a greeting before the first question is no reply."""
    greeted = (reply("Welcome."), *CHAT)
    every = given_turns(tiny_tokenizer, given(*greeted), END, None)
    assert [turn.number for turn in every] == [0, 1]
    (only,) = given_turns(tiny_tokenizer, given(*greeted, last_only=True), END, None)
    assert only == every[1]


def test_replies_with_tools_and_options(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, AGENT)
    tools = ({"type": "function", "function": {"name": "get_weather"}},)
    options = {"enable_thinking": False}
    chat = (user("Rain?"), reply("No."))
    (turn,) = given_turns(tokenizer, given(*chat, tools=tools), END, None, options)
    text = tokenizer.decode(turn.prompt)
    assert "get_weather" in text and text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert list(turn.prompt) == render_prompt(tokenizer, chat[:1], "chat", tools, options)
    assert supervised(tokenizer, [turn]) == ["No.<|im_end|>"]
    assert check_prompt(tokenizer, given(*chat, tools=tools), options) == list(turn.prompt)


def test_generation_markers_change_nothing(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    marked = CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
        "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    )
    assert "generation %}" in marked
    tokenizer = with_template(tiny_tokenizer, marked)
    plain = given_turns(tiny_tokenizer, given(*CHAT), END, None)
    assert given_turns(tokenizer, given(*CHAT), END, None) == plain


def test_the_end_follows_the_content(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """A template that trims, one that prints behind the content; and the first of several ends."""
    trims = with_template(tiny_tokenizer, CHATML.replace("['content'] +", "['content'] | trim +"))
    (turn,) = given_turns(trims, given(user("hi"), reply(" a  b\n")), END, None)
    assert supervised(trims, [turn]) == ["a  b<|im_end|>"]
    more = with_template(
        tiny_tokenizer,
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %} Over.<|endoftext|>{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    for ends, last in (((2,), "<|endoftext|><|im_end|>"), ((2, 0), "<|endoftext|>")):
        (turn,) = given_turns(more, given(user("hi"), reply("So")), ends, None)
        assert supervised(more, [turn]) == ["So Over." + last]
        assert turn.finish == "stop"


def test_an_end_within_the_content_is_none(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    chat = given(user("hi"), reply("a<|im_end|>b"))
    turns = given_turns(tiny_tokenizer, chat, END, None)
    assert supervised(tiny_tokenizer, turns) == ["a<|im_end|>b<|im_end|>"]


def test_an_end_that_merges_with_the_content(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """A target whose end is an ordinary token: the text spells it, its ids do not."""
    end = tiny_tokenizer.convert_tokens_to_ids("s")
    tokenizer = with_template(tiny_tokenizer, CHATML.replace("<|im_end|>", "s"))
    (turn,) = given_turns(tokenizer, given(user("hi"), reply("24")), (end,), None)
    assert supervised(tokenizer, [turn]) == ["24s"]
    with pytest.raises(Unusable, match="no end-of-turn token after a reply: reply 1 spells none"):
        given_turns(tokenizer, given(user("hi"), reply("24 sticker")), (end,), None)


def test_content_that_the_prompt_has_begun(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """A thought that the generation prompt opens is supervised behind its opening."""
    tokenizer = with_template(tiny_tokenizer, THINKER)
    thought = "<think>\nsix\n</think>\n\n24"
    (turn,) = given_turns(tokenizer, given(user("4 x 6?"), reply(thought)), END, None)
    assert tokenizer.decode(turn.prompt).endswith("assistant\n<think>\n")
    assert supervised(tokenizer, [turn]) == ["six\n</think>\n\n24<|im_end|>"]


def test_a_reply_that_says_what_was_asked(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Its text stands in the prompt too: a template that drops it is still found out."""
    chat = given(user("ping"), reply("ping"))
    assert supervised(tiny_tokenizer, given_turns(tiny_tokenizer, chat, END, None)) == [
        "ping<|im_end|>"
    ]
    drops = CHATML.replace("message['content']", "(message['content'] if loop.index0 == 0 else '')")
    dropping = with_template(tiny_tokenizer, drops)
    for said in ("ping", "assistant "):  # the header says that too
        with pytest.raises(Unusable, match=r"not print all of the content of message 2 \(assist"):
            given_turns(dropping, given(user("ping"), reply(said)), END, None)


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_reply(tiny_tokenizer: PreTrainedTokenizerFast, content: str) -> None:
    with pytest.raises(Unusable, match=r"message 2 \(assistant\) is empty"):
        given_turns(tiny_tokenizer, given(user("hi"), reply(content)), END, None)


def test_a_template_that_refuses_the_turns(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """B002: the row is left out, with the template's own words; also for a later turn."""
    refuses = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    tokenizer = with_template(tiny_tokenizer, refuses)
    with pytest.raises(Unusable, match=r"refuses messages with the roles user, .*: too many"):
        given_turns(tokenizer, given(*CHAT), END, None)
    to_make = asked(user("hi"), reply(None), user("and?"))  # type: ignore[arg-type]
    with pytest.raises(Unusable, match="too many"):
        check_prompt(tokenizer, to_make)
    assert check_prompt(tiny_tokenizer, to_make) == render_prompt(tiny_tokenizer, CHAT[:1])


# ---- raw text


def test_raw_replies(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The text as a completion server gets it; the end token, which no text spells, is added."""
    prompt = given(user("def f(): # sum"), reply("\n  return 1"), kind="raw")
    (turn,) = given_turns(tiny_tokenizer, prompt, (0, 2), None)
    assert list(turn.prompt) == tiny_tokenizer("def f(): # sum")["input_ids"]
    assert supervised(tiny_tokenizer, [turn]) == ["\n  return 1<|im_end|>"]
    assert turn.finish == "stop"
    (turn,) = given_turns(tiny_tokenizer, prompt, (0,), None)
    assert turn.reply[-1] == 0
    with pytest.raises(Unusable, match="no end-of-turn token: neither the target nor"):
        given_turns(tiny_tokenizer, prompt, (), None)


def test_a_reply_to_nothing(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """All of the row would be supervised."""
    with pytest.raises(Unusable, match="the prompt has no token"):
        given_turns(tiny_tokenizer, given(user(""), reply("x"), kind="raw"), END, None)
    with pytest.raises(Unusable, match="no reply is given"):
        given_turns(tiny_tokenizer, given(user("x")), END, None)


# ---- tokenizers that mark the beginning of a text


def test_a_reply_is_no_beginning_of_a_text() -> None:
    """A tokenizer that marks beginnings must not put a blank before the reply."""
    tokenizer = metaspace_tokenizer(CORPUS)
    tips = "Give me five simple tips"
    chat = (user(tips), reply("Maya has 24 stickers."), user("many?"), reply("a list of numbers"))
    turns = given_turns(tokenizer, given(*chat), (1,), None)
    whole = tokenizer.apply_chat_template(list(chat), return_dict=False)
    for turn in turns:
        assert [*turn.prompt, *turn.reply] == whole[: len(turn.prompt) + len(turn.reply)]
        assert turn.reply[-1] == 1 and turn.prompt[0] == 0
    assert supervised(tokenizer, turns)[1] == "a list of numbers </s>"
    (turn,) = given_turns(tokenizer, given(user(tips), reply(" for Maya"), kind="raw"), (1,), None)
    assert [*turn.prompt, *turn.reply] == [*tokenizer(f"{tips} for Maya")["input_ids"], 1]
    with pytest.raises(Unusable, match="merges the beginning of a reply with its prompt"):
        given_turns(tokenizer, given(user(f"{tips} for May"), reply("a"), kind="raw"), (1,), None)


# ---- rendered text


@pytest.mark.parametrize("template", [CHATML, AGENT, INSTRUCT])
def test_rendered_chats_give_what_chats_give(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer = with_template(tiny_tokenizer, template)
    text = tokenizer.apply_chat_template(list(CHAT), tokenize=False)
    turns = given_turns(tokenizer, given(*CHAT), END, None)
    assert given_turns(tokenizer, text_of(text), END, None) == turns
    assert given_turns(tokenizer, text_of(text, last_only=True), END, None) == turns[1:]
    assert check_prompt(tokenizer, text_of(text)) == list(turns[0].prompt)


def test_rendered_text_without_its_start_token(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """B017: a server would send one."""
    tokenizer = with_template(tiny_tokenizer, "{{ '<|endoftext|>' }}" + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    text = tokenizer.apply_chat_template(list(CHAT), tokenize=False)
    assert check_prompt(tokenizer, text_of(text))[0] == 0
    bare = text.removeprefix("<|endoftext|>")
    for row in (text_of(bare), text_of(bare, given=False)):
        with pytest.raises(Unusable, match=r"no start token '<\|endoftext\|>', with which"):
            check_prompt(tokenizer, row)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|im_start|>assistant\nHi", r"none of '<\|im_end\|>'"),
        ("<|im_start|>assistant\nHi<|im_start|>assistant\nHo<|im_end|>", "reply 1 of the rendered"),
        ("<|im_start|>assistant\n<|im_end|>", "reply 1 of the rendered text is empty"),
        ("<|im_start|>assistant\n", "none of"),
    ],
)
def test_rendered_replies_that_do_not_end(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, reason: str
) -> None:
    with pytest.raises(Unusable, match=reason):
        given_turns(tiny_tokenizer, text_of(text), END, None)


def test_rendered_text_of_a_template_that_closes_nothing(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """B012: its last reply has no end yet and is kept as an unfinished one."""
    tokenizer = with_template(tiny_tokenizer, OPEN_ENDED, "<|user|>", "<|assistant|>")
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    text = tokenizer.apply_chat_template(list(CHAT), tokenize=False)
    turns = given_turns(tokenizer, text_of(text), (0, end), None)
    assert supervised(tokenizer, turns) == ["Hello.\n<|user|>", "Five tips\n"]
    assert [turn.finish for turn in turns] == ["stop", "length"]
    unfinished = text.replace("Hello.", "Hello.<|assistant|>\nWell.")
    with pytest.raises(Unusable, match="reply 1 of the rendered text has none of"):
        given_turns(tokenizer, text_of(unfinished), (0, end), None)


# ---- batches of them


def test_b013_padding_is_told_by_position(
    tiny_tokenizer: PreTrainedTokenizerFast, tiny_target: Target
) -> None:
    """Pad and end are one token: real ends are supervised, attended to, and end no prompt."""
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id == 2
    chats = [given(user("x"), reply("y")), given(user("x" * 9), reply("y" * 20))]
    turns = [t for chat in chats for t in given_turns(tiny_tokenizer, chat, END, None)]
    assert all(2 in turn.prompt and turn.reply[-1] == 2 for turn in turns)
    # A real end in the middle, as a target may say it that was told to go on.
    long = turns[1]
    turns[1] = Turn(0, long.prompt, (*long.reply[:5], 2, *long.reply[5:]), "stop")
    records = [as_record(turn) for turn in turns]
    batch = collate(records, ["chat"])
    assert batch.lengths.tolist() == [len(t.prompt) + len(t.reply) for t in turns]
    assert batch.prompt_lens.tolist() == [len(t.prompt) for t in turns]
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(), None)
    (step,) = drafter.unroll(batch, 1)
    replies = torch.cat([record.reply for record in records])  # [R]
    # Every reply token but each first is predicted, each real end among them.
    firsts = {0, len(turns[0].reply)}
    assert step.token.tolist() == [n for n in range(len(replies)) if n not in firsts]
    assert (replies[step.token] == 2).sum() == 3
    # Attention sees what it sees without padding.
    (alone,) = drafter.unroll(collate(records[:1], ["chat"]), 1)
    torch.testing.assert_close(step.hidden[: len(alone.hidden)], alone.hidden)


def as_record(turn: Turn) -> Record:
    n = len(turn.reply)
    ids = torch.tensor([*turn.prompt, *turn.reply])
    states = States(torch.zeros(n, 32), torch.zeros(n), torch.zeros(len(ids) - 1, 0))
    return Record("p", "chat", "train", Law(0.0), 0, "stop", ids, len(turn.prompt), states)
