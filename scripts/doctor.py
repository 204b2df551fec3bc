"""`draftsmith doctor`: what is here, and what would not work."""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from ..data.embedded import NAME, WHEEL
from ..data.files import cache_folder

_NEEDED = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "gguf")
_OPTIONAL = {
    "wandb": "train.wandb",
    "deepspeed": "DeepSpeed training (pip install 'draftsmith[deepspeed]')",
}
_MIN_FREE = 3 << 30


def diagnose(console: Console) -> int:
    """Print versions, devices and folders; returns 1 if the demo would not work here."""
    table = Table("what", "found", "note")
    faults = [f"{name} is not installed" for name in _NEEDED if _version(name) is None]
    table.add_row("python", sys.version.split()[0], "")
    for name in _NEEDED:
        table.add_row(name, _version(name) or "[red]missing[/red]", "")
    for name, use in _OPTIONAL.items():
        found = _version(name)
        table.add_row(name, found or "not installed", "" if found else f"needed for {use}")
    table.add_row("processor", f"{os.cpu_count()} cores", f"{torch.get_num_threads()} threads")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table.add_row("accelerators", ", ".join(devices) or "none", "" if devices else "CPU is used")
    folder = cache_folder()
    kept = any((folder / "targets").glob(f"{NAME}*")) if folder.exists() else False
    note = "kept" if kept else f"{WHEEL} is downloaded from the package index on first use"
    table.add_row("embedded target", NAME, note)
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    table.add_row("cache folder", str(folder), f"{free / 2**30:.0f} GiB free")
    if free < _MIN_FREE:
        faults.append(f"only {free / 2**30:.1f} GiB are free for {folder}, the demo needs about 3")
    if not os.access(place, os.W_OK):
        faults.append(f"{place} is not writable; set DRAFTSMITH_CACHE to another folder")
    console.print(table)
    for fault in faults:
        console.print(f"would not work: {fault}", style="red")
    if not faults:
        console.print("everything the demo needs is here")
    return int(bool(faults))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
