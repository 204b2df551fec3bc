"""Whether a target has what a drafter was made for: layers, widths, tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...configs.errors import UserError
from ...data.target import Target


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


def check_rows(folder: Path, count: int, target: Target) -> None:
    """Raise `UserError` if more tokens are embedded than the target knows."""
    rows = target.embedding.shape[0]
    if count > rows:
        raise UserError(
            f"{folder} reads embeddings of {count} tokens, '{target.provenance['name']}' has those "
            f"of {rows}"
        )


def check_ids(folder: Path, largest: int, target: Target) -> None:
    """Raise `UserError` for draft ids, up to `largest`, that the target cannot verify."""
    if largest >= target.vocab_size:
        raise UserError(
            f"{folder} drafts tokens up to id {largest}, those of "
            f"'{target.provenance['name']}' end at {target.vocab_size - 1}"
        )
