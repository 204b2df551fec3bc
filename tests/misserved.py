"""Drafters that are served otherwise than they were trained: in memory, or in their folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.drafters.eagle3 import Eagle3Drafter


def shift_taps(head: Eagle3Drafter) -> None:
    head.taps = tuple(tap + 1 for tap in head.taps)


def swap_norms(head: Eagle3Drafter) -> None:
    layer = head.midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def change_rope(head: Eagle3Drafter) -> None:
    head.config.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    head.rotary = type(head.rotary)(head.config)


def random_fc(head: Eagle3Drafter) -> None:
    torch.manual_seed(1)
    nn.init.normal_(head.fc.weight, std=0.02)


def stale_weights(head: Eagle3Drafter) -> None:
    torch.manual_seed(1)
    for parameter in head.trainable():
        parameter.data += 0.01 * torch.randn_like(parameter)


def feed_normed(head: Eagle3Drafter) -> None:
    inner = head.extend

    def extend(state: Any, tokens: Any, parents: Any = None) -> Any:
        state.hidden = head.norm(state.hidden)
        return inner(state, tokens, parents)

    head.extend = extend  # type: ignore[method-assign]


def keep_drafted(head: Eagle3Drafter) -> None:
    """Keys of refused drafts stay in the cache."""

    def commit(state: Any, tokens: Any, counts: Any, taps: Any, path: Any = None) -> None:
        state.known = list(state.cache.lengths)
        state.tokens, state.counts, state.taps = tokens, list(counts), taps

    head.commit = commit  # type: ignore[method-assign]


def late_taps(head: Eagle3Drafter) -> None:
    """The state at a token goes with that token, not with the next one."""
    inner = head.commit

    def commit(state: Any, tokens: Any, counts: Any, taps: Any, path: Any = None) -> None:
        inner(state, tokens, counts, taps.roll(1, -1), path)

    head.commit = commit  # type: ignore[method-assign]


# ---- folders


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def other_rope(config: dict[str, Any]) -> None:
    config["rope_theta"] = 123_456.0
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 123_456.0}


def other_layers(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]


def lost_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in sorted(tensors) if n in ("fc.weight", "model.norm.weight"))
    tensors[name] = torch.zeros_like(tensors[name]) + 0.5
    save_file(tensors, path, metadata={"format": "pt"})
