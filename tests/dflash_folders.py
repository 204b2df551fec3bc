"""DFlash folders as the tables of their layouts have them, and what they say in plain torch.

Nothing of this package writes or computes here.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, HEADS, KV, D, H, WIDE, SIZE, MASK = 2, 4, 2, 16, 32, 40, 4, 9
TAPS = (0, 2)
EPS, THETA = 1e-5, 5000.0
SOME = sorted({0, 1, 2, *range(7, 400, 5)})
Tensors = dict[str, Tensor]


def weights(bias: bool = False) -> Tensors:
    """Names and shapes as the table of the layout has them; no value is neutral."""
    torch.manual_seed(4)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(TAPS) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(LAYERS):
        at = f"layers.{i}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HEADS * D, H),
            f"{at}self_attn.k_proj.weight": (KV * D, H),
            f"{at}self_attn.v_proj.weight": (KV * D, H),
            f"{at}self_attn.o_proj.weight": (H, HEADS * D),
            f"{at}self_attn.q_norm.weight": (D,),
            f"{at}self_attn.k_norm.weight": (D,),
            f"{at}mlp.gate_proj.weight": (WIDE, H),
            f"{at}mlp.up_proj.weight": (WIDE, H),
            f"{at}mlp.down_proj.weight": (H, WIDE),
            f"{at}input_layernorm.weight": (H,),
            f"{at}post_attention_layernorm.weight": (H,),
        }
        if bias:
            for name, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D), ("o", H)):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
    return {
        name: torch.randn(shape) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in shapes.items()
    }


LAYER: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 512,
    "vocab_size": 400,
    "layer_types": ["full_attention"] * LAYERS,
}
NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
OLD_ROPE = {"rope_theta": THETA, "rope_scaling": None}


def flat(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        **LAYER,
        **OLD_ROPE,
        "block_size": SIZE,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "torch_dtype": "float32",
    }
    return written(folder, config | changes, tensors)


def speculators(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    """With the layer ids one higher, as vLLM counts them."""
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SIZE - 1}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": "qwen3", **LAYER, **NEW_ROPE},
        "draft_vocab_size": 400,
        "block_size": SIZE,
        "aux_hidden_state_layer_ids": [t + 1 for t in TAPS],
        "mask_token_id": MASK,
        "target_hidden_size": None,
    }
    return written(folder, config | changes, tensors)


def written(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- the model in plain torch, one conversation and one block


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, at: int) -> Tensor:
    """One head's vector `[D]` at a position, by pairs half the width apart."""
    turned = x.clone()
    for i in range(D // 2):
        angle = at * THETA ** (-2 * i / D)
        c, s = math.cos(angle), math.sin(angle)
        turned[i], turned[i + D // 2] = x[i] * c - x[i + D // 2] * s, x[i + D // 2] * c + x[i] * s
    return turned


def heads(w: Tensors, at: str, x: Tensor, norm: str | None, position: int) -> list[Tensor]:
    out = w[f"{at}.weight"] @ x + w.get(f"{at}.bias", torch.tensor(0.0))
    parts = [out[i : i + D] for i in range(0, len(out), D)]
    return parts if norm is None else [rotated(rms(p, w[norm]), position) for p in parts]


def block_states(w: Tensors, embedding: Tensor, taps: Tensor, token: int) -> Tensor:
    """Normed states `[SIZE, H]` of the block that begins with `token` behind states `[n, L*H]`."""
    n = len(taps)
    context = [rms(w["fc.weight"] @ t, w["hidden_norm.weight"]) for t in taps]
    x = [embedding[i] for i in (token, *[MASK] * (SIZE - 1))]
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        normed = [rms(s, w[f"{at}input_layernorm.weight"]) for s in x]
        keys, values = [], []
        for position, s in enumerate([*context, *normed]):
            norm = f"{at}self_attn.k_norm.weight"
            keys.append(heads(w, f"{at}self_attn.k_proj", s, norm, position))
            values.append(heads(w, f"{at}self_attn.v_proj", s, None, position))
        after = []
        for place, s in enumerate(normed):
            q_norm = f"{at}self_attn.q_norm.weight"
            out = []
            for h, q in enumerate(heads(w, f"{at}self_attn.q_proj", s, q_norm, n + place)):
                group = h // (HEADS // KV)
                scores = torch.stack([k[group] @ q for k in keys]) / math.sqrt(D)
                each = scores.softmax(0)
                out.append(sum(p * v[group] for p, v in zip(each, values, strict=True)))
            attended = torch.cat(out)
            o = w[f"{at}self_attn.o_proj.weight"] @ attended
            y = x[place] + o + w.get(f"{at}self_attn.o_proj.bias", torch.tensor(0.0))
            z = rms(y, w[f"{at}post_attention_layernorm.weight"])
            gate = w[f"{at}mlp.gate_proj.weight"] @ z
            up = w[f"{at}mlp.up_proj.weight"] @ z
            after.append(y + w[f"{at}mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
        x = after
    return torch.stack([rms(s, w["norm.weight"]) for s in x])
