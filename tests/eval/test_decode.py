"""Decoding: greedy streams are the target's own, sampled ones keep its law, counts are real."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafting import greedy_reference

from draftsmith.configs.errors import UserError
from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.draft import Clock
from draftsmith.eval.lossless import Tokens, chi_square, target_law
from draftsmith.eval.rows import Output

KINDS = ["eagle3", "eagle3 reduced", "causal", "causal reduced", "self", "jump", "jump reduced"]
LENGTHS = [1, 9, 4, 17]
LONGEST = 16

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]


@pytest.fixture(scope="module")
def references(
    tiny_target: Target, small_target: Target, make_requests: MakeRequests
) -> dict[int, list[list[int]]]:
    """Greedy answers without an end token, by vocabulary size."""
    found = {}
    for target in (tiny_target, small_target):
        requests = make_requests(target, LENGTHS)
        found[target.vocab_size] = [greedy_reference(target, r, LONGEST, []) for r in requests]
    return found


def check_rounds(output: Output, gamma: int, limit: int) -> None:
    """What must hold of any output's rounds."""
    out = 1
    for drafted, accepted in output.rounds:
        assert 0 <= accepted <= drafted == min(gamma, limit - out - 1)
        out += accepted + 1
    if output.finish == "length":
        assert out == len(output.ids) == limit
    else:
        assert out - gamma - 1 < len(output.ids) <= out


# ---- greedy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_greedy_output_is_that_of_generate(
    kind: str,
    gamma: int,
    tiny_target: Target,
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    references: dict[int, list[list[int]]],
) -> None:
    for target in (small_target, with_eos(tiny_target))[: 2 if gamma == 2 else 1]:
        drafter = make_drafter(kind, target)
        requests = make_requests(target, LENGTHS)
        for limit in (1, 2, 3, 5, LONGEST):
            expected = [r[:limit] for r in references[target.vocab_size]]
            settings = DecodeSettings(limit, gamma)
            together = decode(target, requests, settings, drafter)
            assert [o.ids for o in together] == expected
            assert {o.finish for o in together} == {"length"}
            for output in together:
                check_rounds(output, gamma, limit)
            if limit == LONGEST:
                alone = [decode(target, [r], settings, drafter)[0] for r in requests]
                assert alone == together


def test_plain_decoding_is_generate(
    small_target: Target, make_requests: MakeRequests, references: dict[int, list[list[int]]]
) -> None:
    requests = make_requests(small_target, LENGTHS)
    outputs = decode(small_target, requests, DecodeSettings(LONGEST, 0))
    assert [o.ids for o in outputs] == references[small_target.vocab_size]
    assert all(o.rounds == [(0, 0)] * (LONGEST - 1) for o in outputs)


@pytest.mark.parametrize("law", [Law(0.0), Law(1.0), Law(0.8, top_k=5)], ids=lambda law: law.label)
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_a_copy_of_the_target_is_accepted_whole(
    law: Law,
    gamma: int,
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
) -> None:
    requests = make_requests(small_target, LENGTHS, law)
    outputs = decode(
        small_target, requests, DecodeSettings(LONGEST, gamma), make_drafter("self", small_target)
    )
    for output in outputs:
        assert all(drafted == accepted for drafted, accepted in output.rounds)
        assert len(output.rounds) == -(-(LONGEST - 1) // (gamma + 1))
        check_rounds(output, gamma, LONGEST)


@pytest.mark.parametrize("kind", ["eagle3", "causal", "self"])
def test_an_end_token_ends_the_reply_wherever_it_falls(
    kind: str,
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    references: dict[int, list[list[int]]],
) -> None:
    requests = make_requests(small_target, LENGTHS)
    drafter = make_drafter(kind, small_target)
    inside = 0
    for eos in range(small_target.vocab_size):
        target = with_eos(small_target, eos)
        expected = [r[: r.index(eos) + 1] if eos in r else r for r in references[target.vocab_size]]
        outputs = decode(target, requests, DecodeSettings(LONGEST, 4), drafter)
        assert [o.ids for o in outputs] == expected
        for output in outputs:
            stopped = output.ids[-1] == eos
            assert output.finish == ("stop" if stopped else "length")
            check_rounds(output, 4, LONGEST)
            emitted = 1 + sum(accepted + 1 for _, accepted in output.rounds)
            inside += emitted > len(output.ids)
    assert inside > 0 or kind != "self", "an accepted end token counts, what lay behind does not"


def test_the_first_of_several_end_tokens_wins(
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    references: dict[int, list[list[int]]],
) -> None:
    (request,) = make_requests(small_target, LENGTHS)[3:]
    reference = references[small_target.vocab_size][3]
    late, early = reference[9], reference[4]
    target = with_eos(small_target, late, early)
    first = min(reference.index(late), reference.index(early))
    (output,) = decode(target, [request], DecodeSettings(LONGEST, 4), make_drafter("self", target))
    assert (
        output.ids
        == reference[: first + 1]
        == greedy_reference(target, request, LONGEST, [late, early])
    )


def test_a_stop_at_the_limit_is_a_stop(
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    references: dict[int, list[list[int]]],
) -> None:
    reference = references[small_target.vocab_size][1]
    request = make_requests(small_target, LENGTHS)[1]
    eos = next(t for i, t in enumerate(reference) if i > 3 and t not in reference[:i])
    place = reference.index(eos)
    target = with_eos(small_target, eos)
    drafter = make_drafter("self", small_target)
    for limit, finish in ((place, "length"), (place + 1, "stop"), (place + 2, "stop")):
        (output,) = decode(target, [request], DecodeSettings(limit, 8), drafter)
        assert (output.ids, output.finish) == (reference[: min(limit, place + 1)], finish)


# ---- sampled


@pytest.mark.parametrize("kind", ["eagle3", "causal reduced"])
def test_a_row_does_not_feel_its_neighbours(
    kind: str, small_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests
) -> None:
    drafter = make_drafter(kind, small_target)
    requests = make_requests(small_target, [1, 9, 4, 17, 6], Law(1.0))
    settings = DecodeSettings(LONGEST, 3)
    together = decode(small_target, requests, settings, drafter)
    assert decode(small_target, requests[::-1], settings, drafter)[::-1] == together
    for size in (1, 2, 3):
        parts = [requests[i : i + size] for i in range(0, 5, size)]
        apart = [o for part in parts for o in decode(small_target, part, settings, drafter)]
        assert apart == together
    reseeded = [Request(**{**r.__dict__, "seed": r.seed + 100}) for r in requests]
    assert [o.ids for o in decode(small_target, reseeded, settings, drafter)] != [
        o.ids for o in together
    ]


@pytest.mark.parametrize(
    ("kind", "law", "eos", "how"),
    [
        (None, Law(1.0), 5, ()),
        ("eagle3", Law(1.0), None, ()),
        ("eagle3 reduced", Law(1.0), 5, ()),
        ("eagle3 reduced", Law(1.0), 5, ("block",)),
        ("causal", Law(1.0), 5, ()),
        ("causal", Law(1.0), None, ("token", "greedy")),
        ("eagle3 reduced", Law(0.6, top_k=4), None, ("block", "greedy")),
        ("causal", Law(0.6, top_k=4), 5, ("block",)),
        ("eagle3", Law(1.3, top_p=0.7), 5, ()),
        ("causal", Law(1.1, min_p=0.2, typical_p=0.8), 5, ("block",)),
    ],
    ids=lambda x: x.label if isinstance(x, Law) else str(x),
)
def test_outputs_follow_the_targets_law(
    kind: str | None,
    law: Law,
    eos: int | None,
    how: tuple[str, ...],
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
) -> None:
    """Thousands of seeds of one prompt against the enumerated law of three tokens."""
    count, limit = 3000, 3
    target = small_target if eos is None else with_eos(small_target, eos)
    (request,) = make_requests(target, [5], law)
    requests = [Request(**{**request.__dict__, "seed": seed}) for seed in range(count)]
    drafter = None if kind is None else make_drafter(kind, target)
    outputs = decode(target, requests, DecodeSettings(limit, 2, *how), drafter)
    if drafter is not None:
        rates = [sum(a > 0 for _, a in o.rounds) for o in outputs]
        assert 0.02 < sum(rates) / count < 1.9, "both outcomes of verification occur"

    expected = exact_law(target, request, law, limit, eos)
    seen = Counter(tuple(o.ids) for o in outputs)
    assert seen.keys() <= expected.keys(), "a token outside of the law's support"
    names = list(expected)
    counts = torch.tensor([seen[x] for x in names])
    assert chi_square(counts, torch.tensor([expected[x] for x in names])) > 1e-3
    for place in range(limit):  # fewer categories, more power
        marginal: Counter[int] = Counter()
        observed: Counter[int] = Counter()
        for x in names:
            token = x[place] if place < len(x) else -1
            marginal[token] += expected[x]  # type: ignore[assignment]
            observed[token] += seen[x]
        keys = sorted(marginal)
        p = chi_square(
            torch.tensor([observed[k] for k in keys]), torch.tensor([marginal[k] for k in keys])
        )
        assert p > 1e-3, f"token {place + 1}"


def exact_law(
    target: Target, request: Request, law: Law, limit: int, eos: int | None
) -> dict[Tokens, float]:
    """Every output of up to three tokens with its probability, from one forward per history."""
    known: dict[Tokens, Any] = {}

    def p(history: Tokens) -> torch.Tensor:
        if history not in known:
            ids = torch.tensor([[*request.ids, *history]])
            with torch.inference_mode():
                logits = target.model(input_ids=ids).logits[0, -1]
            known[history] = log_probs(logits[: target.vocab_size], law).double().exp()
        return known[history]

    return target_law(p, limit, () if eos is None else (eos,))


# ---- clock and refusals


@pytest.mark.parametrize("law", [Law(0.0), Law(1.0)], ids=lambda law: law.label)
def test_the_clock_accounts_for_all_time(
    law: Law, small_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests
) -> None:
    requests = make_requests(small_target, [4, 6], law)
    plain, fast = Clock(), Clock()
    decode(small_target, requests, DecodeSettings(LONGEST, 0), clock=plain)
    drafter = make_drafter("causal", small_target)
    outputs = decode(small_target, requests, DecodeSettings(LONGEST, 3), drafter, fast)
    for clock in (plain, fast):
        assert min(clock.prefill, clock.target, clock.outside) > 0
        parts = clock.target + clock.draft_first + clock.draft_later + clock.outside
        assert parts == pytest.approx(clock.decode)
    assert plain.draft_first == plain.draft_later == plain.drafting_rounds == 0
    assert plain.rounds == LONGEST - 1
    assert fast.rounds == max(len(o.rounds) for o in outputs)
    assert fast.drafting_rounds <= fast.rounds
    assert 0 < fast.later_steps <= 2 * fast.drafting_rounds
    assert min(fast.draft_first, fast.draft_later) > 0


def test_what_cannot_be_decoded_is_refused(
    small_target: Target, make_requests: MakeRequests
) -> None:
    settings = DecodeSettings(4, 0)
    (one,) = make_requests(small_target, [3])
    empty = Request(**{**one.__dict__, "ids": ()})
    with pytest.raises(UserError, match="without any token"):
        decode(small_target, [one, empty], settings)
    full = Request(**{**one.__dict__, "ids": (3,) * 256})
    with pytest.raises(UserError, match="has 256 tokens, the target's context holds 256"):
        decode(small_target, [one, full], settings)
    with pytest.raises(UserError, match="unknown verifier 'tokens' "):
        DecodeSettings(4, 2, "tokens")
