"""The objectives against their closed forms, in float64, and at the edges of float32."""

import math

import pytest
import torch
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.train import losses

INF = math.inf
DIVERGENCES = [name for name in losses.OBJECTIVES if name != "ce"]
BOUNDED = [name for name in DIVERGENCES if name != "rkl"]


def draw(rows: int = 6, size: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(log p, draft logits), float64 [rows, size]."""
    g = torch.Generator().manual_seed(seed)
    log_p = torch.randn(rows, size, generator=g, dtype=torch.float64).mul(2).log_softmax(-1)
    return log_p, torch.randn(rows, size, generator=g, dtype=torch.float64).mul(2)


def reduced(log_p: Tensor) -> Tensor:
    """Drop two tokens of p, without renormalising."""
    return log_p[..., 2:]


def gradient(loss_of: object, logits: Tensor, *args: object, **params: object) -> Tensor:
    z = logits.clone().requires_grad_()
    loss_of(*args, z, **params).sum().backward()  # type: ignore[operator]
    assert z.grad is not None
    return z.grad


def parts(log_p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, q, 1_M, Q_M."""
    p, q = log_p.exp(), logits.softmax(-1)
    under = (q < p).to(p.dtype)
    return p, q, under, (q * under).sum(-1, keepdim=True)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("shorten", [False, True])
def test_gradient_is_that_of_the_value(name: str, shorten: bool) -> None:
    log_p, z = draw()
    if shorten:
        log_p, z = reduced(log_p), z[:, 2:]
    if name != "rkl":
        log_p[0, 3] = -INF
    z.requires_grad_()
    if name == "lk_hybrid":  # its weight is detached: the value must be taken with a fixed weight
        weight = torch.exp(-3.0 * losses.overlap(log_p, z)).detach()

        def fixed(logits: Tensor) -> Tensor:
            return weight * losses.fkl(log_p, logits) + (1 - weight) * losses.tv(log_p, logits)

        assert torch.autograd.gradcheck(fixed, (z,))
        ours = gradient(losses.lk_hybrid, z.detach(), log_p)
        assert torch.allclose(ours, torch.autograd.grad(fixed(z).sum(), z)[0], atol=1e-12)
        assert torch.allclose(losses.lk_hybrid(log_p, z), fixed(z))
        return
    loss_of = losses.objective(name)
    assert torch.autograd.gradcheck(lambda logits: loss_of(log_p, logits), (z,))


@pytest.mark.parametrize("shorten", [False, True])
def test_gradients_of_the_table(shorten: bool) -> None:
    log_p, z = draw(seed=1)
    if shorten:
        log_p, z = reduced(log_p), z[:, 2:]
    p, q, under, q_m = parts(log_p, z)
    mass = p.sum(-1, keepdim=True)
    overlap = losses.overlap(log_p, z)[:, None]
    rkl = losses.rkl(log_p, z)[:, None]
    grad_tv, grad_fkl = -q * (under - q_m), mass * q - p
    weight = torch.exp(-10.0 * overlap)
    s = (2 * z).softmax(-1)
    want = {
        "fkl": grad_fkl,
        "rkl": q * (q.log() - log_p - rkl),
        "tv": grad_tv,
        "nla": grad_tv / overlap,
        "lk_hybrid": weight * grad_fkl + (1 - weight) * grad_tv,
        "greedy_mass": 2 * s * (1 - p / (p * s).sum(-1, keepdim=True)),
    }
    params = {"lk_hybrid": {"eta": 10.0}, "greedy_mass": {"b": 2.0}}
    for name, closed in want.items():
        ours = gradient(losses.objective(name), z, log_p, **params.get(name, {}))
        assert torch.allclose(ours, closed, atol=1e-12), name


def test_gradient_norms() -> None:
    log_p, z = draw(rows=50, seed=2)
    _, _, _, q_m = parts(log_p, z)
    norm = {name: gradient(losses.objective(name), z, log_p).abs().sum(-1) for name in BOUNDED}
    overlap = losses.overlap(log_p, z)
    p, q = log_p.exp(), z.softmax(-1)
    assert torch.allclose(norm["fkl"], (p - q).abs().sum(-1))
    assert torch.allclose(norm["fkl"], 2 * (1 - overlap))
    assert torch.allclose(norm["tv"], 2 * (q_m * (1 - q_m)).squeeze(-1))
    assert norm["nla"].max() <= 2


def test_cold_draft_leaves_only_some_objectives_alive() -> None:
    log_p = torch.tensor([[0.0, -INF, -INF]])
    z = torch.tensor([[-40.0, 0.0, 0.0]])
    assert gradient(losses.tv, z, log_p).abs().sum() < 1e-15
    for name in ("nla", "fkl", "lk_hybrid"):
        assert gradient(losses.objective(name), z, log_p).abs().sum() > 1.9


def test_ce() -> None:
    _, z = draw()
    token = torch.tensor([3, 0, 6, -1, 2, 2])
    loss = losses.ce(z, token)
    want = torch.nn.functional.cross_entropy(z, token, ignore_index=-1, reduction="none")
    assert torch.allclose(loss, want)
    grad = gradient(lambda logits: losses.ce(logits, token), z)
    one_hot = torch.nn.functional.one_hot(token.clamp_min(0), 7)
    assert torch.allclose(grad, (z.softmax(-1) - one_hot) * (token >= 0)[:, None])


def test_nla_and_greedy_mass_on_a_one_hot_target_are_ce() -> None:
    _, z = draw()
    z = z.float()
    z[0] = torch.tensor([200.0, 0, 0, 0, 0, 0, 0])  # q(2) underflows float32
    token = torch.full((6,), 2)
    log_p = torch.full_like(z, -INF)
    log_p[:, 2] = 0
    want = gradient(lambda logits: losses.ce(logits, token), z)
    for loss_of in (losses.nla, losses.greedy_mass, losses.fkl):
        assert torch.allclose(loss_of(log_p, z), losses.ce(z, token))
        assert torch.allclose(gradient(loss_of, z, log_p), want)


def test_known_values_and_directions() -> None:
    """The worked example of a known fault: swapped weights, and zero at both ends."""
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    z = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log()
    forward = 0.7 * math.log(7) - 0.3 * math.log(3)
    reverse = 0.9 * math.log(3) - 0.1 * math.log(7)
    middle = 0.5 * (0.7 * math.log(1.75) + 0.3 * math.log(0.5))
    middle += 0.5 * (0.1 * math.log(0.25) + 0.9 * math.log(1.5))
    values = {
        (losses.fkl, None): forward,
        (losses.rkl, None): reverse,
        (losses.tv, None): 0.6,
        (losses.nla, None): -math.log(0.4),
        (losses.jsd, 0.0): forward,
        (losses.jsd, 0.5): middle,
        (losses.jsd, 1.0): reverse,
        (losses.lk_hybrid, None): math.exp(-1.2) * forward + (1 - math.exp(-1.2)) * 0.6,
        (losses.greedy_mass, None): -math.log(0.07 + 0.12 + 0.03),
    }
    for (loss_of, beta), value in values.items():
        params = {} if beta is None else {"beta": beta}
        assert loss_of(p.log(), z, **params).item() == pytest.approx(value, abs=1e-14)
        assert gradient(loss_of, z, p.log(), **params).abs().sum() > 0.1
    assert losses.overlap(p.log(), z).item() == pytest.approx(0.4, abs=1e-14)


def test_jsd_interpolates_between_both_divergences() -> None:
    log_p, z = draw(seed=3)
    small = 1e-6
    assert torch.allclose(losses.jsd(log_p, z, small) / small, losses.fkl(log_p, z), rtol=1e-4)
    assert torch.allclose(losses.jsd(log_p, z, 1 - small) / small, losses.rkl(log_p, z), rtol=1e-4)
    assert (losses.jsd(log_p, z, 0.3) <= math.log(2)).all()
    with pytest.raises(UserError, match="beta"):
        losses.jsd(log_p, z, 1.5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_value_does_not_depend_on_the_vocabulary_size(name: str) -> None:
    loss_of = losses.objective(name)
    p, z = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.1, 0.6, 0.3]).log()
    wide_p, wide_z = torch.full((49152,), -INF), torch.full((49152,), -INF)
    wide_p[[5, 700, 40000]], wide_z[[5, 700, 40000]] = p, z
    assert loss_of(wide_p, wide_z).item() == pytest.approx(loss_of(p, z).item(), rel=1e-6)
    ours = gradient(loss_of, wide_z, wide_p)[[5, 700, 40000]]
    assert torch.allclose(ours, gradient(loss_of, z, p), atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_reduced_vocabulary(name: str) -> None:
    log_p, z = draw(seed=4)
    log_p, z = reduced(log_p), z[:, 2:]
    log_p[1] = -INF  # nothing of p can be drafted here
    mass = log_p.exp().sum(-1)
    assert (losses.overlap(log_p, z) <= mass).all()
    loss_of = losses.objective(name)
    loss, grad = loss_of(log_p, z), gradient(loss_of, z, log_p)
    assert loss[1] == 0 and (grad[1] == 0).all()
    assert loss.isfinite().all() and (loss >= 0).all() and grad.isfinite().all()
    if name == "fkl":
        share = (log_p - mass.log()[:, None]).exp()
        kl = (share * (share.log() - z.log_softmax(-1))).sum(-1)
        rest = [0, 2, 3, 4, 5]
        assert torch.allclose(loss[rest], (mass * kl)[rest])
    if name == "tv":
        q_all = torch.cat([torch.zeros(6, 2, dtype=torch.float64), z.softmax(-1)], 1)
        full = 0.5 * (draw(seed=4)[0].exp() - q_all).abs().sum(-1)
        assert torch.allclose(loss[2:], full[2:])


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_stay_finite(name: str, dtype: torch.dtype) -> None:
    log_p = torch.tensor([0.5, 0.25, 0.25, 0.0]).log().repeat(5, 1).to(dtype)
    z = torch.zeros(5, 4)
    z[0] = log_p[0].float()  # p = q: every token is a tie
    z[1] = torch.tensor([-300.0, -300.0, -300.0, 0.0])  # q underflows where p lives
    z[2, 3] = -INF  # a masked logit
    z[3] = torch.tensor([0.0, -INF, 0.0, -INF])  # masked where p > 0
    z[4] = torch.tensor([-INF, -INF, -INF, 0.0])  # disjoint supports
    z = z.to(dtype)
    loss_of = losses.objective(name)
    loss, grad = loss_of(log_p, z), gradient(loss_of, z, log_p)
    assert loss.dtype == torch.float32 and not loss.isnan().any()
    assert grad.isfinite().all()
    assert loss[[0, 2]].isfinite().all()
    exact = dtype == torch.float32  # bfloat16 log-probabilities do not even sum to 1
    if exact and name != "greedy_mass":
        assert loss[0].abs() < 1e-6
    if exact and name in ("tv", "nla"):  # ties belong to p: min(p, q) is flat there
        assert (grad[0] == 0).all()
    if name in ("nla", "greedy_mass", "fkl"):
        assert loss[4] == INF
    if exact and name == "nla":
        assert loss[1].item() == pytest.approx(300 - math.log(3), rel=1e-6)


def test_a_tie_belongs_to_the_target() -> None:
    """Tokens 0 and 1 are over- and under-covered, 2 is a tie: only M = {1} is pulled up."""
    z = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64).log()
    log_p = z.log_softmax(-1)[[1, 0, 2]]
    want = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64) * torch.tensor([0.2, -0.8, 0.2])
    assert torch.allclose(gradient(losses.tv, z, log_p), want)
    assert torch.allclose(gradient(losses.nla, z, log_p), want / 0.9)
    assert torch.allclose(-gradient(losses.overlap, z, log_p), want)


def test_reverse_kl_outside_the_support_is_infinite_without_poison() -> None:
    log_p = torch.tensor([[0.0, -INF], [math.log(0.5), math.log(0.5)]])
    z = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert losses.rkl(log_p, z)[0] == INF and losses.rkl(log_p, z)[1].isfinite()
    grad = gradient(losses.rkl, z, log_p)
    assert (grad[0] == 0).all() and (grad[1] != 0).all()


def test_broken_logits_are_not_hidden() -> None:
    log_p, z = draw()
    z[0, 0] = math.nan
    for name in DIVERGENCES:
        assert losses.objective(name)(log_p, z)[0].isnan(), name
    assert losses.overlap(log_p, z)[0].isnan()


def test_no_gradient_reaches_the_target() -> None:
    log_p, z = draw()
    log_p.requires_grad_()
    for name in DIVERGENCES:
        losses.objective(name)(log_p, z.requires_grad_()).sum().backward()
    assert log_p.grad is None


def test_unknown_objective_lists_what_exists() -> None:
    with pytest.raises(UserError, match=r"'kl'.*lk_hybrid"):
        losses.objective("kl")
    with pytest.raises(UserError, match="at least 1"):
        losses.greedy_mass(*draw(), b=0.5)
