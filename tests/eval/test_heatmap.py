"""Every token of a reply is told where it came from, and the pieces are the reply."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from scripted import ask, numbers
from templates import metaspace_tokenizer
from transformers import PreTrainedTokenizerFast

from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.heatmap import heatmap

TEXTS = ["naïve café — 数学 🙂🙃", "x\ufffd y", "  two  spaces .\n\tand 'quotes' , ok", ""]


@pytest.fixture(scope="module")
def spaced() -> PreTrainedTokenizerFast:
    return metaspace_tokenizer(TEXTS)


def kinds(tokenizer: PreTrainedTokenizerFast, count: int, rounds: list[tuple[int, int]]) -> str:
    """Kind and place of each token, such as "f0 a1 a2 b3"."""
    pieces = heatmap(tokenizer.encode("a" * 40)[:1] * count, rounds, tokenizer)
    return " ".join(f"{kind[0]}{place}" for _, kind, place in pieces)


def test_kinds_of_hand_counted_rounds(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rounds = [(3, 2), (3, 3), (3, 0), (0, 0)]
    expected = "f0 a1 a2 c3 a1 a2 a3 b4 c1 u1"
    assert kinds(tiny_tokenizer, 10, rounds) == expected


@pytest.mark.parametrize(
    ("count", "last", "expected"),
    [
        (4, (3, 3), "f0 a1 a2 a3"),  # the end token was drafted
        (3, (3, 2), "f0 a1 a2"),  # cut by the limit within the draft
        (4, (3, 2), "f0 a1 a2 c3"),
        (5, (3, 3), "f0 a1 a2 a3 b4"),
        (1, None, "f0"),
        (0, None, ""),
    ],
)
def test_a_reply_may_end_within_its_last_round(
    count: int,
    last: tuple[int, int] | None,
    expected: str,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert kinds(tiny_tokenizer, count, [last] if last else []) == expected


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", ["byte-level", "metaspace"])
def test_pieces_are_the_decoded_reply(
    text: str,
    which: str,
    tiny_tokenizer: PreTrainedTokenizerFast,
    spaced: PreTrainedTokenizerFast,
) -> None:
    tokenizer = tiny_tokenizer if which == "byte-level" else spaced
    ids = tokenizer.encode(text)
    pieces = heatmap(ids, [(0, 0)] * (len(ids) - 1), tokenizer)
    assert "".join(piece[0] for piece in pieces) == tokenizer.decode(
        ids, clean_up_tokenization_spaces=False
    )
    assert len(pieces) == len(ids)


def test_a_character_of_several_tokens_stands_at_its_last(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tiny_tokenizer.encode("a🙂b")
    assert len(ids) == 6, "four bytes of the smiley, each a token"
    pieces = heatmap(ids, [(3, 3), (0, 0)], tiny_tokenizer)
    assert [text for text, *_ in pieces] == ["a", "", "", "", "🙂", "b"]


def test_any_ids_make_their_own_text(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Broken characters, as a sampled reply may hold them."""
    chance = random.Random(3)
    for _ in range(40):
        ids = [chance.randrange(len(tiny_tokenizer)) for _ in range(chance.randrange(1, 30))]
        pieces = heatmap(ids, [(0, 0)] * (len(ids) - 1), tiny_tokenizer)
        assert "".join(piece[0] for piece in pieces) == tiny_tokenizer.decode(
            ids, clean_up_tokenization_spaces=False
        )


def test_it_fits_what_the_decoder_tells(
    small_target: Target, make_drafter: Callable[[str, Target], Drafter]
) -> None:
    drafter, limit = make_drafter("eagle3", small_target), 17
    requests = [
        ask([1, 2, 3], Law(temperature), seed) for temperature in (0, 1) for seed in range(8)
    ]
    seen: Counter[str] = Counter()
    for output in decode(small_target, requests, DecodeSettings(limit, 3), drafter):
        pieces = heatmap(output.ids, output.rounds, numbers(small_target.vocab_size))
        kinds = Counter(kind for _, kind, _ in pieces)
        seen += kinds
        assert kinds["accepted"] == sum(accepted for _, accepted in output.rounds)
        assert sum(place == 1 for *_, place in pieces) == len(output.rounds)
    assert {"first", "accepted", "corrected"} <= seen.keys()


@pytest.mark.parametrize("rounds", [[(3, 3)], [(3, 2), (3, 2), (0, 0)], []])
def test_rounds_of_another_reply_are_refused(
    rounds: list[tuple[int, int]], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match="not of one decoding"):
        heatmap(tiny_tokenizer.encode("a") * 3, rounds, tiny_tokenizer)
