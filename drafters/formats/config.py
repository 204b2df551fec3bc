"""What the layouts share about `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...configs.errors import UserError


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises `UserError` if it is absent or damaged."""
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`, empty if it has none. Raises `UserError` for a damaged one."""
    return read_config(folder) if (folder / "config.json").exists() else {}


def old_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as readers from before transformers 5 look for it (field report B127)."""
    plain = rope.get("rope_type", "default") == "default"
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else {k: v for k, v in rope.items() if k != "rope_theta"},
    }
