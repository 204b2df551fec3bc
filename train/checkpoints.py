"""Training checkpoints: whole or absent, newest whole one first, the last k kept.

A checkpoint's `progress.json` is written last and lists every file with its size, whoever of the
processes wrote it: one that lacks a byte is damaged, and passed over. All processes share the
folder.
"""

import json
import logging
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from ..configs.errors import UserError
from ..data.files import put_in_place
from .distributed import name_of

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
    state = {
        "step": step,
        "spread": name_of(accelerator),
        "processes": accelerator.num_processes,
        **progress,
    }
    try:
        _write(accelerator, final, state)
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
        for begin in (f"{_PREFIX}*", "best.*", "drafter.*"):
            for path in (*folder.glob(f".{begin}.part"), *folder.glob(f".{begin}.old")):
                shutil.rmtree(path, ignore_errors=True)
    accelerator.wait_for_everyone()


def _write(accelerator: Accelerator, final: Path, state: dict[str, Any]) -> None:
    part = final.with_name(f".{final.name}.part")
    try:
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            written = sorted(path for path in part.rglob("*") if path.is_file())
            for path in written:  # or a power cut leaves files of the right size and no content
                with path.open("rb") as handle:
                    os.fsync(handle.fileno())
            state["files"] = {str(p.relative_to(part)): p.stat().st_size for p in written}
            with (part / _STATE).open("w", encoding="utf-8") as handle:
                json.dump(state, handle)
                handle.flush()
                os.fsync(handle.fileno())
            put_in_place(part, final)
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders that are whole, oldest first."""
    return [path for path in _folders(folder) if _state_of(path)]


def _folders(folder: Path) -> list[Path]:
    """Checkpoint folders, whole or not, by their steps."""
    named = [p for p in folder.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(named, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def saved_progress(folder: Path) -> list[dict[str, Any]]:
    """What the whole checkpoints say of themselves, oldest first."""
    states = (_state_of(path) for path in _folders(folder))
    return [state for state in states if state]


def damaged_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders that a resumed run passes over, oldest first."""
    return [path for path in _folders(folder) if not _state_of(path)]


def _state_of(path: Path) -> dict[str, Any] | None:
    """What a checkpoint says of itself, None for one that is not whole."""
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
        sizes = {name: (path / name).stat().st_size for name in state["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if sizes and sizes == state["files"] else None


def newest(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """What the newest whole checkpoint says of itself, before anything is restored; None without.

    Raises `UserError` if it cannot be continued by processes like these.
    """
    found = checkpoints(folder)
    state = _state_of(found[-1]) if found else None
    if state is None:
        return None
    was, now = state["spread"], name_of(accelerator)
    plain = {"one process", "DDP"}  # keep the very same files
    if was != now and not {was, now} <= plain:
        raise UserError(
            f"{found[-1]} was saved under {was} and this is {now}, which cannot read it; launch "
            "as before, or name another folder"
        )
    if was.startswith("DeepSpeed") and state["processes"] != accelerator.num_processes:
        raise UserError(
            f"{found[-1]} was saved by {state['processes']} processes, and DeepSpeed ties its "
            f"files to them; launch as many, not {accelerator.num_processes}"
        )
    return state


def restore_newest(accelerator: Accelerator, folder: Path) -> None:
    """Restore the newest whole checkpoint, which there must be."""
    accelerator.load_state(str(checkpoints(folder)[-1]))


def as_one_process_saves(accelerator: Accelerator) -> None:
    """Let checkpoints of DDP name weights as those of one process do, so that each reads both."""

    def saving(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        for i, state in enumerate(weights):  # of an OrderedDict, accelerate knows what is shared
            named = ((name.removeprefix("module."), value) for name, value in state.items())
            weights[i] = OrderedDict(named)

    def loading(models: list[nn.Module], folder: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(loading)
