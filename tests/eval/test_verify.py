"""The acceptance rules: exact outcome laws, losslessness by enumeration, independence of rows."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.data.warp import Law, log_probs
from draftsmith.eval import verify
from draftsmith.eval.draws import Streams
from draftsmith.eval.lossless import (
    Tokens,
    chi_square,
    decoding_law,
    outcome_law,
    target_law,
    total_variation,
)
from draftsmith.eval.verify import Rule

RULES = [verify.token, verify.block]
EOS = 0


pytestmark = pytest.mark.usefixtures("one_thread")


def table(
    seed: int, size: int = 3, scale: float = 1.5, law: Law | None = None
) -> Callable[..., Tensor]:
    """A law [V] for each history, different for each, and the same whenever it is asked."""
    known: dict[tuple[Tokens, ...], Tensor] = {}

    def of(*history: Tokens) -> Tensor:
        if history not in known:
            digest = 1 + sum((t + 1) * 7**i for i, t in enumerate(sum(history, ())))
            g = torch.Generator().manual_seed(seed * 1_000_003 + digest + 31 * len(history[0]))
            logits = torch.randn(size, generator=g, dtype=torch.float64) * scale
            known[history] = log_probs(logits, law or Law()).exp()
        return known[history]

    return of


def streams(rows: int) -> Streams:
    return Streams(range(rows), torch.device("cpu"))


class OneStream:
    """Chance for very many rows, from one generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        return (torch.rand(p.shape, generator=self.generator, dtype=torch.float64) < p) & where

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        return torch.multinomial(weights, 1, generator=self.generator).squeeze(1)

    def select(self, rows: object) -> None: ...


def closed_form_token(p: Tensor, q: Tensor, draft: list[int]) -> Tensor:
    """P(accepted, next) of token verification, from the definition; p [γ+1, V], q [γ, V]."""
    law, reach = torch.zeros_like(p), 1.0
    for i, x in enumerate(draft):
        accept = min(1.0, float(p[i, x] / q[i, x]))
        residual = (p[i] - q[i]).clamp_min(0)
        if residual.sum() > 0:
            law[i] = reach * (1 - accept) * residual / residual.sum()
        reach *= accept
    law[len(draft)] = reach * p[len(draft)]
    return law


def rows(count: int, gamma: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = count, gamma + 1, size
    log_p = torch.randn(*shape, generator=g, dtype=torch.float64).mul(1.5).log_softmax(-1)
    log_q = torch.randn(*shape, generator=g, dtype=torch.float64).mul(1.5).log_softmax(-1)[:, 1:]
    draft = torch.randint(size, (count, gamma), generator=g)
    return draft, log_q, log_p, torch.randint(gamma + 1, (count,), generator=g)


def test_token_follows_its_definition() -> None:
    draft, log_q, log_p, drafted = rows(40, 3, 4)
    ours = outcome_law(verify.token, draft, log_q, log_p, drafted)
    for b in range(len(draft)):
        d = int(drafted[b])
        want = closed_form_token(log_p[b].exp()[: d + 1], log_q[b].exp(), draft[b, :d].tolist())
        assert torch.allclose(ours[b, : d + 1], want, atol=1e-12)
        assert (ours[b, d + 1 :] == 0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_decoding_keeps_the_law(rule: Rule, gamma: int) -> None:
    """History-dependent p and q, an end token anywhere in the block, drafts cut by the budget."""
    p, q = table(1), table(2)
    law = decoding_law(p, q, rule, num_draft_tokens=gamma, max_tokens=4, eos=(EOS,))
    assert total_variation(law.outputs, target_law(p, 4, (EOS,))) < 1e-12
    assert law.rounds < 4 and law.accepted[0] > 0.1


@pytest.mark.parametrize("rule", RULES)
def test_laws_with_empty_supports(rule: Rule) -> None:
    """Truncated on either side, differently on each, and disjoint now and then."""
    p = table(3, law=Law(top_k=2))
    for q in (table(4), table(4, law=Law(top_k=1)), table(4, law=Law(0.7, top_p=0.6))):
        law = decoding_law(p, q, rule, num_draft_tokens=2, max_tokens=4, eos=(EOS,))
        assert total_variation(law.outputs, target_law(p, 4, (EOS,))) < 1e-12
        assert set(law.outputs) <= set(target_law(p, 4, (EOS,)))


@pytest.mark.parametrize("rule", RULES)
def test_adaptive_length_may_look_but_not_drop(rule: Rule) -> None:
    """Stopping after an unlikely token is exact if the token is kept, and biased if dropped."""
    p, q = table(5), table(6)

    def stop_at(prefix: Tokens, draft: Tokens, keep: int) -> int:
        for i, x in enumerate(draft):
            if q(prefix, draft[:i])[x] < 0.4:
                return i + keep
        return len(draft)

    plain = target_law(p, 4, (EOS,))
    for keep in (1, 0):
        law = decoding_law(
            p,
            q,
            rule,
            num_draft_tokens=3,
            max_tokens=4,
            eos=(EOS,),
            submitted=lambda prefix, draft, keep=keep: stop_at(prefix, draft, keep),
        )
        distance = total_variation(law.outputs, plain)
        assert distance < 1e-12 if keep else distance > 0.02


def mean_accepted(rule: Rule, p: Tensor, q: Tensor, gamma: int) -> float:
    ids = torch.cartesian_prod(*[torch.arange(len(p))] * gamma).view(-1, gamma)
    n = len(ids)
    log_p, log_q = p.log().expand(n, gamma + 1, -1), q.log().expand(n, gamma, -1)
    law = outcome_law(rule, ids, log_q, log_p, torch.full((n,), gamma))
    chance = q[ids].prod(1)  # [n]
    return float((chance[:, None] * law.sum(-1) * torch.arange(gamma + 1)).sum())


def test_known_accepted_lengths() -> None:
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    q = p.flip(0)
    assert mean_accepted(verify.token, p, q, 2) == pytest.approx(10 / 9, abs=1e-13)
    assert mean_accepted(verify.block, p, q, 2) == pytest.approx(11 / 9, abs=1e-13)


def test_block_never_accepts_less_and_agrees_on_one_hot_drafts() -> None:
    for seed in range(3):
        p, q = table(seed, size=4)((1,)), table(seed + 50, size=4)((1,))
        token, block = (mean_accepted(rule, p, q, 3) for rule in RULES)
        assert block >= token - 1e-13
    draft, _, log_p, drafted = rows(20, 3, 4)
    log_q = torch.nn.functional.one_hot(draft, 4).double().log()
    laws = [outcome_law(rule, draft, log_q, log_p, drafted) for rule in RULES]
    assert torch.allclose(*laws, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_rows_are_independent_and_padding_is_inert(rule: Rule) -> None:
    draft, log_q, log_p, drafted = rows(33, 4, 6)
    accepted, following = rule(draft, log_q, log_p, drafted, streams(33))
    assert (accepted <= drafted).all() and len(set(accepted.tolist())) > 3
    for b in range(33):
        one = slice(b, b + 1)
        d = int(drafted[b])
        own = streams(33)
        own.select([b])
        alone = rule(draft[one, :d], log_q[one, :d], log_p[one, : d + 1], drafted[one], own)
        assert (accepted[b].item(), following[b].item()) == tuple(x.item() for x in alone)
    padding = torch.arange(4) >= drafted[:, None]
    dirty = draft.masked_fill(padding, -1), log_q.masked_fill(padding[..., None], math.nan)
    again = rule(*dirty, log_p, drafted, streams(33))
    assert torch.equal(again[0], accepted) and torch.equal(again[1], following)


@pytest.mark.parametrize("rule", RULES)
def test_residual_is_normalised_not_softmaxed(rule: Rule) -> None:
    """A known fault put the residual through softmax, so that impossible tokens appeared."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0])
    q = torch.tensor([0.1, 0.1, 0.1, 0.35, 0.35])
    count = 200_000
    g = torch.Generator().manual_seed(0)
    draft = torch.multinomial(q, count, replacement=True, generator=g)[:, None]
    log_q, log_p = q.log().expand(count, 1, -1), p.log().expand(count, 2, -1)
    one = torch.ones(count, dtype=torch.long)
    accepted, following = rule(draft, log_q, log_p, one, OneStream())
    first = torch.where(accepted == 1, draft[:, 0], following)
    assert chi_square(first.bincount(minlength=5), p) > 0.001
    assert accepted.double().mean().item() == pytest.approx(0.3, abs=0.005)


@pytest.mark.parametrize("rule", RULES)
def test_equal_and_disjoint_laws(rule: Rule) -> None:
    p = torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=torch.float64).log()
    other = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).log()
    for log_q, ids, count in ((p, [0, 2], 2), (other, [3, 3], 0)):
        law = outcome_law(
            rule,
            torch.tensor([ids]),
            log_q.expand(1, 2, -1),
            p.expand(1, 3, -1),
            torch.tensor([2]),
        )
        assert torch.allclose(law[0, count], p.exp(), atol=1e-13)
    # A rejection that rounding alone made possible still draws from p.
    left = verify.residual(p.exp()[None], p.exp()[None])
    assert torch.equal(left[0], p.exp())


def test_greedy_by_hand() -> None:
    target = torch.tensor([[1, 2, 3, 4]] * 5)
    draft = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]])
    accepted, following = verify.greedy(draft, target, torch.tensor([3, 3, 3, 1, 0]))
    assert accepted.tolist() == [3, 1, 0, 1, 0]
    assert following.tolist() == [4, 2, 1, 2, 1]


@pytest.mark.parametrize("rule", RULES)
def test_greedy_is_the_limit_of_the_sampling_rules(rule: Rule) -> None:
    """With one-hot target and draft every rule decides as `greedy`, whatever the uniforms."""
    g = torch.Generator().manual_seed(1)
    logits_p, logits_q = torch.randn(50, 4, 3, generator=g), torch.randn(50, 3, 3, generator=g)
    log_p, log_q = log_probs(logits_p, Law(0.0)), log_probs(logits_q, Law(0.0))
    draft, drafted = logits_q.argmax(-1), torch.randint(4, (50,), generator=g)
    ours = rule(draft, log_q, log_p, drafted, streams(50))
    want = verify.greedy(draft, logits_p.argmax(-1), drafted)
    assert torch.equal(ours[0], want[0]) and torch.equal(ours[1], want[1])


def test_no_draft_at_all() -> None:
    log_p = torch.tensor([[[0.4, 0.6]]]).log()
    none = torch.zeros(1, 0)
    for rule in RULES:
        law = outcome_law(rule, none.long(), torch.zeros(1, 0, 2), log_p, torch.tensor([0]))
        assert law.tolist() == [[pytest.approx([0.4, 0.6])]]
