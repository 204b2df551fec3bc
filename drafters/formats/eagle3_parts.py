"""What the EAGLE-3 layouts share: a head's tensors, its configuration, its draft vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..eagle3 import Eagle3Drafter
from ..eagle3_layer import Norms
from .config import built, check_attention, flag, kinds_of_layers, number, numbers, rope_of
from .fits import check_rows, check_taps, check_width, same_rounded
from .tensors import any_file, check_tensors, fill, read_any, tensor_names
from .vocab_maps import take_ids

EMBEDDING = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
_OTHER_READERS = ("architectures", "layer_types", "sliding_window", "draft_vocab_size")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


@dataclass(frozen=True)
class Told:
    """What the configuration of a head says of it.

    width: of the target's states; vocab: tokens that it embeds; size: tokens that it drafts.
    """

    config: LlamaConfig
    taps: tuple[int, ...]
    norms: Norms
    width: int
    vocab: int
    size: int


def told(
    layer: Mapping[str, Any],
    head: Mapping[str, Any],
    taps: tuple[int, ...],
    norms: Norms,
    path: Path,
) -> Told:
    """Of the keys `layer` about its layers and those about the head, both of `path`.

    Raises `UserError` for what is built otherwise than this package builds heads.
    """
    if norms.norm_before_fc and norms.fc_norm:
        raise UserError(f"{path}: norm_before_fc and fc_norm exclude each other, and both are set")
    config = layer_config(layer, path)
    vocab = int(config.vocab_size)
    width = number(head, "target_hidden_size", path, config.hidden_size)
    return Told(config, taps, norms, width, vocab, number(head, "draft_vocab_size", path, vocab))


def layer_ids(raw: Mapping[str, Any], path: Path) -> list[int]:
    """Those that the keys `raw` of `path` name, mostly none. Raises `UserError` for others."""
    return numbers(raw, IDS, path) if raw.get(IDS) else []


def recipe_taps(named: tuple[int, ...] | None, path: Path) -> tuple[int, ...]:
    """Those that the recipe names, for a head whose config does not. Raises `UserError` if none."""
    if named is None:
        raise UserError(
            f"{path}: '{IDS}' is missing; to train the head further, name in drafter.taps the "
            "layers that it reads"
        )
    return named


def layer_config(raw: Mapping[str, Any], path: Path) -> LlamaConfig:
    """The layers, as the keys `raw` of `path` have them.

    Raises `UserError` for layers that are not Llama's, see a window, or cannot be built.
    """
    kind = raw.get("model_type", "llama")
    if kind != "llama":
        raise UserError(f"{path}: layers of model type '{kind}' are not read, those of llama are")
    if set(kinds_of_layers(raw, path)) - {"full_attention"}:
        raise UserError(f"{path}: layer_types {raw['layer_types']} are not read, full_attention is")
    if raw.get("logit_scale", 1.0) != 1.0:
        raise UserError(f"{path}: logit_scale {raw['logit_scale']} is not read, 1.0 is")
    if flag(raw, "use_sliding_window", path):
        raise UserError(f"{path}: use_sliding_window is not read, layers that see all tokens are")
    check_attention(raw, path)
    kept = {k: v for k, v in raw.items() if k not in (*_OTHER_READERS, *_ROPE)}
    rope = rope_of(raw, path)
    return built(path, lambda: LlamaConfig(**kept, rope_parameters=rope))


def shape_of(found: Told, folder: Path, target: Target, about: About) -> Eagle3Drafter:
    """The head, its weights being any. Raises `UserError` unless it fits the target.

    An embedding in the folder counts as the head's own, unless `about` tells otherwise.
    """
    any_file(folder)
    path = folder / "config.json"
    check_taps(folder, found.taps, target.num_layers - 1, f"'{target.provenance['name']}'")
    check_width(folder, found.width, target)
    check_rows(folder, found.vocab, target)
    own = (
        EMBEDDING in tensor_names(folder) if about.shared is None else EMBEDDING not in about.shared
    )
    return built(path, lambda: _built(found, torch.arange(found.size), own))


def _built(found: Told, ids: Tensor | None, own_embedding: bool) -> Eagle3Drafter:
    said = (found.config, found.taps, ids, found.width, None, found.norms, own_embedding)
    return Eagle3Drafter(*said)


def read_of(found: Told, folder: Path, target: Target, about: About) -> Eagle3Drafter:
    """The head with the folder's weights; an embedding that it has not is the target's.

    Raises `UserError` unless it fits the target, and naming any tensor that is missing, unexpected
    or of another shape.
    """
    with torch.device("meta"):
        shape_of(found, folder, target, about)
    tensors, theirs = read_any(folder), target.embedding.detach().cpu()[: found.vocab]
    ids = take_ids(tensors, folder, found.size, found.vocab)
    rows = len(target.embedding)
    if found.size == found.vocab == rows > target.vocab_size:
        ids = None  # maps of all tokens name the rows that pad the target's, too
    elif ids is None and found.vocab != rows:
        ids = torch.arange(found.vocab)
    mine = tensors.get(EMBEDDING, theirs)
    own = about.shared is not None and EMBEDDING not in about.shared
    own = own or (mine.shape == theirs.shape and not same_rounded(mine, theirs))
    with torch.device("meta"):
        drafter = _built(found, ids, own)
    drafter.rotary = LlamaRotaryEmbedding(found.config)  # it has no weights, but numbers
    if drafter.shared and "fc.weight" in tensors:
        tensors.setdefault(EMBEDDING, theirs.to(tensors["fc.weight"].dtype))
    names = file_names(drafter, not any(name.startswith("midlayer.") for name in tensors))
    shapes = {names[n]: tuple(t.shape) for n, t in drafter.state_dict().items()}
    check_tensors(shapes, tensors, folder)
    return fill(drafter, {name: tensors[theirs] for name, theirs in names.items()})


def file_names(drafter: Eagle3Drafter, numbered: bool) -> dict[str, str]:
    """Our names of the tensors, and those in files: the first layer is midlayer or layers.0."""
    first = "layers.0." if numbered else "midlayer."

    def theirs(name: str) -> str:
        part, _, rest = name.partition(".")
        if part == "midlayer":
            return first + rest
        if part == "later":
            number, _, rest = rest.partition(".")
            return f"layers.{int(number) + 1}.{rest}"
        return name

    return {name: theirs(name) for name in drafter.state_dict()}


def written(drafter: Eagle3Drafter, numbered: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's tensors as files have them; what it shares with the target is not among them.

    The maps of the draft vocabulary, too, unless that is all tokens: target id = i + d2t[i].
    """
    names, shared = file_names(drafter, numbered), set(drafter.shared)
    own = {n: t.detach() for n, t in drafter.state_dict().items() if n not in shared}
    tensors = {names[name]: tensor.to(dtype) for name, tensor in own.items()}
    if drafter.draft_ids is not None:
        ids = drafter.draft_ids.cpu()  # [V_d]
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def draft_size(drafter: Eagle3Drafter) -> int:
    return int(drafter.lm_head.out_features)
