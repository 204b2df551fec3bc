"""Training runs as users launch them: `accelerate launch` with a shipped configuration."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.configs.load import load_recipe
from draftsmith.data.collection import collect
from draftsmith.data.target import load_target
from draftsmith.data.work import Work
from draftsmith.scripts.pipeline import prepare_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
name: tiny
target: {{name: {target}, device: cpu}}
serving: {{laws: [{{temperature: 1.0}}]}}
domains:
  - {{name: x, source: {prompts}, holdout: 0.25, kind: raw}}
  - {{name: y, source: {others}, holdout: 0.25, kind: raw}}
collect: {{temperatures: [1.0], max_new_tokens: 10}}
drafter: {drafter}
train:
  steps: 6
  tokens_per_batch: 16
  accumulation: {accumulation}
  unroll: 2
  lr: 5e-3
  warmup_steps: 2
  log_every: 1
  eval_every: 3
  save_every: 2
  mixed_precision: "no"
"""
DRAFTERS = {
    "eagle3": "{family: eagle3, draft_vocab_size: 60}",
    "causal": "{family: causal, layers: [0, 3]}",
    "lora": "{family: causal, layers: [0, 3], lora: {rank: 4}}",
}


@dataclass(frozen=True)
class Launcher:
    """A tiny target, its records and recipes, in one folder."""

    folder: Path
    target: Path
    records: Path

    @classmethod
    def prepared(cls, folder: Path, target: Path) -> "Launcher":
        """Collect what all runs train on."""
        for name in ("prompts", "others"):
            rows = (f'{{"prompt": "{name} {i} of a kind"}}\n' for i in range(24))
            (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        launcher = cls(folder, target, folder / "records")
        launcher.collect(launcher.recipe("eagle3"))
        return launcher

    def collect(self, path: Path, *overrides: str) -> None:
        """Answer the recipe's prompts."""
        recipe = load_recipe(path, overrides)
        target, quiet = load_target(recipe.target, few_rows=False), Console(quiet=True)
        prepared = prepare_recipe(recipe, target, quiet)
        collect(Work(recipe, target, (1, 1, 2), prepared, self.records, quiet))

    def recipe(self, family: str, accumulation: int = 1) -> Path:
        path = self.folder / f"{family}-{accumulation}.yaml"
        text = RECIPE.format(
            target=self.target,
            prompts=self.folder / "prompts.jsonl",
            others=self.folder / "others.jsonl",
            drafter=DRAFTERS[family],
            accumulation=accumulation,
        )
        path.write_text(text, encoding="utf-8")
        return path

    def command(self, how: str | None, out: Path, recipe: Path, *overrides: str) -> list[str]:
        """`how` names a shipped configuration, for two processes; None is one process."""
        entry = [
            str(ROOT / "train" / "distill.py"), "--config", str(recipe),
            "--records", str(self.records), "--out", str(out), *overrides,
        ]  # fmt: skip
        if how is None:
            return [sys.executable, *entry]
        return [
            sys.executable, "-m", "accelerate.commands.launch",
            "--config_file", str(ROOT / "configs" / "accelerate" / f"{how}.yaml"),
            "--num_processes", "2", "--main_process_port", str(_free_port()), *entry,
        ]  # fmt: skip

    def run(self, how: str | None, out: Path, recipe: Path, *overrides: str) -> "Trained":
        done = subprocess.run(
            self.command(how, out, recipe, *overrides),
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
            timeout=600,
        )
        return Trained(out, done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Trained:
    """What a run left, and what it said."""

    folder: Path
    code: int
    said: str
    errors: str

    @property
    def tensors(self) -> dict[str, Tensor]:
        assert self.code == 0, self.errors
        return load_file(self.folder / "drafter" / "model.safetensors")

    def figures(self, kind: str, name: str) -> list[float]:
        """One figure of each line of the log."""
        return [row[name] for row in log_lines(self.folder) if row["kind"] == kind]


def log_lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def environment() -> dict[str, str]:
    # What DeepSpeed compiles once is built with this environment's ninja.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agree(a: Trained, b: Trained, within: float = 2e-4) -> None:
    """The same losses and figures to rounding, and weights apart by much less than they moved."""
    mine, theirs = a.tensors, b.tensors
    for kind, name in (
        ("train", "loss"),
        ("train", "gradient_norm"),
        ("train", "lr"),
        ("train", "overlap"),
        ("heldout", "overlap_step_1"),
        ("heldout", "tokens_per_round"),
    ):
        assert a.figures(kind, name) == pytest.approx(b.figures(kind, name), rel=within), name
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        # Adam makes whole steps of a gradient that is all rounding, so single entries may differ.
        apart = (tensor.double() - theirs[name].double()).abs()
        assert float(apart.mean()) < 1e-5 * within / 2e-4, name
