"""EAGLE-1 and EAGLE-2 heads as SafeAILab publishes them: read, never written.

`fc.weight [h, 2h]`, with a bias or without; `layers.0.` without `input_layernorm`, ordinary layers
behind it. Embedding and head are the target's; a copy of the embedding may lie beside.
"""

from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...configs.errors import UserError
from ...data.dense import dense_weight, whole
from ...data.target import Target
from ..about import About
from ..eagle import EagleDrafter
from .config import architectures, built, config_of, flag, read_config
from .eagle3_parts import EMBEDDING, layer_config
from .fits import check_rows, check_width
from .tensors import check_tensors, fill, read_any, tensor_names


def claims(folder: Path) -> bool:
    """Whether the configuration is that of such a head, or of a Llama with the weights of one.

    Most say that they are an ordinary one.
    """
    raw = config_of(folder)
    named = " ".join(architectures(raw))
    if "speculators_model_type" in raw or raw.get("model_type", "llama") != "llama" or not raw:
        return False
    try:
        return ("Eagle" in named and "Eagle3" not in named) or "fc.weight" in tensor_names(folder)
    except UserError:
        return False


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return (num_layers,)


def shape(folder: Path, target: Target, about: About) -> EagleDrafter:
    raw, path = read_config(folder), folder / "config.json"
    config = layer_config(raw, path)
    check_width(folder, config.hidden_size, target)
    check_rows(folder, int(config.vocab_size), target)
    bias = flag(raw, "bias", path, "fc.bias" in tensor_names(folder))
    return built(path, lambda: EagleDrafter(config, target, bias))


def read_for(folder: Path, target: Target, about: About) -> EagleDrafter:
    """Raises `UserError` naming any tensor that is missing, unexpected or of another shape."""
    with torch.device("meta"):
        drafter = shape(folder, target, about)
    drafter.rotary, tensors = LlamaRotaryEmbedding(drafter.config), read_any(folder)
    embedding = whole(target.embedding.detach()).cpu()[: drafter.config.vocab_size]
    tensors.setdefault(EMBEDDING, embedding)
    names = {name: _theirs(name) for name in drafter.state_dict() if not name.startswith("lm_head")}
    shapes = {names[n]: tuple(t.shape) for n, t in drafter.state_dict().items() if n in names}
    check_tensors(shapes, tensors, folder)
    own = {name: tensors[theirs] for name, theirs in names.items()}
    own["lm_head.weight"] = dense_weight(target.head, target.dtype).detach().cpu()
    if drafter.lm_head.bias is not None:
        own["lm_head.bias"] = whole(target.head.bias.detach()).cpu()
    return fill(drafter, own)


def _theirs(name: str) -> str:
    """The name in files of one of our tensors."""
    part, _, rest = name.partition(".")
    if part == "first_layer":
        return rest if rest.startswith("fc.") else f"layers.0.{rest}"
    if part == "later":
        number, _, rest = rest.partition(".")
        return f"layers.{int(number) + 1}.{rest}"
    return name
