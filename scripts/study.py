"""What the studies on the real model share: their options, one collection, and what is kept.

A study's folder holds records, trained drafters and measurements part by part. A part that is done
for the same settings is never repeated, so a killed study goes on with the same command.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.configs.collection import DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.configs.load import load_recipe, to_dict
from draftsmith.configs.recipe import Recipe, TargetSection
from draftsmith.data.collection import collect
from draftsmith.data.files import write_json
from draftsmith.data.linear import speed_up_few_rows
from draftsmith.data.store import RecordStore, settings_hash
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.data.work import Work, start_processes
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.registry import UntrainedConfig, family_config, untrained_drafter
from draftsmith.drafters.start import resolved_taps
from draftsmith.scripts.pipeline import prepare_recipe

LAWS = (Law(0.0), Law(1.0))
TRAINED_ON = {
    "gsm8k_train": ("gsm8k_train.jsonl", 1, None),
    "mbpp_train": ("mbpp.jsonl", 601, None),  # a task's id is its line
    "self_instruct": ("self_instruct.jsonl", 1, None),
}
"""Domains of the shared prompts to train on: file, first and last line."""
HELD_OUT = {
    "gsm8k": ("gsm8k_test.jsonl", 1, None),
    "humaneval": ("humaneval.jsonl", 1, None),
    "mbpp": ("mbpp.jsonl", 1, 510),
    "spec_bench": ("spec_bench.jsonl", 1, None),
}
"""Domains of the shared prompts that are evaluated on, and never trained on."""
TAPS = (1, 8, 10, 14, 18, 20, 24, 27, 28, 29, 30)
"""Target states that are kept beside those the runs read, for shapes that are tried later."""


@dataclass(frozen=True)
class Run:
    """One drafter of a study: a shipped recipe and what is changed of it."""

    recipe: str
    changes: tuple[str, ...] = ()


def parser_of(text: str, runs: str, parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options that studies share; `runs` is the default of the study's folder."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--runs", type=Path, default=Path(runs), help="the study's folder; default: %(default)s")
    add("--only", nargs="+", choices=parts, default=list(parts), help="parts, in this order")
    add("--prompts", type=Path, help="the folder of the shared prompt files, to collect")
    add("--records", type=Path, help="a finished collection; default: the study's own")
    add("--target", default=TargetSection().name, help="a model name, or a folder")
    add("--threads", type=int, default=2, help="of all that is timed; default: %(default)s")
    add("--train-threads", type=int, default=1, help="of training; default: %(default)s")
    add("--seconds", type=float, default=300.0, help="of training, for each drafter")
    add("--demo-rows", type=int, help="prompts of each packaged domain; default: all")
    add("--train-rows", type=int, default=48, help="training prompts of each shared file")
    add("--heldout-rows", type=int, default=12, help="held-out prompts of each shared file")
    add("--max-new-tokens", type=int, default=96)
    add("--store-dtype", default="float32", help="of the kept target states")
    add("--taps", type=int, nargs="*", default=list(TAPS), help="states kept beside those read")
    add("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="draft lengths compared")
    add("--timed", type=int, default=2, help="prompts of each domain that are timed")
    add("--timing-tokens", type=int, default=64, help="tokens of each timed reply")
    add("--parity", type=int, default=16, help="replies of each law that parity is shown on")
    add("--calibration", type=int, default=8, help="training prompts to measure costs on")
    return parser


@dataclass(frozen=True)
class Study:
    """A study's folder, target and records; each is loaded when it is first asked for.

    From then on this process computes with as many threads as are asked for.
    """

    args: argparse.Namespace
    runs: Mapping[str, Run]
    console: Console

    def __post_init__(self) -> None:
        torch.set_num_threads(self.args.threads)

    @property
    def folder(self) -> Path:
        return Path(self.args.runs)

    @cached_property
    def target(self) -> Target:
        return load_target(TargetSection(name=self.args.target))

    @cached_property
    def store(self) -> RecordStore:
        return RecordStore.open(self.args.records or self.folder / "records")

    def recipe(self, name: str) -> Recipe:
        """The recipe of a run, on the study's target. Raises `UserError` for what is not there."""
        run = self.runs[name]
        recipe = load_recipe(run.recipe, list(run.changes))
        family_config(recipe.drafter, f"run '{name}'")
        return replace(recipe, name="study", target=TargetSection(name=self.args.target))

    def possible(self, names: Sequence[str]) -> list[str]:
        """Those of the runs whose recipe, family and options exist; the others are told of."""
        found = []
        for name in names:
            try:
                self.recipe(name)
            except UserError as error:
                self.console.print(f"{name} is left out: {error}", style="yellow", markup=False)
            else:
                found.append(name)
        return found

    def trains(self, name: str) -> bool:
        """Whether the run's family has something to train."""
        config = family_config(self.recipe(name).drafter, name)[1]
        return not isinstance(config, UntrainedConfig)

    def drafter(self, name: str) -> Drafter:
        """The run's drafter as it is served. Raises `UserError` if it is not trained yet."""
        if self.trains(name):
            folder = self.place(name) / "run" / "drafter"
            if not folder.exists():
                raise UserError(f"'{name}' is not trained yet; take --only train first")
            drafter = load_drafter(folder, self.target)
        else:
            config: Any = family_config(self.recipe(name).drafter, name)[1]
            drafter = untrained_drafter(config, self.target)
        assert isinstance(drafter, torch.nn.Module)
        speed_up_few_rows(drafter)
        return drafter

    # ---- what is kept

    def place(self, name: str) -> Path:
        """The folder of a run: another one for another recipe, time, or collection."""
        sections = to_dict(self.recipe(name))
        depends = {key: sections[key] for key in ("drafter", "objective", "train", "serving")}
        depends |= {"seconds": self.args.seconds, "threads": self.args.train_threads}
        key = settings_hash(depends | {"records": self.store.identity})
        return self.folder / f"{name}-{key}"

    def part(
        self, name: str, part: str, depends: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A part of a run's results, made if it is not there for these settings."""
        found = self.known(name, part, depends)
        if found is None:
            self.console.print(f"{part}: {name}", markup=False)
            write_json(self._path(name, part), {"depends": depends, "found": make()})
            found = self.known(name, part, depends)
            assert found is not None
        return found

    def known(self, name: str, part: str, depends: dict[str, Any]) -> dict[str, Any] | None:
        """A part that is there for these settings, else None."""
        path = self._path(name, part)
        if not path.exists():
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        return dict(kept["found"]) if kept["depends"] == depends else None

    def _path(self, name: str, part: str) -> Path:
        return self.place(name) / f"{part}.json"

    # ---- records

    def collect(self) -> RecordStore:
        """Ask the target all prompts of the study; states of all layers that any run reads.

        Raises `UserError` without a folder of prompts, and as `collect` does.
        """
        if self.args.prompts is None:
            raise UserError("collecting takes --prompts, the folder of the shared prompt files")
        start_processes(self.target.device)
        recipe = collection_recipe(self.args)
        prepared = prepare_recipe(recipe, self.target, self.console)
        folder, taps = self.folder / "records", self.taps()
        self.console.print(f"target states kept: {', '.join(map(str, taps))}")
        store = collect(Work(recipe, self.target, taps, prepared, folder, self.console))
        files = sorted({file for file, _, _ in (TRAINED_ON | HELD_OUT).values()})
        hashes = {file: _sha256(self.args.prompts / file) for file in files}
        write_json(self.folder / "prompts.json", hashes)
        return store

    def taps(self) -> tuple[int, ...]:
        """All target states that some run reads, and those that are kept besides."""
        layers = self.target.num_layers
        kept = {tap for tap in self.args.taps if tap <= layers}
        for name in self.possible(list(self.runs)):
            config = family_config(self.recipe(name).drafter, name)[1]
            kept |= set(resolved_taps(config, layers))
        return tuple(sorted(kept))

    def about(self) -> dict[str, Any]:
        """The collection that results rest on: hashes and ids alone, no text."""
        ids: dict[str, dict[str, list[str]]] = {"train": {}, "heldout": {}}
        for row in self.store.index():
            own = ids[row.split].setdefault(row.domain, [])
            if row.prompt_id not in own:
                own.append(row.prompt_id)
        path = self.folder / "prompts.json"
        return {
            "records": self.store.identity,
            "states_kept": self.store.settings["taps"],
            "max_new_tokens": self.store.settings["max_new_tokens"],
            "prompt_files": json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
            "training_prompts": {d: len(own) for d, own in sorted(ids["train"].items())},
            "held_out_prompts": {d: sorted(own) for d, own in sorted(ids["heldout"].items())},
        }


def collection_recipe(args: argparse.Namespace) -> Recipe:
    """The demo's prompts and the shared ones, answered at T = 0 and T = 1."""
    base = load_recipe("demo")
    return replace(
        base,
        name="study",
        target=TargetSection(name=args.target),
        domains=(
            *(replace(domain, max_rows=args.demo_rows) for domain in base.domains),
            *_shared(args.prompts, TRAINED_ON, 0.0, args.train_rows),
            *_shared(args.prompts, HELD_OUT, 1.0, args.heldout_rows),
        ),
        collect=replace(
            base.collect,
            temperatures=tuple(law.temperature for law in LAWS),
            max_new_tokens=args.max_new_tokens,
            store_dtype=args.store_dtype,
        ),
    )


def _shared(
    folder: Path, files: Mapping[str, tuple[str, int, int | None]], holdout: float, rows: int
) -> list[DomainSection]:
    return [
        DomainSection(
            name, str(folder / file), holdout=holdout, first_line=first, last_line=last,
            max_rows=rows,
        )
        for name, (file, first, last) in files.items()
    ]  # fmt: skip


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
