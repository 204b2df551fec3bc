"""The training loop: records in, drafter folder out, on accelerate."""

import json
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..configs.errors import UserError
from ..configs.load import recipe_hash, to_dict
from ..configs.recipe import Recipe, TrainSection
from ..data.files import write_json
from ..data.store import RecordStore
from ..data.target import Target
from ..drafters.base import Drafter, TrainBatch
from ..drafters.checkpoint import save_drafter
from ..drafters.distribution import DraftVocabularyP
from ..drafters.registry import family_config, new_drafter
from .batches import ahead, batches_per_epoch, endless
from .checkpoints import damaged_checkpoints, load_newest, save_checkpoint
from .corpus import Data, load_data
from .metrics import Meter, MetricsLog, training_progress
from .objective import Objective, bind_objective, switch_step
from .optimizer import learning_rate, parameter_groups
from .step import Scored, Scorer, scored_tokens
from .validate import TAU, held_out_figures

_SETTINGS = "settings.json"
_BEST = "best"


def train(
    recipe: Recipe,
    target: Target,
    store: RecordStore,
    folder: Path,
    console: Console,
    accept: bool = False,
) -> Path:
    """Train the recipe's drafter on `store`; returns the finished drafter folder.

    A run that was stopped goes on from its newest whole checkpoint to the same numbers. `accept`
    takes records of another target, with a warning.
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
    objective = bind_objective(recipe.objective, recipe.serving)
    data = load_data(recipe, target, store, objective, accept)
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    drafter = new_drafter(config, target, data.training)
    run = _Run(recipe, objective, accelerator, target, drafter, data, folder, console)
    if data.lawful is not None:
        console.print(
            f"{data.lawful} of {len(data.training)} replies were sampled under "
            f"{objective.law.label}, as part of this objective needs"
        )
    if accelerator.is_main_process:
        write_json(folder / _SETTINGS, settings)
    with _stop_signal() as stop:
        run.fit(stop)
    if accelerator.is_main_process:
        trained = {**trained_by(recipe), "steps": run.steps}
        if run.best.exists():
            run.best.rename(drafter_folder)
        else:
            save_drafter(run.measured, drafter_folder, target, trained)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return drafter_folder


def trained_by(recipe: Recipe) -> dict[str, Any]:
    """What a drafter's folder says about its training."""
    return {"recipe": recipe.name, "recipe_hash": recipe_hash(recipe)}


def train_settings(recipe: Recipe, store: RecordStore) -> dict[str, Any]:
    """All that a trained drafter depends on."""
    sections = to_dict(recipe)
    depends = {name: sections[name] for name in ("seed", "drafter", "objective", "train")}
    depends["law"] = bind_objective(recipe.objective, recipe.serving).law.__dict__
    if recipe.objective.then is not None or recipe.train.patience is not None:
        served = ("num_draft_tokens", "verifier", "drafting")
        depends |= {name: sections["serving"][name] for name in served}
    target = {name: sections["target"][name] for name in ("name", "revision", "dtype")}
    return depends | {"target": target, "records": store.identity}


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


class _Run:
    """The state of one training run: step, modules, optimiser, logs."""

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        accelerator: Accelerator,
        target: Target,
        drafter: Drafter,
        data: Data,
        folder: Path,
        console: Console,
    ):
        self.recipe, self.objective, self.accelerator = recipe, objective, accelerator
        self.target, self.drafter, self.data = target, drafter, data
        self.folder, self.console = folder, console
        section = recipe.train
        world = accelerator.num_processes
        per_epoch = batches_per_epoch(data.plan, world)
        epochs = math.ceil(section.epochs * per_epoch / section.accumulation)
        self.steps = section.steps or epochs
        assert isinstance(drafter, nn.Module)
        drafter.to(accelerator.device)
        p = DraftVocabularyP(target, drafter.draft_ids, objective.law)
        scorer = Scorer(drafter, recipe.objective, objective, p)
        optimizer = torch.optim.AdamW(
            parameter_groups(drafter, section.weight_decay),
            lr=section.lr,
            betas=section.betas,
            fused=True,
        )
        schedule = LambdaLR(optimizer, lambda step: learning_rate(step, self.steps, section))
        self.scorer, self.optimizer = accelerator.prepare(scorer, optimizer)
        self.schedule = schedule  # advanced by us, once per optimiser step, never per process
        accelerator.register_for_checkpointing(schedule)
        self.average: AveragedModel | None = None
        if section.ema > 0:
            average = get_ema_multi_avg_fn(section.ema)
            self.average = AveragedModel(drafter, multi_avg_fn=average)
            accelerator.register_for_checkpointing(self.average)
        if section.wandb != "off":
            _start_tracker(accelerator, recipe, folder)

    @property
    def best(self) -> Path:
        """Where the best weights lie while training, if patience asks for them."""
        return self.folder / _BEST

    @property
    def measured(self) -> Drafter:
        """The weights that are evaluated and saved: the moving average, if there is one."""
        return self.drafter if self.average is None else self.average.module  # type: ignore[return-value]

    def fit(self, stop: "_Stop") -> None:
        section = self.recipe.train
        for path in damaged_checkpoints(self.folder):
            self.console.print(f"{path.name} is damaged and passed over", style="yellow")
        at = _Progress(**(load_newest(self.accelerator, self.folder) or {}))
        log = MetricsLog(self.folder / "metrics.jsonl", at.step, self.accelerator)
        meter = Meter(self.data.domains)
        if at.step:
            self.console.print(f"going on from step {at.step} of {self.steps}")
            meter.restore(at.meter, self.accelerator)
        batches, latest = self._batches(at), switch_step(self.recipe.objective, self.steps)
        self.scorer.train()
        with training_progress(self.console, self.steps, at.step) as show:
            while at.step < self.steps and not self._out_of_patience(at):
                if at.switched is None and at.step >= latest:
                    at.switch()
                    batches = self._batches(at)
                with meter.waiting():
                    window = list(islice(batches, section.accumulation))
                norm = self._optimise(window, meter, at.switched is not None)
                at.step += 1
                if at.step % section.log_every == 0 or at.step == self.steps:
                    rate = float(self.schedule.get_last_lr()[0])
                    line = meter.read(self.accelerator, norm, rate)
                    log.write("train", at.step, line)
                    show(at.step, line)
                if at.step % section.eval_every == 0 or at.step == self.steps:
                    figures = self._validate()
                    log.write("heldout", at.step, figures)
                    if self._learn_from(figures, at):
                        batches = self._batches(at)
                if at.step % section.save_every == 0 or at.step == self.steps or stop.asked:
                    at.meter = meter.state(self.accelerator)
                    save_checkpoint(
                        self.accelerator, self.folder, at.step, asdict(at), section.keep
                    )
                if stop.asked and at.step < self.steps:
                    raise KeyboardInterrupt

    def _out_of_patience(self, at: "_Progress") -> bool:
        patience = self.recipe.train.patience
        return patience is not None and at.worse >= patience

    def _learn_from(self, figures: dict[str, float], at: "_Progress") -> bool:
        """Keep the best weights, and switch objectives early; True if that was done just now."""
        if not figures:
            return False
        if self.recipe.train.patience is not None:
            if at.best is None or figures[TAU] > at.best:
                at.best, at.worse = figures[TAU], 0
                if self.accelerator.is_main_process:
                    trained = {**trained_by(self.recipe), "steps": at.step}
                    save_drafter(self.measured, self.best, self.target, trained)
            else:
                at.worse += 1
        enough = self.recipe.objective.switch_overlap
        early = self.objective.then is not None and at.switched is None and enough is not None
        if early and enough is not None and figures["overlap_step_1"] >= enough:
            at.switch()
            return True
        return False

    def _batches(self, at: "_Progress") -> Iterator[TrainBatch]:
        """Batches from here on: of all records, or since the switch of those that are valid."""
        accelerator, plan = self.accelerator, self.data.plan
        begin = at.step * self.recipe.train.accumulation
        if at.switched is not None:
            plan = self.data.second
            begin = (at.step - at.switched) * self.recipe.train.accumulation
        rank, world = accelerator.process_index, accelerator.num_processes
        return ahead(endless(plan, begin, self.data.load, rank, world))

    def _optimise(self, window: Sequence[TrainBatch], meter: Meter, switched: bool) -> float:
        """One optimiser step over the window's batches; returns the gradient norm.

        Every unrolled step's loss is divided by its token count in the *global* batch, known
        before any forward, so splitting a batch over accumulation or processes changes nothing.
        """
        section, accelerator = self.recipe.train, self.accelerator
        counts = torch.stack([scored_tokens(b, section.unroll) for b in window]).sum(0)
        totals = accelerator.reduce(counts.to(accelerator.device).float(), "sum")  # [K]
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with _maybe_sync(accelerator, self.scorer, last):
                scored: Scored = self.scorer(
                    batch.to(accelerator.device), section.unroll, totals, switched
                )
                # DDP means gradients over processes, the loss is already divided by the global
                # count: undo the mean.
                accelerator.backward(scored.loss * accelerator.num_processes)
                meter.add(batch, scored, float(totals[0]))
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
        if self.average is not None:
            self.average.update_parameters(self.drafter)  # type: ignore[arg-type]
        return value

    def _validate(self) -> dict[str, float]:
        records = self.data.held_out[: self.recipe.train.eval_conversations]
        drafter = self.measured
        assert isinstance(drafter, nn.Module)
        drafter.eval()
        figures = held_out_figures(
            self.target, drafter, records, self.objective, self.recipe.train.unroll,
            self.data.limit,
        )  # fmt: skip
        drafter.train()
        return figures


@dataclass
class _Progress:
    """Where a run stands, as a checkpoint keeps it.

    switched: the step at which the second objective took over; best: highest expected τ so far;
    worse: evaluations since then.
    """

    step: int = 0
    switched: int | None = None
    best: float | None = None
    worse: int = 0
    meter: dict[str, Any] = field(default_factory=dict)

    def switch(self) -> None:
        """The second objective takes over here, with patience of its own."""
        self.switched, self.worse = self.step, 0


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
