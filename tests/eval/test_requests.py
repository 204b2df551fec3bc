"""What a request may ask for: stop strings, laws of its own, streaming, the end of a context."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]
LIMIT = 24


@pytest.mark.parametrize("kind", ["causal", "self"])
def test_a_stop_string_ends_with_the_token_that_completes_it(
    kind: str, tiny_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests
) -> None:
    """At every place of the text, inside of a token or over several."""
    (request,) = make_requests(tiny_target, [7])
    decode_text = tiny_target.tokenizer.decode
    plain = decode(tiny_target, [request], DecodeSettings(LIMIT, 0))[0]
    text = decode_text(plain.ids)
    drafter = make_drafter(kind, tiny_target)
    lengths = set()
    for start in range(0, len(text) - 3, 3):
        word = text[start : start + 3]
        if "\\ufffd" in word:  # half of a character, which later tokens change
            continue
        asked = replace(request, stop=("never said", word))
        (ours,) = decode(tiny_target, [asked], DecodeSettings(LIMIT, 4), drafter)
        (theirs,) = decode(tiny_target, [asked], DecodeSettings(LIMIT, 0))
        assert ours.ids == theirs.ids == plain.ids[: len(ours.ids)]
        assert ours.finish == "stop"
        assert word in decode_text(ours.ids) and word not in decode_text(ours.ids[:-1])
        lengths.add(len(ours.ids))
    assert len(lengths) > 5
    asked = replace(request, stop=("never said",))
    (whole,) = decode(tiny_target, [asked], DecodeSettings(LIMIT, 4), drafter)
    assert (whole.ids, whole.finish) == (plain.ids, plain.finish)


def test_the_prompt_does_not_stop_the_reply(
    tiny_target: Target, make_requests: MakeRequests
) -> None:
    (request,) = make_requests(tiny_target, [7])
    plain = decode(tiny_target, [request], DecodeSettings(4, 0))[0]
    words = tiny_target.tokenizer.decode(request.ids)
    assert words.strip() and words not in tiny_target.tokenizer.decode(plain.ids)
    asked = replace(request, stop=(words,))
    assert decode(tiny_target, [asked], DecodeSettings(4, 0))[0] == plain


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("kind", ["eagle3 reduced", "causal"])
def test_rows_of_different_laws_behave_as_alone(
    kind: str,
    verifier: str,
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
) -> None:
    laws = [Law(0.0), Law(1.0), Law(1e-6), Law(0.01), Law(0.0, top_p=0.9), Law(0.8, top_k=1)]
    requests = [
        replace(request, law=law)
        for request, law in zip(make_requests(small_target, [4, 9, 1, 6, 5, 3]), laws, strict=True)
    ]
    drafter, settings = make_drafter(kind, small_target), DecodeSettings(16, 3, verifier)
    together = decode(small_target, requests, settings, drafter)
    alone = [decode(small_target, [r], settings, drafter)[0] for r in requests]
    assert together == alone
    for request, output in zip(requests, together, strict=True):
        assert all(0 <= a <= d for d, a in output.rounds)
        if request.law.temperature < 1e-4 or request.law.top_k == 1:
            greedy = replace(request, law=Law(0.0))
            assert output.ids == decode(small_target, [greedy], DecodeSettings(16, 0))[0].ids


def test_tokens_are_told_as_they_become_final(
    small_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests
) -> None:
    requests = make_requests(small_target, [4, 9, 1], Law(1.0))
    told: list[tuple[int, list[int]]] = []
    outputs = decode(
        small_target,
        requests,
        DecodeSettings(13, 3),
        make_drafter("causal", small_target),
        on_tokens=lambda place, ids: told.append((place, ids)),
    )
    for place, output in enumerate(outputs):
        parts = [ids for p, ids in told if p == place]
        assert [i for ids in parts for i in ids] == output.ids
        assert [len(ids) for ids in parts] == [1, *(min(a + 1, 13) for _, a in output.rounds)]
    assert {place for place, _ in told[3:6]} == {0, 1, 2}, "rows take turns"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_beyond_the_drafts_context_nothing_is_drafted(
    family: str,
    load_tiny: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
) -> None:
    target = load_tiny(family, max_position_embeddings=40)
    target.eos_ids = ()
    short = load_tiny(family, max_position_embeddings=24)
    drafter = make_drafter("causal", short)
    assert drafter.max_positions == 24
    requests = make_requests(target, [3, 20, 30, 36])
    outputs = decode(target, requests, DecodeSettings(25, 3), drafter)
    plain = decode(target, requests, DecodeSettings(25, 0))
    for request, ours, theirs in zip(requests, outputs, plain, strict=True):
        assert ours.ids == theirs.ids
        assert len(ours.ids) == min(25, 40 - len(request.ids)) and ours.finish == "length"
        at = len(request.ids) + 1
        for drafted, accepted in ours.rounds:
            assert drafted <= max(0, 24 - at)
            at += accepted + 1
    assert outputs[0].rounds[0][0] == 3 and outputs[3].rounds[0][0] == 0
    assert any(drafted == 0 for drafted, _ in outputs[0].rounds)
