"""A configuration as an engine looks things up in it, with a note of what was asked for."""

from collections.abc import Iterator, Mapping
from typing import Any

from .rules import BASE
from .terms import REQUIRED, Key, KeyUse, Like, Rules

_TABLES = (
    *("eagle_config", "dflash_config", "transformer_layer_config", "speculators_config"),
    *("proposal_methods", "verifier"),
)
"""Tables whose entries are options of their own."""
ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


class Missing(Exception):
    """An option without which the engine stops."""


class Lookup:
    """config.json of a folder under an engine's rules."""

    def __init__(self, raw: Mapping[str, Any], rules: Rules):
        self._leaves = dict(_leaves(raw))
        self._rules = rules
        self._read: set[str] = set()
        self.absent: dict[str, Any] = {}
        """Places where something was looked for and nothing is, with the default in its stead."""

    def options(self) -> dict[str, Any]:
        """All options of the rules' keys, by our names. Raises `Missing`."""
        found: dict[str, Any] = {}
        for name, key in self._rules.keys.items():
            found[name] = self._option(key, found)
        return found

    def _option(self, key: Key, found: Mapping[str, Any]) -> Any:
        places = [place for own in key.places for place in self._within(own)]
        there = [place for place in places if place in self._leaves]
        self._read.update(there)
        for place in there:
            if self._leaves[place] is not None:
                return self._leaves[place]
        if key.default is REQUIRED:
            raise Missing(places[0])
        default = found[key.default.option] if isinstance(key.default, Like) else key.default
        if not there:
            self.absent[places[0]] = default
        return default

    def at(self, place: str) -> Any:
        """What stands in one place, None if nothing does."""
        for own in self._within(place):
            if own in self._leaves:
                self._read.add(own)
                return self._leaves[own]
        return None

    def rope(self, spelling: str) -> dict[str, Any]:
        """RoPE as readers of that spelling have it, always with a base.

        New ones take rope_parameters, and what those leave out from outside of them.
        """
        new, theta, scaling = (self.peek(name) for name in ROPE)
        old = dict(scaling or {})
        if "type" in old:
            old.setdefault("rope_type", old.pop("type"))
        told = dict(old if spelling == "old" else (scaling and old) or new or {})
        told.setdefault("rope_type", "default")
        if new and "partial_rotary_factor" in new:  # which had other names, and they are not told
            told.setdefault("partial_rotary_factor", new["partial_rotary_factor"])
        if theta is not None:
            told.setdefault("rope_theta", theta)
        told.setdefault("rope_theta", BASE)
        return told

    def read_rope(self) -> dict[str, Any]:
        """RoPE as the engine has it."""
        spelling = self._rules.rope[0]
        names = ROPE[1:] if spelling == "old" else ROPE
        self._read.update(p for n in names for p in self._within(n) if p in self._leaves)
        tables = (self.peek(name) for name in names if name != "rope_theta")
        bases = [self.peek("rope_theta"), *((table or {}).get("rope_theta") for table in tables)]
        if all(base is None for base in bases):
            self.absent["rope_theta"] = BASE
        return self.rope(spelling)

    def peek(self, name: str) -> Any:
        """What stands in a place, without its being read by the engine."""
        return next((self._leaves[p] for p in self._within(name) if p in self._leaves), None)

    def _within(self, place: str) -> list[str]:
        """Where a place is looked for: in the table of layers first, if there is one."""
        nested = self._rules.nested
        return [place] if nested is None else [f"{nested}.{place}", place]

    def know(self, names: set[str]) -> None:
        """Options that are read by others than these rules."""
        self._read.update(name for name in self._leaves if name.split(".")[0] in names)

    def uses(self) -> list[KeyUse]:
        """What was read, what was not, and which defaults stand for what is absent."""
        found = [
            KeyUse(name, value, "read" if name in self._read else "not read")
            for name, value in self._leaves.items()
        ]
        return found + [KeyUse(name, value, "absent") for name, value in self.absent.items()]


def _leaves(raw: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        if isinstance(value, Mapping) and name in _TABLES:
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
