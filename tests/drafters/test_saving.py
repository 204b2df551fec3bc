"""Saving costs nothing where the drafter trains, and leaves it as it was."""

import copy
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from draftsmith.data.parts import cpu_copy
from draftsmith.data.target import Target
from draftsmith.drafters.adapters import LoraSection
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import save_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
    ),
]


@pytest.fixture(params=["whole", "adapter"])
def draft(request: pytest.FixtureRequest, tiny_target: Target) -> CausalDrafter:
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), None)
    if request.param == "adapter":
        drafter.adapt(LoraSection(), "owner/base")
    return drafter.train()


def test_no_weight_is_copied_where_it_lies(
    draft: CausalDrafter, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, memo: Any) -> NoReturn:
        raise AssertionError("a second one on the same device")

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refuse)
    save_drafter(draft, tmp_path / "d", tiny_target, {})
    assert (tmp_path / "d" / "model.safetensors").exists()


@pytest.mark.parametrize("device", DEVICES)
def test_the_live_drafter_stays_where_and_as_it_is(
    draft: CausalDrafter, device: str, tiny_target: Target, tmp_path: Path
) -> None:
    draft.to(device)
    tensors, before = draft.state_dict(keep_vars=True), copy.deepcopy(draft.state_dict())
    save_drafter(draft, tmp_path / "d", tiny_target, {}, torch.bfloat16)
    after = draft.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert all(t.device.type == device for t in after.values())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(module.training for module in draft.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_on_the_cpu_is_the_model(draft: CausalDrafter, device: str) -> None:
    draft.to(device)
    twin: Any = cpu_copy(draft.model)
    mine, theirs = draft.model.state_dict(keep_vars=True), twin.state_dict(keep_vars=True)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, mine[name].cpu())
        assert tensor is not mine[name] and tensor.requires_grad == mine[name].requires_grad
    assert twin.get_output_embeddings().weight is twin.get_input_embeddings().weight
