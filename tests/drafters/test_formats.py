"""Engine layouts: what each engine's reader looks up, under the name it uses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.about import About
from draftsmith.drafters.borrowed import full_rope
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.formats import eagle3_flat, hf_causal
from draftsmith.drafters.formats.config import old_rope
from draftsmith.drafters.formats.fits import same_rounded

TAPS = (0, 1, 2)
IDS = torch.tensor([0, 1, 2, *range(5, 390, 7), 399])
WEIGHTS = "model.safetensors"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def head(target: Target, taps: tuple[int, ...] = TAPS) -> Eagle3Drafter:
    torch.manual_seed(0)
    return Eagle3Drafter.from_target(target, Eagle3Config(taps, len(IDS)), IDS)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture
def written(tiny_target: Target, tmp_path: Path) -> Path:
    eagle3_flat.write(head(tiny_target), tmp_path, torch.float32)
    return tmp_path


# ---- EAGLE-3


def test_what_engines_look_up(written: Path) -> None:
    config = config_of(written)
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": 400,  # the target's
        "draft_vocab_size": len(IDS),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_before_residual": False,
        "torch_dtype": "float32",
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rms_norm_eps"] == 1e-5


def test_layer_ids_in_both_conventions(written: Path, tiny_target: Target) -> None:
    """SGLang takes outputs of layers, vLLM the layer that reads them: one more."""
    config = config_of(written)
    nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    outer = config["eagle_aux_hidden_state_layer_ids"]
    assert (nested, outer) == ([0, 1, 2], [1, 2, 3])
    ids = torch.tensor([[4, 90, 7, 200]])
    inputs: list[torch.Tensor] = []
    hooks = [
        tiny_target.layers[i].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for i in outer  # what vLLM captures
    ]
    with torch.no_grad():
        taps = tiny_target.forward(ids, tiny_target.new_cache(1, 4), tuple(nested)).taps
    for hook in hooks:
        hook.remove()
    assert torch.equal(taps, torch.cat(inputs, -1))
    assert eagle3_flat.read_for(written, tiny_target, About()).taps == tuple(nested)


def test_tensors_by_name_and_shape(written: Path) -> None:
    shapes = {name: list(t.shape) for name, t in load_file(written / WEIGHTS).items()}
    assert shapes == {
        "fc.weight": [32, 96],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [len(IDS), 32],
        "d2t": [len(IDS)],
        "t2d": [400],
    }


def test_the_maps_of_the_draft_vocabulary(written: Path) -> None:
    tensors = load_file(written / WEIGHTS)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert [i + int(offset) for i, offset in enumerate(tensors["d2t"])] == IDS.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == IDS.tolist()


def test_rope_in_both_spellings(
    load_tiny: Callable[..., Target], tmp_path: Path, written: Path
) -> None:
    plain = config_of(written)
    assert plain["rope_theta"] == plain["rope_parameters"]["rope_theta"] == 10000.0
    assert plain["rope_scaling"] is None
    target = load_tiny("llama", rope_parameters=LLAMA3)
    for dtype in (torch.float32, torch.bfloat16):
        eagle3_flat.write(head(target), tmp_path, dtype)
        config = config_of(tmp_path)
        assert config["rope_theta"] == 500000.0  # what a reader of old looks up
        assert config["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
        assert config["rope_parameters"] == LLAMA3
        assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dropped", [("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_either_spelling_is_read(
    load_tiny: Callable[..., Target], tmp_path: Path, dropped: tuple[str, ...]
) -> None:
    target = load_tiny("llama", rope_parameters=LLAMA3)
    drafter = head(target)
    eagle3_flat.write(drafter, tmp_path, torch.float32)
    config = {k: v for k, v in config_of(tmp_path).items() if k not in dropped}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = eagle3_flat.read_for(tmp_path, target, About())
    assert torch.equal(read.rotary.inv_freq, drafter.rotary.inv_freq)


def test_rope_of_a_head_that_is_rotated_whole(load_tiny: Callable[..., Target]) -> None:
    """GPT-NeoX rotates a quarter of a head, Gemma-3 has a base for each kind of layer: an engine
    would apply to the draft what its config repeats of that."""
    neox = load_tiny("gpt_neox")
    assert neox.text_config.rope_parameters["partial_rotary_factor"] == 0.25
    assert head(neox).config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    gemma = load_tiny("gemma2")
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    gemma.text_config.rope_parameters = {**kinds, "sliding_attention": {"rope_theta": 1e4}}
    assert head(gemma).config.rope_parameters == kinds["full_attention"]
    gemma.text_config.rope_parameters = {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": 9}}
    assert full_rope(gemma.text_config) == {"rope_theta": 1e4}


def test_every_family_is_written_and_read(any_target: Target, tmp_path: Path) -> None:
    drafter = head(any_target)
    eagle3_flat.write(drafter, tmp_path, torch.float32)
    read = eagle3_flat.read_for(tmp_path, any_target, About())
    assert read.config.head_dim == drafter.config.head_dim
    assert torch.equal(read.rotary.inv_freq, drafter.rotary.inv_freq)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm_before_fc": True}, r"'input_norm\.weight' is missing"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "layer ids disagree"),
        ({"draft_vocab_size": 400}, r"'d2t' is \[59\], must be \[400\]"),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {}}, "is missing"),
        ({"eagle_aux_hidden_state_layer_ids": ["a"]}, r"is \['a'\], must be a list of numbers"),
        ({"eagle_config": [1]}, r"'eagle_config' is \[1\], must be a table"),
        ({"target_hidden_size": "wide"}, "'target_hidden_size' is wide, must be a number"),
        (
            {"hidden_size": 16, "target_hidden_size": 32},
            r"'fc\.weight' is \[32, 96\], must be \[16, 96\]",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    written: Path, tiny_target: Target, change: dict[str, Any], said: str
) -> None:
    (written / "config.json").write_text(json.dumps(config_of(written) | change), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        eagle3_flat.read_for(written, tiny_target, About())


@pytest.mark.parametrize("name", ["eagle_aux_hidden_state_layer_ids", "eagle_config"])
def test_either_convention_of_layer_ids_is_read(
    name: str, written: Path, tiny_target: Target
) -> None:
    """An empty list names none, as in what ModelOpt writes by default."""
    whole = config_of(written)
    none: Any = (
        []
        if name == "eagle_aux_hidden_state_layer_ids"
        else {"eagle_aux_hidden_state_layer_ids": []}
    )
    for config in ({k: v for k, v in whole.items() if k != name}, {**whole, name: none}):
        (written / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert eagle3_flat.read_for(written, tiny_target, About()).taps == TAPS


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_maps_that_disagree_are_refused(written: Path, tiny_target: Target, name: str) -> None:
    tensors = load_file(written / WEIGHTS)
    if name == "d2t":
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(IDS))  # ids instead of offsets
    else:
        tensors["t2d"][3] = True
    save_file(tensors, written / WEIGHTS)
    with pytest.raises(UserError, match="'d2t' and 't2d'"):
        eagle3_flat.read_for(written, tiny_target, About())


def test_an_embedding_in_the_file_is_used(written: Path, tiny_target: Target) -> None:
    own = torch.randn(400, 32)
    save_file({**load_file(written / WEIGHTS), "embed_tokens.weight": own}, written / WEIGHTS)
    read = eagle3_flat.read_for(written, tiny_target, About())
    assert torch.equal(read.embed_tokens.weight, own)


def test_another_width_of_the_target_is_refused(
    written: Path, load_tiny: Callable[..., Target]
) -> None:
    with pytest.raises(UserError, match=r"reads states of width 32, those of '.*' have 24"):
        eagle3_flat.read_for(written, load_tiny(hidden_size=24), About())


def test_a_rounded_copy_is_told_from_another_embedding() -> None:
    """By each number: one large entry, as real embeddings have, excuses none of the others."""
    torch.manual_seed(0)
    theirs = 0.1 * torch.randn(50, 8)
    theirs[3, 4] = 40.0
    for dtype in (torch.bfloat16, torch.float16):
        assert same_rounded(theirs.to(dtype), theirs)
    other = theirs + 0.005 * torch.randn(50, 8)  # 5 % of what most entries are
    assert not same_rounded(other, theirs)


# ---- standalone LM


def lm(target: Target) -> CausalDrafter:
    return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)


def test_an_ordinary_model_folder(any_target: Target, tmp_path: Path) -> None:
    drafter = lm(any_target)
    hf_causal.write(drafter, tmp_path, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[3, 70, 5, 9]])
    with torch.no_grad():
        theirs = model(input_ids=ids).logits
        ours = drafter.eval().model(input_ids=ids).logits
        read = hf_causal.read(tmp_path).eval().model(input_ids=ids).logits
    assert torch.equal(theirs, ours)
    assert torch.equal(read, ours)
    config = config_of(tmp_path)
    assert config["architectures"] == [type(any_target.model).__name__]
    assert config["dtype"] == config["torch_dtype"] == "float32"
    if "rope_parameters" in config:
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_scaled_rope_is_spelled_for_old_readers(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    target = load_tiny("llama", rope_parameters=LLAMA3)
    hf_causal.write(lm(target), tmp_path, torch.float32)
    config = config_of(tmp_path)
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"]["rope_type"] == "llama3"
    old = LlamaConfig(**{k: v for k, v in config.items() if k != "rope_parameters"})
    assert old.rope_parameters == LLAMA3
    assert hf_causal.read(tmp_path).model.config.rope_parameters == LLAMA3


def test_old_rope() -> None:
    assert old_rope({"rope_theta": 5.0}) == {"rope_theta": 5.0, "rope_scaling": None}
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    assert old_rope(scaled)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_a_layer_more_than_the_config_says(tiny_target: Target, tmp_path: Path) -> None:
    hf_causal.write(lm(tiny_target), tmp_path, torch.float32)
    config = config_of(tmp_path) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"'model\.layers\.1\..*' is unexpected"):
        hf_causal.read(tmp_path)
