"""Prompt ids are those of a server, and their hashes change when they do."""

import copy
import logging
from typing import Any

import pytest
from templates import OPEN_ENDED, with_template
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.chat import (
    RefusedError,
    _warn_ignored,
    render_prompt,
    reply_header,
    template_hash,
    tokenizer_hash,
)
from draftsmith.data.layouts import Unusable

USER = ({"role": "user", "content": "Give me five tips."},)
CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Maya has 24 stickers."},
    {"role": "assistant", "content": "So?"},
    {"role": "user", "content": "How many are left?"},
)


@pytest.fixture
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy that a test may change."""
    return copy.deepcopy(tiny_tokenizer)


@pytest.mark.parametrize("messages", [USER, CHAT])
def test_ids_are_the_template_with_its_generation_prompt(
    tokenizer: PreTrainedTokenizerFast, messages: tuple[dict[str, str], ...]
) -> None:
    """B041: in every stage, with and without a system prompt of its own."""
    ids = render_prompt(tokenizer, messages)
    assert type(ids) is list and all(type(token) is int for token in ids)
    expected = (
        "" if messages is CHAT else "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    )
    for message in messages:
        expected += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    assert tokenizer.decode(ids) == expected + "<|im_start|>assistant\n"
    # Each turn keeps its own start token.
    assert ids.count(tokenizer.bos_token_id) == expected.count("<|im_start|>") + 1


def with_start_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that prepends a start token, with a template that prints it too."""
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert tokenizer("a")["input_ids"][0] == 0
    return tokenizer


def test_one_start_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """B017."""
    tokenizer = with_start_token(tokenizer)
    ids = render_prompt(tokenizer, USER)
    assert ids[0] == 0 and ids.count(0) == 1
    raw = render_prompt(tokenizer, ({"role": "user", "content": "<|endoftext|>tips"},), "raw")
    assert raw.count(0) == 1 and tokenizer.decode(raw) == "<|endoftext|>tips"


def test_raw_text_must_be_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    """B041."""
    raw = render_prompt(tokenizer, USER, "raw")
    assert raw == tokenizer("Give me five tips.")["input_ids"]
    assert render_prompt(tokenizer, USER) != raw
    for kind in ("raw", "rendered"):
        with pytest.raises(UserError, match=f"a {kind} prompt is one text, not 4 messages"):
            render_prompt(tokenizer, CHAT, kind)


@pytest.mark.parametrize("messages", [USER, CHAT])
def test_prompts_are_those_of_apply_chat_template(
    tokenizer: PreTrainedTokenizerFast, messages: tuple[dict[str, str], ...]
) -> None:
    """B041, B017: what a server does with chats, also where the tokenizer adds a start token."""
    for made in (tokenizer, with_start_token(copy.deepcopy(tokenizer))):
        served = made.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        assert render_prompt(made, messages) == served


def test_options_and_tools_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """And those of `apply_chat_template` itself are refused, as they would change the ids."""
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['function']['name'] }};{% endfor %}"
        "{% if not thinking %}No thoughts. {% endif %}{{ messages[-1]['content'] }}"
    )
    tool = {"type": "function", "function": {"name": "get_weather"}}
    text = tokenizer.decode(render_prompt(tokenizer, USER, tools=[tool]))
    assert text == "get_weather;No thoughts. Give me five tips."
    text = tokenizer.decode(render_prompt(tokenizer, USER, options={"thinking": True}))
    assert text == "Give me five tips."
    for option in ("tokenize", "chat_template", "add_generation_prompt", "max_length"):
        with pytest.raises(UserError, match=f"template_options holds '{option}'"):
            render_prompt(tokenizer, USER, options={option: True})


def test_a_reply_that_nobody_has_made_is_not_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    """B001: the word for null would become text."""
    tokenizer.chat_template = "{{ messages }}"
    messages = (*USER, {"role": "assistant", "content": None}, *USER)
    with pytest.raises(ValueError, match="message 2 of 3 has no content yet"):
        render_prompt(tokenizer, messages)


def test_tools_take_the_template_for_them(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a tokenizer with several, and what they are counts for its identity."""
    own = tokenizer.chat_template
    before = template_hash(tokenizer)
    tokenizer.chat_template = {"default": own, "rag": "x"}
    assert template_hash(tokenizer) == before
    tokenizer.chat_template = {"default": own, "tool_use": "{{ tools[0]['name'] }}!"}
    assert tokenizer.decode(render_prompt(tokenizer, USER, tools=[{"name": "look"}])) == "look!"
    assert "five tips" in tokenizer.decode(render_prompt(tokenizer, USER))
    changed = template_hash(tokenizer)
    assert changed != before
    tokenizer.chat_template["tool_use"] = "y"
    assert template_hash(tokenizer) not in (before, changed)
    _warn_ignored.cache_clear()
    tokenizer.chat_template["tool_use"] = "{{ messages[0].role, messages[0].content, tools }}"
    with caplog.at_level(logging.WARNING):
        render_prompt(tokenizer, USER, tools=[{"name": "look"}])
    assert not caplog.records
    tokenizer.chat_template = {"rag": "x"}
    with pytest.raises(UserError, match="multiple chat templates with no default"):
        render_prompt(tokenizer, USER)


# ---- rendered text

RENDERED = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
)


def rendered(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    message = {"role": "user", "content": text}
    return str(tokenizer.decode(render_prompt(tokenizer, [message], "rendered")))


@pytest.mark.parametrize("reply", ["", "fine", "fine<|im_end|>", "fine<|im_end|>\n"])
def test_rendered_text_ends_where_its_last_reply_begins(
    tokenizer: PreTrainedTokenizerFast, reply: str
) -> None:
    """With its own start tokens and no other."""
    assert rendered(tokenizer, RENDERED + reply) == RENDERED
    assert rendered(with_start_token(tokenizer), RENDERED + reply) == RENDERED


def test_rendered_text_that_asks_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    """Cut at an earlier reply, it would ask what has been answered."""
    with pytest.raises(Unusable, match="a turn after the last assistant header"):
        rendered(tokenizer, RENDERED + "fine<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n")
    open_ended = with_template(tokenizer, OPEN_ENDED, "<|user|>", "<|assistant|>")
    text = "<|user|>\nhi<|assistant|>\nHello."
    assert rendered(open_ended, text) == "<|user|>\nhi<|assistant|>\n"
    with pytest.raises(Unusable, match="a turn after the last assistant header"):
        rendered(open_ended, text + "\n<|user|>\nThanks")
    with pytest.raises(Unusable, match="no assistant header"):
        rendered(tokenizer, "<|im_start|>user\nhi<|im_end|>\n")


def test_the_header_is_the_template_s_own(tokenizer: PreTrainedTokenizerFast) -> None:
    """Its generation prompt, or what follows a question where there is none."""
    assert reply_header(tokenizer) == "<|im_start|>assistant\n"
    tokenizer.chat_template = "{% for m in messages %}[Q] {{ m['content'] }} [/Q]{% endfor %}"
    assert reply_header(tokenizer) == " [/Q]"
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match="prints nothing between a question and its reply"):
        reply_header(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        rendered(tokenizer, RENDERED)


def test_no_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    tokenizer.name_or_path = "some/base-model"
    with pytest.raises(UserError, match=r"some/base-model has no chat template.*kind: raw"):
        render_prompt(tokenizer, USER)
    assert template_hash(tokenizer) is None
    assert render_prompt(tokenizer, USER, "raw")


def test_a_template_that_refuses_a_role(tokenizer: PreTrainedTokenizerFast) -> None:
    """B002: in words, not as an error of the template's engine."""
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.name_or_path = "some/model"
    assert render_prompt(tokenizer, USER)
    with pytest.raises(RefusedError) as caught:
        render_prompt(tokenizer, CHAT)
    assert str(caught.value) == (
        "the chat template of some/model refuses messages with the roles "
        "system, user, assistant, user: no system turn"
    )


def test_fields_that_are_not_printed_are_said_once(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """B005, B016: tool calls and reasoning that the template drops."""
    _warn_ignored.cache_clear()
    messages: tuple[dict[str, Any], ...] = (
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "hm"},
        *USER,
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            render_prompt(tokenizer, messages)
    assert [r.getMessage().partition("print ")[2] for r in caplog.records] == [
        "'reasoning_content': it is ignored",
        "'tool_calls': it is ignored",
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            render_prompt(tokenizer, USER, tools=[{"name": "f"}], options={"enable_thinking": True})
    assert [r.getMessage().partition("print ")[2] for r in caplog.records] == [
        "'enable_thinking': it is ignored",
        "'tools': it is ignored",
    ]


def test_reasoning_under_another_name_is_printed(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """B016: transformers hands it on as thinking too."""
    _warn_ignored.cache_clear()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.thinking }}{{ m['content'] }}{% endfor %}"
    )
    message = {"role": "assistant", "content": "24", "reasoning_content": "four sixes"}
    with caplog.at_level(logging.WARNING):
        assert tokenizer.decode(render_prompt(tokenizer, [message])) == "four sixes24"
    assert not [r for r in caplog.records if "reasoning" in r.getMessage()]


def test_template_hash(tokenizer: PreTrainedTokenizerFast) -> None:
    """B023."""
    before = template_hash(tokenizer)
    assert before == template_hash(copy.deepcopy(tokenizer))
    tokenizer.chat_template = tokenizer.chat_template.replace("You are a helpful assistant", "")
    assert template_hash(tokenizer) != before


def test_template_hash_covers_its_options(tokenizer: PreTrainedTokenizerFast) -> None:
    """B023: a thinking switch alone makes another template; no options are none."""
    plain = template_hash(tokenizer)
    assert template_hash(tokenizer, {}) == plain
    switched = {template_hash(tokenizer, {"enable_thinking": value}) for value in (True, False)}
    assert len({*switched, plain}) == 3
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert template_hash(tokenizer, one) == template_hash(tokenizer, other)


def test_tokenizer_hash(
    tokenizer: PreTrainedTokenizerFast, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """B023: vocabulary and added tokens count, the template has its own hash."""
    before = tokenizer_hash(tiny_tokenizer)
    tokenizer.chat_template = "x"
    tokenizer(["a", "bcd"], padding=True)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<|extra|>"])
    assert tokenizer_hash(tokenizer) != before
