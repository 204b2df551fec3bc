"""Publish: a drafter folder with a card of measured numbers, proved to load back the same."""

import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..configs.errors import UserError
from ..configs.recipe import PublishSection
from ..data.files import whole_folder
from ..data.target import Target
from ..drafters.checkpoint import load_drafter, read_own, save_drafter, weights_hash
from ..drafters.hub import model_card

_PROBE_ROWS = 16
_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3}


def publish(
    section: PublishSection,
    target: Target,
    drafter_folder: Path,
    report: dict[str, Any],
    folder: Path,
    console: Console,
) -> Path:
    """Write the published folder, or nothing.

    Raises `UserError` for a drafter that no engine can read, a report of another drafter, or a
    folder whose logits differ from the trained drafter's when loaded back.
    """
    own = read_own(drafter_folder)
    drafter = load_drafter(drafter_folder, target)
    if drafter.unserved is not None:
        raise UserError(
            f"{drafter_folder} is a drafter of family '{own['family']}' with {drafter.unserved}, "
            "which no engine reads: it serves in draftsmith's own loop only"
        )
    measured = report["provenance"]["drafter"]["weights_sha256"]
    if measured != weights_hash(drafter_folder):
        raise UserError(f"the report measured another drafter than {drafter_folder}; evaluate it")
    base = target.provenance["base_model"] or target.provenance["name"]
    with whole_folder(folder) as part:
        written = part / "drafter"
        dtype = getattr(torch, section.dtype)
        save_drafter(drafter, written, target, own["trained"], dtype)
        card = model_card(report, own["layout"], base, section.licence)
        (written / "README.md").write_text(card, encoding="utf-8")
        trained = load_drafter(drafter_folder, target)
        _compare(trained, load_drafter(written, target), section.dtype, target)
        for path in written.iterdir():
            shutil.move(path, part / path.name)
        written.rmdir()
    console.print(f"published {folder} ({own['layout']} layout, {section.dtype}), loads back equal")
    return folder


@torch.inference_mode()
def _compare(trained: Any, written: Any, dtype: str, target: Target) -> None:
    """Compare draft logits on noise that passes through every weight."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, _PROBE_ROWS), generator=generator)
    results = []
    for drafter in (trained, written):
        drafter.float()
        width = len(drafter.taps) * target.hidden_size
        taps = torch.randn(1, _PROBE_ROWS, width, generator=torch.Generator().manual_seed(1))
        state = drafter.start(1, 2 * _PROBE_ROWS)
        device = next(drafter.parameters()).device
        drafter.prefill(state, ids.to(device), [_PROBE_ROWS], taps.to(device))
        drafter.commit(state, ids[:, -1:].to(device), [1], taps[:, -1:].to(device))
        first = drafter.first(state)  # [1, V_d]
        later = drafter.extend(state, ids[:, :1].to(device))[:, 0]
        results.append(torch.cat([first, later]))
    worst = (results[0] - results[1]).abs().max().item() / results[0].abs().max().item()
    if not worst <= _TOLERANCE[dtype]:
        raise UserError(f"the published folder loads back with other logits (off by {worst:.2g})")
