"""The estimator of rounds and survival against the decoding process itself, enumerated exactly."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftsmith.eval import verify
from draftsmith.eval.lossless import DecodingLaw, Tokens, decoding_law, target_law
from draftsmith.train import accepted_length as al

EOS, SIZE = 0, 3
RULES = {
    "token": (verify.token, al.survival_token),
    "block": (verify.block, al.survival_block),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def table(seed: int, one_hot: bool = False) -> Callable[..., Tensor]:
    """A law [V] for each history (or pair of start and draft), no two alike."""

    def of(*history: Tokens) -> Tensor:
        digest = sum((t + 1) * 5**i for i, t in enumerate(sum(history, ())))
        digest += 10_000_019 * seed + 7_368_787 * len(history[0])
        logits = torch.randn(SIZE, generator=torch.Generator().manual_seed(digest)).double()
        logits[EOS] -= 1.0  # so that outputs of every length have weight
        if one_hot:
            return torch.nn.functional.one_hot(logits.argmax(), SIZE).double()
        return logits.softmax(-1)

    return of


@dataclass(frozen=True)
class Samples:
    """Every output of the target, with its probability, as a padded batch."""

    weight: Tensor  # [B]
    length: Tensor  # [B]
    log_ratio: Tensor  # [B, N, γ]


def every_sample(
    p: Callable[..., Tensor], q: Callable[..., Tensor], max_tokens: int, gamma: int
) -> Samples:
    outputs = target_law(p, max_tokens, (EOS,))
    log_ratio = torch.full((len(outputs), max_tokens, gamma), 7.0, dtype=torch.float64)  # padding
    for b, x in enumerate(outputs):
        for s, k in itertools.product(range(len(x)), range(gamma)):
            if s + k < len(x):
                token = x[s + k]
                log_ratio[b, s, k] = (q(x[:s], x[s : s + k])[token] / p(x[: s + k])[token]).log()
    weight = torch.tensor(list(outputs.values()), dtype=torch.float64)
    return Samples(weight, torch.tensor([len(x) for x in outputs]), log_ratio)


def by_start(values: Tensor, gamma: int) -> Tensor:
    """Per-token values `[B, N]` as each start of a draft LM sees them, `[B, N, γ]`."""
    return torch.nn.functional.pad(values, (0, gamma - 1)).unfold(1, gamma, 1)


def check(samples: Samples, m: Tensor, law: DecodingLaw, max_tokens: int) -> None:
    rounds, u = al.expected_rounds(m, samples.length)
    assert (samples.weight * rounds).sum().item() == pytest.approx(law.rounds, abs=1e-10)
    steps, gamma = m.shape[1:]
    budget = torch.full_like(samples.length, max_tokens)
    drafted = al.drafted_tokens(samples.length, budget, steps, gamma)
    weighted = u * samples.weight[:, None]
    accepted, attempts = al.survival(m, weighted, samples.length, drafted)
    assert attempts.sum(0).tolist() == pytest.approx(list(law.attempts), abs=1e-10)
    assert accepted.sum(0).tolist() == pytest.approx(list(law.accepted), abs=1e-10)
    tokens = samples.weight * samples.length
    tau = al.tokens_per_round(samples.weight * rounds, tokens)
    assert tau.item() == pytest.approx(tokens.sum().item() / law.rounds, abs=1e-10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_estimates_equal_the_decoding_process(rule: str, gamma: int) -> None:
    """End tokens anywhere, γ larger than what is left, q that depends on where a round began."""
    max_tokens = 6 if gamma < 3 else 5
    accept, survival = RULES[rule]
    p, q = table(1), table(2)
    law = decoding_law(p, q, accept, num_draft_tokens=gamma, max_tokens=max_tokens, eos=(EOS,))
    samples = every_sample(p, q, max_tokens, gamma)
    check(samples, survival(samples.log_ratio), law, max_tokens)


def test_estimates_equal_a_process_written_from_scratch() -> None:
    """Token verification step by step in plain Python, without the library's rules."""
    p, q, gamma, max_tokens = table(3), table(4), 3, 5

    def rounds_from(prefix: Tokens) -> float:
        if len(prefix) == max_tokens or EOS in prefix:
            return 0.0
        return 1.0 + emit(prefix, (), min(gamma, max_tokens - len(prefix) - 1))

    def emit(prefix: Tokens, taken: Tokens, left: int) -> float:
        here = p(prefix + taken)
        if EOS in taken:
            return 0.0
        if left == 0:
            return sum(float(here[v]) * rounds_from((*prefix, *taken, v)) for v in range(SIZE))
        draft = q(prefix, taken)
        kept = torch.minimum(here, draft)
        rest = here - kept  # P(refused and then redrawn as v)
        going_on = sum(float(kept[v]) * emit(prefix, (*taken, v), left - 1) for v in range(SIZE))
        ending = sum(float(rest[v]) * rounds_from((*prefix, *taken, v)) for v in range(SIZE))
        return going_on + ending

    samples = every_sample(p, q, max_tokens, gamma)
    rounds, _ = al.expected_rounds(al.survival_token(samples.log_ratio), samples.length)
    assert (samples.weight * rounds).sum().item() == pytest.approx(rounds_from(()), abs=1e-10)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_greedy_drafts_against_a_sampling_target(gamma: int) -> None:
    """A one-hot q survives exactly while it equals x."""
    p, q = table(5), table(6, one_hot=True)
    law = decoding_law(p, q, verify.token, num_draft_tokens=gamma, max_tokens=5, eos=(EOS,))
    samples = every_sample(p, q, 5, gamma)
    match = (samples.log_ratio > -math.inf).double()
    for survival in (al.survival_token, al.survival_block):
        m = survival(samples.log_ratio)
        check(samples, m, law, 5)
        assert torch.equal(m, match.cumprod(-1)), "1 while all match"


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_greedy_decoding(gamma: int) -> None:
    """T = 0 on both sides: one output, and the number of rounds can be counted by hand."""
    output, guesses = [1, 2, 1, 1, 2, 1, 2, 0], [1, 1, 1, 1, 2, 2, 2, 0]
    match = torch.tensor([[a == b for a, b in zip(output, guesses, strict=True)]])
    m = al.survival_token(by_start(match.double().log(), gamma))
    rounds, u = al.expected_rounds(m, torch.tensor([8]))
    starts, s = [], 0
    while s < 8:
        starts.append(s)
        same = itertools.takewhile(lambda i: i < 8 and match[0, i], range(s, s + gamma))
        s += min(len(list(same)) + 1, 8 - s)
    assert u[0].nonzero().flatten().tolist() == starts
    assert rounds.item() == len(starts)


def test_known_accepted_lengths() -> None:
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    ids = torch.cartesian_prod(torch.arange(2), torch.arange(2))  # [4, 2]
    chance = p[ids].prod(1)
    log_ratio = (p.flip(0) / p).log()[ids]
    token, block = (rule(log_ratio).sum(1) for rule in (al.survival_token, al.survival_block))
    assert (chance * token).sum().item() == pytest.approx(10 / 9, abs=1e-14)
    assert (chance * block).sum().item() == pytest.approx(11 / 9, abs=1e-14)


def test_rao_blackwell_has_the_same_mean_and_less_variance() -> None:
    gamma = 3
    g = torch.Generator().manual_seed(0)
    log_p, log_q = torch.randn(2, gamma, 4, generator=g).double().log_softmax(-1)
    ids = torch.cartesian_prod(*[torch.arange(4)] * gamma)  # [64, γ]
    place = torch.arange(gamma)
    chance = log_p.exp()[place, ids].prod(1)[:, None]  # [64, 1]
    log_ratio = (log_q - log_p)[place, ids]
    overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1).expand(64, -1)
    laws = log_p.expand(64, -1, -1), log_q.expand(64, -1, -1)
    pairs = [
        (al.survival_token(log_ratio), al.rao_blackwell_token(log_ratio, overlap)),
        (al.survival_block(log_ratio), al.rao_blackwell_block(log_ratio, *laws)),
    ]
    for plain, smooth in pairs:
        means = [(chance * m).sum(0) for m in (plain, smooth)]
        assert torch.allclose(*means, atol=1e-14)
        noise = [(chance * (m - means[0]) ** 2).sum(0) for m in (plain, smooth)]
        assert (noise[1] < noise[0]).all()


def test_a_plain_mean_over_starts_overstates() -> None:
    """Half of the text is easy, half is hard: rounds live mostly in the hard half."""
    gamma, half = 4, 3000
    rate = torch.cat([torch.full((half,), 0.9), torch.full((half,), 0.1)]).double()
    m = rate[:, None] ** torch.arange(1, gamma + 1)  # [N, γ]
    rounds, _ = al.expected_rounds(m[None], torch.tensor([2 * half]))
    easy, hard = ((1 - a ** (gamma + 1)) / (1 - a) for a in (0.9, 0.1))
    tau = al.tokens_per_round(rounds, torch.tensor([2 * half])).item()
    assert tau == pytest.approx(2 / (1 / easy + 1 / hard), rel=1e-3)
    assert 1 + m.sum(1).mean().item() == pytest.approx((easy + hard) / 2)
    assert tau < 0.7 * (easy + hard) / 2


@pytest.mark.parametrize("survival", [al.survival_token, al.survival_block])
def test_gradient_of_rounds(survival: Callable[[Tensor], Tensor]) -> None:
    """Exact against finite differences, in a padded batch; nothing flows into padding."""
    g = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(3, 7, 3, generator=g, dtype=torch.float64, requires_grad=True)
    length = torch.tensor([7, 4, 0])

    def rate(values: Tensor) -> Tensor:
        return al.expected_rounds(survival(values), length)[0].sum() / length.sum()

    assert torch.autograd.gradcheck(rate, (log_ratio,))
    rate(log_ratio).backward()
    assert log_ratio.grad is not None
    assert (log_ratio.grad[1, 4:] == 0).all() and (log_ratio.grad[2] == 0).all()
    assert (log_ratio.grad[0].abs() > 0).any()


def test_gradient_of_rounds_through_the_draft() -> None:
    """d E[rounds] / d logits by enumeration is the derivative of the true process."""
    p, max_tokens, gamma = table(7), 4, 2
    outputs = target_law(p, max_tokens, (EOS,))
    tokens = [torch.tensor(x) for x in outputs]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)  # [B, N]
    length = torch.tensor([len(x) for x in outputs])
    log_p = torch.zeros(padded.shape, dtype=torch.float64)
    for b, x in enumerate(outputs):
        for i, token in enumerate(x):
            log_p[b, i] = p(x[:i])[token].log()
    weight = torch.tensor(list(outputs.values()), dtype=torch.float64)

    def estimated(z: Tensor) -> Tensor:
        ratio = by_start(z.log_softmax(-1)[padded] - log_p, gamma)
        return (weight * al.expected_rounds(al.survival_token(ratio), length)[0]).sum()

    def true(z: Tensor) -> float:
        q = z.softmax(-1)
        options = {"num_draft_tokens": gamma, "max_tokens": max_tokens, "eos": (EOS,)}
        return decoding_law(p, lambda *_: q, verify.token, **options).rounds  # type: ignore[arg-type]

    z = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(estimated(z), z)
    step = 1e-5
    for i, shift in enumerate(step * torch.eye(3, dtype=torch.float64)):
        plain = z.detach()
        slope = (true(plain + shift) - true(plain - shift)) / (2 * step)
        assert grad[i].item() == pytest.approx(slope, abs=1e-8)
    assert grad.abs().max() > 0.01


def test_tokens_that_cannot_be_drafted() -> None:
    """q(x) = 0 ends every round there, with a finite gradient for the others; NaN stays seen."""
    log_ratio = torch.tensor([[-0.1, -math.inf, 0.5]]).requires_grad_()
    for survival in (al.survival_token, al.survival_block):
        m = survival(log_ratio)
        assert m[0].tolist() == pytest.approx([math.exp(-0.1), 0, 0])
        (grad,) = torch.autograd.grad(m.sum(), log_ratio)
        assert grad[0].tolist() == pytest.approx([math.exp(-0.1), 0, 0])
        assert survival(torch.tensor([math.nan])).isnan().all()


def test_drafted_tokens() -> None:
    # Cut by the budget; ended early, so that drafts run past the end; empty.
    length, budget = torch.tensor([4, 2, 0]), torch.tensor([4, 6, 5])
    drafted = al.drafted_tokens(length, budget, 4, 3)
    assert drafted.tolist() == [[3, 2, 1, 0], [3, 3, 0, 0], [0, 0, 0, 0]]
    nothing = al.expected_rounds(torch.zeros(1, 0, 3), torch.tensor([0]))
    assert nothing[0].tolist() == [0.0] and nothing[1].shape == (1, 0)


def test_what_each_start_sees() -> None:
    """Two replies of 1 + 3 and 1 + 1 tokens; nobody looks beyond a reply's end."""
    index, inside = al.start_index(torch.tensor([0, 4]), torch.tensor([3, 1]), 2)
    assert index.tolist() == [[[1, 2], [2, 3], [3, 0]], [[5, 0], [0, 0], [0, 0]]]
    values = 10.0 * torch.arange(2)[:, None] + torch.arange(6)  # [γ, R]
    seen = al.from_tokens(values, index, inside, fill=-1.0)
    assert seen.tolist() == [[[1, 12], [2, 13], [3, -1]], [[5, -1], [-1, -1], [-1, -1]]]
    back = al.to_tokens(seen, index, inside, 6)
    assert back.tolist() == [[0, 1, 2, 3, 0, 5], [0, 0, 12, 13, 0, 0]]


def test_position_weights_are_what_is_reached_through_each() -> None:
    q = torch.tensor([[[0.5, 0.2, 0.1], [1.0, 0.0, 0.7]]])
    inside = torch.tensor([[[True, True, True], [True, True, False]]])
    first = [0.75, 0.75 * 0.6, 0.75 * 0.6 * 0.55]  # q̃ = 0.5·q + 0.5
    found = al.position_weights(q.log(), inside, 0.5)
    assert found[0, 0].tolist() == pytest.approx([sum(first), sum(first[1:]), first[2]])
    assert found[0, 1].tolist() == pytest.approx([1.0 + 0.5, 0.5, 0.0])
    assert not al.position_weights(q.log().requires_grad_(), inside, 0.5).requires_grad


def test_the_independent_surrogate_is_biased_where_steps_hang_together() -> None:
    """Half of the places are easy and half are hard, for every step alike."""
    rate = torch.tensor([0.9, 0.1]).double()[:, None].expand(2, 3)  # [place, γ]
    truth = rate.cumprod(-1).sum(-1).mean()
    assert al.independent_length(rate[0]) == pytest.approx(0.9 + 0.81 + 0.729)
    assert float(al.independent_length(rate.mean(0))) < 0.7 * float(truth)


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_accepted_length_is_that_of_the_verifier(block: bool, gamma: int) -> None:
    """E[A] of one round, by the last-factor sum over samples and by the process itself."""
    p, q = table(8), table(9)
    rule = verify.block if block else verify.token
    total = 0.0
    for x in itertools.product(range(SIZE), repeat=gamma):
        laws_p = torch.stack([p(x[:k]) for k in range(gamma)])  # [γ, V]
        laws_q = torch.stack([q((), x[:k]) for k in range(gamma)])
        place, token = torch.arange(gamma), torch.tensor(x)
        ratio = (laws_q.log() - laws_p.log())[place, token][None]  # [1, γ]
        if block:
            terms = al.rao_blackwell_block(ratio, laws_p.log()[None], laws_q.log()[None])
        else:
            terms = al.rao_blackwell_token(ratio, torch.minimum(laws_p, laws_q).sum(-1)[None])
        weight = laws_p[place, token].prod()
        total += float(weight * al.accepted_length(terms, torch.ones_like(terms, dtype=torch.bool)))
    assert total == pytest.approx(first_round(p, q, rule, gamma), abs=1e-10)


def first_round(
    p: Callable[..., Tensor], q: Callable[..., Tensor], rule: object, gamma: int
) -> float:
    """E[A] of a round that begins at the beginning, from the verifier's own probabilities."""
    if rule is verify.token:
        return reached(p, q, (), gamma, 1.0)
    total = 0.0
    for x in itertools.product(range(SIZE), repeat=gamma):
        chance, joint, stay = 1.0, 1.0, []
        for k in range(gamma):
            here_p, here_q = p(x[:k]), q((), x[:k])
            chance *= float(here_q[x[k]])
            joint = min(1.0, joint * float(here_p[x[k]] / here_q[x[k]]))
            if k + 1 == gamma:
                stay.append(joint)
                continue
            after = float((joint * p(x[: k + 1]) - q((), x[: k + 1])).clamp_min(0).sum())
            stay.append(after / (after + 1 - joint) if after + 1 - joint > 0 else 1.0)
        longest, left = 0.0, 1.0
        for k in reversed(range(gamma)):  # the longest prefix that passes its own test
            longest += left * stay[k] * (k + 1)
            left *= 1 - stay[k]
        total += chance * longest
    return total


def reached(
    p: Callable[..., Tensor], q: Callable[..., Tensor], taken: Tokens, left: int, chance: float
) -> float:
    if left == 0:
        return 0.0
    kept = torch.minimum(p(taken), q((), taken))
    return sum(
        float(kept[v]) * chance + reached(p, q, (*taken, v), left - 1, chance * float(kept[v]))
        for v in range(SIZE)
    )
