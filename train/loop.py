"""The training loop: records in, drafter folder out, on accelerate."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from rich.console import Console

from ..configs.errors import UserError
from ..configs.load import recipe_hash, to_dict
from ..configs.recipe import Recipe
from ..data.files import whole_folder, write_json
from ..data.store import RecordStore
from ..data.target import Target
from ..data.work import start_processes
from ..drafters.base import Drafter
from ..drafters.checkpoint import save_drafter
from ..drafters.packing import check_packing
from ..drafters.registry import family_config
from ..drafters.start import new_drafter, start_identity
from .checkpoints import checkpoints
from .corpus import load_data
from .distributed import low_precision, make_accelerator, name_of, placed, shard, target_use
from .judge import BEST, Decode
from .objective import bind_objective
from .policy import check as check_renewal
from .progress import Progress, stop_signal
from .run import Run
from .step import check_unroll

_SETTINGS = "settings.json"
_OVER = "over"  # in the settings: whether the run has come to its end
_TRIED = 16  # records among which packing is tried on the shortest
_LENGTH = ("steps", "epochs")
_WATCHING = ("save_every", "keep", "log_every", "samples", "wandb", "wandb_project", "tensorboard")
"""Options of train that change nothing of a drafter."""


def train(
    recipe: Recipe,
    target: Target,
    store: RecordStore,
    folder: Path,
    console: Console,
    accept: bool = False,
    decode: Decode | None = None,
) -> Path:
    """Train the recipe's drafter on `store`; returns the finished drafter folder.

    A run that was stopped goes on from its newest whole checkpoint to the same numbers. `accept`
    takes records of another target, with a warning. Raises `UserError` for what cannot be trained,
    and `KeyboardInterrupt` when stopped by a signal, after saving.
    """
    finished = folder / "drafter"
    settings = train_settings(recipe, store)
    longer, over = _compare(folder, settings)
    if finished.exists() and over:
        console.print(f"{finished} is already trained")
        return finished
    section, processes = recipe.train, start_processes(target.device)
    use = target_use(recipe, store)
    objective = bind_objective(recipe.objective, recipe.serving)
    set_seed(recipe.seed)
    if use == "sharded":  # first, so that no device has to hold or run all of it
        shard(target, processes)
    data = load_data(recipe, target, store, objective, accept)
    if section.on_policy is not None:
        check_renewal(section.on_policy, data.training, use == "replicated", objective)
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    drafter = new_drafter(config, target, data.training)
    check_unroll(drafter.family, drafter.max_draft_tokens, section.unroll)
    if section.packing:
        check_packing(drafter, data.training[:_TRIED], data.domains)
    accelerator = make_accelerator(section, processes, folder)
    if not accelerator.is_main_process:
        console = Console(quiet=True)
    if accelerator.num_processes > 1:
        console.print(f"{accelerator.num_processes} processes, {name_of(accelerator)}")
    passes = "bf16, weights float32" if low_precision(section, accelerator.device) else "float32"
    console.print(f"training on {accelerator.device} in {passes}")
    if objective.needs_samples or objective.then is not None:
        console.print(
            f"{sum(data.lawful)} of {len(data.lawful)} replies were sampled under "
            f"{objective.law.label}, as part of this objective needs"
        )
    if longer:
        console.print(f"{longer}; the course of the learning rate is stretched", style="yellow")
    accelerator.wait_for_everyone()  # until all have read the settings as they were
    if accelerator.is_main_process:
        write_json(folder / _SETTINGS, {**settings, _OVER: False})
    held_out = list(data.held_out)  # while the target can be run for them, if it has to be
    target = placed(target, use, accelerator.device)
    training = replace(data.training, target=target)
    data = replace(data, training=training, held_out=held_out)
    run = Run(recipe, objective, accelerator, target, drafter, data, folder, console, decode)
    with stop_signal() as stop:
        at = run.fit(stop)
    drafter = run.judge.sound(at.step)
    if accelerator.is_main_process:
        _finish(recipe, run, drafter, target, at, finished)
        write_json(folder / _SETTINGS, {**settings, _OVER: True})
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return finished


def _finish(
    recipe: Recipe, run: Run, drafter: Drafter, target: Target, at: Progress, finished: Path
) -> None:
    """Write the drafter: the best weights if they are asked for and there are any, or the last."""
    section, best = recipe.train, run.folder / BEST
    wanted = section.result or ("last" if section.patience is None else "best")
    if wanted == "best" and at.best is not None:
        if not best.exists():
            raise UserError(
                f"{best} is gone, which train.result best (or train.patience) makes the drafter; "
                "take train.result last"
            )
        with whole_folder(finished) as part:
            shutil.copytree(best, part, dirs_exist_ok=True)
    else:
        save_drafter(drafter, finished, target, {**trained_by(recipe), "steps": at.step})


def trained_by(recipe: Recipe) -> dict[str, Any]:
    """What a drafter's folder says about its training."""
    return {"recipe": recipe.name, "recipe_hash": recipe_hash(recipe)}


def train_settings(recipe: Recipe, store: RecordStore) -> dict[str, Any]:
    """All that a trained drafter depends on."""
    sections = to_dict(recipe)
    depends = {name: sections[name] for name in ("seed", "drafter", "objective", "train")}
    depends["train"] = {n: v for n, v in depends["train"].items() if n not in _WATCHING}
    depends["law"] = bind_objective(recipe.objective, recipe.serving).law.__dict__
    judged = recipe.train.patience is not None or recipe.train.result == "best"
    renewed = recipe.train.on_policy is not None
    if recipe.objective.then is not None or judged or renewed or recipe.train.reweight > 0:
        served = ("num_draft_tokens", "verifier", "drafting")
        depends |= {name: sections["serving"][name] for name in served}
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    depends["start"] = start_identity(config)
    target = {name: sections["target"][name] for name in ("name", "revision", "dtype")}
    return depends | {"target": target, "records": store.identity}


def _compare(folder: Path, settings: dict[str, Any]) -> tuple[str, bool]:
    """What is said of a run in `folder` that now is to take longer; whether nothing is left to do.

    Raises `UserError` if it is a run of other settings.
    """
    path = folder / _SETTINGS
    if not path.exists():
        return "", False
    known = json.loads(path.read_text(encoding="utf-8"))
    there, here = _without_length(known), _without_length(settings)
    other = [name for name in here if there.get(name) != here[name]]
    if other:
        raise UserError(
            f"{folder} holds a run of other settings ({', '.join(other)} differ); name another "
            "folder, or delete this one"
        )
    changed = [n for n in _LENGTH if known["train"][n] != settings["train"][n]]
    if not changed or not checkpoints(folder):
        return "", not changed and bool(known[_OVER])
    told = ", ".join(f"{n} {settings['train'][n]} instead of {known['train'][n]}" for n in changed)
    return f"going on with train.{told}", False


def _without_length(settings: dict[str, Any]) -> dict[str, Any]:
    section = {n: v for n, v in settings.get("train", {}).items() if n not in _LENGTH}
    return settings | {"train": section}
