"""YAML and command line in, frozen dataclasses out; every mistake is named by its dotted key."""

import dataclasses
import difflib
import hashlib
import json
import re
import types
import typing
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from .benchmark import Benchmark
from .errors import OptionError, UserError, did_you_mean
from .recipe import Recipe

T = TypeVar("T")
COMMAND_LINE = "the command line"
NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


# ---- checking a mapping against a dataclass


def parse(cls: type[T], mapping: object, where: str, section: str = "") -> T:
    """Build the frozen dataclass `cls` from a mapping as YAML gives it.

    Nothing is converted but whole numbers to floats and lists to tuples.

    Args:
        where: named in errors, such as a file.
        section: put before the keys in errors, where the mapping is a part of a recipe.
    Raises:
        UserError: an unknown or missing key, a wrong type or a value out of range.
    """
    # The dataclass is checked inside a tuple: plain dataclasses take over the configuration of
    # what holds them. In JSON mode "strict" still lets a list be a tuple.
    adapter = TypeAdapter(
        tuple[cls],  # type: ignore[valid-type]
        config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
    )
    try:
        return typing.cast(T, adapter.validate_json(json.dumps([mapping], default=str))[0])
    except ValidationError as error:
        mistakes = [dict(mistake) for mistake in error.errors()]
    # A misspelt required key is both unknown and missing: the unknown one says more.
    mistakes.sort(key=lambda mistake: mistake["type"] != "unexpected_keyword_argument")
    raise UserError(_sentence(cls, mistakes[0], where, section))


def _sentence(cls: type, mistake: dict[str, Any], where: str, section: str) -> str:
    """One of pydantic's errors, in the words of a recipe."""
    path: list[str | int] = list(mistake["loc"][1:])
    if mistake["type"] == "unexpected_keyword_argument":
        known = [_dotted(section, [*path[:-1], name]) for name in _fields_at(cls, path[:-1])]
        key = _dotted(section, path)
        return f"unknown key '{key}' in {where}{did_you_mean(key, known)}"
    if mistake["type"] == "missing":
        if not isinstance(path[-1], int):
            return f"missing key '{_dotted(section, path)}' in {where}"
        path.pop()  # a list that is too short: speak of all of it
    value, accepted, hint = mistake["input"], "", ""
    if mistake["type"] == "value_error":
        error = mistake["ctx"]["error"]
        if not isinstance(error, OptionError):
            key = _dotted(section, path)
            return f"'{key}' in {where}: {error}" if key else f"{where}: {error}"
        path.append(error.option)
        value, accepted = error.value, error.accepted
    else:
        path = _without_label(cls, path)
        kind = _type_at(cls, path)
        accepted = _accepted(kind)
        if isinstance(value, str) and difflib.get_close_matches(value, _words(kind)):
            hint = did_you_mean(value, _words(kind))
    key = _dotted(section, path)
    said = _short(json.dumps(value, ensure_ascii=False, default=str))
    place = f"'{key}' in {where}" if key else where
    return f"{place} must be {accepted}, not {said}{hint}"


def _dotted(section: str, path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in ([section] if section else []) + list(path))


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _type_at(cls: Any, path: Sequence[str | int]) -> Any:
    """The annotated type of the value at `path`, counted from `cls`; Any where it is free."""
    kind = cls
    for part in path:
        members = _members(kind)
        kind = members[0] if len(members) == 1 else Any
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(str(part), Any)
        elif typing.get_origin(kind) is tuple:
            arguments = typing.get_args(kind)
            variadic = len(arguments) == 2 and arguments[1] is Ellipsis
            kind = arguments[0 if variadic else min(int(part), len(arguments) - 1)]
        else:
            return Any
    return kind


def _members(kind: Any) -> list[Any]:
    """What a union offers besides None; of any other annotation, itself."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return [kind]
    return [member for member in typing.get_args(kind) if member is not types.NoneType]


def _without_label(cls: type, path: list[str | int]) -> list[str | int]:
    """`path` up to a union, behind which pydantic puts the member it tried: no key of a recipe."""
    for depth in range(len(path)):
        if len(_members(_type_at(cls, path[:depth]))) > 1:
            return path[:depth]
    return path


def _fields_at(cls: type, path: Sequence[str | int]) -> list[str]:
    """Names of the options that the dataclass at `path` has."""
    members = [kind for kind in _members(_type_at(cls, path)) if dataclasses.is_dataclass(kind)]
    return [f.name for f in dataclasses.fields(members[0])] if len(members) == 1 else []


def _words(kind: Any) -> list[str]:
    """The words that an annotation of `Literal` texts accepts."""
    if typing.get_origin(kind) is Literal:
        return [word for word in typing.get_args(kind) if isinstance(word, str)]
    return [word for member in typing.get_args(kind) for word in _words(member)]


def _accepted(kind: Any) -> str:
    """What an annotation accepts, completing "must be ..."."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is types.NoneType:
        return "null"
    if origin is Literal:
        return " or ".join(f"'{word}'" for word in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_accepted(member) for member in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)}, each {_accepted(arguments[0])}"
    if origin in (tuple, list):
        return f"a list, each {_accepted(arguments[0])}"
    if dataclasses.is_dataclass(kind) or origin is dict or kind is dict:
        return "a mapping of options"
    return NAMES.get(kind, "another value")


# ---- reading YAML


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: `no` and `off` are words, `1e-3` is a number, keys are unique."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                problem = f"key '{key.value}' is given twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_UNWANTED = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _UNWANTED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+
            |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def read_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        UserError: broken YAML or a key given twice, with `where` and the line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML: {reason}") from None


# ---- recipes


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(f.name[: -len(".yaml")] for f in files if f.name.endswith(".yaml")))


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply the command line to it.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        overrides: "section.key=value", the value as YAML; a number in the key counts a list
            from 0, as in "domains.0.holdout=0.1".
    Raises:
        UserError: no such recipe, broken YAML, or anything `parse` refuses.
    """
    file = _locate(path)
    where = file.name if str(path) in shipped_recipes() else str(path)
    return _read(Recipe, file, where, overrides)


def load_benchmark(path: Path | str, overrides: Sequence[str] = ()) -> Benchmark:
    """Read a benchmark's specification and apply the command line to it, as `load_recipe` does."""
    if not Path(path).is_file():
        raise UserError(f"there is no benchmark '{path}': give the YAML file of its specification")
    return _read(Benchmark, Path(path), str(path), overrides)


def _read(cls: type[T], file: Path | Traversable, where: str, overrides: Sequence[str]) -> T:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {where} as UTF-8 text: {error}") from None
    found = parse(cls, read_yaml(text, where), where)
    if not overrides:
        return found
    mapping = to_dict(found)  # with the defaults, so that a key may go into any of them
    for override in overrides:
        set_key(mapping, override)
    return parse(cls, mapping, COMMAND_LINE)


def _locate(path: Path | str) -> Path | Traversable:
    if str(path) in shipped_recipes():
        return resources.files(__package__) / f"{path}.yaml"
    if Path(path).is_file():
        return Path(path)
    hint = did_you_mean(Path(path).stem, shipped_recipes())
    raise UserError(f"there is no recipe '{path}': give a YAML file or a shipped name{hint}")


def set_key(mapping: dict[str, Any], override: str) -> None:
    """Set one key of a recipe's mapping in place; whether it is known, `parse` will tell."""
    dotted, equals, text = override.partition("=")
    path = dotted.strip().split(".")
    if not equals or not all(path):
        raise UserError(f"'{override}' on {COMMAND_LINE} must be written section.key=value")
    value = read_yaml(text, f"'{override}' on {COMMAND_LINE}")
    holder: Any = mapping
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        here = ".".join(path[:depth])
        if isinstance(holder, list):
            if not part.isdecimal() or int(part) >= len(holder):
                raise UserError(
                    f"'{here}' on {COMMAND_LINE} is a list of {len(holder)}: "
                    f"count it from 0 to {len(holder) - 1}, not '{part}'"
                )
            index: Any = int(part)
        elif isinstance(holder, dict):
            index = part
        else:
            raise UserError(f"'{here}' on {COMMAND_LINE} is one value and has no key '{part}'")
        if last:
            holder[index] = value
        elif isinstance(holder, dict):
            holder = holder.setdefault(index, {})
        else:
            holder = holder[index]


def to_dict(obj: Any) -> dict[str, Any]:
    """A dataclass as plain values for YAML or JSON, tuples as lists; `parse` reads it back."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(obj)))
    return plain


def recipe_hash(obj: Any) -> str:
    """16 hex digits that change with any option of a recipe or section."""
    text = json.dumps(to_dict(obj), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
