"""The words in which it is told how an engine reads a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple


class Absent(StrEnum):
    """What stands for a tensor that the folder does not have."""

    TARGET = "the target's own"
    EMBEDDING = "the embedding"
    ONES = "ones"
    RANDOM = "whatever lies in memory"
    STOPS = "nothing: the engine stops"


class Extra(StrEnum):
    """What becomes of a tensor that the engine has no place for."""

    IGNORED = "passed over without a word"
    STOPS = "the engine stops"


class Like(NamedTuple):
    """A default that is the value of another option."""

    option: str


REQUIRED = Like("")
"""In place of a default: the engine stops without the option."""


@dataclass(frozen=True)
class Key:
    """An option as it is looked up: the first of `places` that says anything, else `default`.

    A place is a key of config.json, behind a dot one inside of a table.
    """

    places: tuple[str, ...]
    default: Any


def keys(**defaults: Any) -> dict[str, Key]:
    """Options that are looked up at top level by their own names."""
    return {name: Key((name,), default) for name, default in defaults.items()}


@dataclass(frozen=True)
class LayerIds:
    """Where layers of the target are named.

    places: with what is added to what stands there to make 0-based outputs; usual: what is read of
    a target with so many layers if nothing is named, None if the engine stops then; option: of the
    engine's own, which names them if no place does; ordered: whether each is read once, in the
    order of the layers, however they are named.
    """

    places: tuple[tuple[str, int], ...]
    usual: Callable[[int], tuple[int, ...]] | None
    option: str | None = None
    ordered: bool = True


Kind = Literal["fault", "limit", "note"]


class Finding(NamedTuple):
    """A sentence: a fault of the folder, a limit of the engine (it does not read such drafters,
    however they are written), or a note, with which it serves all the same."""

    kind: Kind
    sentence: str


class Limit(NamedTuple):
    """What of a drafter the engine does not read: whether one for a target has it, and its name."""

    has: Callable[[Any, Any], bool]
    what: str


class TensorUse(NamedTuple):
    """A tensor of the folder, or one that the engine misses there.

    name: in files; called: by the engine; becomes: what it is used as, or what stands for it.
    """

    name: str
    called: str
    shape: tuple[int, ...]
    becomes: str


class KeyUse(NamedTuple):
    """An option of config.json, and whether it is read; or one that is absent, and its default."""

    name: str
    value: Any
    becomes: Literal["read", "not read", "absent"]


@dataclass(frozen=True)
class Rules:
    """How one engine reads one layout.

    family: of its drafters; keys: what it looks up, by our names of it; neutral: options that are
    replayed with this value alone; rope: spellings of RoPE, `new` or `old`, of the readers in use,
    the engine's own first; nested: a table that holds what is said of layers; taps: of families
    that read layers; firsts: what the first layer is called in files; called: regular expressions
    that turn names in files into the engine's; passed: names that it knows and passes over; absent:
    regular expressions on our names, and what stands for such a tensor; misfit: what does where the
    target's own has another shape; extra: what becomes of other names; shared: our names of
    what is the target's whatever lies in the folder; tied: whether a head goes by the option that
    ties it to the embedding, or by what lies in the folder; limits: what of a drafter it does not
    read.
    """

    family: str
    keys: Mapping[str, Key]
    rope: tuple[Literal["new", "old"], ...] = ("new",)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    nested: str | None = None
    taps: LayerIds | None = None
    firsts: tuple[str, ...] = ()
    called: tuple[tuple[str, str], ...] = ()
    passed: tuple[str, ...] = ()
    absent: tuple[tuple[str, Absent], ...] = (("", Absent.STOPS),)
    misfit: Absent = Absent.STOPS
    extra: Extra = Extra.STOPS
    shared: frozenset[str] = frozenset()
    tied: bool = True
    limits: tuple[Limit, ...] = ()
