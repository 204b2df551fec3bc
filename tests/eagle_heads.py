"""EAGLE heads as others publish them, by the tables of their layouts, and run in plain torch.

Nothing of this package writes or computes what its reading is held against.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from drafting import propose
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV, D, H, TARGET, WIDE, VOCAB = 4, 2, 8, 32, 32, 40, 400
TAPS = (0, 1, 3)
EPS, THETA = 1e-5, 5000.0
Tensors = dict[str, Tensor]


class Published:
    """A head as its publisher knows it: tensors, and where it norms."""

    def __init__(
        self,
        first: str = "layers.0.",
        layers: int = 1,
        h: int = H,
        embedding: bool = False,
        bias: bool = False,
        ids: list[int] | None = None,
        norms: tuple[str, ...] = (),
        rope: dict[str, Any] | None = None,
    ):
        torch.manual_seed(4)
        self.first, self.layers, self.h, self.ids, self.norms = first, layers, h, ids, norms
        self.rope, self.bias = rope or {"rope_type": "default", "rope_theta": THETA}, bias
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, 3 * TARGET), "norm.weight": (h,)}
        for i in range(layers):
            at, width = (first, 2 * h) if i == 0 else (f"layers.{i}.", h)
            shapes |= {
                f"{at}self_attn.q_proj.weight": (HEADS * D, width),
                f"{at}self_attn.k_proj.weight": (KV * D, width),
                f"{at}self_attn.v_proj.weight": (KV * D, width),
                f"{at}self_attn.o_proj.weight": (h, HEADS * D),
                f"{at}mlp.gate_proj.weight": (WIDE, h),
                f"{at}mlp.up_proj.weight": (WIDE, h),
                f"{at}mlp.down_proj.weight": (h, WIDE),
                f"{at}input_layernorm.weight": (h,),
                f"{at}post_attention_layernorm.weight": (h,),
            }
            if i == 0:
                shapes[f"{at}hidden_norm.weight"] = (h,)
            if bias:
                for name, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D), ("o", h)):
                    shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes["lm_head.weight"] = (VOCAB if ids is None else len(ids), h)
        if embedding:
            shapes["embed_tokens.weight"] = (VOCAB, h)
        if "norm_before_fc" in norms:
            shapes["input_norm.weight"] = (3 * TARGET,)
        if "fc_norm" in norms:
            shapes |= {f"fc_norm.{i}.weight": (TARGET,) for i in range(3)}
        self.tensors = {
            name: torch.randn(shape) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
            for name, shape in shapes.items()
        }

    @property
    def maps(self) -> Tensors:
        if self.ids is None:
            return {}
        there = torch.zeros(VOCAB, dtype=torch.bool)
        there[self.ids] = True
        return {"d2t": torch.tensor([t - i for i, t in enumerate(self.ids)]), "t2d": there}

    @property
    def layer(self) -> dict[str, Any]:
        """What is said of its layers, but for RoPE."""
        return {
            "model_type": "llama",
            "hidden_size": self.h,
            "intermediate_size": WIDE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV,
            "head_dim": D,
            "num_hidden_layers": self.layers,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "attention_bias": self.bias,
        }

    def flat(self, folder: Path, old: bool = False, pickled: bool = False) -> Path:
        """SafeAILab's and SpecForge's, with RoPE in the spelling of old or of now."""
        own = {**self.layer, **dict.fromkeys(self.norms, True), **self._rope(old)}
        own["architectures"] = ["LlamaForCausalLMEagle3"]
        own["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in TAPS]
        if self.ids is not None:
            own["draft_vocab_size"] = len(self.ids)
        if self.h != TARGET:
            own["target_hidden_size"] = TARGET
        return self._write(folder, own, pickled)

    def speculators(self, folder: Path, old: bool = False) -> Path:
        own: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": {**self.layer, **self._rope(old)},
            "draft_vocab_size": VOCAB if self.ids is None else len(self.ids),
            "target_hidden_size": None if self.h == TARGET else TARGET,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
            **{name: True for name in self.norms if name != "norm_before_residual"},
        }
        if "norm_before_residual" not in self.norms:  # which is what is taken if nothing is said
            own["norm_before_residual"] = False
        return self._write(folder, own, False)

    def _rope(self, old: bool) -> dict[str, Any]:
        if not old:
            return {"rope_parameters": self.rope}
        plain = self.rope["rope_type"] == "default"
        rest = {name: value for name, value in self.rope.items() if name != "rope_theta"}
        return {"rope_theta": THETA, "rope_scaling": None if plain else rest}

    def _write(self, folder: Path, config: dict[str, Any], pickled: bool) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        every = {**self.tensors, **self.maps}
        if pickled:
            torch.save(every, folder / "pytorch_model.bin")
        else:
            save_file(every, folder / "model.safetensors")
        return folder

    # ---- in plain torch

    def says(self, embedding: Tensor, taps: Tensor, tokens: Tensor, drafted: Tensor) -> Tensor:
        """Logits behind the true pairs of `taps [n, 3*h]` and `tokens [n]`, and behind each of the
        `drafted [m]`: `[1 + m, V_d]`."""
        weights = self.tensors
        table = weights.get("embed_tokens.weight", embedding)
        if "norm_before_fc" in self.norms:
            taps = self._norm(taps, "input_norm")
        if "fc_norm" in self.norms:
            parts = taps.split(TARGET, -1)
            taps = torch.cat([self._norm(t, f"fc_norm.{i}") for i, t in enumerate(parts)], -1)
        states = list(taps @ weights["fc.weight"].T)
        logits = []
        for end in range(len(tokens), len(tokens) + len(drafted) + 1):
            read = torch.cat([tokens, drafted])[:end]
            out = self._run(torch.stack(states), table[read])[-1]
            normed = self._norm(out, "norm")
            logits.append(weights["lm_head.weight"] @ normed)
            states.append(normed if "norm_output" in self.norms else out)
        return torch.stack(logits)

    def _run(self, x: Tensor, embedded: Tensor) -> Tensor:
        for i in range(self.layers):
            at = self.first if i == 0 else f"layers.{i}."
            read = self._norm(embedded if i == 0 else x, f"{at}input_layernorm")
            if i == 0:
                normed = self._norm(x, f"{at}hidden_norm")
                read = torch.cat([read, normed], -1)
                x = normed if "norm_before_residual" in self.norms else x
            x = x + self._attention(read, at)
            inner = self._norm(x, f"{at}post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(inner, f"{at}mlp.gate_proj"))
            gated = gate * self._linear(inner, f"{at}mlp.up_proj")
            x = x + self._linear(gated, f"{at}mlp.down_proj")
        return x

    def _attention(self, x: Tensor, at: str) -> Tensor:
        n = len(x)
        q, k, v = (
            self._linear(x, f"{at}self_attn.{name}_proj").view(n, -1, D).transpose(0, 1)
            for name in "qkv"
        )
        angle = torch.arange(n)[:, None] * self._frequencies()  # [n, D/2]
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

        def turned(y: Tensor) -> Tensor:
            return y * cos + torch.cat([-y[..., D // 2 :], y[..., : D // 2]], -1) * sin

        k, v = turned(k).repeat_interleave(HEADS // KV, 0), v.repeat_interleave(HEADS // KV, 0)
        score = turned(q) @ k.transpose(1, 2) / math.sqrt(D)
        score = score.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1)
        return self._linear((score @ v).transpose(0, 1).flatten(1), f"{at}self_attn.o_proj")

    def _frequencies(self) -> Tensor:
        plain = THETA ** (-torch.arange(0, D, 2) / D)
        if self.rope["rope_type"] == "default":
            return plain
        waves = 2 * math.pi / plain
        whole = self.rope["original_max_position_embeddings"]
        share = (whole / waves - 1.0) / (4.0 - 1.0)  # between the low factor and the high one
        mixed = (1 - share) * plain / 8.0 + share * plain
        return torch.where(
            waves > whole, plain / 8.0, torch.where(waves < whole / 4.0, plain, mixed)
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.tensors[f"{name}.weight"]


class PublishedEagle(Published):
    """A head of EAGLE-1 or EAGLE-2: no norm of its inputs, no norm and no head behind it."""

    def __init__(self, fused_bias: bool = False, embedding: bool = False, layers: int = 1):
        super().__init__(layers=layers, embedding=embedding)
        gone = ("norm.weight", "lm_head.weight")
        gone += tuple(f"layers.0.{name}.weight" for name in ("input_layernorm", "hidden_norm"))
        for name in gone:
            del self.tensors[name]
        for name in "qkv":
            name = f"layers.0.self_attn.{name}_proj.weight"
            self.tensors[name] = self.tensors[name][:, :H].contiguous()
        self.tensors["fc.weight"] = torch.randn(H, 2 * H) * 0.3
        if fused_bias:
            self.tensors["fc.bias"] = torch.randn(H)
        for name, tensor in self.tensors.items():  # or what is fed back grows from step to step
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                self.tensors[name] = tensor * 0.2

    def write(self, folder: Path, pickled: bool = False, **told: Any) -> Path:
        config = {**self.layer, "architectures": ["LlamaForCausalLM"], "rope_theta": 5000.0}
        return self._write(folder, {**config, **told}, pickled)

    def outputs(self, embedding: Tensor, taps: Tensor, tokens: Tensor, drafted: Tensor) -> Tensor:
        """What stands in for the target's head inputs: `[1 + m, h]`."""
        table = self.tensors.get("embed_tokens.weight", embedding)
        states = list(taps)
        for end in range(len(tokens), len(tokens) + len(drafted) + 1):
            embedded = table[torch.cat([tokens, drafted])[:end]]
            x = self._linear(torch.cat([embedded, torch.stack(states)], -1), "fc")
            for i in range(self.layers):
                at = f"layers.{i}."
                x = x + self._attention(self._norm(x, f"{at}input_layernorm") if i else x, at)
                inner = self._norm(x, f"{at}post_attention_layernorm")
                gate = torch.nn.functional.silu(self._linear(inner, f"{at}mlp.gate_proj"))
                gated = gate * self._linear(inner, f"{at}mlp.up_proj")
                x = x + self._linear(gated, f"{at}mlp.down_proj")
            states.append(x[-1])
        return torch.stack(states[len(tokens) :])


def said(drafter: Any, taps: Tensor, tokens: Tensor, drafted: Tensor) -> Tensor:
    """What the decode protocol says where `Published.says` says something."""
    logits: list[Tensor] = []

    def draw(step: Tensor, k: int) -> Tensor:
        logits.append(step[0])
        return drafted[k : k + 1] if k < len(drafted) else drafted[:1]

    prompt, n = torch.cat([torch.tensor([9]), tokens[:-1]])[None], len(tokens)
    with torch.no_grad():
        state = drafter.start(1, 32)
        drafter.prefill(state, prompt, [n], taps[None])
        drafter.commit(state, tokens[None, -1:], [1], taps[None, -1:])
        propose(drafter, state, 1 + len(drafted), draw)
    return torch.stack(logits)
