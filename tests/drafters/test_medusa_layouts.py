"""Medusa heads that others publish, for vLLM or their own way, say what their weights say."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from published import TOKENS, medusa_for_vllm, medusa_native
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter, start_identity

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]

SHUFFLED = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))[:60]


def drafted(drafter: Drafter, state: Tensor, steps: int) -> list[Tensor]:
    """Logits over all tokens of each draft step behind one state of the target; -inf if none."""
    working = drafter.start(1, 40)
    found = []
    with torch.no_grad():
        drafter.commit(working, torch.tensor([[5]]), [1], state.view(1, 1, -1))
        for k in range(steps):
            logits = (
                drafter.extend(working, torch.tensor([[7 + k]]))[0, 0]
                if k
                else drafter.first(working)[0]
            )
            wide = torch.full((TOKENS,), -torch.inf)
            wide[slice(TOKENS) if drafter.draft_ids is None else drafter.draft_ids] = logits
            found.append(wide)
    return found


def expected(
    tensors: dict[str, Tensor], state: Tensor, block: str, output: str, heads: int, layers: int
) -> list[Tensor]:
    """By the formula; names have places for the head, and the block's layer and kind of tensor."""
    found = []
    for h in range(heads):
        x = state
        for i in range(layers):
            bias = tensors.get(block.format(h, i, "bias"), torch.zeros(()))
            x = x + F.silu(tensors[block.format(h, i, "weight")] @ x + bias)
        found.append(tensors[output.format(h)] @ x)
    return found


def assert_says(drafter: Drafter, logits: list[Tensor], state: Tensor) -> None:
    assert drafter.max_draft_tokens == len(logits) and drafter.taps == (4,)
    for one, two in zip(drafted(drafter, state, len(logits)), logits, strict=True):
        assert torch.equal(one == -torch.inf, two == -torch.inf)
        assert (one - two)[two > -torch.inf].abs().max() < 1e-5


VLLM: dict[str, dict[str, Any]] = {
    "plain": {},
    "several layers": {"layers": 2, "heads": 4},
    "biases": {"bias": True, "layers": 2},
    "one head's rows": {"original": True},
    "truncated": {"map": SHUFFLED},
    "truncated, rows of all": {"map": SHUFFLED, "whole_heads": True},
    "truncated, one head's": {"map": SHUFFLED.sort().values, "original": True},
    "prefixed": {"prefix": "medusa_heads."},
}


@pytest.mark.parametrize("kind", VLLM)
def test_heads_for_vllm(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    options = VLLM[kind]
    tensors = medusa_for_vllm(tmp_path / "d", **options)
    state = torch.linspace(-2, 2, 32).sin()
    heads, layers = options.get("heads", 3), options.get("layers", 1)
    rows = "lm_heads.0.weight" if options.get("original") else "lm_heads.{}.weight"
    logits = expected(tensors, state, "blocks.{}.layers.{}.{}", rows, heads, layers)
    if (map := tensors.get("token_map")) is not None:
        wide = [torch.full((TOKENS,), -torch.inf) for _ in logits]
        for one, two in zip(wide, logits, strict=True):
            one[map] = two[map] if len(two) == TOKENS else two
        logits = wide
    drafter = load_drafter(tmp_path / "d", tiny_target)
    assert drafter.family == "medusa"
    assert_says(drafter, logits, state)
    # And written again, whatever way they were written.
    again = load_drafter(save_drafter(drafter, tmp_path / "e", tiny_target, {}), tiny_target)
    assert_says(again, logits, state)
    assert again.options == drafter.options


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_what_is_written_for_vllm(
    shared: bool, reduced: bool, tiny_target: Target, tmp_path: Path
) -> None:
    """Names, shapes and settings as its reader asks for them; biases are declared."""
    ids = SHUFFLED.sort().values if reduced else None
    config = MedusaConfig(num_heads=2, shared_head=shared)
    drafter = MedusaDrafter.from_target(tiny_target, config, ids)
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {}, torch.bfloat16)
    raw, tensors = json.loads((folder / "config.json").read_text()), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = (list(tensor.shape), tensor.dtype)
    size = 60 if reduced else TOKENS
    half = torch.bfloat16
    names = {f"blocks.{h}.layers.0.weight": ([32, 32], half) for h in range(2)}
    names |= {f"blocks.{h}.layers.0.bias": ([32], half) for h in range(2)}
    names |= {f"lm_heads.{h}.weight": ([size, 32], half) for h in range(1 if shared else 2)}
    assert tensors == names | ({"token_map": ([60], torch.int64)} if reduced else {})
    assert raw == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": TOKENS,
        "truncated_vocab_size": size,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "torch_dtype": "bfloat16",
    }


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_heads_of_their_authors(
    layers: int, pickled: bool, tiny_target: Target, tmp_path: Path
) -> None:
    tensors = medusa_native(tmp_path / "d", layers=layers, pickled=pickled)
    state = torch.linspace(-2, 2, 32).sin()
    logits = expected(tensors, state, "{}.{}.linear.{}", f"{{}}.{layers}.weight", 3, layers)
    drafter = load_drafter(tmp_path / "d", tiny_target)
    assert_says(drafter, logits, state)
    folder = save_drafter(drafter, tmp_path / "e", tiny_target, {})
    assert not list(folder.glob("*.pt")), "no pickle is written"
    assert_says(load_drafter(folder, tiny_target), logits, state)


@pytest.mark.parametrize("pickled", [True, False])
def test_a_config_that_tells_of_fewer_heads(
    pickled: bool, tiny_target: Target, tmp_path: Path
) -> None:
    """As that of the first ones published does: what lies in the file is there."""
    medusa_native(tmp_path / "d", heads=5, said=2, pickled=pickled)
    assert load_drafter(tmp_path / "d", tiny_target).max_draft_tokens == 5


def test_a_pickle_in_the_old_container(tiny_target: Target, tmp_path: Path) -> None:
    tensors = medusa_native(tmp_path / "d")
    path = tmp_path / "d" / "medusa_lm_head.pt"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert load_drafter(tmp_path / "d", tiny_target).max_draft_tokens == 3


class Harm:
    """What a pickle can do when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize("harmful", [False, True])
def test_nothing_but_tensors_is_taken_out_of_a_pickle(
    harmful: bool, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    medusa_native(tmp_path / "d")
    path = tmp_path / "d" / "medusa_lm_head.pt"
    if harmful:
        path.write_bytes(pickle.dumps(Harm()))
    else:
        torch.save({"0.0.linear.weight": [1.0, 2.0]}, path)
    with pytest.raises(UserError, match="is damaged" if harmful else "no table of tensors"):
        load_drafter(tmp_path / "d", tiny_target)
    assert not (tmp_path / "harmed").exists()


# ---- going on


@pytest.mark.parametrize("kind", ["for vLLM", "safetensors", "pickle"])
def test_training_goes_on_from_them(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    if kind == "for vLLM":
        medusa_for_vllm(tmp_path / "d", map=SHUFFLED)
    else:
        medusa_native(tmp_path / "d", pickled=kind == "pickle")
    section = {"family": "medusa", "start": str(tmp_path / "d")}
    _, config = family_config(section, "r.yaml")
    drafter: Any = new_drafter(config, tiny_target, [])
    published = load_drafter(tmp_path / "d", tiny_target)
    state = torch.linspace(-2, 2, 32).sin()
    assert_says(drafter, drafted(published, state, 3), state)
    assert drafter.training and len(drafter.trainable()) == len(list(drafter.parameters()))
    assert start_identity(config)
    _, other = family_config(section | {"num_heads": 4}, "r.yaml")
    with pytest.raises(UserError, match=r"drafter\.num_heads 4 is another than the 3"):
        new_drafter(other, tiny_target, [])


def test_factors_of_logits_go_into_the_heads(tiny_target: Target, tmp_path: Path) -> None:
    """vLLM multiplies by it, and what is written says none."""
    tensors = medusa_for_vllm(tmp_path / "d", map=SHUFFLED)
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logit_scale": 0.25}))
    state = torch.linspace(-2, 2, 32).sin()
    logits = expected(tensors, state, "blocks.{}.layers.{}.{}", "lm_heads.{}.weight", 3, 1)
    drafter = load_drafter(tmp_path / "d", tiny_target)
    for one, two in zip(drafted(drafter, state, 3), logits, strict=True):
        assert (one[SHUFFLED] - 0.25 * two).abs().max() < 1e-5
    folder = save_drafter(drafter, tmp_path / "e", tiny_target, {})
    assert_says(load_drafter(folder, tiny_target), drafted(drafter, state, 3), state)


# ---- what does not fit


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 24}, r"states of width 24, those of '.*' have 32"),
        ({"vocab_size": 399, "truncated_vocab_size": 399}, r"for 399 tokens, '.*' has 400$"),
        ({"num_heads": None}, "'num_heads' is None, must be a number above 0"),
        ({"num_heads": True}, "'num_heads' is True, must be a number above 0"),
        (
            {"truncated_vocab_size": "x"},
            "'truncated_vocab_size' is x, must be a number from 1 to 400",
        ),
        ({"truncated_vocab_size": 500}, "is 500, must be a number from 1 to 400"),
        ({"logit_scale": -1}, "'logit_scale' is -1, must be a number above 0"),
    ],
)
def test_another_target(
    changes: dict[str, Any], said: str, tiny_target: Target, tmp_path: Path
) -> None:
    medusa_for_vllm(tmp_path / "d")
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=said):
        load_drafter(tmp_path / "d", tiny_target)


@pytest.mark.parametrize("map", [torch.tensor([3, 5, 5]), torch.tensor([3, 5, TOKENS])])
def test_a_map_of_no_vocabulary(map: Tensor, tiny_target: Target, tmp_path: Path) -> None:
    medusa_for_vllm(tmp_path / "d", map=map)
    with pytest.raises(UserError, match="'token_map' must name 3 different tokens below 400"):
        load_drafter(tmp_path / "d", tiny_target)
