"""Tokenizers are compared by what their ids mean, not by size (B104, B105)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.vocabulary import same_tokens

SIZE = 400


def permuted(tokenizer: PreTrainedTokenizerFast, ids: dict[int, int]) -> PreTrainedTokenizerFast:
    """A copy in which the token of id i has the id `ids[i]`: as large, other words."""
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    state["model"]["vocab"] = {token: ids.get(i, i) for token, i in vocab.items()}
    for token in state["added_tokens"]:
        token["id"] = ids.get(token["id"], token["id"])
    state["added_tokens"].sort(key=lambda token: token["id"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def extended(
    tokenizer: PreTrainedTokenizerFast, *tokens: str, special: bool = True
) -> PreTrainedTokenizerFast:
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens([AddedToken(token, special=special) for token in tokens])
    assert len(copied) == len(tokenizer) + len(tokens)
    return copied


def test_the_same_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    for other in (copy.deepcopy(tiny_tokenizer), AutoTokenizer.from_pretrained(tmp_path)):
        found = same_tokens(tiny_tokenizer, other)
        assert (found.shared, found.note) == (SIZE, "")


@pytest.mark.parametrize(
    "ids",
    [
        {a: 60 + (a - 60 + 1) % 200 for a in range(60, 260)},  # 200 ordinary tokens, shifted
        {398: 399, 399: 398},  # the last two
        {1: 2, 2: 1},  # special tokens only: turns open where they close
    ],
)
def test_permuted_tokens_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, ids: dict[int, int]
) -> None:
    other = permuted(tiny_tokenizer, ids)
    assert len(other) == len(tiny_tokenizer)
    first = min(ids)
    meant, means = (side.convert_ids_to_tokens(first) for side in (tiny_tokenizer, other))
    assert meant != means
    with pytest.raises(UserError) as caught:
        same_tokens(tiny_tokenizer, other)
    assert f"id {first} is {meant!r} to the target and {means!r} to the draft" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_missing_in_between_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    moved = permuted(tiny_tokenizer, {399: 400})
    with pytest.raises(UserError, match=r"id 399 is '.+' to the target and no token to the draft"):
        same_tokens(tiny_tokenizer, moved)
    with pytest.raises(UserError, match=r"id 399 is no token to the target and '.+' to the draft"):
        same_tokens(moved, tiny_tokenizer)


@pytest.mark.parametrize("special", [True, False])
def test_more_tokens_at_the_end_are_accepted_and_said(
    tiny_tokenizer: PreTrainedTokenizerFast, special: bool
) -> None:
    more = extended(tiny_tokenizer, "<|tool|>", special=special)
    found = same_tokens(tiny_tokenizer, more)
    assert found.shared == SIZE
    assert found.note.startswith("only the draft knows the last 1 token ('<|tool|>')")
    found = same_tokens(more, tiny_tokenizer)
    assert found.shared == SIZE
    assert found.note.startswith("only the target knows the last 1 token ('<|tool|>')")
    assert same_tokens(more, more).shared == SIZE + 1


def test_a_note_is_short(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    more = extended(tiny_tokenizer, *(f"<|{i}|>" for i in range(40)))
    note = same_tokens(tiny_tokenizer, more).note
    assert "the last 40 tokens ('<|0|>', '<|1|>', '<|2|>', ...)" in note


def test_other_tokens_at_the_end_are_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Both have 401 tokens, and only the last, special one differs."""
    one, other = (extended(tiny_tokenizer, token) for token in ("<|tool|>", "<|think|>"))
    with pytest.raises(UserError, match=r"id 400 is '<\|tool\|>' to the target and '<\|think\|>'"):
        same_tokens(one, other)
