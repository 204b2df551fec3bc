"""The stages of a run and the folders between them.

Every folder's name carries a hash of all it depends on: a changed recipe never meets stale files,
an unchanged one finds its finished stages again.
"""

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ..configs.collection import DomainSection
from ..configs.errors import UserError
from ..configs.load import recipe_hash, to_dict
from ..configs.recipe import Recipe
from ..data.collection import collect, collect_settings
from ..data.devices import pick_device
from ..data.files import write_json
from ..data.known_sets import known_set_of
from ..data.linear import speed_up_few_rows
from ..data.prepare import Prepared, prepare
from ..data.store import RecordStore, settings_hash
from ..data.target import Target, TargetInfo, load_target, target_info
from ..data.top import check_law
from ..data.work import Work, start_processes
from ..drafters.base import Drafter
from ..drafters.checkpoint import load_drafter, read_own, save_drafter, weights_hash
from ..drafters.registry import FamilyConfig, UntrainedConfig, family_config, untrained_drafter
from ..drafters.start import resolved_taps
from ..eval.evaluate import evaluate
from ..eval.report import FORMAT, read_report, write_report
from ..eval.request_rows import write_requests
from ..eval.serving import check_length, check_serving
from ..eval.tracked import log_report
from ..train.loop import train, train_settings
from ..train.objective import bind_objective, training_law
from ..train.step import check_unroll
from ..train.tracking import tell_wandb
from .publish import publish
from .samples import sampler


def check_recipe(recipe: Recipe) -> None:
    """Everything that can be wrong with a recipe without loading a model."""
    family, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    bind_objective(recipe.objective, recipe.serving)
    check_serving(recipe)
    if not isinstance(config, UntrainedConfig):
        check_unroll(family, config.most, recipe.train.unroll)
        check_length(family, config.most, recipe.serving.num_draft_tokens)
    if recipe.collect.distributions == "top":
        check_law(training_law(recipe.serving), recipe.collect.top, 1.0)
        if config.reads_target:
            raise UserError(
                f"collect.distributions top keeps no states, and family '{family}' reads the "
                "target's layers; take hidden, or none, with which training runs the target again"
            )


@dataclass
class Run:
    """One recipe in one run folder; the target is loaded once and shared by the stages."""

    recipe: Recipe
    root: Path
    console: Console
    deadline: float | None = None
    """Seconds from `begun` after which collecting begins no further batch."""
    begun: float = field(default_factory=time.monotonic)
    accept: bool = False
    """Records of another target are taken, with a warning."""
    _target: Target | None = None
    _prepared: Prepared | None = None

    @property
    def target(self) -> Target:
        if self._target is None:
            self.console.print(f"loading target {self.recipe.target.name}")
            self._target = load_target(self.recipe.target)
            known = self._target.provenance
            note = f", {known['quantisation']}" if known["quantisation"] else ""
            self.console.print(
                f"target {known['name']}{note}: {known['parameters'] / 1e6:.0f} M parameters, "
                f"{known['dtype']} on {self._target.device}, "
                f"{torch.get_num_threads()} threads"
            )
        return self._target

    @property
    def prepared(self) -> Prepared:
        """The recipe's prompts; needs no more of the target than its tokenizer."""
        if self._prepared is None:
            self._prepared = prepare_recipe(self.recipe, self._described(), self.console)
        return self._prepared

    def _described(self) -> Target | TargetInfo:
        """The target if it is loaded, else what is known without its weights."""
        return self._target or target_info(self.recipe.target)

    def taps(self, *drafters: Path) -> tuple[int, ...]:
        """The target layers that the drafters in these folders read, or this run's own."""
        read = [self._load(folder).taps for folder in drafters]
        if not read:
            return resolved_taps(self._config, self.target.num_layers)
        return read[0] if len(read) == 1 else tuple(sorted({tap for taps in read for tap in taps}))

    @property
    def _config(self) -> FamilyConfig:
        return family_config(self.recipe.drafter, f"recipe '{self.recipe.name}'")[1]

    def untrained(self) -> Path | None:
        """The drafter's folder if its family has nothing to train, else None."""
        if not isinstance(self._config, UntrainedConfig):
            return None
        drafter = untrained_drafter(self._config, self.target)
        depends = {"options": drafter.options, "target": self.target.provenance["weights"]}
        folder = self.root / f"{drafter.family}-{settings_hash(depends)}"
        return folder if folder.exists() else save_drafter(drafter, folder, self.target, {})

    # ---- stages

    def collect(self, *drafters: Path) -> RecordStore:
        """The target's replies, with the states that the drafters in these folders read, or else
        those that the recipe's own does."""
        # First, so that each process of several loads the target onto its own device.
        processes = start_processes(pick_device(self.recipe.target.device))
        with self._stage("collect"):
            with processes.local_main_process_first():
                prepared = self.prepared  # before the target is loaded: faults of data show early
            if self.recipe.collect.server is None:
                target: Target | TargetInfo = self.target
                taps = self.taps(*drafters)
            else:
                target, taps = target_info(self.recipe.target), ()
            settings = collect_settings(self.recipe, target, taps)
            folder = self.root / f"records-{settings_hash(settings)}"
            console = self.console if processes.is_main_process else Console(quiet=True)
            ends = None if self.deadline is None else self.begun + self.deadline
            return collect(Work(self.recipe, target, taps, prepared, folder, console, ends))

    def train(self, store: RecordStore) -> Path:
        with self._stage("train"):
            depends = train_settings(self.recipe, store)
            folder = self.root / f"train-{settings_hash(depends)}"
            decode = sampler(self.recipe, self.target) if self.recipe.train.samples else None
            return train(
                self.recipe, self._lent(), store, folder, self.console, self.accept, decode
            )

    def _lent(self) -> Target:
        """The target for training, which may cut it down; an accelerator has no room for two."""
        target = self.target
        if target.device.type != "cpu":
            self._target = None  # loaded again by whoever asks for it next
        return target

    def release(self) -> None:
        """Leave an accelerator to another process; whoever asks for the target loads it again."""
        if self._target is not None and self._target.device.type != "cpu":
            self._target = None
            gc.collect()
            torch.cuda.empty_cache()

    def evaluate(self, store: RecordStore, drafter_folder: Path) -> Path:
        """The folder of its report, requests and manifest; a finished one is not measured again."""
        depends = {
            "eval": to_dict(self.recipe.eval),
            "serving": to_dict(self.recipe.serving),
            "records": store.identity,
            "drafter": weights_hash(drafter_folder),
            "format": FORMAT,
        }
        folder = self.root / f"eval-{settings_hash(depends)}"
        if not (folder / "report.json").exists():
            with self._stage("eval"):
                drafter = self.drafter(drafter_folder)
                write_json(folder / "manifest.json", {**depends, "recipe": to_dict(self.recipe)})
                found = evaluate(
                    self.recipe, self.target, drafter, drafter_folder, store, folder, self.console,
                    self.accept,
                )  # fmt: skip
            found.report["stages"] = self.stages()
            write_requests(folder, found.requests)
            write_report(found.report, folder, found.replies)
            tell_wandb(self.recipe, folder, partial(log_report, found.report), self.console)
        return folder

    def publish(self, drafter_folder: Path, report_folder: Path) -> Path:
        with self._stage("publish"):
            report = read_report(report_folder / "report.json")
            own = read_own(drafter_folder)
            if own["layout"] is None:
                raise UserError(
                    f"{drafter_folder} is of family '{own['family']}', which has no weights to "
                    "publish"
                )
            name = f"{self.recipe.name}-{own['family']}"
            return publish(
                self.recipe.publish, self.target, drafter_folder, report,
                self.root / "published" / name, self.console, to_dict(self.recipe),
            )  # fmt: skip

    def drafter(self, folder: Path) -> Drafter:
        """A saved drafter as it is served."""
        drafter = self._load(folder)
        assert isinstance(drafter, torch.nn.Module)
        speed_up_few_rows(drafter)
        return drafter

    def _load(self, folder: Path) -> Drafter:
        """A saved drafter; one that others published may have left to the recipe what it reads."""
        return load_drafter(folder, self.target, getattr(self._config, "taps", None))

    # ---- times

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the stage's total in `stages.json`, over restarts too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if PartialState().is_main_process:
                path = self.root / "stages.json"
                known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
                known[name] = known.get(name, 0.0) + time.perf_counter() - start
                write_json(path, known)

    def stages(self) -> list[dict[str, Any]]:
        path = self.root / "stages.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return [{"stage": name, "seconds": seconds} for name, seconds in known.items()]


def prepare_recipe(recipe: Recipe, target: Target | TargetInfo, console: Console) -> Prepared:
    """The recipe's prompts as this target is to be asked them."""
    return prepare(
        recipe.domains, recipe.collect, target.tokenizer, target.eos_ids, target.max_positions,
        recipe.target.template_options, console,
    )  # fmt: skip


def with_prompts(recipe: Recipe, sources: list[str], max_rows: int | None) -> Recipe:
    """The recipe evaluated on `NAME=SOURCE` prompts only, all of them held out."""
    domains = []
    for entry in sources:
        name, _, source = entry.rpartition("=")
        known = known_set_of(source)
        label = name or (known[0] if known else Path(source).stem)
        domains.append(DomainSection(label, source, holdout=1.0, max_rows=max_rows))
    changed = replace(recipe, domains=tuple(domains))
    return replace(changed, name=f"{recipe.name}-{recipe_hash(changed)[:6]}")
