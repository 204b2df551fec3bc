"""What the layouts share about `config.json`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...configs.errors import UserError, did_you_mean

T = TypeVar("T")

RAISED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError),
    *(StrictDataclassError, TypeError, ValueError),
)
"""What transformers and torch raise for a configuration that nothing can be built of."""


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("max_position_embeddings", "num_attention_heads", "num_key_value_heads", "head_dim"),
)


def read_json(path: Path) -> dict[str, Any]:
    """The table that a file holds. Raises `UserError` if it is absent, damaged or none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
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


def flag(raw: Mapping[str, Any], name: str, path: Path, default: bool = False) -> bool:
    """What the config `raw` of `path` says is so, or not, or else `default`.

    Raises `UserError` for what is neither true nor false.
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{path}: '{name}' is {value}, must be true or false")
    return value


def table(raw: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """The table of that name, empty if there is none. Raises `UserError` for something else."""
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: '{name}' is {value}, must be a table of names and values")
    return dict(value)


def needed_table(raw: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """The table of that name. Raises `UserError` for something else, or if there is none."""
    if raw.get(name) is None:
        raise UserError(f"{path}: '{name}' is missing")
    return table(raw, name, path)


def kinds_of_layers(raw: Mapping[str, Any], path: Path) -> list[str]:
    """What `layer_types` lists, if anything. Raises `UserError` for what is no list of words."""
    value = raw.get("layer_types")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
        raise UserError(f"{path}: 'layer_types' is {value}, must be a list of words")
    return value


def check_attention(raw: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` for sizes of a layer that no layer has, as far as they are said."""
    for name in _SIZES:
        if raw.get(name) is not None:
            number(raw, name, path)
    factor(raw, "rms_norm_eps", path)
    heads = number(raw, "num_attention_heads", path, 1)
    shared = number(raw, "num_key_value_heads", path, heads)
    if heads % shared:
        raise UserError(
            f"{path}: 'num_attention_heads' {heads} must be a multiple of 'num_key_value_heads' "
            f"{shared}"
        )
    if number(raw, "head_dim", path, 2) % 2:
        raise UserError(f"{path}: 'head_dim' {raw['head_dim']} must be even")


def rope_of(raw: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """RoPE in its new spelling; what that leaves out is taken from the old one.

    Raises `UserError` where they differ, for a kind that is not known, for a base that is no number
    above 0 and for heads that are rotated in part.
    """
    new, old = table(raw, "rope_parameters", path), table(raw, "rope_scaling", path)
    if "type" in old:
        old.setdefault("rope_type", old.pop("type"))
    if raw.get("rope_theta") is not None:
        old["rope_theta"] = raw["rope_theta"]
    for name in sorted(new.keys() & old.keys()):
        if new[name] != old[name]:
            raise UserError(
                f"{path}: '{name}' is {new[name]} in rope_parameters and {old[name]} outside of it"
            )
    rope = old | new
    kind, known = rope.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in known:
        raise UserError(f"{path}: unknown rope_type '{kind}'{did_you_mean(str(kind), known)}")
    if factor(rope, "rope_theta", path) is None and new:
        raise UserError(f"{path}: 'rope_theta' of rope_parameters is missing")
    partial = factor(rope, "partial_rotary_factor", path)
    if partial not in (None, 1.0):
        raise UserError(f"{path}: partial_rotary_factor {partial} is not read, 1.0 is")
    return rope or None


def built(path: Path, make: Callable[[], T]) -> T:
    """What `make` builds of the config of `path`. Raises `UserError` for why it cannot be built."""
    try:
        return make()
    except RAISED as error:
        raise UserError(f"{path}: its layers cannot be built: {why(error)}") from error


def why(error: Exception) -> str:
    """What an error of others says, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


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
