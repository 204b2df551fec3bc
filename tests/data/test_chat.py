"""Prompt ids are those of a server, and their hashes change when they do."""

import copy
import logging
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.chat import (
    _warn_ignored,
    render_prompt,
    template_hash,
    tokenizer_hash,
)

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
    raw = render_prompt(tokenizer, ({"role": "user", "content": "<|endoftext|>tips"},), raw=True)
    assert raw.count(0) == 1 and tokenizer.decode(raw) == "<|endoftext|>tips"


def test_raw_text_must_be_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    """B041."""
    raw = render_prompt(tokenizer, USER, raw=True)
    assert raw == tokenizer("Give me five tips.")["input_ids"]
    assert render_prompt(tokenizer, USER) != raw
    with pytest.raises(UserError, match="one text, not 4 messages"):
        render_prompt(tokenizer, CHAT, raw=True)


def test_no_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    tokenizer.name_or_path = "some/base-model"
    with pytest.raises(UserError, match=r"some/base-model has no chat template.*raw: true"):
        render_prompt(tokenizer, USER)
    assert template_hash(tokenizer) is None
    assert render_prompt(tokenizer, USER, raw=True)


def test_a_template_that_refuses_a_role(tokenizer: PreTrainedTokenizerFast) -> None:
    """B002: in words, not as an error of the template's engine."""
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.name_or_path = "some/model"
    assert render_prompt(tokenizer, USER)
    with pytest.raises(UserError) as caught:
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


def test_template_hash(tokenizer: PreTrainedTokenizerFast) -> None:
    """B023."""
    before = template_hash(tokenizer)
    assert before == template_hash(copy.deepcopy(tokenizer))
    tokenizer.chat_template = tokenizer.chat_template.replace("You are a helpful assistant", "")
    assert template_hash(tokenizer) != before


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
