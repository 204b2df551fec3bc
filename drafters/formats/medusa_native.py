"""Medusa heads as their authors publish them: read, never written.

`medusa_lm_head.safetensors`, or a pickle `medusa_lm_head.pt`, with `{head}.{layer}.linear.weight`,
`.bias` and `{head}.{layers}.weight` for the output. Only tensors are taken out of a pickle. Widths
are the target's. `config.json` may name fewer heads than there are, as that of the first published
ones does.
"""

import re
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...data.target import Target
from ..about import About
from ..medusa import MedusaDrafter
from .config import number, read_config
from .tensors import check_tensors, fill, header, read_pickle

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_HEAD = re.compile(r"(\d+)\.\d+\.")


def claims(folder: Path) -> bool:
    """Whether the folder holds a file of that name."""
    return any((folder / name).exists() for name in _FILES)


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return (num_layers,)


def shape(folder: Path, target: Target, about: About) -> MedusaDrafter:
    """As many heads as `config.json` names or the file has names for, whichever are more."""
    path = _file(folder)
    return _built(folder, target, read_pickle(path) if path.suffix == ".pt" else header(path))


def read_for(folder: Path, target: Target, about: About) -> MedusaDrafter:
    """Raises `UserError` naming any tensor that is missing, unexpected or of another shape."""
    tensors = _tensors(folder)
    with torch.device("meta"):
        drafter = _built(folder, target, tensors)
    names = {name: _published(name, drafter) for name, _ in drafter.named_parameters()}
    expected = {names[name]: tuple(p.shape) for name, p in drafter.named_parameters()}
    check_tensors(expected, tensors, folder)
    return fill(drafter, {name: tensors[theirs] for name, theirs in names.items()})


def _built(folder: Path, target: Target, names: Collection[str]) -> MedusaDrafter:
    raw, path = read_config(folder), folder / "config.json"
    found = [int(head[1]) + 1 for head in map(_HEAD.match, names) if head]
    return MedusaDrafter(
        target.hidden_size,
        target.head.out_features,
        (target.num_layers,),
        max([number(raw, "medusa_num_heads", path), *found]),
        number(raw, "medusa_num_layers", path),
    )


def _published(name: str, drafter: MedusaDrafter) -> str:
    """What others call a tensor of ours."""
    parts = name.split(".")
    if parts[0] == "blocks":  # blocks.{head}.layers.{layer}.{kind}
        return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
    return f"{parts[1]}.{drafter.num_layers}.weight"


def _file(folder: Path) -> Path:
    return next(folder / name for name in _FILES if (folder / name).exists())


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = _file(folder)
    if path.suffix == ".pt":
        return read_pickle(path)
    header(path)  # which refuses one that is damaged
    return load_file(path)
