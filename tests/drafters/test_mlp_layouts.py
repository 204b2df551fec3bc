"""MLP speculators that others publish say what their weights say, and ours are written alike."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from published import TOKENS, mlp_speculator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]

WORDS = [5, 7, 390, 41, 2]
KINDS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "tied, written for every step": {"tied": True, "copies": True, "steps": 4},
    "tied, two steps": {"tied": True, "steps": 2},
    "scaled": {"scaled": True, "inner": 32},
    "one step": {"steps": 1},
}


def drafted(drafter: Drafter, state: Tensor, steps: int) -> Tensor:
    """Logits `[steps, V]` behind one state of the target and known words."""
    working = drafter.start(1, 40)
    with torch.no_grad():
        drafter.commit(working, torch.tensor([WORDS[:1]]), [1], state.view(1, 1, -1))
        found = [drafter.first(working)[0]]
        for word in WORDS[1:steps]:
            found.append(drafter.extend(working, torch.tensor([[word]]))[0, 0])
    return torch.stack(found)


def expected(
    tensors: dict[str, Tensor], state: Tensor, steps: int, tied: bool, scaled: bool
) -> Tensor:
    """As vLLM computes it."""
    own = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    inner = own["emb.0.weight"].shape[1]
    share = 0.5 ** (0.5 / steps)
    mix = math.sqrt((1 - share**2) * (inner / 2))

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    if scaled:
        state = normed(state) / 2**0.5
    found = []
    for i in range(steps):
        at, projected = (0, min(i, 1)) if tied else (i, i)
        state = own[f"proj.{projected}.weight"] @ state
        state = state + mix / share * own[f"emb.{at}.weight"][WORDS[i]]
        state = F.gelu(own[f"ln.{at}.weight"] * normed(state) + own[f"ln.{at}.bias"])
        found.append(own[f"head.{at}.weight"] @ state)
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_published_ones(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    options = KINDS[kind]
    tensors = mlp_speculator(tmp_path / "d", **options)
    steps, state = options.get("steps", 3), torch.linspace(-2, 2, 32).sin()
    tied, scaled = bool(options.get("tied")), bool(options.get("scaled"))
    logits = expected(tensors, state, steps, tied, scaled)
    drafter = load_drafter(tmp_path / "d", tiny_target)
    assert (drafter.family, drafter.taps, drafter.max_draft_tokens) == ("mlp", (4,), steps)
    assert (drafted(drafter, state, steps) - logits).abs().max() < 1e-5
    again = load_drafter(save_drafter(drafter, tmp_path / "e", tiny_target, {}), tiny_target)
    assert torch.equal(drafted(again, state, steps), drafted(drafter, state, steps))
    assert again.options == drafter.options


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written(tied: bool, tiny_target: Target, tmp_path: Path) -> None:
    config = MLPConfig(n_predict=3, inner_dim=24, tie_weights=tied, scale_input=True)
    drafter = MLPDrafter.from_target(tiny_target, config, None)
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {}, torch.bfloat16)
    found = load_file(folder / "model.safetensors")
    own = range(1 if tied else 3)
    shapes = {f"speculator.{n}.{i}.weight": [TOKENS, 24] for n in ("emb", "head") for i in own}
    shapes |= {f"speculator.ln.{i}.{n}": [24] for n in ("weight", "bias") for i in own}
    for i in range(2 if tied else 3):
        shapes[f"speculator.proj.{i}.weight"] = [24, 24 if i else 32]
    assert {name: list(tensor.shape) for name, tensor in found.items()} == shapes
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": TOKENS,
        "emb_dim": 32,
        "inner_dim": 24,
        "n_predict": 3,
        "top_k_tokens_per_head": [1, 1, 1],
        "n_candidates": 1,
        "tie_weights": tied,
        "scale_input": True,
        "torch_dtype": "bfloat16",
    }


def test_training_goes_on_from_one(tiny_target: Target, tmp_path: Path) -> None:
    mlp_speculator(tmp_path / "d", tied=True)
    section: dict[str, Any] = {"family": "mlp", "start": str(tmp_path / "d")}
    _, config = family_config(section, "r.yaml")
    drafter: Any = new_drafter(config, tiny_target, [])
    state = torch.linspace(-2, 2, 32).sin()
    published = load_drafter(tmp_path / "d", tiny_target)
    assert torch.equal(drafted(drafter, state, 3), drafted(published, state, 3))
    assert drafter.training and len(drafter.trainable()) == 6
    _, other = family_config(section | {"tie_weights": False}, "r.yaml")
    with pytest.raises(UserError, match=r"drafter\.tie_weights False is another than the True"):
        new_drafter(other, tiny_target, [])


def test_copies_of_tied_weights_must_be_copies(tiny_target: Target, tmp_path: Path) -> None:
    tensors = mlp_speculator(tmp_path / "d", tied=True, copies=True)
    tensors["speculator.proj.2.weight"] += 1e-3
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    said = r"'speculator\.proj\.2\.weight' is another than 'speculator\.proj\.1\.weight'"
    with pytest.raises(UserError, match=said):
        load_drafter(tmp_path / "d", tiny_target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"emb_dim": 24}, r"states of width 24, those of '.*' have 32"),
        ({"vocab_size": 500}, r"for 500 tokens, '.*' has 400$"),
        ({"n_predict": "three"}, "'n_predict' is three, must be a number above 0"),
        ({"n_predict": True}, "'n_predict' is True, must be a number above 0"),
        ({"inner_dim": "wide"}, "'inner_dim' is wide, must be a number above 0"),
        ({"inner_dim": -3}, "'inner_dim' is -3, must be a number above 0"),
        ({"n_predict": 1, "tie_weights": True}, "tie_weights is true, and there is one step alone"),
    ],
)
def test_another_target(
    changes: dict[str, Any], said: str, tiny_target: Target, tmp_path: Path
) -> None:
    mlp_speculator(tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=said):
        load_drafter(tmp_path / "d", tiny_target)
