"""What the layouts share about `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ...configs.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The table that a file holds. Raises `UserError` if it is absent, damaged or none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"cannot read {path}: it holds no table of names and values")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises `UserError` as `read_json`."""
    return read_json(folder / "config.json")


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`, empty if it has none. Raises `UserError` for a damaged one."""
    return read_config(folder) if (folder / "config.json").exists() else {}


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The classes that a config names, be it one or a list of them."""
    named = raw.get("architectures")
    if isinstance(named, str):
        return [named]
    return [str(name) for name in named] if isinstance(named, list) else []


def number(
    raw: Mapping[str, Any],
    name: str,
    path: Path,
    default: int | None = None,
    most: int | None = None,
) -> int:
    """A count that the config `raw` of `path` says, or else `default`.

    Raises `UserError` if there is neither, or it is none from 1 to `most`.
    """
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if not is_whole(value) or value < 1 or (most is not None and value > most):
        allowed = "above 0" if most is None else f"from 1 to {most}"
        raise UserError(f"{path}: '{name}' is {value}, must be a number {allowed}")
    return value


def numbers(raw: Mapping[str, Any], name: str, path: Path) -> list[int]:
    """Numbers that the config `raw` of `path` lists. Raises `UserError` if it lists none."""
    value = raw.get(name)
    if value is None:
        raise UserError(f"{path}: '{name}' is missing")
    if not isinstance(value, list) or not value or not all(map(is_whole, value)):
        raise UserError(f"{path}: '{name}' is {value}, must be a list of numbers")
    return list(value)


def factor(raw: Mapping[str, Any], name: str, path: Path) -> float | None:
    """What the config `raw` of `path` multiplies or caps by, None if it does not say.

    Raises `UserError` for what is no number above 0.
    """
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{path}: '{name}' is {value}, must be a number above 0")
    return float(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def old_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as readers from before transformers 5 look for it (field report B127)."""
    plain = rope.get("rope_type", "default") == "default"
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else {k: v for k, v in rope.items() if k != "rope_theta"},
    }
