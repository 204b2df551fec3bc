"""What an engine would make of a folder, without the engine.

Its reading of names, options, layers, vocabulary and RoPE is replayed on the files, and what comes
out is run by this package's own forward, beside the drafter that was trained.
"""

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.errors import UserError, did_you_mean
from ...data.target import Target
from ...drafters.about import about
from ...drafters.base import Drafter
from ...drafters.checkpoint import load_drafter
from ...drafters.checksums import SUMS, verify_checksums
from ...drafters.formats.tensors import read_any
from ...drafters.layouts import layout_of
from .compare import as_published, differences, soft_cap
from .heads import replayed
from .replay import Replay
from .rules import ENGINES, RULES, engines_of, layouts_of
from .terms import Finding, KeyUse, TensorUse

_NEW_CLASS = "TokenizersBackend"


@dataclass(frozen=True)
class Preflight:
    """What was found of one folder for one engine; engine: by its name in `ENGINES`.

    trained, served: the drafters that can be run beside each other, rounded as the folder's weights
    are; None for one that there is not.
    """

    engine: str
    layout: str
    tensors: tuple[TensorUse, ...]
    keys: tuple[KeyUse, ...]
    findings: tuple[Finding, ...]
    trained: Drafter | None = None
    served: Drafter | None = None
    acceptance: tuple[dict[str, Any], ...] = ()
    """By domain and law, of the two, where there are records."""

    @property
    def faults(self) -> list[str]:
        """For which the engine would not serve what was trained, those that it has itself last."""
        return [f.sentence for kind in ("fault", "limit") for f in self.of(kind)]

    @property
    def ok(self) -> bool:
        return not self.faults

    def of(self, kind: str) -> list[Finding]:
        return [f for f in self.findings if f.kind == kind]

    def told(self, *sentences: str) -> "Preflight":
        """With further faults."""
        more = tuple(Finding("fault", sentence) for sentence in sentences)
        return replace(self, findings=self.findings + more)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "engine": self.engine,
            "layout": self.layout,
            "ok": self.ok,
            "findings": [f._asdict() for f in self.findings],
            "tensors": [{**t._asdict(), "shape": list(t.shape)} for t in self.tensors],
            "keys": [k._asdict() for k in self.keys],
            "acceptance": list(self.acceptance),
        }


@dataclass(frozen=True)
class Files:
    """What lies in a folder, read once for all engines.

    tensors: None if they cannot be read; faults: of the folder, whoever reads it.
    """

    folder: Path
    layout: str
    tensors: dict[str, Tensor] | None
    faults: tuple[str, ...]


def files_of(folder: Path) -> Files:
    """Raises `UserError` for what is no drafter's folder."""
    if not folder.is_dir():
        raise UserError(f"there is no drafter's folder {folder}")
    layout = layout_of(folder, about(folder))
    faults, tensors = [], None
    if (folder / SUMS).exists():
        try:
            verify_checksums(folder)
        except UserError as error:
            faults.append(str(error))
    try:
        tensors = read_any(folder)
    except UserError as error:
        if str(error) not in faults:
            faults.append(str(error))
    return Files(folder, layout, tensors, tuple([*faults, *_tokenizer(folder)]))


def _tokenizer(folder: Path) -> list[str]:
    path = folder / "tokenizer_config.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class")
    except (OSError, ValueError):
        return []
    if named != _NEW_CLASS:
        return []
    return [
        f"{path.name} names the class {_NEW_CLASS}, which no reader from before transformers 5 "
        "knows; PreTrainedTokenizerFast is read by all"
    ]


def preflight(
    files: Files, engine: str, target: Target, trained: Drafter | None = None
) -> Preflight:
    """What `engine`, a name of `ENGINES`, would make of the folder in front of `target`.

    trained: what should be served; None takes what this package's own reader makes of the folder,
    whose refusal is a fault. Raises `UserError` for an engine that is unknown.
    """
    if engine not in ENGINES:
        raise UserError(f"unknown engine '{engine}'{did_you_mean(engine, ENGINES)}")
    faults = [Finding("fault", sentence) for sentence in files.faults]
    if (engine, files.layout) not in RULES:
        readers = ", ".join(ENGINES[e] for e in engines_of(files.layout)) or "no engine"
        reads = ", ".join(layouts_of(engine))
        sentence = (
            f"{ENGINES[engine]} is not known to read the layout '{files.layout}' ({readers} reads "
            f"it); it reads {reads}"
        )
        return Preflight(engine, files.layout, (), (), (*faults, Finding("fault", sentence)))
    if files.tensors is None:
        return Preflight(engine, files.layout, (), (), tuple(faults))
    replay = Replay(engine, files.layout, files.folder, files.tensors, target)
    replayed(replay)
    replay.findings[:0] = faults
    trained = trained or _own(files, target, replay)
    served: Any = replay.drafter
    if trained is not None:
        kinds = (t.dtype for t in files.tensors.values() if t.is_floating_point())
        dtype = next(kinds, torch.float32)
        trained = as_published(trained, dtype, target)
        for limit in replay.rules.limits:
            if limit.has(trained, target):
                replay.tell("limit", f"{replay.name} does not read {limit.what}")
    if served is not None:
        served = served.to(target.device).eval()
    if served is not None and trained is not None:
        _compare(replay, trained, served)
    return Preflight(
        engine,
        files.layout,
        tuple(replay.uses),
        tuple(replay.lookup.uses()),
        tuple(replay.findings),
        trained,
        served,
    )


def _own(files: Files, target: Target, replay: Replay) -> Drafter | None:
    """What this package's reader makes of the folder; a refusal is told."""
    if files.faults:  # which it would tell again
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heads need no tokenizer beside them
            return load_drafter(files.folder, target)
    except UserError as error:
        if not any(f.kind == "fault" for f in replay.findings):
            replay.tell("fault", str(error))
        return None


def _compare(replay: Replay, trained: Any, served: Any) -> None:
    if trained.family != served.family:
        replay.tell(
            "fault", f"family '{trained.family}' was trained, '{served.family}' is in the folder"
        )
        return
    cap = soft_cap(trained)
    if cap and not soft_cap(served):
        replay.tell(
            "note",
            f"{replay.name} leaves out the soft cap of the target's logits ({cap:g}): drafts that "
            "are drawn come from another distribution, the most probable ones are the same",
        )
    for sentence in differences(replay.name, trained, served, replay.target):
        replay.tell("fault", sentence)


def unread(layout: str, drafter: Drafter, target: Target) -> dict[str, str]:
    """What engines do not read of a drafter however it is written, by their keys in `ENGINES`."""
    found = {}
    for engine in engines_of(layout):
        limits = [
            limit.what for limit in RULES[engine, layout].limits if limit.has(drafter, target)
        ]
        if limits:
            found[engine] = " and ".join(limits)
    return found


def check_served(folder: Path, target: Target, trained: Drafter) -> None:
    """Raise `UserError` unless all engines that read such drafters would serve it as trained."""
    files = files_of(folder)
    left_out = unread(files.layout, trained, target)
    for engine in engines_of(files.layout):
        if engine in left_out:
            continue
        faults = preflight(files, engine, target, trained).faults
        if faults:
            raise UserError(
                f"the published folder would not be served as it was trained: {faults[0]}"
            )
