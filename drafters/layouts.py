"""The table of folder layouts: which there are, whose they are, how they are told apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..configs.errors import UserError, did_you_mean
from ..data.target import Target
from .about import About
from .base import Drafter
from .formats import eagle3_flat, hf_causal, own


class Layout(NamedTuple):
    """How drafters lie in a folder.

    Readers raise `UserError` for what does not fit the target, naming every tensor that is missing,
    unexpected or of another shape.

    family: of what is read, None for any; claims: whether a folder without `draftsmith.json` has
    this layout; taps: the states that it reads of a target with so many layers; shape: the drafter
    by its configuration alone, no weight being read; read: with its weights, in the precision that
    they have; write: None for layouts that are only read.
    """

    family: str | None
    claims: Callable[[Path], bool]
    taps: Callable[[Path, About, int], tuple[int, ...]]
    shape: Callable[[Path, Target, About], Drafter]
    read: Callable[[Path, Target, About], Drafter]
    write: Callable[[Any, Path, torch.dtype], None] | None


LAYOUTS: dict[str, Layout] = {
    "eagle3": Layout(
        family="eagle3",
        claims=eagle3_flat.claims,
        taps=eagle3_flat.taps,
        shape=eagle3_flat.shape,
        read=eagle3_flat.read_for,
        write=eagle3_flat.write,
    ),
    "draftsmith": Layout(
        family=None,
        claims=own.claims,
        taps=own.taps,
        shape=own.shape,
        read=own.read,
        write=own.write,
    ),
    "transformers": Layout(
        family="causal",
        claims=hf_causal.claims,
        taps=hf_causal.taps,
        shape=hf_causal.shape,
        read=hf_causal.read_for,
        write=hf_causal.write,
    ),
}
"""A folder that does not say what it is has the first layout that claims it."""


def layout_of(folder: Path, known: About) -> str:
    """The name of the folder's layout. Raises `UserError` for one that is unknown."""
    name = known.layout
    if name is None:
        name = next((name for name, layout in LAYOUTS.items() if layout.claims(folder)), None)
    if name is None:
        raise UserError(f"{folder} has none of the layouts {', '.join(LAYOUTS)}")
    if name not in LAYOUTS:
        raise UserError(f"{folder}: unknown layout '{name}'{did_you_mean(name, LAYOUTS)}")
    return name
