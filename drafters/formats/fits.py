"""Whether a target has what a drafter was made for: layers, widths, tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import UserError
from ...data.target import Target

_ROUNDING = 2.0**-7  # what a 16-bit copy differs by, of each number
_LEAST = 2.0**-14  # below which half precision has fewer digits


def check_taps(folder: Path, taps: Sequence[int], last: int, target: str = "the target") -> None:
    """Raise `UserError` unless `target`, as it is called there, has states 0 to `last`."""
    if not all(0 <= tap <= last for tap in taps):
        raise UserError(
            f"{folder} reads the layers {list(taps)}, those of {target} are 0 to {last}"
        )


def check_width(folder: Path, width: Any, target: Target) -> None:
    """Raise `UserError` unless the target's states are as wide as those that are read."""
    if width != target.hidden_size:
        raise UserError(
            f"{folder} reads states of width {width}, those of '{target.provenance['name']}' have "
            f"{target.hidden_size}"
        )


def same_rounded(mine: Tensor, theirs: Tensor) -> bool:
    """Whether one is the other or a 16-bit copy of it, as drafters may have of a target's part."""
    mine, theirs = mine.cpu().float(), theirs.cpu().float()
    return torch.allclose(mine, theirs, rtol=_ROUNDING, atol=_LEAST)


def check_rows(folder: Path, count: int, target: Target) -> None:
    """Raise `UserError` if more tokens are embedded than the target knows."""
    rows = target.embedding.shape[0]
    if count > rows:
        raise UserError(
            f"{folder} reads embeddings of {count} tokens, '{target.provenance['name']}' has those "
            f"of {rows}"
        )


def check_head(folder: Path, count: int, target: Target) -> None:
    """Raise `UserError` unless `count` rows are all of the target's tokens, padding or not."""
    least, most = target.vocab_size, max(target.head.out_features, target.embedding.shape[0])
    if not least <= count <= most:
        raise UserError(
            f"{folder} is for {count} tokens, '{target.provenance['name']}' has {least}"
            + (f" to {most} with padding" if most > least else "")
        )


def check_ids(folder: Path, largest: int, target: Target) -> None:
    """Raise `UserError` for draft ids, up to `largest`, that the target cannot verify."""
    if largest >= target.vocab_size:
        raise UserError(
            f"{folder} drafts tokens up to id {largest}, those of "
            f"'{target.provenance['name']}' end at {target.vocab_size - 1}"
        )


def check_shared(folder: Path, name: str, mine: Tensor, theirs: Tensor) -> None:
    """Raise `UserError` unless a tensor of the folder is the target's own, or a rounded copy."""
    if not same_rounded(mine, theirs):
        kind = "embedding" if name.startswith("embed_tokens") else "head"
        raise UserError(
            f"{folder}: tensor '{name}' is another {kind} than the target's, which a drafter shares"
            " here"
        )
