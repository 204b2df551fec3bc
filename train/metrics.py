"""Counting and showing what training does: pooled sums, a JSONL log, a progress bar."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..drafters.base import TrainBatch
from .step import Scored

Show = Callable[[int, dict[str, float]], None]


class Meter:
    """Sums since the last line; every figure is a ratio of pooled counts over all processes."""

    def __init__(self, domains: Sequence[str]):
        self.domains = domains
        self._reset()

    def _reset(self) -> None:
        self.loss = torch.zeros(1, dtype=torch.float64)
        self.overlap = torch.zeros(len(self.domains), dtype=torch.float64)
        self.mass = torch.zeros(len(self.domains), dtype=torch.float64)
        self.count = torch.zeros(len(self.domains), dtype=torch.float64)
        self.waited = torch.zeros(1, dtype=torch.float64)
        self.start = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's seconds as spent on waiting for data."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def add(self, batch: TrainBatch, scored: Scored, total: float) -> None:
        """Count a batch by its first unrolled step; its loss was divided by the global `total`."""
        shared, token = scored.measured.overlap[0], scored.token[0]
        domain = batch.domain[token.cpu()]  # [N_0]
        self.loss += scored.loss.detach().double().cpu() * total
        self.overlap.index_add_(0, domain, shared.double().cpu())
        self.mass.index_add_(0, domain, scored.measured.mass.double().cpu())
        self.count.index_add_(0, domain, torch.ones(len(domain), dtype=torch.float64))

    def state(self, accelerator: Accelerator) -> dict[str, Any]:
        """What was counted since the last read, over all processes, for a checkpoint."""
        parts = torch.cat([self.loss, self.overlap, self.mass, self.count, self.waited])
        parts = accelerator.reduce(parts.to(accelerator.device), "sum").cpu()
        return {"sums": parts.tolist(), "seconds": time.perf_counter() - self.start}

    def restore(self, state: dict[str, Any], accelerator: Accelerator) -> None:
        """Go on counting from a checkpoint's `state`, which one process keeps for all."""
        self.start -= state["seconds"]
        if accelerator.is_main_process:
            n = len(self.domains)
            sums = torch.tensor(state["sums"], dtype=torch.float64)
            self.loss, self.overlap, self.mass, self.count, self.waited = (
                part.clone() for part in sums.split([1, n, n, n, 1])
            )

    def read(self, accelerator: Accelerator, norm: float, lr: float) -> dict[str, float]:
        """The line since the last read, and start again."""
        state = self.state(accelerator)
        n = len(self.domains)
        sums = torch.tensor(state["sums"], dtype=torch.float64)
        loss, overlap, mass, count, waited = sums.split([1, n, n, n, 1])
        line = {
            "loss": float(loss / count.sum()),
            "overlap": float(overlap.sum() / count.sum()),
            "captured_mass": float(mass.sum() / count.sum()),
            "gradient_norm": norm,
            "lr": lr,
            "tokens_per_s": float(count.sum()) / state["seconds"],
            "data_wait": float(waited) / state["seconds"] / accelerator.num_processes,
        }
        for i, domain in enumerate(self.domains):
            if count[i] > 0:
                line[f"overlap/{domain}"] = float(overlap[i] / count[i])
                line[f"captured_mass/{domain}"] = float(mass[i] / count[i])
        self._reset()
        return line


class MetricsLog:
    """`metrics.jsonl`, complete whatever trackers do; a resumed run drops the lines it redoes."""

    def __init__(self, path: Path, step: int, accelerator: Accelerator):
        self.path, self.accelerator = path, accelerator
        if not accelerator.is_main_process:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self.accelerator.log({f"{kind}/{name}": v for name, v in values.items()}, step=step)
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # cut off by a kill


@contextmanager
def training_progress(console: Console, steps: int, begin: int) -> Iterator[Show]:
    """A bar with loss, overlap, tokens/s and time left."""
    columns: tuple[Any, ...] = (
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, completed=begin, text="")

        def show(step: int, line: dict[str, float]) -> None:
            text = (
                f"loss {line['loss']:.3f}  α {line['overlap']:.3f}  "
                f"{line['tokens_per_s']:.0f} tokens/s"
            )
            progress.update(task, completed=step, text=text)

        yield show
