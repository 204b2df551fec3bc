"""B069: a head as its exported files describe it, written out again from those files alone.

Nothing of the package is used by `Exported`; its logits at the first three draft positions are
those of the training forward and of the decoder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from echoes import echoing
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.eval.replay import Forced, decoded_logits

GAMMA = 3
LIMIT = 14


class Exported:
    """The files of a head, beside the target's embedding and hidden states."""

    def __init__(self, folder: Path, embedding: Tensor):
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.embedding = embedding
        assert self.config["norm_before_residual"] is False

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Heads `[H, d]` turned to their position."""
        d = x.shape[-1]
        speed = self.config["rope_theta"] ** -(torch.arange(0, d, 2) / d)
        angle = (position * speed).repeat(2)
        turned = torch.cat([-x[:, d // 2 :], x[:, : d // 2]], -1)
        return x * angle.cos() + turned * angle.sin()

    def layer(
        self, state: Tensor, token: int, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One pair of state `[h]` and token behind those in the cache: the un-normed output."""
        at = "midlayer."
        embedded = self.norm(self.embedding[token], f"{at}input_layernorm")
        x = torch.cat([embedded, self.norm(state, f"{at}hidden_norm")])
        d, heads = self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (self.w[f"{at}self_attn.{n}_proj.weight"] @ x for n in "qkv")
        keys.append(self.rotate(k.view(-1, d), position))
        values.append(v.view(-1, d))
        group = heads // len(keys[0])
        mine = self.rotate(q.view(-1, d), position)  # [H, d]
        out = []
        for h in range(heads):
            scores = torch.stack([key[h // group] @ mine[h] for key in keys]) / d**0.5
            out.append(scores.softmax(0) @ torch.stack([value[h // group] for value in values]))
        state = state + self.w[f"{at}self_attn.o_proj.weight"] @ torch.cat(out)
        inner = self.norm(state, f"{at}post_attention_layernorm")
        gate, up, down = (self.w[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return state + down @ (silu(gate @ inner) * (up @ inner))

    def logits(self, ids: list[int], known: int, k: int, states: list[Tensor]) -> Tensor:
        """Draft logits of token `known + k`, when the target has read `known - 1` of them.

        `states` are transformers' hidden states; each id names the layer whose input is read.
        """
        tapped = torch.cat([states[i] for i in self.config["eagle_aux_hidden_state_layer_ids"]], -1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for t in range(known - 1):
            fused = self.w["fc.weight"] @ tapped[t]
            state = self.layer(fused, ids[t + 1], t, keys, values)
        for j in range(k):  # its own output takes the place of the target's state
            state = self.layer(state, ids[known + j], known - 1 + j, keys, values)
        return self.w["lm_head.weight"] @ self.norm(state, "norm")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced"])
def test_b069_training_decoder_and_files_say_the_same(
    kind: str,
    tiny_target: Target,
    make_drafter: Callable[[str, Target], Drafter],
    answers: Callable[..., list[Record]],
    tmp_path: Path,
) -> None:
    trained = make_drafter(kind, tiny_target)
    assert isinstance(trained, torch.nn.Module)
    torch.manual_seed(0)
    for parameter in trained.parameters():  # no norm is neutral
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn_like(parameter)
    folder = save_drafter(trained, tmp_path / "d", tiny_target, {})
    exported = Exported(folder, tiny_target.embedding)
    records = answers(tiny_target, echoing(tiny_target, [4, 6], Law(1.0)), LIMIT)
    forced = Forced(tiny_target, trained, records, GAMMA)
    compared = [0] * GAMMA
    for row, record in enumerate(records):
        out = tiny_target.model(input_ids=record.ids[None, :-1], output_hidden_states=True)
        states = [state[0] for state in out.hidden_states]
        seen = decoded_logits(tiny_target, load_drafter(folder, tiny_target), record, GAMMA)
        places = sorted(seen)
        for place, train in zip(places, forced.logits(row, places), strict=True):
            known = record.prompt_len + 1 + place.start
            mine = exported.logits(record.ids.tolist(), known, place.k, states)
            assert float((mine - train).abs().max()) < 1e-4, place
            assert float((mine - seen[place]).abs().max()) < 1e-4, place
            compared[place.k] += 1
    assert min(compared) > 3
