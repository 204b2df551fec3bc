"""Training checkpoints: whole or absent, newest whole one first, the last k kept."""

import json
import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError, safe_open

from ..configs.errors import UserError
from ..data.files import whole_folder

_PREFIX = "step-"
_STATE = "progress.json"

# A tied head is one tensor under two names: accelerate drops the second when it saves, warns of
# it at each checkpoint, and restores both.
logging.getLogger("accelerate.utils.other").addFilter(
    lambda record: "Removed shared tensor" not in record.getMessage()
)


def save_checkpoint(
    accelerator: Accelerator, folder: Path, step: int, progress: dict[str, Any], keep: int
) -> None:
    """Save weights, optimiser, schedule and random state of all processes as `step-N`.

    Raises `UserError` if it cannot be written; those before it stay whole.
    """
    final = folder / f"{_PREFIX}{step:06d}"
    _remove_leftovers(accelerator, folder)
    try:
        _write(accelerator, final, {"step": step, **progress})
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors hide errno
        raise UserError(
            f"could not write {final}: {error}; the checkpoints before it are whole, free some "
            "space and run the same command again"
        ) from error
    if accelerator.is_main_process:
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)


def _remove_leftovers(accelerator: Accelerator, folder: Path) -> None:
    """Remove what killed processes left half-written or half-replaced."""
    # One run owns the folder, and between two checkpoints none of its processes writes here, so
    # all that is found is left over: process ids say less, other machines may share the folder.
    # Only the main process removes, and the others wait: they write into one `.part` together.
    if accelerator.is_main_process:
        for ending in ("part", "old"):
            for path in folder.glob(f".{_PREFIX}*.{ending}"):
                shutil.rmtree(path, ignore_errors=True)
    accelerator.wait_for_everyone()


def _write(accelerator: Accelerator, final: Path, progress: dict[str, Any]) -> None:
    if accelerator.num_processes == 1:
        with whole_folder(final) as part:
            accelerator.save_state(str(part))
            (part / _STATE).write_text(json.dumps(progress), encoding="utf-8")
    else:
        part = final.with_name(f".{final.name}.part")
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (part / _STATE).write_text(json.dumps(progress), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
        accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders that are whole, oldest first."""
    return [path for path in sorted(folder.glob(f"{_PREFIX}*")) if _is_whole(path)]


def damaged_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders that a resumed run passes over, oldest first."""
    return [path for path in sorted(folder.glob(f"{_PREFIX}*")) if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    pickled = [p for p in path.glob("*") if p.suffix in (".bin", ".pkl")]
    if not all(zipfile.is_zipfile(p) for p in pickled):  # cut off: the index stands at the end
        return False
    try:
        json.loads((path / _STATE).read_text(encoding="utf-8"))
        weights = sorted(path.glob("*.safetensors"))
        for file in weights:
            with safe_open(file, "pt") as handle:
                handle.keys()
    except (OSError, ValueError, SafetensorError):
        return False
    return bool(weights) and any(path.glob("optimizer*"))


def load_newest(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint; returns its progress, or None without one."""
    found = checkpoints(folder)
    if not found:
        return None
    accelerator.load_state(str(found[-1]))
    return dict(json.loads((found[-1] / _STATE).read_text(encoding="utf-8")))
