"""The estimator against the decoder: equal at T = 0, equal in the mean at T = 1."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from draftsmith.data.gather import Request
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.estimate import captured_mass, estimate, overlap_bounds, overlap_interval
from draftsmith.eval.rows import Output
from draftsmith.train.score import Conversation, expected, score

LIMIT = 16
GAMMAS = (1, 2, 4)

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]
Answers = Callable[..., list[Record]]


def expected_rounds(conversation: Conversation, gamma: int, verifier: str = "token") -> float:
    return float(expected([conversation], gamma, verifier).rounds)


def survivals(outputs: Sequence[Output], gamma: int) -> list[float]:
    rounds = [r for o in outputs for r in o.rounds]
    attempts = [sum(d >= k for d, _ in rounds) for k in range(1, gamma + 1)]
    accepted = [sum(a >= k for _, a in rounds) for k in range(1, gamma + 1)]
    return [a / max(1, n) for a, n in zip(accepted, attempts, strict=True)]


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced", "causal", "causal reduced", "self"])
@pytest.mark.parametrize("eos", [(), (5, 7)], ids=["no end", "ends"])
def test_greedy_rounds_are_known_exactly(
    kind: str,
    eos: tuple[int, ...],
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    answers: Answers,
) -> None:
    target = with_eos(small_target, *eos)
    law = Law(0.0)
    requests = make_requests(target, [1 + i % 11 for i in range(30)], law)
    drafter = make_drafter(kind, target)
    records = answers(target, requests, LIMIT)
    scored = score(target, drafter, records, law, max(GAMMAS), LIMIT)
    replied = [i for i, r in enumerate(records) if len(r.reply) > 1]
    assert len(scored) == len(replied) > 15
    for gamma in GAMMAS:
        outputs = decode(target, requests, DecodeSettings(LIMIT, gamma), drafter)
        assert [o.ids for o in outputs] == [r.reply.tolist() for r in records]
        for conversation, i in zip(scored, replied, strict=True):
            assert conversation.tokens == len(outputs[i].ids) - 1
            rounds = expected_rounds(conversation, gamma)
            assert rounds == pytest.approx(len(outputs[i].rounds))
        found = estimate(scored, gamma, "token", 10)
        assert [s.value for s in found.survival] == pytest.approx(survivals(outputs, gamma))
        assert estimate(scored, gamma, "block", 10) == found, "one-hot drafts"
    drafted = sum(len(o.rounds) for o in outputs)
    assert kind == "self" or drafted > 20
    assert any(a for o in outputs for _, a in o.rounds), "some drafts must be right"


@pytest.mark.parametrize(
    ("kind", "law", "verifier", "drafting"),
    [
        ("eagle3", Law(1.0), "token", "sampled"),
        ("eagle3", Law(1.0), "block", "sampled"),
        ("eagle3 reduced", Law(0.7, top_k=6), "block", "sampled"),
        ("eagle3 reduced", Law(0.7, top_k=6), "token", "greedy"),
        ("causal", Law(1.0), "token", "sampled"),
        ("causal", Law(0.7, top_k=6), "block", "sampled"),
        ("causal", Law(1.0), "block", "greedy"),
    ],
    ids=lambda x: x.label if isinstance(x, Law) else x,
)
def test_sampled_rounds_are_known_in_the_mean(
    kind: str,
    law: Law,
    verifier: str,
    drafting: str,
    small_target: Target,
    with_eos: Callable[..., Target],
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    answers: Answers,
) -> None:
    """Records and decodings of other seeds are independent samples of the same mean."""
    gamma, limit, count = 3, 10, 350
    target = with_eos(small_target, 5)
    requests = make_requests(target, [1 + i % 7 for i in range(count)], law)
    drafter = make_drafter(kind, target)
    records = answers(target, requests, limit)
    scored = score(target, drafter, records, law, gamma, limit, drafting)
    others = [Request(**{**r.__dict__, "seed": r.seed + 10_000}) for r in requests]
    outputs = decode(target, others, DecodeSettings(limit, gamma, verifier, drafting), drafter)

    estimated = np.array([[c.tokens, expected_rounds(c, gamma, verifier)] for c in scored])
    decoded = np.array([[len(o.ids) - 1, len(o.rounds)] for o in outputs], dtype=float)
    value, error = ratio(estimated)
    other, other_error = ratio(decoded)
    assert 1.05 < value < gamma + 0.9
    assert abs(value - other) < 4 * np.hypot(error, other_error)
    assert error < 0.05 and other_error < 0.06, "a difference of a quarter would show"

    found = estimate(scored, gamma, verifier, 10)
    assert found.tokens_per_round.value == pytest.approx(value)
    estimated_survival = [s.value for s in found.survival]
    pairs = zip(estimated_survival, survivals(outputs, gamma), strict=True)
    for k, (one, two) in enumerate(pairs):
        attempts = sum(d > k for o in outputs for d, _ in o.rounds)
        # Rounds of a conversation are not independent: twice the binomial error is generous.
        assert abs(one - two) < 4 * 2 * (two * (1 - two) / attempts) ** 0.5


def ratio(pairs: np.ndarray) -> tuple[float, float]:
    """Σ a / Σ b over rows (a, b), and its standard error by the delta method."""
    value = pairs[:, 0].sum() / pairs[:, 1].sum()
    residual = pairs[:, 0] - value * pairs[:, 1]
    return value, residual.std(ddof=1) / pairs[:, 1].mean() / len(pairs) ** 0.5


@pytest.mark.parametrize("kind", ["causal", "causal reduced"])
@pytest.mark.parametrize("law", [Law(1.0), Law(0.6, top_p=0.8), Law(0.0)], ids=lambda x: x.label)
def test_overlap_and_mass_are_direct_sums(
    kind: str,
    law: Law,
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    answers: Answers,
) -> None:
    drafter = make_drafter(kind, small_target)
    requests = make_requests(small_target, [4, 9, 1, 6], law)
    records = answers(small_target, requests, LIMIT)
    scored = score(small_target, drafter, records, law, 2, LIMIT)
    shared, mass, tokens = [], [], 0
    for record in records:
        ids = record.ids[None, :-1]
        with torch.inference_mode():
            p = log_probs(small_target.model(input_ids=ids).logits[0].double(), law).exp()
            z = drafter.model(input_ids=ids).logits[0].double()  # type: ignore[attr-defined]
        q = torch.zeros_like(p)
        columns = drafter.draft_ids if drafter.draft_ids is not None else torch.arange(12)
        q[:, columns] = log_probs(z[:, columns], law).exp()
        own = slice(record.prompt_len, None)  # predicts reply tokens 1, 2, ..
        shared.append(float(torch.minimum(p, q)[own].sum()))
        mass.append(float(p[own][:, columns].sum()))
        tokens += len(record.reply) - 1
    assert [c.overlap[0][0] for c in scored] == pytest.approx(shared, abs=1e-4)
    assert [c.mass for c in scored] == pytest.approx(mass, abs=1e-4)
    assert overlap_interval(scored, 50).value == pytest.approx(sum(shared) / tokens, abs=1e-5)
    assert captured_mass(scored) == pytest.approx(sum(mass) / tokens, abs=1e-5)
    if kind == "causal":
        assert captured_mass(scored) == pytest.approx(1.0, abs=1e-5)


def test_greedy_drafts_are_accepted_with_the_targets_own_probability(
    small_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests, answers: Answers
) -> None:
    """The draft is one-hot at its argmax, so Σ min(p, q) is p of that token."""
    drafter = make_drafter("causal", small_target)
    records = answers(small_target, make_requests(small_target, [4, 9, 6], Law(1.0)), LIMIT)
    scored = score(small_target, drafter, records, Law(1.0), 2, LIMIT, "greedy")
    for record, conversation in zip(records, scored, strict=True):
        ids = record.ids[None, :-1]
        with torch.inference_mode():
            p = small_target.model(input_ids=ids).logits[0].double().softmax(-1)
            best = drafter.model(input_ids=ids).logits[0].argmax(-1)  # type: ignore[attr-defined]
        own = slice(record.prompt_len, None)
        chance = p.gather(1, best[:, None])[own, 0]
        assert conversation.overlap[0][0] == pytest.approx(float(chance.sum()), abs=1e-4)
        hits = (best[own] == record.ids[record.prompt_len + 1 :]).tolist()
        assert (conversation.log_ratio[:, 0] > -torch.inf).tolist() == hits


def test_records_keep_their_order_and_short_ones_fall_out(
    small_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests, answers: Answers
) -> None:
    requests = make_requests(small_target, [9, 1, 5], Law(1.0))
    drafter = make_drafter("eagle3", small_target)
    lengths = (6, 1, 3)
    records = [answers(small_target, [r], n)[0] for r, n in zip(requests, lengths, strict=True)]
    scored = score(small_target, drafter, records, Law(1.0), 2, LIMIT)
    assert [c.tokens for c in scored] == [5, 2]
    assert {c.limit for c in scored} == {LIMIT - 1}


def test_bounds_from_the_stored_top_hold_the_true_overlap() -> None:
    """Served top-K log-probabilities: never renormalised, or a heavy tail reads 0.70 for 0.27."""
    torch.manual_seed(2)
    for k in (1, 5, 40, 200):
        p, q = (3.0 * torch.randn(2, 50, 200, dtype=torch.float64)).log_softmax(-1)
        top = p.topk(k).indices
        low, high = overlap_bounds(p.gather(-1, top), q.gather(-1, top))
        true = p.exp().minimum(q.exp()).sum(-1)
        assert bool((low <= true + 1e-12).all()) and bool((true <= high + 1e-12).all())
        assert bool(((high - low) <= 1 - p.gather(-1, top).exp().sum(-1) + 1e-12).all())
    torch.testing.assert_close(low, true)
    torch.testing.assert_close(high, true)


def test_renormalising_the_top_would_overstate_the_overlap() -> None:
    """§6's heavy-tailed toy: both laws agree on the head, and have disjoint tails."""
    head, tail = 27, 100
    p, q = torch.zeros(2, head + 2 * tail, dtype=torch.float64)
    p[:head], q[:head] = 0.01, 0.01
    p[head : head + tail], q[head + tail :] = 0.73 / tail, 0.73 / tail
    top = p.topk(head).indices
    low, high = overlap_bounds(p[top].log(), q[top].log())
    true = float(p.minimum(q).sum())
    assert true == pytest.approx(0.27)
    assert float(low) == pytest.approx(true) and float(high) == pytest.approx(1.0)
    renormalised = (p[top] / p[top].sum()).minimum(q[top] / q[top].sum()).sum()
    assert float(renormalised) > float(low) + 0.5
