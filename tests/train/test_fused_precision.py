"""The lean objectives in float32 against the eager ones in float64, on the benchmark's case."""

import copy

import pytest
import torch
from torch import Tensor

from draftsmith.scripts.bench_losses import FORMS, Case


def gradients(case: Case, form: str, name: str) -> list[Tensor]:
    case.hidden.grad = case.weight.grad = None
    FORMS[form](case, name)
    assert case.hidden.grad is not None and case.weight.grad is not None
    return [case.hidden.grad.double(), case.weight.grad.double()]


def in_double(case: Case) -> Case:
    """The same case with every float in float64."""
    double = copy.copy(case)
    for name, value in vars(case).items():
        if torch.is_tensor(value) and value.is_floating_point():
            exact = value.detach().double().requires_grad_(value.requires_grad)
            setattr(double, name, exact)
    return double


@pytest.mark.parametrize(
    "name", ["accepted_length token", "accepted_length block", "rounds token", "rounds block"]
)
def test_lean_gradients_are_right_to_one_part_in_a_hundred_thousand(name: str) -> None:
    """Eager in float32 is not: where min(p, q) is nearly tied it takes the other branch."""
    torch.manual_seed(0)
    case = Case(128, 4096, False)
    exact = gradients(in_double(case), "eager", name)
    for mine, wanted in zip(gradients(case, "lean", name), exact, strict=True):
        assert float((mine - wanted).abs().max() / wanted.abs().max()) < 1e-5
        assert float((mine - wanted).norm() / wanted.norm()) < 1e-5
