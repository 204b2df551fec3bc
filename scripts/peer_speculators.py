"""Runs the trainer of speculators 0.9 on data that `bench_train` wrote: `PEER_PYTHON this JOB`.

This file imports nothing of draftsmith: it runs in the peer's own environment. The trainer expects
an accelerator, so a few of its functions are replaced from outside before its `main` is called. Its
validation and its checkpoints are left out, as neither is measured: that is in its favour.

A job (JSON) has `arguments` (the trainer's own), `initial` (a safetensors file of first weights, by
its names), `batches` (row numbers of each batch, for each epoch; null leaves them to its sampler),
`out` (a folder), `threads` and `profile` (steps to profile from the fifth on; 0 for none).
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MATMULS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
ATTENTION = "scaled_dot_product"
FIRST_PROFILED = 5


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    cli: Any = import_module("speculators.train.cli")
    config: Any = import_module("speculators.train.config")
    trainer: Any = import_module("speculators.train.trainer")
    steps = Steps(job["profile"])
    on_the_cpu(trainer)
    measured(trainer, steps, out)
    begin_with(cli, load_file(job["initial"]))
    if job["batches"] is not None:
        same_batches(job["batches"])
    cli.main(config.TrainConfig.resolve([*job["arguments"], f"--save-path={out / 'peer'}"]))
    (out / "steps.json").write_text(json.dumps(steps.result()), encoding="utf-8")


class Steps:
    """Times and supervised tokens of all optimiser steps, and the profile of some of them."""

    def __init__(self, profiled: int):
        self.profiled = profiled
        self.tokens: list[int] = []
        self.times = [time.perf_counter()]
        self.profile: torch.profiler.profile | None = None

    def end(self) -> None:
        self.times.append(time.perf_counter())
        done = len(self.times) - 1
        if self.profiled and done == FIRST_PROFILED:
            self.profile = torch.profiler.profile()
            self.profile.start()
        if self.profile is not None and done == FIRST_PROFILED + self.profiled:
            self.profile.stop()

    def result(self) -> dict[str, Any]:
        share = None if self.profile is None else matmul_share(self.profile)
        return {"tokens": self.tokens, "times": self.times, "matmul_share": share}


def matmul_share(profile: torch.profiler.profile) -> float:
    """Matrix products and attention's kernels, of all time spent in operators."""
    own = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    products = sum(t for name, t in own.items() if name in MATMULS or ATTENTION in name)
    return products / sum(own.values())


def on_the_cpu(trainer: Any) -> None:
    checkpointer: Any = import_module("speculators.train.checkpointer")
    torch.accelerator.synchronize = lambda *args: None
    trainer.get_local_rank = lambda: "cpu"
    checkpointer.get_current_device = lambda: "cpu"
    set_up: Callable[[Any], None] = trainer.Trainer.setup_trainer

    def setup_trainer(self: Any) -> None:
        self.device_type = "cpu"
        set_up(self)

    trainer.Trainer.setup_trainer = setup_trainer


def measured(trainer: Any, steps: Steps, out: Path) -> None:
    """Count every step; no validation or checkpoints, but the last weights in full precision."""
    kind = trainer.Trainer
    epoch_of, run = kind.train_epoch, kind.run_training

    def train_epoch(self: Any, epoch: int) -> None:
        forward = self.model.forward

        def counted(*args: Any, **batch: Any) -> Any:
            steps.tokens.append(int(batch["loss_mask"].sum()))
            return forward(*args, **batch)

        self.model.forward = counted
        epoch_of(self, epoch, step_callback=steps.end)
        self.model.forward = forward

    def run_training(self: Any) -> None:
        run(self)
        trained = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        save_file(trained, out / "last.safetensors")

    kind.train_epoch, kind.run_training = train_epoch, run_training
    kind.val_epoch = lambda self, epoch: None
    kind.maybe_save_checkpoint = lambda self, epoch, local_step=0: None


def begin_with(cli: Any, initial: dict[str, torch.Tensor]) -> None:
    """Start from these weights instead of noise."""
    build = cli.build_draft_model

    def build_draft_model(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        unknown = model.load_state_dict(initial, strict=False).unexpected_keys
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        lacking = trained - initial.keys()
        if unknown or lacking:
            raise SystemExit(f"unknown first weights {unknown}, lacking {sorted(lacking)}")
        return model

    cli.build_draft_model = build_draft_model


def same_batches(batches: list[list[list[int]]]) -> None:
    """Our batches in our order, each laid out without padding, which its fixed length would add."""
    samplers: Any = import_module("speculators.train.distributed_batch_sampler")
    data: Any = import_module("speculators.train.data")
    sampler, collate = samplers.MultipackDistributedBatchSamplerV2, data.CollateFn
    own, call = sampler._generate_batches, collate.__call__

    def generate(self: Any, epoch: int) -> Any:
        validating = len(self.lengths) == 1
        return own(self, epoch) if validating else batches[epoch]

    def exact(self: Any, batch: Any) -> Any:
        self.max_len = sum(len(item["input_ids"]) - 1 for item in batch)  # of shifted rows
        return call(self, batch)

    sampler._generate_batches, collate.__call__ = generate, exact


if __name__ == "__main__":
    main()
