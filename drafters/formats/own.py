"""The layout of drafters that no engine reads: weights by our names, options in `draftsmith.json`.

A drafter is built as a recipe with those options would build it, and every weight of its own is
replaced by the folder's. What it shares with the target is not written: it stays the target's.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...configs.errors import UserError
from ...data.target import Target
from ..about import OWN, About
from ..base import Drafter
from ..registry import FAMILIES, FamilyConfig, family_config
from .fits import check_ids
from .tensors import check_tensors, read_tensors, write_tensors


def claims(folder: Path) -> bool:
    """Only `draftsmith.json` tells of it."""
    return False


def config_of(folder: Path, about: About) -> FamilyConfig:
    """The options that the folder's drafter was built by. Raises `UserError` for what is none."""
    try:
        return family_config({**(about.options or {}), "family": about.family}, "its options")[1]
    except UserError as error:
        raise UserError(f"{folder / OWN}: {error}") from error


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return config_of(folder, about).resolved_taps(num_layers)


def shape(folder: Path, target: Target, about: About) -> Drafter:
    """The drafter as it would begin, with the draft vocabulary of the folder.

    Raises `UserError` for a target that lacks tokens or layers of it.
    """
    assert about.family is not None
    ids, config = None, config_of(folder, about)
    if about.draft_ids is None and getattr(config, "vocab_size", None) is not None:
        raise UserError(f"{folder / OWN}: 'draft_ids' is missing")
    if about.draft_ids is not None:
        check_ids(folder, max(about.draft_ids), target)
        ids = torch.tensor(about.draft_ids, device="cpu")  # rows are taken by them, on device meta
    try:
        return FAMILIES[about.family].build(target, config, ids)
    except UserError as error:
        raise UserError(f"{folder / OWN}: {error}") from error


def read(folder: Path, target: Target, about: About) -> Drafter:
    drafter = shape(folder, target, about)
    assert isinstance(drafter, nn.Module)
    found = read_tensors(folder)
    expected = {name: tuple(p.shape) for name, p in written(drafter).items()}
    check_tensors(expected, found, folder)
    dtypes = {tensor.dtype for tensor in found.values()}
    if len(dtypes) != 1:
        raise UserError(f"{folder}: tensors of several precisions, {sorted(map(str, dtypes))}")
    for name, parameter in drafter.named_parameters():
        value = found.get(name, parameter.data).to(dtype=next(iter(dtypes)))
        # A copy: products of unaligned weights, as they lie in a mapped file, round otherwise.
        parameter.data = value.clone().to(parameter.device)
    return drafter


def written(drafter: Any) -> dict[str, torch.Tensor]:
    """The drafter's own weights; what it shares with the target is not among them."""
    shared = set(drafter.shared)
    return {n: p.detach() for n, p in drafter.named_parameters() if n not in shared}


def write(drafter: Any, folder: Path, dtype: torch.dtype) -> None:
    write_tensors({n: t.to(dtype) for n, t in written(drafter).items()}, folder)
