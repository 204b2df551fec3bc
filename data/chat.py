"""From messages to the ids the target is served with, and what those ids depend on."""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..configs.errors import UserError

LOG = logging.getLogger(__name__)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], raw: bool = False
) -> list[int]:
    """Ids of a prompt as a server makes them: the chat template with its generation prompt.

    The template alone decides on the start token; none is added to it.

    Args:
        raw: tokenise the text of the one message as it is, with the tokenizer's own start token.
    Raises:
        UserError: the tokenizer has no chat template, or its template refuses the messages.
    """
    if raw:
        return _raw_ids(tokenizer, messages)
    template = _template(tokenizer)
    if template is None:
        raise UserError(
            f"the tokenizer of {tokenizer_name(tokenizer)} has no chat template: take an "
            "instruction-tuned target, or set raw: true on each domain of a completion model"
        )
    for field in sorted({field for message in messages for field in message}):
        if field not in template:
            _warn_ignored(tokenizer_name(tokenizer), field)
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UserError(
            f"the chat template of {tokenizer_name(tokenizer)} refuses messages with the roles "
            f"{roles}: {error}"
        ) from None
    return list(cast(list[int], ids))


def _raw_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    if len(messages) != 1:
        raise UserError(f"a raw prompt is one text, not {len(messages)} messages")
    ids = [int(token) for token in tokenizer(messages[0]["content"])["input_ids"]]
    # A text that spells the start token would begin with it twice.
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template that `apply_chat_template` takes by default."""
    if not tokenizer.chat_template:
        return None
    return str(tokenizer.get_chat_template())


@functools.cache
def _warn_ignored(name: str, field: str) -> None:
    """Say it once for each tokenizer, not for each prompt."""
    LOG.warning("the chat template of %s does not print '%s': it is ignored", name, field)


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Where it was loaded from, or what it is."""
    return str(tokenizer.name_or_path or type(tokenizer).__name__)


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """16 hex digits over the chat template, or None where there is none."""
    template = _template(tokenizer)
    return None if template is None else _hash(template)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over all tokens, their ids, and how the added ones are matched."""
    added = [
        (token_id, t.content, t.special, t.normalized, t.lstrip, t.rstrip, t.single_word)
        for token_id, t in sorted(tokenizer.added_tokens_decoder.items())
    ]
    return _hash(json.dumps([sorted(tokenizer.get_vocab().items()), added]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
