"""What a report's numbers come from: recipe, models, versions, machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..configs.load import recipe_hash
from ..configs.recipe import Recipe
from ..data.store import RecordStore
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.checkpoint import weights_hash

_VERSIONS = ("torch", "transformers", "accelerate", "datasets", "peft")


def provenance(
    recipe: Recipe, target: Target, drafter: Drafter, folder: Path, store: RecordStore
) -> dict[str, Any]:
    assert isinstance(drafter, torch.nn.Module)
    ids = drafter.draft_ids
    return {
        "draftsmith": _version("draftsmith"),
        "recipe": recipe.name,
        "recipe_hash": recipe_hash(recipe),
        "target": dict(target.provenance),
        "drafter": {
            "family": drafter.family,
            "parameters": sum(p.numel() for p in drafter.trainable()),
            "draft_vocab_size": target.vocab_size if ids is None else len(ids),
            "weights_sha256": weights_hash(folder),
            "config": {"taps": list(drafter.taps)},
        },
        "versions": {name: _version(name) for name in _VERSIONS},
        "machine": {
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "device": str(target.device),
        },
        "prompts_sha256": store.identity,
        "collected": store.summary().get("cells", []),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.machine()}, {os.cpu_count()} cores"
