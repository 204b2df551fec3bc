"""What is served, and what an engine is: how it is started, what it reads, how it drafts."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...configs.errors import UserError
from ...data.served import Program

START = 600.0
"""Seconds until a server answers its first question, or is given up."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""What is served lies on this machine, and nobody is told of it."""


@dataclass(frozen=True)
class Serving:
    """A target with a drafter, or without one.

    target: its folder or Hub id; drafter: its folder, None for plain decoding; layout: how it lies
    there; reduced: whether it drafts some tokens of the target's alone; sampled: whether drafts are
    drawn, or always the most probable token; dtype: of the target, as torch calls it; cpu: whether
    it runs on this machine's processors; context: tokens of the longest conversation; rows:
    conversations at a time; work: a folder for what is made on the way; limit: seconds the server
    may run; python: the interpreter of the engine's environment.
    """

    target: str
    drafter: Path | None
    layout: str
    reduced: bool
    num_draft_tokens: int
    sampled: bool
    dtype: str
    cpu: bool
    context: int
    rows: int
    work: Path
    limit: float
    python: str

    def program(self, name: str, words: list[str], environment: dict[str, str]) -> Program:
        """The program of an engine called `name`, whose words follow the interpreter."""
        return Program(
            command=(self.python, *words),
            name=name,
            option="the start of an engine may take no longer",
            timeout=min(START, self.limit),
            environment={**OFFLINE, **environment},
            limit=self.limit,
            scratch=self.work,
        )


@dataclass(frozen=True)
class Engine:
    """One kind of engine.

    name: as it is written; methods: what it calls the drafters of each layout that it reads;
    program: what starts it; counters: the prefix of its counters, None where every reply tells of
    its own rounds; samples: whether it can draw drafts, and by the temperature alone; greedy: the
    layouts whose drafts it never draws; overruns: whether it drafts whole rounds even where the
    reply has no room for them; version: where it tells its own, as path and key; unread: layouts
    whose heads of some tokens alone it leaves unread, taking the target's.
    """

    name: str
    methods: Mapping[str, str]
    program: Callable[[Serving], Program]
    counters: str | None
    samples: bool
    greedy: frozenset[str]
    overruns: bool
    version: tuple[str, str]
    unread: frozenset[str] = frozenset()


def method_of(engine: Engine, layout: str | None, family: str) -> str:
    """What the engine calls such a drafter. Raises `UserError` for one that it does not read."""
    method = engine.methods.get(layout or "")
    if method is None:
        raise UserError(
            f"{engine.name} reads no drafter of family '{family}' in the layout '{layout}'; it "
            f"reads the layouts {', '.join(engine.methods)}"
        )
    return method


def python_of(variable: str, module: str, named: str | None) -> str:
    """The interpreter that has an engine: the one named, that of the environment, or this one.

    Raises `UserError` if none is known.
    """
    found = named or os.environ.get(variable)
    if found:
        return found
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    raise UserError(
        f"this environment has no {module}: name the python of one that has it with --python or "
        f"{variable}"
    )
