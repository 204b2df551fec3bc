"""Medusa heads as vLLM loads them, up to 0.32.

`blocks.{head}.layers.{layer}.weight` (and `.bias` where `medusa_fc_bias` is true), and
`lm_heads.{head}.weight`, of which there is the first alone where `original_lm_head` is true. A
reduced vocabulary is `truncated_vocab_size` rows and their target ids in `token_map`. Folders of
others may order the map as they like, hold whole heads beside it, put `medusa_heads.` before names,
and name a `logit_scale`, which goes into the heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..medusa import MedusaDrafter
from .config import architectures, config_of, factor, flag, number, read_config
from .fits import check_head, check_width
from .tensors import check_tensors, fill, read_tensors, weights_file, write_tensors

ARCHITECTURE = "MedusaModel"
MAP = "token_map"


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such heads."""
    raw = config_of(folder)
    return raw.get("model_type") == "medusa" or ARCHITECTURE in architectures(raw)


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return (num_layers,)


def shape(folder: Path, target: Target, about: About) -> MedusaDrafter:
    weights_file(folder)
    raw, path = read_config(folder), folder / "config.json"
    check_width(folder, raw.get("hidden_size"), target)
    rows = number(raw, "vocab_size", path)
    check_head(folder, rows, target)
    size = number(raw, "truncated_vocab_size", path, rows, rows)
    return _built(raw, path, target, about, torch.arange(size) if size < rows else None)


def read_for(folder: Path, target: Target, about: About) -> MedusaDrafter:
    """Raises `UserError` naming any tensor that is missing, unexpected or of another shape."""
    with torch.device("meta"):
        asked = shape(folder, target, about)  # which refuses what does not fit
    tensors = {n.removeprefix("medusa_heads."): t for n, t in read_tensors(folder).items()}
    if asked.shared_head and "lm_head.weight" in tensors:
        tensors.setdefault("lm_heads.0.weight", tensors.pop("lm_head.weight"))
    ids = _take_map(folder, tensors, asked) if asked.draft_ids is not None else None
    expected = {name: tuple(p.shape) for name, p in asked.named_parameters()}
    check_tensors(expected, tensors, folder)
    raw, path = read_config(folder), folder / "config.json"
    scale = factor(raw, "logit_scale", path)
    if scale is not None:  # vLLM multiplies what heads say
        tensors |= {n: scale * t for n, t in tensors.items() if n.startswith("lm_heads.")}
    with torch.device("meta"):
        drafter = _built(raw, path, target, about, ids)
    return fill(drafter, tensors)


def _built(
    raw: Mapping[str, Any], path: Path, target: Target, about: About, ids: Tensor | None
) -> MedusaDrafter:
    return MedusaDrafter(
        target.hidden_size,
        number(raw, "vocab_size", path),
        (target.num_layers,),
        number(raw, "num_heads", path),
        number(raw, "num_hidden_layers", path),
        ids,
        bias=flag(raw, "medusa_fc_bias", path),
        shared_head=flag(raw, "original_lm_head", path),
        train_head=(about.options or {}).get("train_head") is not False,
    )


def _take_map(folder: Path, tensors: dict[str, Tensor], asked: MedusaDrafter) -> Tensor:
    """The target ids of the heads' rows, ascending `[V_d]`, and the rows in their order.

    The map is taken out of `tensors`, in which heads of all rows are cut down to it.
    """
    assert asked.draft_ids is not None
    size = len(asked.draft_ids)
    if MAP not in tensors:
        raise UserError(f"{folder}: tensor '{MAP}' (of the draft vocabulary) is missing")
    ids = tensors.pop(MAP)
    if tuple(ids.shape) != (size,):
        raise UserError(f"{folder}: tensor '{MAP}' is {list(ids.shape)}, must be [{size}]")
    ids, order = ids.long().sort()
    if len(ids.unique()) < size or int(ids[0]) < 0 or int(ids[-1]) >= asked.rows:
        raise UserError(
            f"{folder}: tensor '{MAP}' must name {size} different tokens below {asked.rows}"
        )
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and len(tensor) in (size, asked.rows):
            tensors[name] = tensor[order if len(tensor) == size else ids]
    return ids


def write(drafter: MedusaDrafter, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder.

    Output matrices are written even if they are the target's own: vLLM leaves a missing one
    random.
    """
    tensors = {n: p.detach().to(dtype) for n, p in drafter.named_parameters()}
    options = drafter.options
    if drafter.draft_ids is not None:
        tensors[MAP] = drafter.draft_ids
    write_tensors(tensors, folder)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "hidden_size": drafter.width,
        "vocab_size": drafter.rows,
        "truncated_vocab_size": options["draft_vocab_size"] or drafter.rows,
        "num_heads": options["num_heads"],
        "num_hidden_layers": options["num_layers"],
        "medusa_fc_bias": any(name.endswith(".bias") for name in tensors),
        "original_lm_head": drafter.shared_head,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
