"""One training run: its modules, optimiser and logs, and the steps over them."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.records import Record
from ..data.target import Target
from ..drafters.base import Drafter, TrainBatch
from ..drafters.distribution import DraftVocabularyP
from .batches import ahead, batches_per_epoch, endless, grouped
from .checkpoints import (
    as_one_process_saves,
    damaged_checkpoints,
    newest,
    restore_newest,
    save_checkpoint,
    saved_progress,
)
from .corpus import Data
from .distributed import hold_head, low_precision
from .flops import TrainingFlops, device_flops
from .judge import Decode, Judge
from .metrics import Meter, MetricsLog, training_progress
from .objective import Objective, switch_step
from .optimizer import learning_rate, make_optimizer
from .policy import is_made, keep_renewals, renew
from .progress import Progress, Stop
from .rows import describe_batch, save_fault
from .step import Scored, Scorer, scored_tokens
from .tracking import new_run_id, start_tracking
from .watch import Watch, domain_weights, lower_rate


class Run:
    """The state of one training run."""

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
        decode: Decode | None,
    ):
        self.recipe, self.objective, self.accelerator = recipe, objective, accelerator
        self.target, self.drafter, self.data = target, drafter, data
        self.folder, self.console = folder, console
        section = recipe.train
        assert isinstance(drafter, nn.Module)
        drafter.to(accelerator.device)
        drafter.checkpoint(section.gradient_checkpointing)
        self.window = accelerator.num_processes * section.accumulation  # batches of a step
        self.steps = self._planned(Progress(weights=dict(section.domain_weights)))
        p = DraftVocabularyP(target, drafter.draft_ids, objective.law)
        self.low = low_precision(section, accelerator.device)
        scorer = Scorer(drafter, recipe.objective, objective, p, self.low)
        self.flops = TrainingFlops.of(drafter, p, section.unroll)
        self.judge = Judge(recipe, objective, accelerator, target, drafter, data, folder, decode)
        optimizer = make_optimizer(drafter, section)
        schedule = LambdaLR(optimizer, lambda step: learning_rate(step, self.steps, section))
        self.scorer, self.optimizer = accelerator.prepare(scorer, optimizer)
        self.judge.scorer = self.scorer
        hold_head(accelerator, scorer, drafter)
        self.schedule = schedule  # advanced by us, once per optimiser step, never per process
        accelerator.register_for_checkpointing(schedule)
        as_one_process_saves(accelerator)
        if section.ema > 0:
            average = get_ema_multi_avg_fn(section.ema)
            self.judge.average = AveragedModel(drafter, multi_avg_fn=average)
            accelerator.register_for_checkpointing(self.judge.average)
        self.renewed: dict[int, Record] = {}
        self.halting = False

    def _planned(self, at: Progress) -> int:
        """Optimiser steps of the whole run, of which `at` has done some."""
        section = self.recipe.train
        if section.steps is not None:
            return section.steps
        plan = self.data.plan(weights=section.domain_weights)
        left = section.epochs * batches_per_epoch(plan) - at.batches
        return at.step + max(0, math.ceil(left / self.window))

    # ---- the loop

    def fit(self, stop: Stop) -> Progress:
        """Train to the end; returns where that is."""
        section = self.recipe.train
        at = self._begin()
        log = MetricsLog(self.folder / "metrics.jsonl", at.step, self.accelerator)
        dtype = torch.bfloat16 if self.low else torch.float32
        meter = Meter(self.data.domains, device_flops(self.accelerator.device, dtype))
        meter.restore(at.meter, self.accelerator)
        if at.due:
            self._evaluate(at, log)
        windows, latest = self._windows(at), switch_step(self.recipe.objective, self.steps)
        self.scorer.train()
        with training_progress(self.console, self.steps, at.step) as show:
            while at.step < self.steps and not self._out_of_patience(at):
                with meter.paused():
                    turned = self._turns(at, latest)
                if turned:
                    windows = self._windows(at)
                with meter.waiting():
                    window = next(windows)
                if at.step == 0:
                    self._show_first(window[0])
                norm = self._optimise(window, meter, at, stop)
                at.advance(self.window)
                last = at.step == self.steps
                if at.step % section.log_every == 0 or last:
                    rate = float(self.schedule.get_last_lr()[0])
                    line = meter.read(self.accelerator, norm, rate)
                    log.write("train", at.step, line)
                    self._say(self.watch.train(at.step, line), log, at.step)
                    show(at.step, line)
                at.due = at.step % section.eval_every == 0 or last
                with meter.paused():
                    # Who sent a signal may not wait for an evaluation: it follows after the resume.
                    if at.due and (last or not self.halting) and self._evaluate(at, log):
                        windows = self._windows(at)
                last = last or self._out_of_patience(at)
                if at.step % section.save_every == 0 or last or self.halting:
                    with meter.paused():
                        self._save(at, meter)
                if self.halting and not last:
                    raise KeyboardInterrupt
        return at

    def _show_first(self, batch: TrainBatch) -> None:
        """Keep the first batch for people to read: what of it is supervised."""
        if self.accelerator.is_main_process:
            text = describe_batch(batch, self.target.tokenizer, self.data.domains).plain
            (self.folder / "first_batch.txt").write_text(text, encoding="utf-8")

    def _begin(self) -> Progress:
        """Where this run stands: at its newest whole checkpoint, which is restored, or at 0."""
        for path in damaged_checkpoints(self.folder):
            self.console.print(f"{path.name} is damaged and passed over", style="yellow")
        section, kept = self.recipe.train, newest(self.accelerator, self.folder)
        if kept is None:
            at = Progress(weights=dict(section.domain_weights), tracking_id=new_run_id(self.recipe))
        else:
            restore_newest(self.accelerator, self.folder)
            at = Progress(**{f.name: kept[f.name] for f in fields(Progress)})
            self.steps = self._planned(at)
            if at.step > self.steps:
                raise UserError(
                    f"{self.folder} has done {at.step} steps already, and {self.steps} are asked "
                    "for; name another folder for a shorter run"
                )
            self._set_rate(at)
            self.console.print(f"going on from step {at.step} of {self.steps}")
            self._say_if_approximate(kept["processes"], at)
        self.watch = Watch(section, at.watch)
        start_tracking(
            self.accelerator, self.recipe, self.folder, str(at.tracking_id), at.step, self.console
        )
        if at.renewal:
            self.renewed = self._renew(at.renewal, at)
        return at

    def _set_rate(self, at: Progress) -> None:
        """The rate of the step to come, in a run that may have become longer since."""
        factor = learning_rate(at.step, self.steps, self.recipe.train)
        for group, highest in zip(
            self.schedule.optimizer.param_groups, self.schedule.base_lrs, strict=True
        ):
            group["lr"] = highest * factor

    def _say_if_approximate(self, processes: int, at: Progress) -> None:
        was = processes * self.recipe.train.accumulation
        if at.renewal and not is_made(self.folder, at.renewal):
            self.console.print(
                f"the records of renewal {at.renewal} are gone and are made anew, by the weights "
                "as they are now, so numbers are not those of an uninterrupted run",
                style="yellow",
            )
        if was != self.window:
            if self.accelerator.is_main_process:  # those further on came of another course
                keep_renewals(self.folder, {at.renewal})
            self.console.print(
                f"{processes} processes saved this, {self.accelerator.num_processes} go on with "
                f"it: steps take in {self.window} batches instead of {was}, so from here on "
                "numbers are not those of an uninterrupted run (no record is lost or repeated)",
                style="yellow",
            )

    def _out_of_patience(self, at: Progress) -> bool:
        patience = self.recipe.train.patience
        return patience is not None and at.worse >= patience

    def _windows(self, at: Progress) -> Iterator[list[TrainBatch]]:
        """This process's batches of each optimiser step from here on."""
        plan = self.data.plan(at.switched is not None, at.segment, at.weights, self.renewed)
        load = partial(self.data.load, renewed=self.renewed)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batches = endless(plan, at.seen, load, rank, world)
        steps = grouped(batches, self.recipe.train.accumulation)
        # Where the target runs to load a batch, nothing else may run it meanwhile.
        return steps if self.data.computes else ahead(steps)

    def _turns(self, at: Progress, latest: int) -> bool:
        """Whether something else is trained on from here: another objective, renewed records."""
        turned = at.switched is None and at.step >= latest
        if turned:
            self._switch(at)
        policy = self.recipe.train.on_policy
        due = 0 if policy is None else at.step // policy.every
        if due > at.renewal:
            self.renewed, at.renewal = self._renew(due, at), due
            at.turn()
            turned = True
        return turned

    def _renew(self, number: int, at: Progress) -> dict[int, Record]:
        """Renewal `number`. The second objective is not valid on what the drafter wrote."""
        policy = self.recipe.train.on_policy
        assert policy is not None
        if at.switched is not None and number * policy.every >= at.switched:
            if not policy.resampled:
                return {}
            policy = replace(policy, drafted=0.0)
        made = renew(
            self.folder, number, policy, self.recipe.seed, self.target, self.judge.measured(),
            self.data.training, self.objective, self.accelerator,
        )  # fmt: skip
        return made if at.switched is None else _of_the_target(made)

    # ---- a step

    def _optimise(
        self, window: Sequence[TrainBatch], meter: Meter, at: Progress, stop: Stop
    ) -> float:
        """One optimiser step over this process's share of it; returns the gradient norm.

        Every unrolled step's loss is divided by its token count in the *global* batch, known
        before any forward, so splitting a batch over accumulation or processes changes nothing.
        """
        section, accelerator = self.recipe.train, self.accelerator
        totals = self._agree(window, stop)
        counted, losses, norm = float(totals[0]), [], torch.zeros(())
        for place, batch in enumerate(window):
            self._seed(at.batches + place * accelerator.num_processes + accelerator.process_index)
            with accelerator.accumulate(self.scorer):
                scored: Scored = self.scorer(
                    batch.to(accelerator.device), section.unroll, totals, at.switched is not None
                )
                losses.append(scored.loss.detach())
                # Gradients become a mean over processes and accumulation, the loss is already
                # divided by the global count: undo the mean.
                accelerator.backward(scored.loss * self.window)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.drafter.trainable(), section.clip)
                    self._check_finite(at, window, losses, float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
            meter.add(batch, scored, counted, self.flops.batch(batch))
        self.schedule.step()
        if self.judge.average is not None:
            self.judge.average.update_parameters(self.drafter)  # type: ignore[arg-type]
        return float(norm)

    def _agree(self, window: Sequence[TrainBatch], stop: Stop) -> Tensor:
        """Tokens each unrolled step scores in the global batch `[K]`, and whether all are to end.

        A signal may reach one process alone, and none may stop while the others wait for it.
        """
        counts = torch.stack([scored_tokens(b, self.recipe.train.unroll) for b in window]).sum(0)
        told = torch.cat([counts.double(), torch.tensor([float(stop.asked)]).double()])
        told = self.accelerator.reduce(told.to(self.accelerator.device), "sum")
        self.halting = bool(told[-1] > 0)
        return told[:-1].float()  # [K]

    def _seed(self, number: int) -> None:
        """Dropout in a batch follows from its number, whichever process it falls to."""
        torch.manual_seed(random.Random(f"{self.recipe.seed}/batch/{number}").getrandbits(63))

    def _check_finite(
        self, at: Progress, window: Sequence[TrainBatch], losses: Sequence[Tensor], norm: float
    ) -> None:
        """Stop at a loss or gradient that is not finite, with the rows that caused it.

        All processes do, or the others would wait for the one that has seen it.
        """
        total = float(self.accelerator.reduce(torch.stack(list(losses)).sum(), "sum"))
        if math.isfinite(total) and math.isfinite(norm):
            return
        found, rank = [float(loss) for loss in losses], self.accelerator.process_index
        mine = not all(map(math.isfinite, found)) or math.isfinite(total)
        folder = self.folder if rank == 0 else self.folder / f"process-{rank}"
        kept = "another process's folder"
        if mine:
            kept = str(save_fault(folder, at.step + 1, window, found, norm, self.data.domains))
        what = f"gradient's norm is {norm}" if math.isfinite(total) else f"loss is {total}"
        raise UserError(
            f"the {what} at step {at.step + 1}; its rows are in {kept}, and the weights before it "
            f"in the last checkpoint of {self.folder}. Look at the rows, or try a lower train.lr "
            f"than {self.recipe.train.lr}, such as {lower_rate(self.recipe.train.lr):g}"
        )

    # ---- what follows from figures

    def _evaluate(self, at: Progress, log: MetricsLog) -> bool:
        """Judge the weights; whether something else is trained on from here."""
        at.due = False
        figures = self.judge.evaluate(at, log)
        if not figures:
            return False
        self._say(self.watch.heldout(at.step, figures), log, at.step)
        enough, turned = self.recipe.objective.switch_overlap, False
        if self.objective.then is not None and at.switched is None and enough is not None:
            turned = figures["overlap_step_1"] >= enough
            if turned:
                self._switch(at)
        section = self.recipe.train
        if section.reweight > 0:
            base = {name: section.domain_weights.get(name, 1.0) for name in self.data.domains}
            at.weights = domain_weights(figures, base, section.reweight)
            at.turn()
            turned = True
        return turned

    def _switch(self, at: Progress) -> None:
        """The second objective takes over, which is not valid on what the drafter wrote."""
        at.switch()
        self.watch.restart()
        self.renewed = _of_the_target(self.renewed)

    def _save(self, at: Progress, meter: Meter) -> None:
        at.meter, at.watch = meter.state(self.accelerator), self.watch.state()
        keep = self.recipe.train.keep
        save_checkpoint(self.accelerator, self.folder, at.step, asdict(at), keep)
        if self.accelerator.is_main_process:
            needed = {state["renewal"] for state in saved_progress(self.folder)}
            keep_renewals(self.folder, needed)

    def _say(self, sentences: Sequence[str], log: MetricsLog, step: int) -> None:
        for sentence in sentences:
            self.console.print(sentence, style="yellow")
            log.note(step, sentence)


def _of_the_target(records: Mapping[int, Record]) -> dict[int, Record]:
    """Those of the records that are not the drafter's own text."""
    return {i: r for i, r in records.items() if r.origin != "drafted"}
