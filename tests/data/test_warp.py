"""The serving law and the inverse-CDF draw."""

import math

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.warp import Law, log_probs, pick, sample

INF = math.inf


def test_labels() -> None:
    assert Law().label == "T=1"
    assert Law(0.0).label == "T=0"
    assert Law(0.7, top_k=50, top_p=0.9).label == "T=0.7 top_k=50 top_p=0.9"
    assert Law(1.0, min_p=0.05, typical_p=0.8).label == "T=1 min_p=0.05 typical_p=0.8"


def test_laws_that_draw_alike_are_equal() -> None:
    assert Law(0, top_k=50, top_p=0.9, min_p=0.1, typical_p=0.5) == Law(0.0)
    assert not Law(0.5).truncates and not Law(0, top_k=5).truncates
    for cut in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}):
        assert Law(**cut).truncates and Law(**cut) != Law()  # type: ignore[arg-type]
    assert Law(1) == Law(1.0)
    assert Law(1.0, top_k=5) != Law(1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("temperature", 1e-40),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("typical_p", 0.0),
        ("typical_p", math.nan),
    ],
)
def test_bad_laws_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        Law(**{name: value})


def test_plain_law_is_softmax() -> None:
    logits = torch.randn(2, 3, 11)
    assert torch.allclose(log_probs(logits, Law()), logits.log_softmax(-1))
    half = log_probs(logits.bfloat16(), Law(0.5))
    assert half.dtype == torch.float32
    assert torch.allclose(half, (logits.bfloat16().float() / 0.5).log_softmax(-1))
    assert log_probs(logits.double(), Law()).dtype == torch.float64


def test_greedy_is_one_hot_and_the_lowest_id_wins() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, -INF]])
    assert log_probs(logits, Law(0.0)).exp().tolist() == [[0, 1, 0], [1, 0, 0]]


def test_truncation_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    top_k = log_probs(logits, Law(top_k=2)).exp()
    assert torch.allclose(top_k, torch.tensor([[0.625, 0.375, 0, 0]]))
    top_p = log_probs(logits, Law(top_p=0.9)).exp()
    assert torch.allclose(top_p, torch.tensor([[0.5, 0.3, 0.15, 0]]) / 0.95)
    min_p = log_probs(logits, Law(min_p=0.4)).exp()
    assert torch.allclose(min_p, torch.tensor([[0.625, 0.375, 0, 0]])), "0.2 is the least"
    typical = log_probs(logits, Law(typical_p=0.2)).exp()
    assert torch.allclose(typical, torch.tensor([[0, 1.0, 0, 0]])), "nearest to the entropy"
    everything = log_probs(logits, Law(top_k=100)).exp()
    assert torch.allclose(everything, logits.exp())
    # In the order of generate: temperature first, so a hot law keeps more under top-p.
    hot = log_probs(logits, Law(100.0, top_p=0.9)).exp()
    assert (hot > 0).all()


def test_sample_is_the_inverse_of_the_cumulative_law() -> None:
    log_p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log().expand(7, -1)
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert sample(log_p, u).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_sample_frequencies_and_independence_of_rows() -> None:
    log_p = torch.randn(1, 9).log_softmax(-1)
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    ids = sample(log_p.expand(len(u), -1), u)
    assert torch.allclose(ids.bincount(minlength=9) / len(u), log_p[0].exp(), atol=2e-5)
    assert ids[31_337].item() == sample(log_p, u[31_337:31_338]).item()


def test_no_zero_probability_token_however_small_the_rest() -> None:
    weights = torch.tensor([[0.0, 1e-300, 0.0, 1e-300, 0.0]], dtype=torch.float64)
    for u in (0.0, 0.499, 0.5, 1 - 2.0**-53):
        assert pick(weights, torch.tensor([u], dtype=torch.float64)).item() in (1, 3)
    third = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]).log()  # float32: sums to 1 + 3e-8
    assert sample(third, torch.tensor([1.0])).item() == 2
