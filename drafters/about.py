"""What `draftsmith.json` tells of a drafter, beside what its engine layout has place for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configs.errors import UserError
from .formats.config import is_whole, read_json

OWN = "draftsmith.json"
FORMAT = 1
_KINDS: dict[str, tuple[type, str]] = {
    "family": (str, "a word"),
    "layout": (str, "a word, or null"),
    "options": (dict, "a table of names and values"),
    "trained": (dict, "a table of names and values"),
    "draft_ids": (list, "a list of token ids, or null"),
    "shared": (list, "a list of names"),
}


@dataclass(frozen=True)
class About:
    """What is known of a drafter without its layout; None for what is not.

    tokenizer: hash of the one it was made with; draft_ids: the target ids it drafts, None for those
    that its layout names, or all; shared: names of its parameters that are the target's own; taps:
    layers that it reads where its layout names none; options: what a recipe would say of it; own:
    all of the folder's `draftsmith.json`.
    """

    family: str | None = None
    layout: str | None = None
    tokenizer: str | None = None
    draft_ids: list[int] | None = None
    shared: Sequence[str] | None = None
    taps: tuple[int, ...] | None = None
    options: dict[str, Any] | None = None
    own: dict[str, Any] | None = None


def about(folder: Path, taps: tuple[int, ...] | None = None) -> About:
    """What the folder's `draftsmith.json` says, if there is one; `taps` are the recipe's.

    Raises `UserError` for one of another version, damaged or incomplete.
    """
    path = folder / OWN
    if not path.exists():
        return About(taps=taps)
    own = read_json(path)
    if own.get("format") != FORMAT:
        raise UserError(f"{path} has format {own.get('format')}; this version reads {FORMAT}")
    missing = [name for name in ("family", "layout", "draft_ids") if name not in own]
    target = own.get("target")
    if not isinstance(target, dict) or "tokenizer" not in target:
        missing.append("target.tokenizer")
    if missing:
        raise UserError(f"{path} is incomplete: it does not tell {', '.join(missing)}")
    for name, (kind, accepted) in _KINDS.items():
        if own.get(name) is not None and not isinstance(own[name], kind):
            raise UserError(f"{path}: '{name}' is {own[name]}, must be {accepted}")
    _check_ids(own["draft_ids"], path)
    return About(
        family=own["family"],
        layout=own["layout"],
        tokenizer=own["target"]["tokenizer"],
        draft_ids=own["draft_ids"],
        shared=own.get("shared"),
        taps=taps,
        options=own.get("options"),
        own=own,
    )


def _check_ids(ids: Any, path: Path) -> None:
    """Raise `UserError` unless they are None, or different ids in ascending order."""
    if ids is None:
        return
    if not ids or not all(map(is_whole, ids)) or ids[0] < 0 or ids != sorted(set(ids)):
        raise UserError(f"{path}: 'draft_ids' must be different token ids in ascending order")
