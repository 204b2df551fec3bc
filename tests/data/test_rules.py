"""Rules of a request: as `generate` has them, by hand, and what is refused."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.rules import Processor, Rules
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs

INF = math.inf
EOS = 2
VOCAB = 400
PROMPT = [10, 45, 45, 200, 10, 45]
LIMIT = 24


def plain(target: Target, rules: Rules, eos: Sequence[int] = (EOS,)) -> list[int]:
    """The greedy reply by one whole forward a token."""
    processor = Processor(rules, len(PROMPT), eos, target.tokenizer, target.vocab_size)
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + LIMIT and not (len(ids) > len(PROMPT) and ids[-1] in eos):
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([ids])).logits[0, -1]  # [V]
        ids.append(int(processor(ids, logits).argmax()))
    return ids[len(PROMPT) :]


def generated(target: Target, eos: Sequence[int] = (EOS,), **options: Any) -> list[int]:
    """The greedy reply of transformers."""
    ids = torch.tensor([PROMPT])
    out = target.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LIMIT,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        **options,
    )
    reply: list[int] = out[0, len(PROMPT) :].tolist()
    return reply


# ---- transformers' rules


def test_no_rules_change_nothing(tiny_target: Target) -> None:
    assert not Rules().any and Rules(presence_penalty=0.1).any
    assert not Rules(logit_bias=(((5,), 0.0),)).any, "a bias of 0 is none"
    assert plain(tiny_target, Rules()) == generated(tiny_target)
    logits = torch.randn(VOCAB)
    out = Processor(Rules(), 0, (EOS,), tiny_target.tokenizer, VOCAB)([], logits)
    assert torch.equal(out, logits) and out.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram"])
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_repetition_rules_equal_generate(tiny_target: Target, name: str, strength: int) -> None:
    if name == "repetition_penalty":
        penalty = (0.5, 1.3, 3.0)[strength - 1]
        ours = plain(tiny_target, Rules(repetition_penalty=penalty))
        theirs = generated(tiny_target, repetition_penalty=penalty)
    else:
        ours = plain(tiny_target, Rules(no_repeat_ngram=strength))
        theirs = generated(tiny_target, no_repeat_ngram_size=strength)
    assert ours == theirs


def test_the_rules_above_bite(tiny_target: Target) -> None:
    free = plain(tiny_target, Rules())
    assert plain(tiny_target, Rules(repetition_penalty=3.0)) != free
    assert plain(tiny_target, Rules(no_repeat_ngram=1)) != free


def test_banned_and_biased_sequences_equal_generate(tiny_target: Target) -> None:
    free = generated(tiny_target)
    words = [[free[0]], free[2:4], free[5:8]]
    ours = plain(tiny_target, Rules(bad_words=tuple(tuple(word) for word in words)))
    assert ours == generated(tiny_target, bad_words_ids=words) != free
    bias: list[list[Any]] = [[[free[0]], -INF], [[free[2], free[3]], -2.5], [[17], 3.0]]
    rules = Rules(logit_bias=tuple((tuple(ids), value) for ids, value in bias))
    assert plain(tiny_target, rules) == generated(tiny_target, sequence_bias=bias) != free


def test_min_new_tokens_equals_generate(tiny_target: Target) -> None:
    free = generated(tiny_target, eos=())
    eos = (free[1], free[6])
    assert len(generated(tiny_target, eos=eos)) == 2
    for least in (1, 2, 3, 12, LIMIT):
        ours = plain(tiny_target, Rules(min_new_tokens=least), eos)
        assert ours == generated(tiny_target, eos=eos, min_new_tokens=least)
        assert len(ours) >= least and not set(ours[: least - 1]) & set(eos)


def test_all_rules_at_once_equal_generate(tiny_target: Target) -> None:
    free = generated(tiny_target, eos=())
    rules = Rules(
        repetition_penalty=1.4,
        no_repeat_ngram=2,
        bad_words=((free[1], free[2]), (free[0],)),
        logit_bias=(((free[4],), 1.5), ((33, 34), -1.0)),
        min_new_tokens=10,
    )
    theirs = generated(
        tiny_target,
        repetition_penalty=1.4,
        no_repeat_ngram_size=2,
        bad_words_ids=[[free[1], free[2]], [free[0]]],
        sequence_bias=[[[free[4]], 1.5], [[33, 34], -1.0]],
        min_new_tokens=10,
    )
    assert plain(tiny_target, rules) == theirs != free


def test_each_rule_by_hand(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    def after(history: list[int], logits: list[float], **rules: Any) -> list[float]:
        processor = Processor(Rules(**rules), 2, (4,), tiny_tokenizer, 5)
        values: list[float] = processor(history, torch.tensor(logits).double()).tolist()
        return values

    flat = [1.0, -1.0, 2.0, 0.0, 3.0]
    assert after([0, 1, 3], flat, repetition_penalty=2.0) == [0.5, -2.0, 2.0, 0.0, 3.0]
    # The reply is 3 0 3: prompt tokens are not counted.
    frequency = after([0, 1, 3, 0, 3], flat, frequency_penalty=0.5)
    assert frequency == [0.5, -1.0, 2.0, -1.0, 3.0]
    presence = after([0, 1, 3, 0, 3], flat, presence_penalty=0.25)
    assert presence == [0.75, -1.0, 2.0, -0.25, 3.0]
    both = after([0, 1, 3, 0, 3], flat, frequency_penalty=-0.5, presence_penalty=0.25)
    assert both == [1.25, -1.0, 2.0, 0.75, 3.0]
    assert after([0, 1, 0], flat, no_repeat_ngram=2) == [1.0, -INF, 2.0, 0.0, 3.0]
    # Penalties come after the bias, as in generate and vLLM: (1 + 1) / 2, then -1.
    ordered = after(
        [0, 1, 0],
        flat,
        logit_bias=(((0,), 1.0),),
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    assert ordered[0] == 0.0


def test_a_sequence_is_banned_at_its_last_token_only(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    processor = Processor(Rules(bad_words=((7, 8, 9),)), 1, (EOS,), tiny_tokenizer, VOCAB)
    logits = torch.zeros(VOCAB)

    def banned(history: list[int]) -> list[int]:
        return (processor(history, logits) == -INF).nonzero().flatten().tolist()

    assert banned([5, 7, 8]) == [9]
    assert banned([7, 8]) == [9], "the prompt may begin it"
    for history in ([5, 7], [5, 8], [5, 8, 7], [7, 8, 9], [8]):
        assert banned(history) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_the_input_is_not_touched(
    tiny_tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype
) -> None:
    rules = Rules(1.2, 0.5, 0.5, 2, ((7,),), (((8,), 1.0),), 3)
    processor = Processor(rules, 2, (EOS,), tiny_tokenizer, VOCAB)
    logits = torch.randn(VOCAB, dtype=dtype)
    before = logits.clone()
    out = processor([4, 5, 6, 4], logits)
    assert out.dtype == dtype and torch.equal(logits, before) and not torch.equal(out, logits)


# ---- nothing left


def test_where_nothing_is_allowed_the_reply_is_over(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 1.0])
    rules = Rules(no_repeat_ngram=1, min_new_tokens=9)
    left = Processor(rules, 1, (2, 3), tiny_tokenizer, 4)([0, 1, 2, 3], logits)
    assert left.tolist() == [-INF, -INF, 2.0, 1.0]
    endless = Processor(rules, 1, (), tiny_tokenizer, 4)([0, 1, 2, 3], logits)
    assert torch.equal(endless, logits), "no end token: as it came in"
    draft = torch.tensor([0.5, -1.0, -INF, -INF])  # a draft vocabulary without end tokens
    assert torch.equal(Processor(rules, 1, (2, 3), tiny_tokenizer, 4)([0, 1, 2, 3], draft), draft)
    for law in (Law(0.0), Law(0.7, top_k=2, top_p=0.9)):
        for row in (left, endless):
            assert not log_probs(row, law).isnan().any()


# ---- refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", INF),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -2.1),
        ("no_repeat_ngram", -1),
        ("no_repeat_ngram", 1.5),
        ("min_new_tokens", -1),
        ("min_new_tokens", INF),
        ("bad_words", ((),)),
        ("bad_words", (5,)),
        ("bad_words", ("word",)),
        ("bad_words", ((-1,),)),
        ("bad_words", ((1.0,),)),
        ("logit_bias", ((5, 1.0, 2.0),)),
        ("logit_bias", ((5, 1.0),)),
        ("logit_bias", (((5,), INF),)),
        ("logit_bias", (((5,), math.nan),)),
        ("logit_bias", (((5,), "1"),)),
        ("logit_bias", (((5,), 1.0), ((5,), 2.0))),
        ("json_schema", "{"),
        ("json_schema", "[]"),
    ],
)
def test_bad_rules_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        Rules(**{name: value})


def test_rules_that_ask_the_same_are_equal() -> None:
    lists: Any = {"bad_words": [[1, 2]], "logit_bias": [[[3], 1], [[4], 0]]}
    tuples = Rules(bad_words=((1, 2),), logit_bias=(((3,), 1.0),))
    assert Rules(**lists) == tuples and hash(Rules(**lists)) == hash(tuples)
    with pytest.raises(UserError, match="regex and lark"):
        Rules(regex="a", lark='start: "a"')


def test_ids_that_cannot_be_ruled_on_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    for name, rules in (
        ("bad_words", Rules(bad_words=((1, VOCAB),))),
        ("logit_bias", Rules(logit_bias=(((VOCAB,), 1.0),))),
    ):
        with pytest.raises(UserError, match=f"{name} names token {VOCAB}"):
            Processor(rules, 0, (EOS,), tiny_tokenizer, VOCAB)
    with pytest.raises(UserError, match="min_new_tokens"):
        Processor(Rules(bad_words=((EOS,),)), 0, (EOS,), tiny_tokenizer, VOCAB)
    processor = Processor(Rules(), 2, (EOS,), tiny_tokenizer, VOCAB)
    for history, size in (([1], VOCAB), ([1, 2], VOCAB - 1)):
        with pytest.raises(ValueError, match="need logits"):
            processor(history, torch.zeros(size))
