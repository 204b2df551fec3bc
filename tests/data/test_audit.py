"""What is said of a tokenizer before its data, and how the supervised tokens are shown."""

import pytest
from conftest import CHATML
from templates import (
    AGENT,
    INSTRUCT,
    OPEN_ENDED,
    THINKER,
    given,
    reply,
    user,
    with_template,
)
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.audit import audit, coloured
from draftsmith.data.replies import given_turns

END = (2,)
TOOLS = [f"the chat template has no place for {what} of tools" for what in ("calls", "results")]


def about(findings: list[str], word: str) -> list[str]:
    return [finding for finding in findings if word in finding]


def test_findings_of_a_plain_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """B013, B016, B026: SmolLM2's layout, and not a word of what is in order."""
    assert audit(tiny_tokenizer, END) == [
        "padding and the end of a turn are one token, '<|im_end|>': harmless here, where padding "
        "is told by its position",
        "the tokenizer tells no longest text: the limits of the target and collect.max_length hold",
        "the chat template opens chats that have no system turn with its own: "
        "'<|im_start|>system\\nYou are a helpful assistant'",
        "the chat template has no place for descriptions of tools",
        "the chat template has no place for calls of tools",
        "the chat template has no place for reasoning fields",
    ]


def test_nothing_to_find(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, AGENT)
    tokenizer.pad_token, tokenizer.model_max_length = "<|endoftext|>", 256
    assert audit(tokenizer, END) == []
    assert audit(tokenizer, END, {"enable_thinking": False}) == []


def test_calls_that_are_not_printed_where_tools_are(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The name of a tool in its description is no trace of a call."""
    tokenizer = with_template(tiny_tokenizer, AGENT.replace("m.tool_calls or []", "[]"))
    assert about(audit(tokenizer, END), "no place") == TOOLS[:1]


def test_no_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, "")
    first, *_ = audit(tokenizer, END)
    assert "has no chat template: only domains of kind raw" in first


def test_templates_without_an_end(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """B012: an end that the next header gives is one, where it is an end token."""
    tokenizer = with_template(tiny_tokenizer, OPEN_ENDED, "<|user|>", "<|assistant|>")
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    assert not about(audit(tokenizer, (end,)), "end-of-turn")
    (finding,) = about(audit(tokenizer, END), "end-of-turn")
    assert finding.startswith("given replies cannot be used: no end-of-turn token after a reply")
    assert about(audit(tokenizer, ()), "no end token is known")


def test_thinking_modes(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (finding,) = about(audit(with_template(tiny_tokenizer, THINKER), END), "thinking mode?")
    assert "differently from its own generation prompt" in finding
    empty = CHATML.replace(
        "'\n' + message['content']",
        "'\n' + ('<think>\n\n</think>\n\n' if message['role'] == 'assistant' else '')"
        " + message['content']",
    )
    (finding,) = about(audit(with_template(tiny_tokenizer, empty), END), "thinking mode?")
    assert r"opens a reply's content with '<think>\n\n</think>', which is supervised" in finding


def test_options_and_dates(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    findings = audit(tiny_tokenizer, END, {"enable_thinking": False})
    assert about(findings, "no word of 'enable_thinking' in target.template_options")
    with pytest.raises(UserError, match="template_options holds 'tokenize'"):
        audit(tiny_tokenizer, END, {"tokenize": True})
    dated = with_template(tiny_tokenizer, "{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert about(audit(dated, END), "prints the date")


def test_a_template_that_refuses_roles(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """It has no place for them, and the rest of the audit goes on."""
    refuses = (
        "{% for m in messages %}{% if m['role'] in ('system', 'tool') %}"
        "{{ raise_exception('no such role') }}{% endif %}{% endfor %}" + INSTRUCT
    )
    findings = audit(with_template(tiny_tokenizer, refuses), END)
    assert about(findings, "no place for system turns") and set(TOOLS) <= set(findings)
    assert not about(findings, "own:") and not about(findings, "cannot be used")
    only_questions = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    findings = audit(with_template(tiny_tokenizer, only_questions + CHATML), END)
    assert about(findings, "given replies cannot be used: the chat template of")


def test_b025_supervised_tokens_are_shown(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Every token, special ones marked, and blanks that could hide a fault."""
    chat = given(user("hi\r\n"), reply("a\tb\n🙂[bold]"))
    (turn,) = given_turns(tiny_tokenizer, chat, END, None)
    text = coloured(tiny_tokenizer, turn)
    assert text.plain.endswith(
        "<|im_start|>user␊\nhi␍␊\n<|im_end|>␊\n<|im_start|>assistant␊\na␉b␊\n🙂[bold]<|im_end|>"
    )
    green = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert green == ["a␉b␊\n🙂[bold]", "<|im_end|>"]
    dim = [text.plain[s.start : s.end] for s in text.spans if "dim" in str(s.style)]
    assert "".join(dim + green) == text.plain
    marked = [text.plain[s.start : s.end] for s in text.spans if "reverse" in str(s.style)]
    assert marked.count("<|im_end|>") == 3 and marked.count("<|im_start|>") == 3
    assert set(marked) == {"<|im_end|>", "<|im_start|>"}
