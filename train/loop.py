"""The training loop: records in, drafter folder out, on accelerate."""

import json
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..configs.errors import UserError
from ..configs.load import recipe_hash, to_dict
from ..configs.recipe import Recipe, TrainSection
from ..data.files import write_json
from ..data.records import Record
from ..data.store import RecordStore, settings_hash
from ..data.target import Target
from ..drafters.base import Drafter, TrainBatch
from ..drafters.batch import collate, records_with_states
from ..drafters.checkpoint import save_drafter
from ..drafters.distribution import DraftVocabularyP
from ..drafters.registry import family_config, new_drafter, resolved_taps
from .batches import Plan, batches_per_epoch, endless, make_plan
from .checkpoints import damaged_checkpoints, load_newest, save_checkpoint
from .metrics import Meter, MetricsLog, training_progress
from .step import Scorer, StepSums, objective_law, scored_tokens
from .validate import held_out_overlap

_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Data:
    """Training and held-out records with states, the domains' order, the batch plan."""

    training: Sequence[Record]
    held_out: Sequence[Record]
    domains: tuple[str, ...]
    plan: Plan

    def load(self, indices: Sequence[int]) -> TrainBatch:
        return collate([self.training[i] for i in indices], self.domains)


def train(
    recipe: Recipe, target: Target, store: RecordStore, folder: Path, console: Console
) -> Path:
    """Train the recipe's drafter on `store`; returns the finished drafter folder.

    A run that was stopped goes on from its newest whole checkpoint to the same numbers.
    """
    drafter_folder = folder / "drafter"
    settings = train_settings(recipe, store)
    _refuse_other(folder, settings)
    if drafter_folder.exists():
        console.print(f"{drafter_folder} is already trained")
        return drafter_folder
    set_seed(recipe.seed)
    section = recipe.train
    accelerator = _accelerator(section, target)
    data = load_data(recipe, target, store)
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    drafter = new_drafter(config, target, data.training)
    run = _Run(recipe, accelerator, target, drafter, data, folder, console)
    if accelerator.is_main_process:
        write_json(folder / _SETTINGS, settings)
    with _stop_signal() as stop:
        run.fit(stop)
    if accelerator.is_main_process:
        trained = {"recipe": recipe.name, "recipe_hash": recipe_hash(recipe), "steps": run.steps}
        save_drafter(run.drafter, drafter_folder, target, trained)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return drafter_folder


def train_settings(recipe: Recipe, store: RecordStore) -> dict[str, Any]:
    """All that a trained drafter depends on."""
    sections = to_dict(recipe)
    depends = {name: sections[name] for name in ("seed", "drafter", "objective", "train")}
    return depends | {"records": settings_hash(store.settings)}


def _refuse_other(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / _SETTINGS
    if not path.exists():
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name in settings if known.get(name) != settings[name]]
    if other:
        raise UserError(
            f"{folder} holds a run of other settings ({', '.join(other)} differ); name another "
            "folder, or delete this one"
        )


def _accelerator(section: TrainSection, target: Target) -> Accelerator:
    on_cpu = target.device.type == "cpu"
    precision = section.mixed_precision
    if precision == "auto":
        precision = "bf16" if not on_cpu and torch.cuda.is_bf16_supported() else "no"
    trackers = None if section.wandb == "off" else "wandb"
    return Accelerator(mixed_precision=precision, log_with=trackers, cpu=on_cpu)


def load_data(recipe: Recipe, target: Target, store: RecordStore) -> Data:
    """Read the store's records and plan their batches."""
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    taps = resolved_taps(config, target.num_layers)
    records = records_with_states(store, target, taps)
    training = [r for r in records if r.split == "train"]
    held_out = [r for r in records if r.split == "heldout" and r.law.temperature > 0]
    held_out.sort(key=lambda r: r.key)
    domains = tuple(sorted({r.domain for r in records}))
    plan = make_plan(training, recipe.train.tokens_per_batch, recipe.seed)
    return Data(training, held_out, domains, plan)


class _Run:
    """The state of one training run: step, modules, optimiser, logs."""

    def __init__(
        self,
        recipe: Recipe,
        accelerator: Accelerator,
        target: Target,
        drafter: Drafter,
        data: Data,
        folder: Path,
        console: Console,
    ):
        self.recipe, self.accelerator, self.data = recipe, accelerator, data
        self.drafter, self.folder, self.console = drafter, folder, console
        section = recipe.train
        world = accelerator.num_processes
        per_epoch = batches_per_epoch(data.plan, world)
        epochs = math.ceil(section.epochs * per_epoch / section.accumulation)
        self.steps = section.steps or epochs
        law = objective_law(recipe.objective)
        assert isinstance(drafter, nn.Module)
        drafter.to(accelerator.device)
        p = DraftVocabularyP(target, drafter.draft_ids, law)
        scorer = Scorer(drafter, recipe.objective, p)
        optimizer = torch.optim.AdamW(
            _groups(drafter, section.weight_decay), lr=section.lr, betas=section.betas, fused=True
        )
        schedule = LambdaLR(optimizer, lambda step: learning_rate(step, self.steps, section))
        self.scorer, self.optimizer = accelerator.prepare(scorer, optimizer)
        self.schedule = schedule  # advanced by us, once per optimiser step, never per process
        accelerator.register_for_checkpointing(schedule)
        if section.wandb != "off":
            _start_tracker(accelerator, recipe, folder)

    def fit(self, stop: "_Stop") -> None:
        section = self.recipe.train
        for path in damaged_checkpoints(self.folder):
            self.console.print(f"{path.name} is damaged and passed over", style="yellow")
        progress = load_newest(self.accelerator, self.folder) or {"step": 0, "tokens": 0}
        step, tokens = progress["step"], progress["tokens"]
        log = MetricsLog(self.folder / "metrics.jsonl", step, self.accelerator)
        meter = Meter(self.data.domains)
        if step:
            self.console.print(f"going on from step {step} of {self.steps}")
            meter.restore(progress["meter"], self.accelerator)
        batches = self._batches(step)
        self.scorer.train()
        with training_progress(self.console, self.steps, step) as show:
            while step < self.steps:
                window = list(islice(batches, section.accumulation))
                norm = self._optimise(window, meter)
                step += 1
                tokens += sum(b.supervised for b in window)
                if step % section.log_every == 0 or step == self.steps:
                    rate = float(self.schedule.get_last_lr()[0])
                    line = meter.read(self.accelerator, norm, rate)
                    log.write("train", step, line)
                    show(step, line)
                if step % section.eval_every == 0 or step == self.steps:
                    log.write("heldout", step, self._validate())
                if step % section.save_every == 0 or step == self.steps or stop.asked:
                    at = {"tokens": tokens, "meter": meter.state(self.accelerator)}
                    save_checkpoint(self.accelerator, self.folder, step, at, section.keep)
                if stop.asked and step < self.steps:
                    raise KeyboardInterrupt

    def _batches(self, step: int) -> Iterator[TrainBatch]:
        accelerator = self.accelerator
        begin = step * self.recipe.train.accumulation
        return endless(
            self.data.plan, begin, self.data.load, accelerator.process_index,
            accelerator.num_processes,
        )  # fmt: skip

    def _optimise(self, window: Sequence[TrainBatch], meter: Meter) -> float:
        """One optimiser step over the window's batches; returns the gradient norm.

        Every unrolled step's loss is divided by its token count in the *global* batch, known
        before any forward, so splitting a batch over accumulation or processes changes nothing.
        """
        section, accelerator = self.recipe.train, self.accelerator
        counts = torch.stack([scored_tokens(b, section.unroll) for b in window]).sum(0)
        totals = accelerator.reduce(counts.to(accelerator.device).float(), "sum")  # [K]
        decay = self.recipe.objective.position_decay ** torch.arange(section.unroll)
        weights = decay.to(accelerator.device) / decay.sum()
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with _maybe_sync(accelerator, self.scorer, last):
                sums: list[StepSums] = self.scorer(batch.to(accelerator.device), section.unroll)
                loss = combine(sums, totals, weights)
                # DDP means gradients over processes, the loss is already divided by the global
                # count: undo the mean.
                accelerator.backward(loss * accelerator.num_processes)
                meter.add(batch, sums)
        norm = accelerator.clip_grad_norm_(self.drafter.trainable(), section.clip)
        value = float(norm)
        if not math.isfinite(value):
            raise UserError(
                f"the gradient is not finite (norm {value}); the weights before it are kept in "
                f"the last checkpoint of {self.folder}. Try a lower train.lr than {section.lr}"
            )
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return value

    def _validate(self) -> dict[str, float]:
        records = self.data.held_out[: self.recipe.train.eval_conversations]
        if not records:
            return {}
        steps = self.recipe.train.unroll
        scorer = self.accelerator.unwrap_model(self.scorer)
        return held_out_overlap(
            scorer, records, self.data.domains, steps, self.accelerator.device
        )  # fmt: skip


def combine(sums: Sequence[StepSums], totals: Tensor, weights: Tensor) -> Tensor:
    """Σ_k w_k · loss_k / N_k over the unrolled steps, `totals` and `weights` `[K]`.

    A family that predicts in one pass has a single step, which carries all the weight.
    """
    if len(sums) == 1:
        return sums[0].loss / totals[0].clamp_min(1)
    parts = [w * s.loss / n.clamp_min(1) for s, n, w in zip(sums, totals, weights, strict=True)]
    return torch.stack(parts).sum()


def learning_rate(step: int, steps: int, section: TrainSection) -> float:
    """Factor on the highest rate at optimiser step `step` of `steps`."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    done = (step - section.warmup_steps) / max(1, steps - section.warmup_steps)
    shape = 1 - done if section.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return section.final_lr_fraction + (1 - section.final_lr_fraction) * shape


def _groups(drafter: Drafter, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in drafter.trainable() if p.dim() >= 2]
    others = [p for p in drafter.trainable() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def _start_tracker(accelerator: Accelerator, recipe: Recipe, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    accelerator.init_trackers(
        recipe.train.wandb_project,
        config=to_dict(recipe),
        init_kwargs={
            "wandb": {
                "mode": recipe.train.wandb,
                "dir": str(folder),
                "name": recipe.name,
                "id": f"{recipe.name}-{recipe_hash(recipe)}",
                "resume": "allow",
            }
        },
    )


@contextmanager
def _maybe_sync(accelerator: Accelerator, module: nn.Module, last: bool) -> Iterator[None]:
    if last:
        yield
        return
    with accelerator.no_sync(module):
        yield


class _Stop:
    asked = False


@contextmanager
def _stop_signal() -> Iterator[_Stop]:
    """Ctrl-C and SIGTERM ask the loop to save and stop after the step at hand."""
    stop = _Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    kept = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
