"""Where a training run stands, as its checkpoints keep it, and the signals that end it."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_SAME_WISH = 2.0  # seconds within which a second signal says nothing new


@dataclass
class Progress:
    """Where a run stands.

    step: optimiser steps done; batches: of all processes together; switched: the step at which the
    second objective took over; best: highest expected τ so far; worse: evaluations since then. A
    *segment* is a stretch between changes of what is trained on (another objective, weights of
    domains, renewed records): its number, and its batches so far in `seen`; weights: of domains, in
    this segment; renewal: number of the records made while training, 0 for none; due: whether an
    evaluation was put off, for a signal left no time; weights_hash: of what was evaluated last.
    """

    step: int = 0
    batches: int = 0
    switched: int | None = None
    best: float | None = None
    worse: int = 0
    segment: int = 0
    seen: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    renewal: int = 0
    due: bool = False
    weights_hash: str | None = None
    tracking_id: str | None = None
    meter: dict[str, Any] = field(default_factory=dict)
    watch: dict[str, Any] = field(default_factory=dict)

    def advance(self, batches: int) -> None:
        """An optimiser step on so many batches of all processes is done."""
        self.step += 1
        self.batches += batches
        self.seen += batches

    def turn(self) -> None:
        """From here on, something else is trained on."""
        self.segment, self.seen = self.segment + 1, 0

    def switch(self) -> None:
        """The second objective takes over here, with patience of its own."""
        self.switched, self.worse = self.step, 0
        self.turn()


class Stop:
    """Whether this process was asked to end."""

    asked = False


@contextmanager
def stop_signal() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask the loop to save and stop after the step at hand.

    Launchers pass on what the processes were sent themselves, so the same wish may come twice; one
    Ctrl-C more, after a while, stops at once.
    """
    stop, asked = Stop(), time.monotonic()

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if stop.asked and number == signal.SIGINT and time.monotonic() - asked > _SAME_WISH:
            raise KeyboardInterrupt
        if not stop.asked:
            stop.asked, asked = True, time.monotonic()

    kept = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
