"""How a new EAGLE-3 head begins: its sizes, and what it takes over from the target."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..configs.errors import UserError
from ..data.dense import dense_weight, whole
from ..data.target import Target
from .borrowed import fill_rows, full_rope, layer_weights, multiplies, nothing_taken
from .eagle3_config import Eagle3Config
from .lowrank import factors


def llama_config(target: Target, config: Eagle3Config) -> LlamaConfig:
    """The layers' configuration. Raises `UserError` for widths that do not go together."""
    source = target.text_config
    h = config.hidden_size or source.hidden_size
    if config.head_rank is not None and config.head_rank > h:
        raise UserError(
            f"drafter.head_rank {config.head_rank} is more than the head's width {h}; leave it out "
            "for a head of one matrix"
        )
    heads, kv_heads = _heads(source, h)
    inside = getattr(source, "intermediate_size", 4 * source.hidden_size)
    found: dict[str, Any] = {
        "hidden_size": h,
        "intermediate_size": config.intermediate_size or round(inside * h / source.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": getattr(source, "head_dim", None)
        or source.hidden_size // source.num_attention_heads,
        "num_hidden_layers": config.layers or 1,
        "rms_norm_eps": getattr(source, "rms_norm_eps", 1e-5),
        "vocab_size": target.head.out_features,
        "max_position_embeddings": target.max_positions or 2048,
        "rope_parameters": full_rope(source),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": getattr(source, "bos_token_id", None),
        "eos_token_id": getattr(source, "eos_token_id", None),
    }
    return LlamaConfig(**found)


def _heads(source: Any, h: int) -> tuple[int, int]:
    """Query and key heads of a head as wide as `h`: as many to one another as the target's."""
    heads = source.num_attention_heads
    kv_heads = getattr(source, "num_key_value_heads", heads)
    if h == source.hidden_size:
        return heads, kv_heads
    group, most = heads // kv_heads, max(1, round(kv_heads * h / source.hidden_size))
    for count in range(most, 0, -1):
        if h % (group * count) == 0:
            return group * count, count
    raise UserError(
        f"drafter.hidden_size {h} must be a multiple of {group}, the target's query heads for each "
        "of its key heads"
    )


def begin(drafter: Any, target: Target, config: Eagle3Config) -> None:
    """Give a new head its first weights.

    Raises `UserError` for options that are for a head of the target's width, for `init: target`
    where the layer cannot be taken over, and as `learn`.
    """
    own = drafter.config.hidden_size != target.hidden_size
    if own and not config.train_head:
        raise UserError(
            f"drafter.train_head is off, and a head {drafter.config.hidden_size} wide cannot keep "
            f"the target's rows, which are {target.hidden_size} wide"
        )
    drafter.learn(config.train_head, config.train_embedding)
    if own:  # columns beyond the target's
        nn.init.zeros_(drafter.embed_tokens.weight)
        nn.init.zeros_(drafter.lm_head.weight)
    fill_rows(drafter.embed_tokens.weight.data, whole(target.embedding.detach()))
    begin_head(drafter, target, None)
    std = float(getattr(target.text_config, "initializer_range", 0.02))
    kept = ("lm_head", "head_down", "embed_tokens")
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2 and not name.startswith(kept):
            nn.init.normal_(parameter, std=std)
    if config.init == "random":
        return
    for layer in drafter.later:  # which add nothing at first
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    copied = not own and _copy_last_layer(drafter, target)
    if config.init == "target" and not copied:
        raise nothing_taken(target)


def begin_head(drafter: Any, target: Target, moment: Tensor | None) -> None:
    """Begin the head as the target's rows, or near to them.

    `moment [h, h]` as `lowrank.factors` takes it, of the target's own width.
    """
    rows = dense_weight(target.head, target.dtype)  # [V, h_t]
    if drafter.draft_ids is not None:
        rows = rows[drafter.draft_ids]
    h = drafter.config.hidden_size
    if drafter.head_down is None:
        fill_rows(drafter.lm_head.weight.data, rows)
        return
    if h != target.hidden_size:
        moment, narrow = None, torch.zeros(len(rows), h, device=rows.device)
        fill_rows(narrow, rows)
        rows = narrow
    up, down = factors(rows, drafter.head_down.out_features, moment)
    drafter.lm_head.weight.data.copy_(up)
    drafter.head_down.weight.data.copy_(down)


_COPIED = {f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")} | {
    "post_attention_layernorm": "post_attention_layernorm",
    "hidden_norm": "input_layernorm",
    "self_attn.o_proj": "self_attn.o_proj",
}
_HALF_COPIED = tuple(f"self_attn.{name}_proj" for name in "qkv")  # the half that reads the state


def _copy_last_layer(drafter: Any, target: Target) -> bool:
    """Start as the target's last layer over its last tap; what reads the embedding stays noise.

    Only for targets whose last layer is Llama's in names, shapes and norms; others start from
    noise throughout, which is told. A head with other norms than the paper's has the weights of
    that layer, and begins as something else.
    """
    layer, final = target.layers[-1], getattr(target.body, "norm", None)
    theirs, mine = layer_weights(layer, target.dtype), drafter.midlayer.state_dict()
    h = drafter.config.hidden_size
    pairs = {f"{name}.weight": theirs.get(f"{source}.weight") for name, source in _COPIED.items()}
    halves = {f"{name}.weight": theirs.get(f"{name}.weight") for name in _HALF_COPIED}
    fits = all(w is not None and w.shape == mine[name].shape for name, w in pairs.items()) and all(
        w is not None and w.shape == mine[name][:, h:].shape for name, w in halves.items()
    )
    norms = (final, getattr(layer, "input_layernorm", None))
    if not fits or final is None or not all(multiplies(norm) for norm in norms):
        return False
    for name, weight in pairs.items():
        mine[name].copy_(weight)
    for name, weight in halves.items():
        mine[name][:, h:].copy_(weight)
    drafter.fc.weight.data[:, -h:] += torch.eye(h)
    drafter.norm.load_state_dict(final.state_dict())
    return True
