"""The table of folder layouts: which there are, whose they are, how they are told apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..configs.errors import UserError, did_you_mean
from ..data.target import Target
from .about import About
from .base import Drafter
from .formats import (
    dflash_flat,
    dflash_speculators,
    eagle,
    eagle3_flat,
    eagle3_speculators,
    hf_causal,
    medusa_native,
    medusa_vllm,
    mlp_speculator,
    own,
)
from .formats.config import config_of


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
    "dflash": Layout(
        family="dflash",
        claims=dflash_flat.claims,
        taps=dflash_flat.taps,
        shape=dflash_flat.shape,
        read=dflash_flat.read_for,
        write=dflash_flat.write,
    ),
    "dflash speculators": Layout(
        family="dflash",
        claims=dflash_speculators.claims,
        taps=dflash_speculators.taps,
        shape=dflash_speculators.shape,
        read=dflash_speculators.read_for,
        write=None,
    ),
    "eagle3": Layout(
        family="eagle3",
        claims=eagle3_flat.claims,
        taps=eagle3_flat.taps,
        shape=eagle3_flat.shape,
        read=eagle3_flat.read_for,
        write=eagle3_flat.write,
    ),
    "eagle3 speculators": Layout(
        family="eagle3",
        claims=eagle3_speculators.claims,
        taps=eagle3_speculators.taps,
        shape=eagle3_speculators.shape,
        read=eagle3_speculators.read_for,
        write=None,  # it names the target, and how many tokens to draft: see scripts/publish.py
    ),
    "medusa": Layout(
        family="medusa",
        claims=medusa_vllm.claims,
        taps=medusa_vllm.taps,
        shape=medusa_vllm.shape,
        read=medusa_vllm.read_for,
        write=medusa_vllm.write,
    ),
    "medusa native": Layout(
        family="medusa",
        claims=medusa_native.claims,
        taps=medusa_native.taps,
        shape=medusa_native.shape,
        read=medusa_native.read_for,
        write=None,
    ),
    "mlp_speculator": Layout(
        family="mlp",
        claims=mlp_speculator.claims,
        taps=mlp_speculator.taps,
        shape=mlp_speculator.shape,
        read=mlp_speculator.read_for,
        write=mlp_speculator.write,
    ),
    "eagle": Layout(
        family="eagle",
        claims=eagle.claims,
        taps=eagle.taps,
        shape=eagle.shape,
        read=eagle.read_for,
        write=None,
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
        kind = config_of(folder).get("speculators_model_type")
        raise UserError(
            f"{folder} is no drafter folder: it has none of the layouts {', '.join(LAYOUTS)}"
            + (f"; its speculators_model_type '{kind}' is not read" if kind else "")
        )
    if name not in LAYOUTS:
        raise UserError(f"{folder}: unknown layout '{name}'{did_you_mean(name, LAYOUTS)}")
    return name
