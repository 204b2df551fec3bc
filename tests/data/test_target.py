"""Loading targets: logits rebuilt from final states, taps, end tokens, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import Target, load_target

IDS = torch.tensor([[3, 90, 14, 260, 41, 7, 77, 8, 19, 300, 5, 64], [9] * 12])


def run(target: Target, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Final states and taps of `IDS`."""
    with torch.no_grad():
        out = target.forward(IDS, target.new_cache(*IDS.shape), taps)
    return out.hidden, out.taps


def theirs(target: Target) -> Any:
    with torch.no_grad():
        return target.model(input_ids=IDS, use_cache=False, output_hidden_states=True)


def load(folder: Path, **options: Any) -> Target:
    return load_target(TargetSection(name=str(folder), device="cpu", **options), few_rows=False)


# ---- logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_stored_states_in_a_low_precision_target(
    target_folder: Callable[..., Path], dtype: str
) -> None:
    target = load(target_folder("llama"), dtype=dtype)
    hidden, _ = run(target)
    assert hidden.dtype == getattr(torch, dtype)
    assert torch.equal(target.logits(hidden.float()), target.logits(hidden))


def test_logits_are_rebuilt_from_final_states(any_target: Target) -> None:
    hidden, _ = run(any_target)
    logits = any_target.logits(hidden)
    assert logits.dtype == torch.float32
    assert logits.shape == (*IDS.shape, 400)
    assert (logits - theirs(any_target).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "option"),
    [(CohereConfig, {"logit_scale": 0.3}), (GraniteConfig, {"logits_scaling": 4})],
)
def test_scaled_logits(
    target_folder: Callable[..., Path], tmp_path: Path, kind: Any, option: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes, **heads, **special, **option))
    folder = shutil.copytree(target_folder(), tmp_path / "scaled")
    model.save_pretrained(folder)
    target = load(folder)
    difference = target.logits(run(target)[0]) - theirs(target).logits
    assert difference.abs().max() < 1e-4


def test_few_row_layers_change_nothing(target_folder: Callable[..., Path]) -> None:
    plain = load(target_folder())
    fast = load_target(TargetSection(name=str(target_folder()), device="cpu"))
    assert any(type(m).__name__ == "FewRowsLinear" for m in fast.model.modules())
    one = IDS[:1, :4]
    with torch.no_grad():
        a = plain.logits(plain.forward(one, plain.new_cache(1, 4)).hidden)
        b = fast.logits(fast.forward(one, fast.new_cache(1, 4)).hidden)
    assert (a - b).abs().max() < 1e-4


def test_padding_ids_get_no_logits(load_tiny: Callable[..., Target]) -> None:
    padded = load_tiny("llama", vocab_size=448)
    assert padded.vocab_size == 400
    logits = padded.logits(run(padded)[0])
    assert logits.shape[-1] == 400
    assert (logits - theirs(padded).logits[..., :400]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_no_reason_to_refuse(
    any_target: Target, load_tiny: Callable[..., Target], tmp_path: Path, dtype: str
) -> None:
    any_target.model.save_pretrained(tmp_path)
    any_target.tokenizer.save_pretrained(tmp_path)
    target = load(tmp_path, dtype=dtype)
    assert target.dtype == getattr(torch, dtype)
    assert target.logits(run(target)[0]).dtype == torch.float32


def test_wrong_logits_are_refused(target_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A Llama does not cap its logits, whatever its config says."""
    folder = shutil.copytree(target_folder(), tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 1.0}))
    with pytest.raises(UserError, match=r"'odd' \(llama\).*cannot be rebuilt"):
        load(folder)


def test_a_missing_final_norm_is_noticed(
    load_tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the probe is for: states from before the final norm give other logits."""
    target = load_tiny()
    hidden, _ = run(target)
    before = theirs(target).hidden_states
    assert torch.allclose(hidden, before[-1], atol=1e-5)
    states: list[Tensor] = []
    target.body.norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    run(target)
    assert (target.logits(states[0]) - theirs(target).logits).abs().max() > 0.1


# ---- taps


def test_tap_i_is_the_output_of_layer_i(any_target: Target) -> None:
    every = theirs(any_target).hidden_states  # embedding, outputs of layers 0.., the last normed
    _, taps = run(any_target, (0, 1, 2))
    expected = torch.cat([every[1], every[2], every[3]], -1)
    assert taps.shape == (*IDS.shape, 3 * 32)
    assert torch.allclose(taps, expected, atol=1e-5)


def test_taps_come_in_the_order_asked_for(tiny_target: Target) -> None:
    _, there = run(tiny_target, (0, 2))
    _, back = run(tiny_target, (2, 0))
    assert torch.equal(there, torch.cat([back[..., 32:], back[..., :32]], -1))
    assert run(tiny_target)[1].shape == (*IDS.shape, 0)


# ---- what is known about a target


def test_provenance(tiny_target: Target, load_tiny: Callable[..., Target]) -> None:
    known = tiny_target.provenance
    assert known["source"] == "local folder"
    assert known["model_type"] == "llama"
    assert known["dtype"] == "float32"
    assert known["parameters"] == sum(p.numel() for p in tiny_target.model.parameters())
    assert not any(p.requires_grad for p in tiny_target.model.parameters())
    assert not tiny_target.model.training
    assert load_tiny().provenance["weights"] == known["weights"]
    other = load_tiny("llama", rms_norm_eps=0.5)
    assert other.provenance["tokenizer"] == known["tokenizer"]
    assert load_tiny("llama", intermediate_size=40).provenance["weights"] != known["weights"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"eos_token_id": [2, 0]}, (2, 0)), ({"eos_token_id": 0}, (0,)), ({}, (2,))],
)
def test_end_tokens_come_from_the_generation_config(
    target_folder: Callable[..., Path],
    tmp_path: Path,
    settings: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    folder = shutil.copytree(target_folder(), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert load(folder).eos_ids == expected


def test_sampling_settings_without_flag_do_not_stop_loading(
    target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(target_folder(), tmp_path / "model")
    settings = {
        "eos_token_id": 2,
        "temperature": 0.6,
        "top_p": 0.9,
        "cache_implementation": "static",
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert load(folder).eos_ids == (2,)


# ---- refused


def test_unknown_name() -> None:
    with pytest.raises(UserError, match=r"'\./no-such-folder'.*target\.name takes") as caught:
        load_target(TargetSection(name="./no-such-folder"))
    assert "\n" not in str(caught.value)


def test_unknown_device(target_folder: Callable[..., Path]) -> None:
    for device in ("banana", "cuda:99"):
        with pytest.raises(UserError, match=rf"target\.device '{device}'"):
            load_target(TargetSection(name=str(target_folder()), device=device))


def test_cut_off_weights(target_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(target_folder(), tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot load target"):
        load(folder)


def test_missing_weights_are_not_left_random(
    target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(target_folder(), tmp_path / "holes")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot load target"):
        load(tmp_path)
