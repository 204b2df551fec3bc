"""Save and load drafters. A saved drafter *is* its engine layout, plus one file of our own.

`draftsmith.json` names the family, its options, the target it was trained for (tokenizer hash
included), what of it is the target's own and, where the layout has no place for them, the ids of
its draft vocabulary. Everything else is what engines read. Folders that others published are read
as they are.

A family that has nothing to train keeps its options, and nothing else: loading it makes it anew
from the target at hand.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import UserError, did_you_mean
from ..data.files import whole_folder
from ..data.shelves import sha256
from ..data.target import Target
from .about import FORMAT, OWN, About, about
from .base import Drafter
from .formats.own import config_of
from .formats.tensors import weight_files
from .layouts import LAYOUTS
from .reading import read
from .registry import FAMILIES, UntrainedConfig, untrained_drafter

_OURS = ("transformers", "draftsmith")
"""Layouts that have no place for the ids of a draft vocabulary."""


def save_drafter(
    drafter: Drafter,
    folder: Path,
    target: Target,
    trained: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a drafter with its tokenizer into `folder`, whole or not at all."""
    with whole_folder(folder) as part:
        own: dict[str, Any] = {
            "format": FORMAT,
            "family": drafter.family,
            "layout": drafter.layout,
            "options": drafter.options,
            "target": dict(target.provenance),
            "trained": dict(trained),
            "draft_ids": None,
            "shared": list(drafter.shared),
        }
        if drafter.layout is not None:
            write = LAYOUTS[drafter.layout].write
            assert write is not None
            write(drafter, part, dtype)
            _save_tokenizer(target, part)
            if drafter.draft_ids is not None and drafter.layout in _OURS:
                own["draft_ids"] = drafter.draft_ids.tolist()
        (part / OWN).write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
    return folder


def _save_tokenizer(target: Target, folder: Path) -> None:
    target.tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":  # unknown before transformers 5
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_own(folder: Path) -> dict[str, Any]:
    """The folder's `draftsmith.json`. Raises `UserError` if it has none."""
    known = _about(folder)
    if known.own is None:
        raise UserError(f"{folder} is no drafter folder of ours (no {OWN})")
    return known.own


def _about(folder: Path, taps: tuple[int, ...] | None = None) -> About:
    known = about(folder, taps)
    if known.family is not None and known.family not in FAMILIES:
        raise UserError(
            f"{folder / OWN}: unknown family '{known.family}'{did_you_mean(known.family, FAMILIES)}"
        )
    return known


def load_drafter(folder: Path, target: Target, taps: tuple[int, ...] | None = None) -> Drafter:
    """Load a drafter for `target`, ours or others', on its device.

    `taps` are read where a head that others published names none. Raises `UserError` as
    `reading.read`.
    """
    if not folder.is_dir():
        raise UserError(f"there is no drafter's folder {folder}")
    known = _about(folder, taps)
    if known.own is not None and known.layout is None:
        return _from_options(folder, known, target)
    drafter: Any = read(folder, target, known)
    return drafter.to(target.device).eval()


def _from_options(folder: Path, known: About, target: Target) -> Drafter:
    config = config_of(folder, known)
    if not isinstance(config, UntrainedConfig):
        raise UserError(f"{folder / OWN}: 'layout' of a drafter '{known.family}' must be told")
    return untrained_drafter(config, target)


def weights_hash(folder: Path) -> str:
    """SHA-256 of the folder's weights; where it has none, of the options that stand for them."""
    known = _about(folder)
    if known.own is not None and known.layout is None:
        said = {"family": known.family, "options": known.options}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    digests = [sha256(path) for path in weight_files(folder)]
    return (
        digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    )
