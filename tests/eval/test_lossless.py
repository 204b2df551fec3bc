"""The proofs themselves: they must catch rules that are wrong."""

import math

import pytest
import torch
from torch import Tensor

from draftsmith.data.warp import Law, log_probs
from draftsmith.eval import verify
from draftsmith.eval.draws import Draws
from draftsmith.eval.lossless import (
    Tokens,
    chi_square,
    decoding_law,
    greedy_equality,
    target_law,
    total_variation,
)
from draftsmith.eval.verify import Rule

pytestmark = pytest.mark.usefixtures("one_thread")


def law_of(seed: int, law: Law | None = None) -> Rule:
    def of(*history: Tokens) -> Tensor:
        ids = sum(history, ())
        digest = sum((t + 1) * 5**i for i, t in enumerate(ids)) + 10_000 * seed
        logits = torch.randn(3, generator=torch.Generator().manual_seed(digest)).double()
        return log_probs(logits, law or Law()).exp()

    return of  # type: ignore[return-value]


def everywhere(draws: Draws, weights: Tensor) -> Tensor:
    return draws.categorical(weights, torch.ones(len(weights), dtype=torch.bool))


def softmax_residual(draft, log_q, log_p, drafted, draws):  # type: ignore[no-untyped-def]
    """Lossy: the residual goes through softmax."""
    accepted, following = verify.token(draft, log_q, log_p, drafted, draws)
    rows = torch.arange(len(draft))
    p, q = log_p[rows, accepted].exp(), log_q[rows, accepted.clamp_max(draft.shape[1] - 1)].exp()
    redrawn = everywhere(draws, (p - q).clamp_min(0).softmax(-1))
    return accepted, torch.where(accepted == drafted, following, redrawn)


def redraw_from_p(draft, log_q, log_p, drafted, draws):  # type: ignore[no-untyped-def]
    """Lossy: a rejected place is drawn from p instead of the residual."""
    accepted, _ = verify.token(draft, log_q, log_p, drafted, draws)
    return accepted, everywhere(draws, log_p[torch.arange(len(draft)), accepted].exp())


def typical(draft, log_q, log_p, drafted, draws):  # type: ignore[no-untyped-def]
    """Lossy: typical acceptance, by a threshold on p alone."""
    likely = log_p[:, :-1].gather(2, draft[..., None]).squeeze(2) > math.log(0.3)
    likely &= torch.arange(draft.shape[1]) < drafted[:, None]
    accepted = likely.long().cumprod(1).sum(1)
    return accepted, everywhere(draws, log_p[torch.arange(len(draft)), accepted].exp())


def joint_ratio(draft, log_q, log_p, drafted, draws):  # type: ignore[no-untyped-def]
    """Lossy from γ = 2 on, exact at γ = 1: prefixes tested by their joint ratio, token residual."""
    ids, inside = draft[..., None], torch.arange(draft.shape[1]) < drafted[:, None]
    ratio = (log_p[:, :-1].gather(2, ids) - log_q.gather(2, ids)).squeeze(2).cumsum(1)
    passed = draws.bernoulli(ratio.exp().clamp_max(1.0), inside)
    accepted = (passed * torch.arange(1, draft.shape[1] + 1)).amax(1)
    rows = torch.arange(len(draft))
    p, q = log_p[rows, accepted].exp(), log_q[rows, accepted.clamp_max(draft.shape[1] - 1)].exp()
    use_p = (accepted == drafted)[:, None]
    left = (p - q).clamp_min(0)
    left = torch.where(left.sum(1, keepdim=True) > 0, left, p)
    return accepted, everywhere(draws, torch.where(use_p, p, left))


@pytest.mark.parametrize("rule", [softmax_residual, redraw_from_p, typical, joint_ratio])
def test_enumeration_catches_lossy_rules(rule: Rule) -> None:
    p, q = law_of(1), law_of(2)
    for gamma in (1, 2):
        law = decoding_law(p, q, rule, num_draft_tokens=gamma, max_tokens=3, eos=(0,))
        assert sum(law.outputs.values()) == pytest.approx(1.0, abs=1e-12)
        distance = total_variation(law.outputs, target_law(p, 3, (0,)))
        assert distance < 1e-12 if (rule, gamma) == (joint_ratio, 1) else distance > 0.01


def test_draft_law_must_be_the_one_it_drew_from() -> None:
    """A known fault: drawn after truncation, but the ratio used the raw law."""
    logits = torch.tensor([1.0, 0.7, 0.2, -0.5], dtype=torch.float64)
    p = log_probs(logits.flip(0), Law(0.7, top_k=3)).exp()
    drawn, raw = log_probs(logits, Law(0.7, top_k=2)).exp(), log_probs(logits, Law()).exp()

    def confused(draft, log_q, *rest):  # type: ignore[no-untyped-def]
        return verify.token(draft, raw.log().expand_as(log_q), *rest)

    right, wrong = (
        decoding_law(
            lambda history: p, lambda *history: drawn, rule, num_draft_tokens=2, max_tokens=3
        )
        for rule in (verify.token, confused)
    )
    plain = target_law(lambda history: p, 3)
    assert total_variation(right.outputs, plain) < 1e-12
    assert total_variation(wrong.outputs, plain) > 0.1
    overlap = float(torch.minimum(p, drawn).sum())
    assert right.accepted[0] / right.attempts[0] == pytest.approx(overlap, abs=1e-12)


def test_decoding_by_hand() -> None:
    """A perfect draft: γ + 1 tokens a round, until the budget or an end token cuts it."""
    p = lambda history: torch.tensor([0.5, 0.5], dtype=torch.float64)  # noqa: E731
    q = lambda prefix, drafted: p(prefix)  # noqa: E731
    law = decoding_law(p, q, verify.token, num_draft_tokens=2, max_tokens=5)
    assert len(law.outputs) == 32 and law.rounds == pytest.approx(2)
    assert law.attempts == pytest.approx((2.0, 1.0)) == law.accepted
    law = decoding_law(p, q, verify.token, num_draft_tokens=2, max_tokens=5, eos=(0,))
    # The first round ends the output unless its three tokens are all 1; 1 of 4 keeps x_2 only
    # if x_1 is not the end.
    assert law.rounds == pytest.approx(1 + 1 / 8)
    assert law.attempts == pytest.approx((1 + 1 / 8, 1.0))
    assert law.accepted == pytest.approx((1 + 1 / 8, 0.5))


def test_chi_square() -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    assert chi_square(torch.tensor([5000, 3000, 2000, 0]), p) == pytest.approx(1.0)
    assert chi_square(torch.tensor([5200, 2900, 1900, 0]), p) < 0.001
    assert chi_square(torch.tensor([5000, 3000, 1999, 1]), p) == 0.0
    rare = torch.tensor([0.999, 0.0004, 0.0003, 0.0003])
    assert chi_square(torch.tensor([9990, 4, 3, 3]), rare) == pytest.approx(1.0)


def test_greedy_equality() -> None:
    reference = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7, 8]}
    margins = {"a": [9.0, 1e-6, 9.0], "b": [2.0, 2.0], "c": [5.0, 0.5, 5.0]}
    equal = greedy_equality(reference, reference, margins, 1e-4)
    assert equal == {"verdict": "equal", "prompts": 3, "near_ties": [], "different": []}
    outputs = reference | {"a": [1, 7, 9]}
    tied = greedy_equality(outputs, reference, margins, 1e-4)
    assert tied["verdict"] == "equal except near-ties"
    assert tied["near_ties"] == [{"prompt_id": "a", "position": 1, "margin": 1e-6}]
    outputs |= {"b": [4, 5, 5], "c": [6, 1, 8]}
    wrong = greedy_equality(outputs, reference, margins, 1e-4)
    assert wrong["verdict"] == "different" and len(wrong["near_ties"]) == 1  # type: ignore[arg-type]
    assert wrong["different"] == [
        {"prompt_id": "b", "position": 2, "margin": None},
        {"prompt_id": "c", "position": 1, "margin": 0.5},
    ]
    assert greedy_equality({}, {}, {}, 0.0)["verdict"] == "not checked"
    with pytest.raises(ValueError, match="same prompts"):
        greedy_equality({}, reference, margins, 0.0)
