"""A folder as an engine reads it: every tensor, every option, and the drafter that results."""

import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...data.target import Target
from ...drafters.base import Drafter
from ...drafters.dflash_begin import target_words
from ...drafters.formats.config import config_of
from ...drafters.formats.fits import same_rounded
from ...drafters.formats.tensors import fill
from .lookup import Lookup
from .rules import ENGINES, RULES
from .terms import Absent, Extra, Finding, Kind, TensorUse

M = TypeVar("M", bound=nn.Module)

_STD = 0.02  # of what stands for memory that nobody wrote


class Stops(Exception):
    """What an engine cannot start with; told among the findings by whoever raises it."""


class Replay:
    """One engine reading one folder.

    tensors: those of the folder's files; called by family, see `heads.py`.
    """

    def __init__(
        self, engine: str, layout: str, folder: Path, tensors: Mapping[str, Tensor], target: Target
    ):
        self.engine, self.layout, self.folder, self.target = engine, layout, folder, target
        self.name = ENGINES[engine]
        self.rules = RULES[engine, layout]
        self.tensors = dict(tensors)
        self.raw: dict[str, Any] = config_of(folder)
        self.lookup = Lookup(self.raw, self.rules)
        self.findings: list[Finding] = []
        self.uses: list[TensorUse] = []
        self.drafter: Drafter | None = None
        self.shared = self.rules.shared
        self.embedding = ""
        """Of a language model, our name of its embedding."""

    def tell(self, kind: Kind, sentence: str) -> None:
        if all(sentence != known.sentence for known in self.findings):
            self.findings.append(Finding(kind, sentence))

    def stop(self, sentence: str) -> Stops:
        """To be raised: the engine does not start."""
        self.tell("fault", sentence)
        return Stops(sentence)

    # ---- options

    def check_neutral(self, options: Mapping[str, Any]) -> None:
        """Tell of options under which the drafter would be another than is replayed here."""
        for name, value in self.rules.neutral.items():
            if options[name] != value:
                place = self.rules.keys[name].places[0]
                self.tell(
                    "fault",
                    f"{self.name} reads '{place}' {options[name]}, with which it runs another "
                    f"drafter than one with {value}, which alone can be replayed",
                )

    def rope(self) -> dict[str, Any]:
        """RoPE as the engine has it; tells of readers of other versions that have it otherwise."""
        mine = self.lookup.read_rope()
        if "rope_theta" in self.lookup.absent:
            self.tell(
                "fault",
                f"config.json names no base of RoPE where {self.name} looks for one, which then "
                f"takes {mine['rope_theta']:,.0f}",
            )
        known = self.rules.rope
        for spelling in ("new", "old"):
            theirs = self.lookup.rope(spelling)
            if spelling == known[0] or theirs == mine:
                continue
            who = (
                f"{self.name} before transformers 5"
                if spelling in known
                else "a reader from before transformers 5"
                if spelling == "old"
                else "a reader since transformers 5"
            )
            self.tell(
                "fault" if spelling in known else "note",
                f"{who} takes RoPE's base for {theirs['rope_theta']:,.0f}, {self.name} for "
                f"{mine['rope_theta']:,.0f}: config.json has to spell it as rope_parameters and as "
                "rope_theta",
            )
        return mine

    def layers(self, width: int) -> tuple[int, ...]:
        """The target's layers that are read, as 0-based outputs. Raises `Stops` for none.

        width: how many states the drafter has room for, if another number cannot be.
        """
        told, layers = self.rules.taps, self.target.num_layers
        assert told is not None
        for place, shift in told.places:
            value = self.lookup.at(place)
            if value:
                ids = tuple(int(i) + shift for i in value)
                break
        else:
            ids = self._unnamed(layers)
        ids = tuple(sorted(set(ids))) if told.ordered else ids
        if not all(0 <= i < layers for i in ids):
            raise self.stop(
                f"{self.name} reads the outputs {list(ids)} of the target's layers, which are 0 to "
                f"{layers - 1}"
            )
        if len(ids) != width:
            raise self.stop(
                f"{self.name} reads {len(ids)} layers of the target, {list(ids)}, and 'fc.weight' "
                f"has room for {width}"
            )
        return ids

    def _unnamed(self, layers: int) -> tuple[int, ...]:
        told = self.rules.taps
        assert told is not None
        if told.option is not None:
            known = self._declared()
            if known:
                self.tell("note", f"{self.name} is told of layers by {told.option} {known}")
                return tuple(known)
        if told.usual is None:
            raise self.stop(
                f"config.json names no layers where {self.name} looks for them "
                f"('{told.places[0][0]}')"
            )
        ids = told.usual(layers)
        where = f"'{told.places[0][0]}'" if told.places else told.option
        self.tell(
            "fault",
            f"config.json names no layers where {self.name} looks for them ({where}), which then "
            f"reads its own, {list(ids)}",
        )
        return ids

    def _declared(self) -> list[int]:
        """The layers that the folder names anywhere, as an operator would take them from it."""
        nested, outer = (
            self.lookup.peek(place)
            for place in (
                "eagle_config.eagle_aux_hidden_state_layer_ids",
                "eagle_aux_hidden_state_layer_ids",
            )
        )
        return list(nested or [int(i) - 1 for i in outer or ()])

    # ---- tensors

    def draft_ids(self, size: int, rows: int, needed: bool) -> Tensor | None:
        """Target ids of a draft vocabulary of `size`, in the order of the head's rows `[size]`.

        None for all `rows` of the target's. `needed`: the engine stops without a map.
        """
        if size == rows:
            self.tensors.pop("d2t", None)
            return None
        d2t = self.tensors.pop("d2t", None)
        called = self.called("d2t")
        if d2t is None:
            self.uses.append(
                TensorUse("d2t", called, (size,), Absent.RANDOM if needed else "zeros")
            )
            if needed:
                raise self.stop(f"'d2t' is missing, without which {self.name} does not start")
            self.tell(
                "fault",
                f"'d2t' is missing: {self.name} takes each of the {size} draft ids for the "
                "target's id of the same number",
            )
            return torch.arange(size)
        self.uses.append(TensorUse("d2t", called, tuple(d2t.shape), "used"))
        if tuple(d2t.shape) != (size,):
            raise self.stop(f"'d2t' is {list(d2t.shape)}, and {self.name} expects [{size}]")
        return d2t.long().cpu() + torch.arange(size)

    def called(self, name: str) -> str:
        """What the engine calls a tensor of the files."""
        for pattern, other in self.rules.called:
            name = re.sub(pattern, other, name)
        return name

    def take(
        self, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, Sequence[str]]
    ) -> dict[str, Tensor]:
        """What the engine has for each tensor of a drafter, in float32; tells of all tensors.

        shapes: by our names, as they have to be; names: those that each may have in files, its own
        unless they are given. Raises `Stops`.
        """
        stops = False
        values: dict[str, Tensor] = {}
        for own, shape in shapes.items():
            candidates = names.get(own, [own])
            there = () if own in self.shared else candidates
            name = next((n for n in there if n in self.tensors), None)
            if name is None:
                found = self._stand_in(own, candidates[0], shape, values)
            else:
                found = self._take(name, shape)
            stops = stops or found is None
            if found is not None:
                values[own] = found.float()
        if self._tell_rest() or stops:
            raise Stops
        return values

    def fill(self, drafter: M, names: Mapping[str, Sequence[str]]) -> M:
        """The drafter with what the engine has for its parameters, as `take`."""
        shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
        return fill(drafter, self.take(shapes, names))

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        tensor = self.tensors.pop(name)
        self.uses.append(TensorUse(name, self.called(name), tuple(tensor.shape), "used"))
        if tuple(tensor.shape) == shape:
            return tensor
        self.tell(
            "fault",
            f"'{name}' is {list(tensor.shape)}, and config.json as {self.name} reads it makes it "
            f"{list(shape)}",
        )
        return None

    def _stand_in(
        self, own: str, name: str, shape: tuple[int, ...], values: Mapping[str, Tensor]
    ) -> Tensor | None:
        """What the engine has in place of a tensor that is not there; None if it stops."""
        what = next(kind for pattern, kind in self.rules.absent if re.search(pattern, own))
        value, misfit = None, False
        if what is Absent.TARGET:
            value = target_words(self.target, None)[own].cpu()
            misfit = tuple(value.shape) != shape
            if misfit:
                what = Absent.STOPS if own.startswith("lm_head") else self.rules.misfit
                self._tell_misfit(name, what, value.shape, shape)
                value = None
        elif what is Absent.EMBEDDING:
            value = values.get(self.embedding)
        elif what is Absent.ONES:
            value = torch.ones(shape)
        if what is Absent.RANDOM:
            generator = torch.Generator().manual_seed(zlib.crc32(own.encode()))
            value = _STD * torch.randn(shape, generator=generator)
        self.uses.append(TensorUse(name, self.called(name), shape, what))
        if not misfit:
            self._tell_absent(name, what)
        return value

    def _tell_misfit(
        self, name: str, what: Absent, there: Sequence[int], shape: tuple[int, ...]
    ) -> None:
        ends = (
            "its first round fails"
            if what is Absent.STOPS
            else "it keeps one of whatever lies in memory, and accepts next to nothing"
        )
        self.tell(
            "fault",
            f"'{name}' is missing, and the target's own, which {self.name} takes then, is "
            f"{list(there)} where the drafter has {list(shape)}: {ends}",
        )

    def _tell_absent(self, name: str, what: Absent) -> None:
        if what is Absent.RANDOM:
            self.tell(
                "fault",
                f"'{name}' is missing: {self.name} says nothing, leaves '{self.called(name)}' at "
                "whatever lies in memory, and accepts next to nothing",
            )
        elif what is Absent.ONES:
            self.tell("fault", f"'{name}' is missing: {self.name} scales by ones in its place")
        elif what is Absent.STOPS:
            self.tell("fault", f"'{name}' is missing, without which {self.name} does not start")

    def _tell_rest(self) -> bool:
        """Tell of tensors that nothing took; whether the engine stops at one."""
        stops = False
        for name, tensor in sorted(self.tensors.items()):
            passed = any(re.search(pattern, name) for pattern in self.rules.passed)
            extra: str = Extra.IGNORED if passed else self.rules.extra
            if not passed and not self._copy(name, tensor):
                stops = stops or extra is Extra.STOPS
                self.tell(
                    "fault",
                    f"{self.name} has no place for '{name}' {list(tensor.shape)}: "
                    + ("it does not start" if extra is Extra.STOPS else "it is not read"),
                )
            self.uses.append(TensorUse(name, self.called(name), tuple(tensor.shape), extra))
        self.tensors.clear()
        return stops

    def _copy(self, name: str, tensor: Tensor) -> bool:
        """Whether it is an unread copy of what the target has, which then does no harm."""
        if self.rules.extra is Extra.STOPS or name not in ("embed_tokens.weight", "lm_head.weight"):
            return False
        theirs = target_words(self.target, None)[name]
        return tensor.shape == theirs.shape and same_rounded(tensor, theirs)
