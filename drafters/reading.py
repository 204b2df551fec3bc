"""Reading the folder of a drafter, ours or others', for a target that it fits."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from ..configs.errors import UserError
from ..data.target import Target
from ..data.vocabulary import same_tokens
from .about import About
from .base import Drafter
from .checksums import SUMS, verify_checksums
from .formats.config import why
from .formats.fits import check_ids
from .formats.hf_causal import text_config
from .layouts import LAYOUTS, layout_of


def check(folder: Path, target: Target, known: About) -> Drafter:
    """The folder's drafter without weights, judged by configuration, tokenizer and file names.

    Raises `UserError` if it was made for another tokenizer, or reads layers, widths or tokens that
    the target does not have.
    """
    known = _fitted(folder, target, known)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about copying nothing
        return LAYOUTS[layout_of(folder, known)].shape(folder, target, known)


def read(folder: Path, target: Target, known: About) -> Drafter:
    """The folder's drafter, in the precision of its weights and on the CPU.

    Raises `UserError` as `check`, for weights that are incomplete or do not fit, for draft tokens
    that are none, and for a published folder whose files are not those of its checksums.
    """
    known = _fitted(folder, target, known)
    if (folder / SUMS).exists():
        verify_checksums(folder)
    drafter = LAYOUTS[layout_of(folder, known)].read(folder, target, known)
    if drafter.draft_ids is not None:
        check_ids(folder, int(drafter.draft_ids.max()), target)
    return drafter


def _fitted(folder: Path, target: Target, known: About) -> About:
    """`known` with the ids that a language model drafts: those it shares with the target.

    None stands for all of the target's tokens. Raises `UserError` for another tokenizer. A head
    that brings none is taken as made for the target's; a language model has to bring one.
    """
    if LAYOUTS[layout_of(folder, known)].family != "causal":
        if known.tokenizer is not None or has_tokenizer(folder):
            _shared_tokens(folder, target, known.tokenizer)
        else:
            warnings.warn(
                f"{folder} has no tokenizer: its ids are taken as the target's", stacklevel=4
            )
        return known
    shared = _shared_tokens(folder, target, known.tokenizer)
    shared = min(shared, int(text_config(folder).vocab_size))
    ids = known.draft_ids
    if ids is None and shared < target.vocab_size:
        ids = list(range(shared))
    if ids is not None:
        check_ids(folder, max(ids), target)
    return replace(known, draft_ids=ids)


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
        theirs = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a tokenizer's code makes of damaged files
        raise UserError(f"cannot read the tokenizer of {folder}: {why(error)}") from error
    try:
        found = same_tokens(target.tokenizer, theirs)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    if found.note:
        warnings.warn(f"{folder}: {found.note}", stacklevel=5)
    return min(found.shared, target.vocab_size)
