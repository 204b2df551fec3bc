"""What the most probable tokens tell of a distribution, and what they do not (B040)."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Top
from draftsmith.data.top import captured_mass, joined, rows_of, top_of, warped
from draftsmith.data.warp import Law, log_probs
from draftsmith.train.losses import fkl, tv

ROWS, VOCAB, K = 20, 4096, 16


def random_logits(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    """Some rows flat, some sharp: tails from almost all of the mass to almost none."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(1.0, 6.0, rows)[:, None]
    return torch.randn(rows, vocab, generator=generator) * spread


def scattered(top: Top, log_p: Tensor, vocab: int = VOCAB) -> Tensor:
    """log p of told tokens `[R, K]` in their places, `[R, V]`."""
    everywhere = torch.full((len(log_p), vocab + 1), -torch.inf)
    return everywhere.scatter(1, top.ids.long() % (vocab + 1), log_p)[:, :vocab]


def test_the_most_probable_tokens_with_their_true_probabilities() -> None:
    logits = random_logits(0)
    top = top_of(logits, K)
    full = logits.double().log_softmax(-1)
    expected = full.sort(-1, descending=True)
    assert torch.equal(top.ids.long(), expected.indices[:, :K])
    torch.testing.assert_close(top.log_probs.double(), expected.values[:, :K], rtol=0, atol=1e-5)
    assert top.ids.dtype == torch.int32 and top.log_probs.dtype == torch.float32
    assert top.temperature == 1.0
    mass = captured_mass(top)
    share = expected.values[:, :K].exp().sum(-1)
    torch.testing.assert_close(mass.double(), share, rtol=0, atol=1e-5)
    assert float(mass.min()) < 0.1 and float(mass.max()) > 0.9, "never renormalised to the K"


def test_b040_all_tokens_have_all_of_the_mass() -> None:
    top = top_of(random_logits(1), VOCAB + 5)
    assert top.ids.shape == (ROWS, VOCAB)
    torch.testing.assert_close(captured_mass(top), torch.ones(ROWS))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_first_of_equals_is_the_greedy_choice(k: int) -> None:
    logits = torch.zeros(1, 300)
    logits[0, [7, 120, 290]] = 4.0
    top = top_of(logits, k)
    assert int(top.ids[0, 0]) == int(logits.argmax(-1)) == 7
    assert set(top.ids[0].tolist()) <= {7, 120, 290} and len(set(top.ids[0].tolist())) == k


def test_tokens_without_probability_are_not_told() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, [3, 9]] = 1.0
    top = top_of(logits, 4)
    assert sorted(top.ids[0].tolist()) == [-1, -1, 3, 9]
    assert float(captured_mass(top)) == pytest.approx(1.0)


# ---- the tail (B040): p on 20 rows, of which 16 of 4,096 tokens are told


def test_b040_lost_tail_bounds_the_total_variation() -> None:
    """0 <= TV of the told - TV of all = overlap in the tail <= the smaller of both tails."""
    p, q = random_logits(2).double(), random_logits(3).double()
    for share in (0.0, 0.5, 0.9):  # drafts from unrelated to close
        draft = torch.lerp(q, p, share)
        top = top_of(p, K)
        told = scattered(top, top.log_probs).double()
        gap = tv(told, draft) - tv(p.log_softmax(-1), draft)
        tail = 1 - captured_mass(top).double()
        inside = torch.where(told > -torch.inf, draft.softmax(-1), 0.0).sum(-1)
        assert bool((gap >= -1e-6).all()) and bool(
            (gap <= torch.minimum(tail, 1 - inside) + 1e-6).all()
        )
        assert bool((tv(told, draft) <= 1).all())
    assert float(gap.max()) > 0.05, "some rows have a tail that matters"


def test_b040_divergences_of_the_told_tokens_against_the_full_one() -> None:
    """Of a subset, its binary split and the rest: the chain rule makes these inequalities true."""
    p, q = random_logits(4).double(), torch.lerp(random_logits(4), random_logits(5), 0.3).double()
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    full = (log_p.exp() * (log_p - log_q)).sum(-1)  # KL(p‖q)
    top = top_of(p, K)
    at = top.ids.long()
    told_p, told_q = log_p.gather(1, at), log_q.gather(1, at)
    mass, shared = told_p.exp().sum(-1), told_q.exp().sum(-1)  # P and Q of the K tokens
    own_p, own_q = told_p - mass.log()[:, None], told_q - shared.log()[:, None]
    subset = (own_p.exp() * (own_p - own_q)).sum(-1)  # softmax over the K on both sides
    split = mass * (mass / shared).log() + (1 - mass) * ((1 - mass) / (1 - shared)).log()
    bucket = mass * subset + split  # one bucket for the tail
    found = fkl(scattered(top, top.log_probs).double(), q)
    assert bool((bucket <= full + 1e-9).all()) and bool((mass * subset <= bucket + 1e-9).all())
    torch.testing.assert_close(found, mass * (subset - shared.log()), rtol=1e-5, atol=1e-6)
    assert bool((found >= mass * subset).all()) and bool((found >= 0).all())


def test_b040_a_softmax_over_the_told_does_not_see_the_mass_elsewhere() -> None:
    """A draft right in proportion, with 99% of its mass on tokens that the target hardly says."""
    p = random_logits(6)[-1:]
    top = top_of(p, K)
    told = scattered(top, top.log_probs)
    inside = told > -torch.inf
    q = torch.where(inside, told, -torch.inf).softmax(-1) * 0.01
    q = torch.where(inside, q, 0.99 / (VOCAB - K))
    both = [log.masked_fill(~inside, -torch.inf).softmax(-1) for log in (told, q.log())]
    assert float((both[0] - both[1]).abs().max()) < 1e-6, "equal after the softmax"
    mass = float(captured_mass(top))
    assert float(tv(told, q.log())) == pytest.approx(0.99, abs=1e-5)
    assert float(fkl(told, q.log())) == pytest.approx(mass * math.log(100), rel=1e-4)


# ---- laws

EXACT = [
    Law(0.0),
    Law(0.7, top_k=5),
    Law(1.0, top_k=K),
    Law(1.3, top_k=8, top_p=0.7),
    Law(1.0, top_k=8, min_p=0.2),
    Law(0.5, top_k=8, typical_p=0.6),
]


@pytest.mark.parametrize("stored", [1.0, 0.7])
@pytest.mark.parametrize("law", EXACT, ids=lambda law: law.label)
def test_laws_that_the_told_tokens_determine(law: Law, stored: float) -> None:
    logits = random_logits(7)
    top = replace(top_of(logits / stored, K), temperature=stored)
    found = scattered(top, warped(top, law)).exp()
    torch.testing.assert_close(found, log_probs(logits, law).exp(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(ROWS))


@pytest.mark.parametrize("stored", [1.0, 0.7])
def test_the_stored_temperature_is_exact_up_to_the_tail(stored: float) -> None:
    logits = random_logits(8)
    top = replace(top_of(logits / stored, K), temperature=stored)
    full = log_probs(logits, Law(stored))
    torch.testing.assert_close(
        warped(top, Law(stored)), full.gather(1, top.ids.long()), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("law", "stored"),
    [
        (Law(0.7), 1.0),
        (Law(1.0), 0.7),
        (Law(1.0, top_p=0.9), 1.0),
        (Law(1.0, min_p=0.1), 1.0),
        (Law(1.0, top_k=K + 1), 1.0),
        (Law(0.7, top_k=4), 0.0),
    ],
)
def test_other_laws_are_refused_by_name(law: Law, stored: float) -> None:
    top = replace(top_of(random_logits(9), K), temperature=stored)
    said = f"the {K} most probable tokens at T={stored:g}, .* do not tell {law.label},"
    with pytest.raises(UserError, match=said):
        warped(top, law)


@pytest.mark.parametrize("law", [Law(1.0), *EXACT], ids=lambda law: law.label)
def test_rows_of_which_less_is_told(law: Law) -> None:
    """A server tells nothing of an end token, and fewer than K at times: no NaN, no invention."""
    whole = top_of(random_logits(10), K)
    ids, told = whole.ids.clone(), whole.log_probs.clone()
    ids[1, 2:], told[1, 2:] = -1, -torch.inf
    ids[2], told[2] = -1, -torch.inf
    found, expected = warped(Top(ids, told), law), warped(whole, law)
    others = [0, *range(3, ROWS)]
    assert torch.equal(found[others], expected[others])
    assert bool((found[2] == -torch.inf).all())
    known = law.top_k == 0
    assert torch.equal(found[1, :2], expected[1, :2] if known else torch.full((2,), -torch.inf))
    assert bool((found[1, 2:] == -torch.inf).all())


# ---- rows


def test_rows_are_joined_and_chosen() -> None:
    wide, narrow = top_of(random_logits(11), K), top_of(random_logits(12, rows=3), 2)
    both = joined([narrow, wide])
    assert both.ids.shape == both.log_probs.shape == (3 + ROWS, K)
    assert torch.equal(both.ids[:3, :2], narrow.ids) and bool((both.ids[:3, 2:] == -1).all())
    assert bool((both.log_probs[:3, 2:] == -torch.inf).all())
    assert both.ids.dtype == torch.int32
    back = rows_of(both, torch.arange(3, 3 + ROWS))
    assert torch.equal(back.ids, wide.ids) and torch.equal(back.log_probs, wide.log_probs)


def test_rows_of_several_temperatures_are_not_mixed() -> None:
    top = top_of(random_logits(13), K)
    with pytest.raises(UserError, match=r"at temperatures 0\.7, 1, .*collect\.temperatures"):
        joined([top, replace(top, temperature=0.7)])
