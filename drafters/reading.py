"""Reading the folder of a trained drafter, for a target that it fits.

`draftsmith.json`, where there is one, says what the engine layouts have no place for: the family,
the target it was trained for and, for a standalone LM with a reduced vocabulary, its ids.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import UserError
from ..data.target import Target
from ..data.vocabulary import same_tokens
from .causal import CausalDrafter
from .eagle3 import Eagle3Drafter
from .formats import eagle3_flat, hf_causal
from .formats.config import read_config
from .formats.tensors import weights_file

OWN = "draftsmith.json"
FORMAT = 1


def read_about(folder: Path) -> dict[str, Any] | None:
    """The folder's `draftsmith.json`, None if there is none.

    Raises `UserError` for one of another version.
    """
    path = folder / OWN
    if not path.exists():
        return None
    own = json.loads(path.read_text(encoding="utf-8"))
    if own.get("format") != FORMAT:
        raise UserError(f"{path} has format {own.get('format')}; this version reads {FORMAT}")
    return dict(own)


def read_head(folder: Path, target: Target, tokenizer: str | None) -> Eagle3Drafter:
    """An EAGLE-3 head for `target`. Raises `UserError` as `check_head` and `load_head`."""
    check_head(folder, target, tokenizer)
    return load_head(folder, target)


def check_head(
    folder: Path, target: Target, tokenizer: str | None, unnamed: tuple[int, ...] | None = None
) -> None:
    """Refuse a head by its configuration, tokenizer and file names; no weight is read.

    `tokenizer` is the hash of the one it was made with, or None; `unnamed` as `read_taps`. Raises
    `UserError` if it was trained for another tokenizer, or reads layers, widths or tokens that the
    target does not have.
    """
    weights_file(folder)
    if tokenizer is not None or has_tokenizer(folder):
        _shared_tokens(folder, target, tokenizer)
    else:
        warnings.warn(f"{folder} has no tokenizer: its ids are taken as the target's", stacklevel=4)
    _check_states(folder, target, unnamed)


def load_head(
    folder: Path, target: Target, unnamed: tuple[int, ...] | None = None
) -> Eagle3Drafter:
    """A head that `check_head` lets pass.

    Raises `UserError` if its weights are incomplete, or it drafts tokens that are none.
    """
    drafter = eagle3_flat.read(folder, target.embedding.cpu(), unnamed)
    _check_ids(folder, int(drafter.draft_ids.max()), target)
    return drafter


def read_lm(
    folder: Path, target: Target, tokenizer: str | None, draft_ids: list[int] | None
) -> CausalDrafter:
    """A standalone LM for `target`. Raises `UserError` as `check_lm` and `load_lm`."""
    return load_lm(folder, check_lm(folder, target, tokenizer, draft_ids))


def check_lm(
    folder: Path, target: Target, tokenizer: str | None, draft_ids: list[int] | None
) -> list[int] | None:
    """What a standalone LM drafts: `draft_ids`, or all that both it and `target` know.

    None stands for all of the target's tokens. Nothing is read but configuration and tokenizer.
    Raises `UserError` as `check_head`; a folder without a tokenizer is refused, too.
    """
    known = _shared_tokens(folder, target, tokenizer)
    known = min(known, int(hf_causal.text_config(folder).vocab_size))
    if draft_ids is None and known < target.vocab_size:
        draft_ids = list(range(known))
    if draft_ids is not None:
        _check_ids(folder, max(draft_ids), target)
    return draft_ids


def load_lm(folder: Path, draft_ids: list[int] | None) -> CausalDrafter:
    """A standalone LM that drafts `draft_ids`, None for all. Raises `UserError` as its reader."""
    drafter = hf_causal.read(folder)
    return drafter if draft_ids is None else CausalDrafter(drafter.model, torch.tensor(draft_ids))


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in the folder, of any kind that transformers reads."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any((folder / name).exists() for name in names)


def _shared_tokens(folder: Path, target: Target, tokenizer: str | None) -> int:
    """Ids from 0 to this number mean the same to the drafter and to `target`."""
    if tokenizer == target.provenance["tokenizer"]:
        return target.vocab_size
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        raise UserError(f"{folder} has no tokenizer to compare with the target's")
    try:
        found = same_tokens(target.tokenizer, AutoTokenizer.from_pretrained(folder))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    if found.note:
        warnings.warn(f"{folder}: {found.note}", stacklevel=5)
    return min(found.shared, target.vocab_size)


def _check_states(folder: Path, target: Target, unnamed: tuple[int, ...] | None) -> None:
    """Refuse a head that is built otherwise, or whose inputs the target cannot give."""
    raw, name, path = read_config(folder), target.provenance["name"], folder / "config.json"
    eagle3_flat.layer_config(raw, path)
    taps = eagle3_flat.read_taps(raw, path, unnamed)
    check_taps(folder, taps, target.num_layers, f"'{name}'")
    if raw.get("hidden_size") != target.hidden_size:
        raise UserError(
            f"{folder} reads states of width {raw.get('hidden_size')}, those of '{name}' have "
            f"{target.hidden_size}"
        )
    rows = target.embedding.shape[0]
    if raw.get("vocab_size", 0) > rows:
        raise UserError(
            f"{folder} reads embeddings of {raw['vocab_size']} tokens, '{name}' has those of {rows}"
        )


def check_taps(folder: Path, taps: Sequence[int], num_layers: int, target: str) -> None:
    """Raise `UserError` unless `target`, as it is called there, has the layers that are read."""
    if not all(0 <= tap < num_layers for tap in taps):
        raise UserError(
            f"{folder} reads the layers {list(taps)}, those of {target} are 0 to {num_layers - 1}"
        )


def _check_ids(folder: Path, largest: int, target: Target) -> None:
    """Refuse draft ids, up to `largest`, that the target cannot verify."""
    if largest >= target.vocab_size:
        raise UserError(
            f"{folder} drafts tokens up to id {largest}, those of "
            f"'{target.provenance['name']}' end at {target.vocab_size - 1}"
        )
