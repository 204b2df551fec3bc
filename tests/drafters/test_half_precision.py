"""A head kept in half precision tells places apart as exactly as engines do."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from starting import begun, edit_weights
from torch import Tensor

from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.about import About
from draftsmith.drafters.batch import collate
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.formats import eagle3_flat

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = 512


@pytest.fixture(scope="module")
def target(load_tiny: Callable[..., Target]) -> Target:
    """Of one head as wide as those of real models are: narrow ones turn by few angles."""
    return load_tiny(
        hidden_size=64, head_dim=64, num_attention_heads=1, num_key_value_heads=1,
        max_position_embeddings=1024,
    )  # fmt: skip


@pytest.fixture(scope="module")
def drafter(target: Target) -> Eagle3Drafter:
    torch.manual_seed(0)
    head = Eagle3Drafter.from_target(target, Eagle3Config((0, 1, 2), 400), torch.arange(400))
    with torch.no_grad():  # sharp attention, for which places matter
        for name in ("q_proj", "k_proj"):
            getattr(head.midlayer.self_attn, name).weight.mul_(2.0)
    return head.eval()


@pytest.fixture(scope="module")
def half(drafter: Eagle3Drafter, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half") / "d"
    return save_drafter(drafter, folder, target, {}, torch.bfloat16)


def logits_far_out(head: Eagle3Drafter) -> Tensor:
    """Draft logits `[n, V]` of the last tokens of a long text, in float32."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 400, (LONG,), generator=generator)
    taps = torch.randn(LONG - 1, 3 * 64, generator=generator)
    states = States(torch.zeros(12, 64), torch.zeros(12), taps)
    record = Record("p", "a", "train", Law(), 0, "stop", ids, LONG - 12, states)
    with torch.no_grad():
        (step,) = head.unroll(collate([record], ["a"]), 1)
        return head.head(step.hidden).float()


def test_angles_stay_as_exact(drafter: Eagle3Drafter, half: Path, target: Target) -> None:
    exact = drafter.rotary.inv_freq
    assert not torch.equal(exact, exact.bfloat16().float()), "or there is nothing to lose"
    served = eagle3_flat.read_for(half, target, About())
    assert {p.dtype for p in served.parameters()} == {torch.bfloat16}
    for found in (served, load_drafter(half, target), begun(half, "eagle3", target)):
        assert isinstance(found, Eagle3Drafter)
        assert found.rotary.inv_freq.dtype == torch.float32
        assert torch.equal(found.rotary.inv_freq, exact)
        assert torch.equal(found.rotary.original_inv_freq, exact)


def test_far_tokens_are_read_as_in_full_precision(
    half: Path, drafter: Eagle3Drafter, target: Target, tmp_path: Path
) -> None:
    full = save_drafter(drafter, tmp_path / "full", target, {})
    rounded = load_file(half / "model.safetensors")
    whole = {n: t.float() if t.is_floating_point() else t for n, t in rounded.items()}
    edit_weights(full, lambda tensors: tensors.update(whole))  # the same weights, upcast
    near = copy.deepcopy(target)
    near.embedding.data.copy_(target.embedding.bfloat16())
    expected = logits_far_out(eagle3_flat.read_for(full, near, About()))
    served = eagle3_flat.read_for(half, near, About())
    scale = expected.abs().max()
    assert (logits_far_out(served) - expected).abs().max() < 0.04 * scale
    coarse = served.to(torch.bfloat16)  # angles included
    assert (logits_far_out(coarse) - expected).abs().max() > 0.1 * scale
    again = begun(half, "eagle3", target)
    assert (logits_far_out(again) - expected).abs().max() < 0.04 * scale
