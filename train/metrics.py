"""Counting and showing what training does: pooled sums, a JSONL log, a progress bar."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from ..data.files import whole_file
from ..drafters.base import TrainBatch
from .step import Scored

Show = Callable[[int, dict[str, float]], None]


class Meter:
    """Sums since the last line; every figure is a ratio of pooled counts over all processes.

    `rate` is what one device can do, in floating-point operations a second; None leaves `mfu` out.
    """

    def __init__(self, domains: Sequence[str], rate: float | None = None):
        self.domains, self.rate = domains, rate
        self._reset()

    def _reset(self) -> None:
        self.loss = torch.zeros(1, dtype=torch.float64)
        # Overlap, captured mass and number of each domain's tokens.
        self.by_domain = torch.zeros(3, len(self.domains), dtype=torch.float64)
        self.waited = torch.zeros(1, dtype=torch.float64)
        self.flops = torch.zeros(1, dtype=torch.float64)
        self.start = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's seconds as spent on waiting for data."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The block's seconds are no training: evaluations, checkpoints, records made anew."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin

    def add(self, batch: TrainBatch, scored: Scored, total: float, flops: float = 0.0) -> None:
        """Count a batch by its first unrolled step; its loss was divided by the global `total`.

        `flops` are the floating-point operations of its forward and backward pass.
        """
        overlap, token = scored.measured.overlap[0].double(), scored.token[0]
        device = overlap.device
        # Kept where they are made: reading them would wait for the device at each batch.
        self.loss = self.loss.to(device) + scored.loss.detach().double() * total
        counted = torch.stack([overlap, scored.measured.mass.double(), torch.ones_like(overlap)])
        domain = batch.domain.to(device)[token]  # [N_0]
        self.by_domain = self.by_domain.to(device).index_add(1, domain, counted)
        self.flops += flops

    def state(self, accelerator: Accelerator) -> dict[str, Any]:
        """What was counted since the last read, over all processes, for a checkpoint."""
        parts = [self.loss, self.by_domain.flatten(), self.waited, self.flops]
        sums = torch.cat([part.to(accelerator.device) for part in parts])
        sums = accelerator.reduce(sums, "sum").cpu()
        return {"sums": sums.tolist(), "seconds": time.perf_counter() - self.start}

    def restore(self, state: dict[str, Any], accelerator: Accelerator) -> None:
        """Go on counting from a checkpoint's `state`, which one process keeps for all, if any."""
        if not state:
            return
        self.start -= state["seconds"]
        if accelerator.is_main_process:
            self.loss, self.by_domain, self.waited, self.flops = self._split(state)

    def _split(self, state: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sums = torch.tensor(state["sums"], dtype=torch.float64)
        n = len(self.domains)
        loss, by_domain, waited, flops = sums.split([1, 3 * n, 1, 1])
        return loss, by_domain.view(3, n), waited, flops

    def read(self, accelerator: Accelerator, norm: float, lr: float) -> dict[str, float]:
        """The line since the last read, and start again."""
        state = self.state(accelerator)
        loss, (overlap, mass, count), waited, flops = self._split(state)
        processes = accelerator.num_processes
        line = {
            "loss": float(loss / count.sum()),
            "overlap": float(overlap.sum() / count.sum()),
            "captured_mass": float(mass.sum() / count.sum()),
            "gradient_norm": norm,
            "lr": lr,
            "tokens_per_s": float(count.sum()) / state["seconds"],
            "data_wait": float(waited) / state["seconds"] / processes,
        }
        if self.rate is not None:
            line["mfu"] = float(flops) / state["seconds"] / (self.rate * processes)
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
        if accelerator.is_main_process:
            _rewrite(path, _lines_to(path, step))

    def write(self, kind: str, step: int, values: Mapping[str, float], **words: str) -> None:
        """A line of figures, with words among them."""
        told: dict[str, float | str] = {**values, **words}
        self.accelerator.log({f"{kind}/{name}": v for name, v in told.items()}, step=step)
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps({"kind": kind, "step": step, **told}) + "\n")

    def note(self, step: int, sentence: str) -> None:
        """A line with a sentence about the run, of the kind "watch"."""
        self.write("watch", step, {}, text=sentence)


def log_samples(
    accelerator: Accelerator, folder: Path, step: int, samples: Sequence[Mapping[str, Any]]
) -> None:
    """Put decoded replies into `samples.jsonl` and the trackers; all have the same keys.

    What a stopped run put there of this step and later ones is replaced.
    """
    if not accelerator.is_main_process or not samples:
        return
    path = folder / "samples.jsonl"
    new = [json.dumps({"step": step, **sample}, ensure_ascii=False) for sample in samples]
    _rewrite(path, [*_lines_to(path, step - 1), *new])
    accelerator.log({"samples": [dict(sample) for sample in samples]}, step=step)


def _lines_to(path: Path, step: int) -> list[str]:
    """The whole lines of a JSONL file that are of no later step."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [line for line in lines if _step_of(line) <= step]


def _rewrite(path: Path, lines: Sequence[str]) -> None:
    with whole_file(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


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
