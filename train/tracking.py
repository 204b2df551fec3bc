"""Weights & Biases and TensorBoard, through accelerate's trackers; training never depends on them.

The complete log is `metrics.jsonl`. A tracker that cannot start, or fails later, costs one bounded
wait and one sentence.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from rich.console import Console

from .. import __version__
from ..configs.load import recipe_hash, to_dict
from ..configs.recipe import Recipe

STEP = "step"
"""What W&B plots every figure over: optimiser steps."""

_OPENING = 30.0  # seconds that a server has to open a run
_UPLOAD = 60.0  # and to take in, at the end, what is still on its way
_SYNONYMS = {"dryrun": "offline", "run": "online"}  # of WANDB_MODE

Values = Mapping[str, Any]
Put = Callable[[Any, Values, int | None], None]


def new_run_id(recipe: Recipe) -> str:
    """An id for a run that begins; checkpoints keep it, so that a resumed run is the same one."""
    name = re.sub(r"[^\w.-]", "-", recipe.name)[:64]
    return f"{name}-{recipe_hash(recipe)[:8]}-{secrets.token_hex(4)}"


def start_tracking(
    accelerator: Accelerator,
    recipe: Recipe,
    folder: Path,
    run_id: str,
    step: int,
    console: Console,
) -> None:
    """Give the accelerator the recipe's trackers, for its `log` and `end_training`.

    `step` optimiser steps are done. What a stopped run told of later ones is replaced in
    TensorBoard, and kept beside what is told again in W&B.
    """
    if not accelerator.is_main_process:
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = {**to_dict(recipe), "run": _versions(accelerator)}
    wanted: list[tuple[str, Callable[[], GeneralTracker | None], Put]] = []
    if recipe.train.wandb != "off":
        opening = partial(_wandb, recipe, folder, run_id, config, console)
        wanted.append(("W&B", opening, _put_wandb))
    if recipe.train.tensorboard:
        wanted.append(("TensorBoard", partial(_tensorboard, folder, step, config), _put_board))
    for name, start, put in wanted:
        try:
            tracker = start()
        except Exception as error:  # whatever it is, training goes on
            console.print(_lost(name, error), style="yellow", markup=False)
        else:
            if tracker is not None:
                accelerator.trackers.append(_Guarded(name, tracker, put, console))


def tell_wandb(recipe: Recipe, folder: Path, log: Callable[[Any], None], console: Console) -> None:
    """Open a W&B run of an evaluation as the recipe says, let `log` fill it, and end it.

    The report in `folder` is complete without it: whatever fails costs one sentence.
    """
    if recipe.train.wandb == "off":
        return
    try:
        tracker = _wandb(recipe, folder, new_run_id(recipe), to_dict(recipe), console)
        if tracker is not None:
            log(tracker.run)
            tracker.finish()
    except Exception as error:
        console.print(_lost("W&B", error, "report.json"), style="yellow", markup=False)


def _versions(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "draftsmith": __version__,
        "commit": _commit(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "processes": accelerator.num_processes,
    }


def _commit() -> str | None:
    """The commit of this source tree, "-dirty" behind it where files differ; None if installed."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _lost(name: str, error: Exception, kept: str = "metrics.jsonl") -> str:
    if isinstance(error, ImportError):
        return f"{name} is off, its package is not installed; {kept} is complete without it"
    return f"{name} is off ({_reason(error)}); {kept} is complete without it"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _Guarded(GeneralTracker):
    """One of accelerate's trackers, which its first failure ends, and nothing else with it."""

    requires_logging_directory = False

    def __init__(self, title: str, inner: Any, put: Put, console: Console):
        super().__init__(_blank=True)
        self.name = inner.name
        self._title, self._inner, self._put, self._console = title, inner, put, console
        self._alive = True

    @property
    def tracker(self) -> Any:
        return self._inner.tracker

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        self._attempt(lambda: self._put(self._inner, values, step))

    def finish(self) -> None:
        self._attempt(self._inner.finish)
        self._alive = False

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:  # whatever it is, training goes on
            self._alive = False
            self._console.print(_lost(self._title, error), style="yellow", markup=False)


# ---- Weights & Biases


def _wandb(
    recipe: Recipe, folder: Path, run_id: str, config: dict[str, Any], console: Console
) -> WandBTracker | None:
    """A run that was opened, or None where the environment disables them.

    Without a key or an answer of the server it is kept offline.
    """
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",  # a progress bar is redrawn ten times a second
        init_timeout=_OPENING,
        finish_timeout=_UPLOAD,
        reinit="finish_previous",  # one that failed in this process
    )
    wandb.setup(settings)
    opened = partial(_opened, recipe, folder, run_id, settings)
    mode, reason = _mode(recipe.train.wandb)
    if mode == "disabled":
        return None
    try:
        tracker = opened(mode)
    except Exception as error:
        if mode != "online":
            raise
        mode, reason = "offline", _reason(error)
        tracker = opened(mode)
    if reason:
        console.print(
            f"W&B is offline ({reason}): `wandb sync` sends what is kept in {folder / 'wandb'}",
            style="yellow",
            markup=False,
        )
    tracker.run.define_metric(STEP, hidden=True)
    tracker.run.define_metric("*", step_metric=STEP)
    tracker.store_init_configuration(config)
    told = tracker.run.url if mode == "online" else f"offline in {folder / 'wandb'}"
    console.print(f"W&B run {run_id}: {told}")
    return tracker


def _mode(asked: str) -> tuple[str, str]:
    """What `wandb.init` is told, and why a run that should be online is not.

    The environment comes first: it knows the machine, a recipe may run on any.
    """
    import wandb

    named = os.environ.get("WANDB_MODE") or asked
    mode = _SYNONYMS.get(named, named)
    if mode != "online":
        return mode, ""
    try:
        known = wandb.login(prompt=False)  # asks the server, for some ten seconds at most
    except Exception as error:
        return "offline", _reason(error)
    return ("online", "") if known else ("offline", "no key is known")


def _opened(recipe: Recipe, folder: Path, run_id: str, settings: Any, mode: str) -> WandBTracker:
    tracker = WandBTracker(
        recipe.train.wandb_project,
        name=recipe.name,
        id=run_id,
        resume="allow",
        mode=mode,
        dir=str(folder),
        settings=settings,
    )
    tracker.start()
    return tracker


def _put_wandb(tracker: Any, values: Values, step: int | None) -> None:
    """Log without W&B's own step: it drops what goes back, as a resumed run's steps do."""
    import wandb

    shown = {name: value for name, value in values.items() if not _is_table(value)}
    for name in values.keys() - shown.keys():
        rows = values[name]
        columns = list(rows[0])
        shown[name] = wandb.Table(columns=columns, data=[[r[c] for c in columns] for r in rows])
    for name, counts in _survivals(values).items():
        edges = np.arange(len(counts) + 1) + 0.5
        shown[name] = wandb.Histogram(np_histogram=(np.array(counts), edges))
    tracker.log({**shown, STEP: step})


def _survivals(values: Values) -> dict[str, list[float]]:
    """S_1, S_2... that stand together in a histogram, by its name."""
    found: dict[str, list[float]] = {}
    for name, value in values.items():
        match = re.fullmatch(r"(.+/survival)_\d+(/.+)?", name)
        if match:
            found.setdefault(match[1] + (match[2] or ""), []).append(value)
    return found


# ---- TensorBoard


def _tensorboard(folder: Path, step: int, config: dict[str, Any]) -> TensorBoardTracker:
    purge = {"purge_step": step + 1} if step else {}
    tracker = TensorBoardTracker("tensorboard", folder, **purge)
    tracker.start()
    tracker.log({"config": _literal(yaml.safe_dump(config, sort_keys=False))}, step=step)
    return tracker


def _put_board(tracker: Any, values: Values, step: int | None) -> None:
    texts = {
        n: _literal(yaml.safe_dump([dict(row) for row in v], sort_keys=False, allow_unicode=True))
        for n, v in values.items()
        if _is_table(v)
    }
    tracker.log({**values, **texts}, step=step)


def _literal(text: str) -> str:
    """Text as TensorBoard's Markdown shows it line by line."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _is_table(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
