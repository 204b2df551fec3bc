"""Publish: a drafter folder with a card of measured numbers, proved to load back the same."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..configs.errors import UserError
from ..configs.recipe import PublishSection
from ..data.files import whole_folder
from ..data.target import Target
from ..drafters.about import OWN, About
from ..drafters.base import Drafter
from ..drafters.card_commands import SERVING
from ..drafters.card_notes import engine_note
from ..drafters.checkpoint import load_drafter, read_own, save_drafter, weights_hash
from ..drafters.checksums import CARD, write_checksums
from ..drafters.formats import eagle3_speculators
from ..drafters.formats.eagle3_speculators import FOLDER
from ..drafters.formats.tensors import split_weights
from ..drafters.hub import model_card
from ..drafters.layouts import LAYOUTS
from ..drafters.public import public_values
from ..drafters.push import check_name
from ..eval.engines.registry import WHOLE
from ..eval.preflight.compare import logits_apart
from ..eval.preflight.preflight import check_served, unread
from ..eval.preflight.rules import ENGINES

_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}


def publish(
    section: PublishSection,
    target: Target,
    drafter_folder: Path,
    report: dict[str, Any],
    folder: Path,
    console: Console,
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Write the published folder, or nothing. Its card tells of `recipe`, as `to_dict` has it.

    No path of this machine is in it, and its SHA256SUMS lists all files but the card. Raises
    `UserError` for a drafter that no engine can read, a report of another drafter or of rounds that
    engines would not draft so, a folder whose logits differ from the trained drafter's when loaded
    back, or one that an engine would serve otherwise than it was trained.
    """
    own = read_own(drafter_folder)
    drafter = load_drafter(drafter_folder, target)
    _check(drafter, drafter_folder, report)
    without = _without(drafter, drafter_folder, target)
    known, gamma = target.provenance, report["settings"]["num_draft_tokens"]
    base = section.base_model or known["base_model"] or known["name"]
    if section.speculators:
        _check_speculators(own["layout"], base)
    with whole_folder(folder) as part:
        written = part / "drafter"
        dtype = getattr(torch, section.dtype)
        save_drafter(drafter, written, target, own["trained"], dtype)
        split_weights(written, section.max_shard_size)
        _without_paths(written / OWN)
        note = engine_note(drafter)
        about: dict[str, Any] = {"recipe": recipe, "note": note, "without": without}
        card = model_card(
            report, own["layout"], base, section.licence, **about, speculators=section.speculators
        )
        (written / CARD).write_text(card, encoding="utf-8")
        trained = load_drafter(drafter_folder, target)
        if section.speculators:
            again = _write_speculators(drafter, written / FOLDER, section, target, base, gamma)
            _compare(trained, again, section.dtype, target)
            check_served(written / FOLDER, target, trained)
        write_checksums(written)
        _compare(trained, load_drafter(written, target), section.dtype, target)
        check_served(written, target, trained)
        for path in written.iterdir():
            shutil.move(path, part / path.name)
        written.rmdir()
    console.print(f"published {folder} ({own['layout']} layout, {section.dtype}), loads back equal")
    return folder


def _check(drafter: Drafter, folder: Path, report: dict[str, Any]) -> None:
    """Raise `UserError` unless engines read the drafter, and draft as `report` measured it."""
    if drafter.unserved is not None:
        raise UserError(
            f"{folder} is a drafter of family '{drafter.family}' with {drafter.unserved}, "
            "which no engine reads: it serves in draftsmith's own loop only"
        )
    if report["provenance"]["drafter"]["weights_sha256"] != weights_hash(folder):
        raise UserError(f"the report measured another drafter than {folder}; evaluate it")
    gamma, most = report["settings"]["num_draft_tokens"], drafter.max_draft_tokens
    if drafter.layout in WHOLE and gamma != most:
        raise UserError(
            f"the report measured rounds of {gamma} tokens, and engines let a drafter of family "
            f"'{drafter.family}' see as many places as they draft: set serving.num_draft_tokens to "
            f"{most}, which it was trained for, and evaluate it"
        )


def _without(drafter: Drafter, folder: Path, target: Target) -> dict[str, str]:
    """What engines do not read of the drafter, by their names.

    Raises `UserError` if that leaves none of those that a card names.
    """
    layout = drafter.layout or ""
    found, named = unread(layout, drafter, target), SERVING[layout].engines
    if named and not set(named) - found.keys():
        told = "; ".join(f"{ENGINES[engine]} does not read {found[engine]}" for engine in named)
        raise UserError(f"{folder} would be served by no engine as it was trained: {told}")
    return {ENGINES[engine]: what for engine, what in found.items()}


def _check_speculators(layout: str, base: str) -> None:
    """Raise `UserError` for a drafter that has no such layout, or a target without a Hub id."""
    if layout != "eagle3":
        raise UserError(
            f"publish.speculators is for EAGLE-3 heads, not for drafters of layout '{layout}'"
        )
    try:
        check_name(base)
    except UserError as error:
        raise UserError(
            f"publish.speculators names the target by its Hub id, publish.base_model: {error}"
        ) from error


def _write_speculators(
    drafter: Any, folder: Path, section: PublishSection, target: Target, base: str, gamma: int
) -> Any:
    """The drafter as it is read back from the layout of the speculators library in `folder`."""
    folder.mkdir()
    kind = type(target.model).__name__
    eagle3_speculators.write(drafter, folder, getattr(torch, section.dtype), base, kind, gamma)
    split_weights(folder, section.max_shard_size)
    again: Any = LAYOUTS["eagle3 speculators"].read(folder, target, About(shared=drafter.shared))
    return again.to(target.device).eval()


def _without_paths(path: Path) -> None:
    own = json.loads(path.read_text(encoding="utf-8"))
    for name in ("options", "target", "trained"):
        own[name] = public_values(own[name])
    path.write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")


def _compare(trained: Any, written: Any, dtype: str, target: Target) -> None:
    """Compare draft logits on noise that passes through every weight."""
    worst = logits_apart(trained.float(), written.float(), target)
    if not worst <= _TOLERANCE[dtype]:
        raise UserError(f"the published folder loads back with other logits (off by {worst:.2g})")
