"""DFlash folders of others: they load, say what plain torch says, and are refused if damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_folders import (
    LAYER,
    MASK,
    NEW_ROPE,
    OLD_ROPE,
    SIZE,
    SOME,
    TAPS,
    H,
    block_states,
    flat,
    speculators,
    weights,
)
from drafting import propose
from safetensors.torch import load_file
from starting import edit_weights
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.start import check_start, new_drafter

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]


def said(drafter: DFlashDrafter, taps: Tensor) -> Tensor:
    """Logits `[SIZE-1, V_d]` of a round behind token 21, the prompt's states being `taps`."""
    logits: list[Tensor] = []

    def draw(step: Tensor, k: int) -> Tensor:
        logits.append(step[0])
        return torch.tensor([47])

    with torch.no_grad():
        state = drafter.start(1, 16)
        drafter.prefill(state, torch.full((1, len(taps)), 5), [len(taps)], taps[None])
        drafter.commit(state, torch.tensor([[21]]), [1], taps[None, -1:])
        propose(drafter, state, SIZE - 1, draw)
    return torch.stack(logits)


@pytest.fixture(scope="module")
def states() -> Tensor:
    return torch.linspace(-3, 5, 6 * len(TAPS) * H).sin().view(6, -1)


def loaded(folder: Path, target: Target) -> DFlashDrafter:
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, DFlashDrafter)
    return drafter


CASES: dict[str, tuple[Callable[..., Path], dict[str, Any], bool]] = {
    "flat": (flat, {}, False),
    "flat, new rope": (flat, {**NEW_ROPE, "rope_theta": None}, False),
    "flat, biases": (flat, {"attention_bias": True}, True),
    "flat, block size inside": (
        flat,
        {
            "block_size": None,
            "dflash_config": {
                "block_size": SIZE, "mask_token_id": MASK, "target_layer_ids": list(TAPS),
                "causal": False,
            },
        },
        False,
    ),
    "flat, both conventions": (flat, {"eagle_aux_hidden_state_layer_ids": [1, 3]}, False),
    "speculators": (speculators, {}, False),
    "speculators, old rope": (
        speculators,
        {"transformer_layer_config": {"model_type": "qwen3", **LAYER, **OLD_ROPE}},
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_others_says_what_plain_torch_says(
    case: str, tiny_target: Target, states: Tensor, tmp_path: Path
) -> None:
    write, changes, bias = CASES[case]
    w = weights(bias)
    drafter = loaded(write(tmp_path / "d", w, **changes), tiny_target)
    assert (drafter.taps, drafter.max_draft_tokens, drafter.mask_token_id) == (TAPS, 3, MASK)
    expected = block_states(w, tiny_target.embedding, states, 21) @ tiny_target.head.weight.T
    assert (said(drafter, states) - expected[1:]).abs().max() < 1e-4
    assert drafter.layout == "dflash" and drafter.unserved is None


@pytest.mark.parametrize("write", [flat, speculators])
def test_a_reduced_vocabulary(
    write: Callable[..., Path], tiny_target: Target, states: Tensor, tmp_path: Path
) -> None:
    w, ids = weights(), torch.tensor(SOME)
    head = torch.randn(len(ids), H)
    more = {"lm_head.weight": head, "d2t": ids - torch.arange(len(ids))}
    more["t2d"] = torch.zeros(400, dtype=torch.bool).index_fill(0, ids, True)
    folder = write(tmp_path / "d", {**w, **more}, draft_vocab_size=len(ids))
    drafter = loaded(folder, tiny_target)
    assert drafter.draft_ids is not None and drafter.draft_ids.tolist() == SOME
    assert drafter.unserved is None, "vLLM reads it"
    expected = block_states(w, tiny_target.embedding, states, 21) @ head.T
    assert (said(drafter, states) - expected[1:]).abs().max() < 1e-4
    again = loaded(save_drafter(drafter, tmp_path / "e", tiny_target, {}), tiny_target)
    assert torch.equal(said(again, states), said(drafter, states))
    edit_weights(folder, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(UserError, match=r"tensor 'd2t' .* is missing"):
        load_drafter(folder, tiny_target)


NESTED = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}


@pytest.mark.parametrize(
    ("changes", "scale", "cap"),
    [
        ({"logit_scale": 0.5}, 0.5, None),
        ({"output_multiplier": 0.5}, 0.5, None),
        ({"dflash_config": {**NESTED, "output_multiplier": 0.5}, "logit_scale": 0.5}, 0.5, None),
        ({"final_logit_softcapping": 2.0, "logit_scale": 0.5}, 0.5, 2.0),
        ({"dflash_config": {**NESTED, "final_logit_softcapping": 2.0}}, 1.0, 2.0),
        ({"dflash_config": {**NESTED, "final_logit_softcapping": 0.0}}, 1.0, None),
    ],
)
def test_what_follows_the_head_is_that_of_the_file(
    changes: dict[str, Any],
    scale: float,
    cap: float | None,
    tiny_target: Target,
    states: Tensor,
    tmp_path: Path,
) -> None:
    """A factor, then a cap, wherever an engine looks for them; and where each does, written."""
    w = weights()
    drafter = loaded(flat(tmp_path / "d", w, **changes), tiny_target)
    raw = block_states(w, tiny_target.embedding, states, 21) @ tiny_target.head.weight.T
    expected = raw[1:] * scale if cap is None else (raw[1:] * scale / cap).tanh() * cap
    assert (said(drafter, states) - expected).abs().max() < 1e-4
    folder = save_drafter(drafter, tmp_path / "e", tiny_target, {})
    config = json.loads((folder / "config.json").read_text())
    for place in (config, config["dflash_config"]):
        assert place.get("final_logit_softcapping") == cap
        assert place.get("output_multiplier", 1.0) == scale
    assert config.get("logit_scale", 1.0) == scale
    again = loaded(folder, tiny_target)
    assert (said(again, states) - said(drafter, states)).abs().max() < 1e-5


def test_maps_of_all_tokens_say_nothing(
    tiny_target: Target, states: Tensor, tmp_path: Path
) -> None:
    maps = {"d2t": torch.zeros(400, dtype=torch.long), "t2d": torch.ones(400, dtype=torch.bool)}
    for write in (flat, speculators):
        plain = loaded(write(tmp_path / f"{write.__name__} d", weights()), tiny_target)
        folder = write(tmp_path / f"{write.__name__} e", {**weights(), **maps})
        mapped = loaded(folder, tiny_target)
        assert mapped.draft_ids is None and torch.equal(said(mapped, states), said(plain, states))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_copy_of_the_targets_is_the_targets(
    name: str, tiny_target: Target, states: Tensor, tmp_path: Path
) -> None:
    """Rounded or not; another embedding or head is refused, which nothing would write again."""
    own = tiny_target.embedding if name.startswith("embed") else tiny_target.head.weight
    copy = own.detach().bfloat16().float()
    drafter = loaded(flat(tmp_path / "d", {**weights(), name: copy}), tiny_target)
    bare = loaded(flat(tmp_path / "e", weights()), tiny_target)
    assert torch.equal(said(drafter, states), said(bare, states))
    folder = flat(tmp_path / "f", {**weights(), name: copy.roll(1, 0).contiguous()})
    with pytest.raises(UserError, match=f"tensor '{name}' is another .* than the target's"):
        load_drafter(folder, tiny_target)


def test_keys_that_change_nothing_are_read(tiny_target: Target, tmp_path: Path) -> None:
    harmless = {
        "use_swa": False, "attention_sink_bias": False, "selector_rank": 0, "mask_token": "<m>",
        "projector_type": None, "attention_value_scale": None,
    }  # fmt: skip
    changes = {"dflash_config": {**NESTED, **harmless}, "is_neox_style": True, "layer_types": None}
    loaded(flat(tmp_path / "d", weights(), **changes, use_sliding_window=False), tiny_target)


def test_b038_what_is_written_is_what_others_read(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """Names, shapes and both conventions of layers and RoPE; nothing that is the target's."""
    target = load_tiny("gemma2")
    drafter = DFlashDrafter.from_target(target, DFlashConfig(layers=2, taps=(0, 2)))
    folder = save_drafter(drafter, tmp_path / "d", target, {})
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {
        "mask_token_id": drafter.mask_token_id, "target_layer_ids": [0, 2],
        "final_logit_softcapping": 3.0,
    }  # fmt: skip
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert (config["block_size"], config["num_target_layers"]) == (4, 4)
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 10000.0
    assert config["final_logit_softcapping"] == 3.0
    tensors = load_file(folder / "model.safetensors")
    d = target.text_config.head_dim
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert set(shapes) == set(weights())
    assert shapes["fc.weight"] == (32, 64) and shapes["layers.1.self_attn.k_norm.weight"] == (d,)


# ---- going on


def test_going_on_from_it(tiny_target: Target, states: Tensor, tmp_path: Path) -> None:
    folder = flat(tmp_path / "d", weights())
    drafter: Any = new_drafter(DFlashConfig(start=str(folder)), tiny_target, [])
    assert torch.equal(said(drafter.eval(), states), said(loaded(folder, tiny_target), states))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    shape: Any = check_start(DFlashConfig(start=str(folder), block_size=SIZE), tiny_target).shape
    assert {p.device.type for p in shape.parameters()} == {"meta"}
    for option, value in {"block_size": 8, "taps": (1, 2), "sequential": True}.items():
        with pytest.raises(UserError, match=f"drafter.{option} .* is another than"):
            check_start(DFlashConfig(start=str(folder), **{option: value}), tiny_target)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architecture DFlash2DraftModel"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "kind sliding_attention"),
        ({"is_causal": True}, "is_causal True"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dflash_config": {**NESTED, "selector_rank": 4}}, "selector_rank 4"),
        ({"dflash_config": {**NESTED, "embedding_rank": 4}}, "dflash_config.embedding_rank"),
        ({"dflash_config": {**NESTED, "input_embedding_scale": 3.0}}, "input_embedding_scale 3.0"),
        ({"dflash_config": {"mask_token_id": MASK}}, "target_layer_ids' is missing"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id' is None"),
        ({"dflash_config": {**NESTED, "mask_token_id": 400}}, "mask_token_id' is 400"),
        ({"dflash_config": {**NESTED, "target_layer_ids": [0, 4]}}, r"reads the layers \[0, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, "layer ids disagree"),
        ({"block_size": None}, "'block_size' is None"),
        ({"rope_theta": None}, "neither rope_parameters nor rope_theta"),
        ({"num_target_layers": 36}, "for a target of 36 layers, '.*' has 4"),
        ({"hidden_size": 64}, "reads states of width 64"),
        ({"target_hidden_size": 64}, "reads states of width 64"),
        ({"vocab_size": 4000}, "4000"),
        ({"num_key_value_heads": None}, "'num_key_value_heads' is None"),
        (
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
            },
            "layers of kind sliding_attention",
        ),
        ({"is_neox_style": False}, "is_neox_style False"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style False"),
        ({"dflash_config": {**NESTED, "use_swa": True}}, "use_swa True"),
        ({"dflash_config": {**NESTED, "target_layer_ids": [2, 2]}}, "must be different layers"),
        ({"dflash_config": {**NESTED, "target_layer_ids": 2}}, "is 2, must be a list of numbers"),
        ({"dflash_config": {**NESTED, "mask_token_id": True}}, "mask_token_id' is True"),
        ({"dflash_config": [1, 2]}, r"'dflash_config' is \[1, 2\], must be a table"),
        ({"architectures": "OtherDFlash"}, "architecture OtherDFlash"),
        (
            {"draft_vocab_size": "many"},
            "'draft_vocab_size' is many, must be a number from 1 to 400",
        ),
        ({"draft_vocab_size": 500}, "'draft_vocab_size' is 500, must be a number from 1 to 400"),
        ({"logit_scale": 0.5, "output_multiplier": 1.0}, "must be the same"),
        ({"logit_scale": "half"}, "'logit_scale' is half, must be a number above 0"),
    ],
)
def test_a_flat_folder_that_is_built_otherwise(
    changes: dict[str, Any], message: str, tiny_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load_drafter(flat(tmp_path / "d", weights(), **changes), tiny_target)


def test_an_embedding_of_the_mask_token_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """vLLM puts it in place of the target's."""
    folder = flat(tmp_path / "d", weights())
    torch.save(torch.ones(H), folder / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"has mask_embedding\.pt beside it"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize(("ids", "said"), [([0, 9999], "below 400"), ([5, 3], "ascending")])
def test_a_map_of_no_vocabulary(
    ids: list[int], said: str, tiny_target: Target, tmp_path: Path
) -> None:
    more = {"lm_head.weight": torch.ones(2, H), "d2t": torch.tensor(ids) - torch.arange(2)}
    folder = flat(tmp_path / "d", {**weights(), **more}, draft_vocab_size=2)
    with pytest.raises(UserError, match=f"tensor 'd2t' must name .*{said}"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector_type": "domino"}, "projector_type domino"),
        ({"sample_from_anchor": True}, "sample_from_anchor True"),
        ({"shift_label": True}, "shift_label True"),
        ({"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids' is missing"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, r"reads the layers \[-1, 1\]"),
        ({"mask_token_id": None}, "'mask_token_id' is missing"),
        ({"transformer_layer_config": None}, "'transformer_layer_config' is missing"),
        ({"block_size": None}, "'block_size' is None"),
    ],
)
def test_a_speculators_folder_that_is_built_otherwise(
    changes: dict[str, Any], message: str, tiny_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load_drafter(speculators(tmp_path / "d", weights(), **changes), tiny_target)
