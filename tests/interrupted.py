"""Training runs that are stopped, and what is compared of those that were not."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from draftsmith.train.run import Run

CLOCKED = ("tokens_per_s", "data_wait", "mfu")


def log_of(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Rows of metrics.jsonl but for what the clock says."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in row.items() if name not in CLOCKED}
        for row in rows
        if kind in ("", row["kind"])
    ]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C while optimiser step number `steps` runs."""
    optimise, done = Run._optimise, 0

    def counted(self: Any, *args: Any) -> float:
        nonlocal done
        done += 1
        if done == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return optimise(self, *args)

    monkeypatch.setattr(Run, "_optimise", counted)


def crash_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """The machine fails after `steps` optimiser steps, with no time to save."""
    optimise, done = Run._optimise, 0

    def counted(self: Any, *args: Any) -> float:
        nonlocal done
        done += 1
        if done == steps + 1:
            raise RuntimeError("power cut")
        return optimise(self, *args)

    monkeypatch.setattr(Run, "_optimise", counted)
