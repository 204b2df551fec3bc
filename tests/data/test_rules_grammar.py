"""Rules as pure functions of the history, and grammars."""

import json
import math
import random
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.rules import Processor, Rules
from draftsmith.data.warp import Law, log_probs, sample

INF = math.inf
EOS = 2
VOCAB = 400
PROMPT = [10, 45, 45, 200, 10, 45]

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["a", "list"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
GRAMMARS = {
    "json_schema": Rules(json_schema=SCHEMA),
    "regex": Rules(regex="(ab|abc|[0-9]{1,3}x?)+"),
    "lark": Rules(lark='start: "(" start? ")"'),
}


def need_llguidance() -> None:
    pytest.importorskip("llguidance", reason="grammars need the extra: draftsmith[grammar]")


# ---- purity


def walk(processor: Processor, prompt: list[int], rng: random.Random, length: int) -> list[int]:
    """A history sampled from the rules with random logits."""
    ids = list(prompt)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for _ in range(length):
        out = processor(ids, torch.randn(VOCAB, generator=generator))
        ids.append(int(sample(log_probs(out[None], Law()), torch.tensor([rng.random()]))))
    return ids


def tree(
    rules: Rules, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[tuple[int, ...]]:
    """Prefixes of branching walks, some past an end token, some with tokens out of the grammar."""

    def fresh() -> Processor:
        return Processor(rules, len(PROMPT), (EOS, 0), tokenizer, VOCAB)

    found: set[tuple[int, ...]] = set()
    trunk = walk(fresh(), PROMPT, rng, 14)
    for _ in range(12):
        cut = rng.randrange(len(PROMPT), len(trunk))
        branch = walk(fresh(), trunk[:cut], rng, 4)
        stray = [*branch, rng.randrange(3, VOCAB), rng.randrange(3, VOCAB)]
        ended = [*branch[: cut + 2], EOS, 9, 9]
        for ids in (branch, stray, ended):
            found |= {tuple(ids[:n]) for n in range(cut, len(ids) + 1)}
    return sorted(found)


PURE = {
    "repetition": Rules(repetition_penalty=1.5),
    "counts": Rules(frequency_penalty=0.7, presence_penalty=0.3),
    "ngram": Rules(no_repeat_ngram=1),
    "words": Rules(bad_words=((7,), (10, 11)), logit_bias=(((45,), 9.0), ((45, 45), -INF))),
    "least": Rules(min_new_tokens=5),
    **GRAMMARS,
    "all": Rules(1.2, 0.5, -0.5, 3, ((7,),), (((45,), 4.0),), 6, regex="[a-z0-9]{2,9}"),
}


@pytest.mark.parametrize("name", PURE)
def test_the_order_of_histories_does_not_matter(
    tiny_tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    rules = PURE[name]
    if rules.grammar:
        need_llguidance()
    rng = random.Random(name)
    histories = tree(rules, tiny_tokenizer, rng)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))

    def fresh(history: tuple[int, ...]) -> Tensor:
        return Processor(rules, len(PROMPT), (EOS, 0), tiny_tokenizer, VOCAB)(history, logits)

    right = {history: fresh(history) for history in histories}
    assert len({tuple(row.tolist()) for row in right.values()}) > 1, "histories tell nothing"
    shared = Processor(rules, len(PROMPT), (EOS, 0), tiny_tokenizer, VOCAB)
    order = 3 * histories
    rng.shuffle(order)
    for history in order:
        out = shared(history, logits)
        assert torch.equal(out, right[history])
        assert torch.isfinite(out).any() and not log_probs(out, Law(0.5)).isnan().any()


# ---- grammars


def reply_text(
    rules: Rules, tokenizer: PreTrainedTokenizerFast, seed: int, limit: int = 200
) -> str:
    """A reply sampled with random logits; it must end by itself within `limit` tokens."""
    processor = Processor(rules, len(PROMPT), (EOS,), tokenizer, VOCAB)
    ids, generator = list(PROMPT), torch.Generator().manual_seed(seed)
    while ids[-1] != EOS and len(ids) < len(PROMPT) + limit:
        log_p = log_probs(processor(ids, torch.randn(VOCAB, generator=generator)), Law())
        u = torch.rand(1, generator=generator, dtype=torch.float64)
        ids.append(int(sample(log_p[None], u)))
    assert ids[-1] == EOS
    return str(tokenizer.decode(ids[len(PROMPT) : -1], clean_up_tokenization_spaces=False))


def test_replies_under_a_schema_validate(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    need_llguidance()
    texts = {reply_text(GRAMMARS["json_schema"], tiny_tokenizer, seed) for seed in range(25)}
    assert len(texts) > 20
    for text in texts:
        value = json.loads(text)
        assert list(value) == ["name", "count", "kind"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 4
        assert type(value["count"]) is int and 0 <= value["count"] <= 99
        assert value["kind"] in ("a", "list")


def test_replies_match_a_regex_and_a_lark_grammar(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    need_llguidance()
    for seed in range(10):
        text = reply_text(GRAMMARS["regex"], tiny_tokenizer, seed)
        assert re.fullmatch("(ab|abc|[0-9]{1,3}x?)+", text)
        text = reply_text(GRAMMARS["lark"], tiny_tokenizer, seed)
        depth = len(text) // 2
        assert depth and text == "(" * depth + ")" * depth


def test_what_a_grammar_allows_token_by_token(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    need_llguidance()
    a, b, c, x = (tiny_tokenizer.vocab[letter] for letter in "abcx")
    logits = torch.randn(VOCAB)

    def allowed(regex: str | None, reply: list[int], **more: Any) -> set[int]:
        rules = Rules(regex=regex, **more)
        # The end tokens also stand in the prompt, as they do in chats.
        processor = Processor(rules, 3, (EOS, 0), tiny_tokenizer, VOCAB)
        out = processor([EOS, 5, 0, *reply], logits)
        kept = (out > -INF).nonzero().flatten()
        assert torch.equal(out[kept], logits[kept])
        return set(kept.tolist())

    ends = {EOS, 0}
    assert allowed("a[bc]", []) == {a}
    assert allowed("a[bc]", [a]) == {b, c}
    assert allowed("a[bc]", [a, b]) == ends, "complete: both end tokens, nothing else"
    assert allowed("ax*", [a]) == {x} | ends, "may end or go on"
    assert allowed("ax*", [a], min_new_tokens=3) == {x}
    assert allowed("a[bc]", [a, b], min_new_tokens=3) == ends, "complete wins over a minimum"
    assert allowed("a[bc]", [a, EOS]) == ends and allowed("a[bc]", [a, b, 0, x, x]) == ends
    turns = 'start: "a" <|endoftext|> "b"'
    assert allowed(None, [a], lark=turns) == {0}
    assert allowed(None, [a, 0], lark=turns) == ends, "an end token ends whatever follows"
    assert allowed("a[bc]", [x]) == ends and allowed("a[bc]", [a, x, x]) == ends


def test_a_grammar_under_a_vocabulary_smaller_or_larger_than_the_tokenizer(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    need_llguidance()
    for size in (300, 431, 512):
        processor = Processor(Rules(regex="[a-z]+"), 0, (EOS,), tiny_tokenizer, size)
        kept = (processor([], torch.zeros(size)) > -INF).nonzero().flatten().tolist()
        assert kept and max(kept) < VOCAB
        assert all(re.fullmatch("[a-z]+", str(tiny_tokenizer.decode([i]))) for i in kept)


def test_bad_grammars_are_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    need_llguidance()
    for rules in (
        Rules(regex="(a"),
        Rules(lark="start: nothing"),
        Rules(json_schema='{"type": "nonsense"}'),
    ):
        with pytest.raises(UserError, match=f"{rules.grammar} cannot be read"):
            Processor(rules, 0, (EOS,), tiny_tokenizer, VOCAB)


def test_without_llguidance_the_extra_is_named(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install draftsmith\[grammar\]"):
        Processor(Rules(regex="a"), 0, (EOS,), tiny_tokenizer, VOCAB)
    Processor(Rules(min_new_tokens=3), 0, (EOS,), tiny_tokenizer, VOCAB)  # the rest needs none
