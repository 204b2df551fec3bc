"""What a training run would take and whether it can work, before any model is loaded."""

import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from rich.console import Console
from torch import Tensor

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.devices import pick_device
from ..data.plan import Ask
from ..data.store import RecordStore
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.distribution import DraftVocabularyP
from .batches import Plan, make_plan
from .blueprint import drafter_shapes, target_shapes
from .corpus import check_domains, load_data
from .distributed import TargetUse, low_precision, target_use
from .flops import TrainingFlops, device_flops
from .memory import Extents, extents, memory, weights
from .objective import Objective, bind_objective
from .optimizer import check_optimizer
from .policy import check as check_renewal
from .step import check_unroll

UTILISATION = 0.45
"""Share of the rate of matrix products that training is taken to reach, as it does on a CPU."""
_GB = 1e9


@dataclass(frozen=True)
class DryRun:
    """What was found out; sizes in bytes, times in seconds.

    trained, frozen: parameters of the drafter; records, supervised: those trained on and their
    tokens that can be drafted, in an epoch; batches: of an epoch; longest: tokens; steps: optimiser
    steps; tokens_per_step: supervised ones on average, over all processes; memory: on each device,
    by what takes it; checkpoint: on disk; disk: for all that is kept of the run; rate: FLOPs a
    second of matrix products here; exact: whether the records were there to be counted.
    """

    trained: int
    frozen: int
    records: int
    supervised: int
    held_out: int
    batches: int
    longest: int
    steps: int
    tokens_per_step: float
    flops_per_epoch: float
    rate: float
    seconds_per_epoch: float
    memory: dict[str, float]
    device: torch.device
    free_memory: float
    checkpoint: float
    disk: float
    free_disk: float
    use: TargetUse
    target_parameters: int
    target_bytes: float
    world: int
    exact: bool


@dataclass(frozen=True)
class _Course:
    """What is trained on: the plan of an epoch, lengths and prompts `[C]` of its conversations."""

    plan: Plan
    lengths: Tensor
    prompts: Tensor
    held_out: int


def dry_run(
    recipe: Recipe,
    store: RecordStore | None,
    console: Console,
    folder: Path = Path(),
    accept: bool = False,
    asks: Sequence[Ask] = (),
) -> DryRun:
    """Print what training the recipe on `store` would take, or on replies to `asks` without one.

    folder: where the run would be kept; accept: takes records of another target, with a warning.
    Shapes, configurations and the records' index are read, and no weights.

    Raises `UserError` for what cannot work: what `train` refuses, a warm-up that never ends, or
    weights and checkpoints that there is no room for.
    """
    section = recipe.train
    check_optimizer(section)
    objective = bind_objective(recipe.objective, recipe.serving)
    target = target_shapes(recipe)
    drafter = drafter_shapes(recipe, target)
    check_unroll(drafter.family, drafter.max_draft_tokens, section.unroll)
    if store is None:
        settings = {"distributions": recipe.collect.distributions}
        use = target_use(recipe, RecordStore(folder, settings, False))
        course = _planned(recipe, asks)
    else:
        use = target_use(recipe, store)
        course, target = _of_store(recipe, store, target, objective, use, accept)
        settings = store.settings
    found = _found(recipe, target, drafter, objective, course, use, folder, settings)
    found = replace(found, exact=store is not None)
    _refuse(recipe, drafter, found)
    if os.environ.get("RANK", "0") == "0":
        for line in lines(recipe, drafter, found):
            console.print(line, soft_wrap=True)
    return found


def _of_store(
    recipe: Recipe, store: RecordStore, target: Target, objective: Objective, use: TargetUse,
    accept: bool,
) -> tuple[_Course, Target]:  # fmt: skip
    """What the store's records make, checked as training checks them."""
    known = {"weights": store.settings["target"]["weights"]}  # which are not known without reading
    target = replace(target, provenance=target.provenance | known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if known["weights"] is None else "default")
        data = load_data(recipe, target, store, objective, accept)
    section = recipe.train
    if section.on_policy is not None:
        check_renewal(section.on_policy, data.training, use == "replicated", objective)
    rows = data.training.rows
    course = _Course(
        data.plan(weights=section.domain_weights),
        torch.tensor([r.tokens for r in rows]),
        torch.tensor([r.prompt_len for r in rows]),
        len(data.held_out),
    )
    return course, target


@dataclass(frozen=True)
class _Reply:
    """A reply that is still to be made: as long as may be."""

    prompt_len: int
    reply: range


def _planned(recipe: Recipe, asks: Sequence[Ask]) -> _Course:
    """What replies of the greatest length to all training prompts would make."""
    section, limit = recipe.train, recipe.collect.max_new_tokens
    check_domains(section, {ask.domain for ask in asks}, "the prompts are of")
    wanted = [a for a in asks if section.domains is None or a.domain in section.domains]
    training = [a for a in wanted if a.split == "train"]
    turns = [(a, a.tokens + turn * limit) for a in training for turn in range(a.turns)]
    rows = [_Reply(prompt, range(limit)) for _, prompt in turns]
    weights = [section.domain_weights.get(a.domain, 1.0) for a, _ in turns]
    return _Course(
        make_plan(rows, section.tokens_per_batch, recipe.seed, None, weights),
        torch.tensor([r.prompt_len + limit for r in rows]),
        torch.tensor([r.prompt_len for r in rows]),
        min(section.eval_conversations, sum(a.split != "train" for a in wanted)),
    )


# ---- what it takes


def _found(
    recipe: Recipe, target: Target, drafter: Drafter, objective: Objective, course: _Course,
    use: TargetUse, folder: Path, settings: Mapping[str, object],
) -> DryRun:  # fmt: skip
    section, world = recipe.train, int(os.environ.get("WORLD_SIZE", "1"))
    device = pick_device(recipe.target.device)
    low = low_precision(section, device)
    epoch = course.plan.epoch(0)
    used = torch.tensor([row for batch in epoch for row in batch])
    supervised = sum(course.plan.supervised[row] for batch in epoch for row in batch)
    window = world * section.accumulation
    steps = section.steps or math.ceil(section.epochs * len(epoch) / window)
    p = DraftVocabularyP(target, drafter.draft_ids, objective.law)
    trained, frozen = weights(drafter)
    flops = TrainingFlops.of(drafter, p, section.unroll).conversations(
        course.lengths[used], course.prompts[used], settings["distributions"] != "top"
    )
    total = float(flops.sum())
    parameters = target.model.num_parameters()
    if settings["distributions"] == "none":  # the target reads each conversation again
        total += 2.0 * parameters * float(course.lengths[used].sum())
    rate = device_flops(device, torch.bfloat16 if low else torch.float32)
    largest = max((_extents(course, rows, recipe) for rows in epoch), key=_size)
    checkpoint = 4.0 * (trained + frozen) * (2 if section.ema else 1) + 8.0 * trained
    return DryRun(
        trained=trained,
        frozen=frozen,
        records=len(used.unique()),
        supervised=supervised,
        held_out=course.held_out,
        batches=len(epoch),
        longest=int(course.lengths[used].max()),
        steps=steps,
        tokens_per_step=supervised / len(epoch) * window,
        flops_per_epoch=total,
        rate=rate,
        seconds_per_epoch=total / (UTILISATION * rate * world),
        memory=memory(drafter, target, use, section, largest, p, low, world),
        device=device,
        free_memory=free_memory(device) / (world if device.type == "cpu" else 1),
        checkpoint=checkpoint,
        # One more is written before the oldest goes; best weights and the drafter lie beside them.
        disk=checkpoint * (section.keep + 1) + 8.0 * (trained + frozen),
        free_disk=shutil.disk_usage(_there(folder)).free,
        use=use,
        target_parameters=parameters,
        target_bytes=float(parameters * target.dtype.itemsize),
        world=world,
        exact=True,
    )


def _extents(course: _Course, rows: Sequence[int], recipe: Recipe) -> Extents:
    at, section = torch.tensor(rows), recipe.train
    lengths, prompts = course.lengths[at].tolist(), course.prompts[at].tolist()
    return extents(lengths, prompts, section.unroll, section.packing)


def _size(batch: Extents) -> int:
    return batch.rows * batch.width


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


# ---- what is said


def _refuse(recipe: Recipe, drafter: Drafter, found: DryRun) -> None:
    """Raise `UserError` for what cannot work with any luck."""
    section = recipe.train
    if section.warmup_steps >= found.steps:
        raise UserError(
            f"train.warmup_steps {section.warmup_steps} is no less than the {found.steps} "
            "optimiser steps of the run, so the learning rate would never reach train.lr; lower "
            "it, or train longer"
        )
    if drafter.max_positions is not None and found.longest > drafter.max_positions:
        raise UserError(
            f"the longest record has {found.longest} tokens, and the drafter reads no more than "
            f"{drafter.max_positions}; lower collect.max_length and collect again"
        )
    certain = sum(size for name, size in found.memory.items() if name != "activations")
    if certain > found.free_memory:
        raise UserError(
            f"weights, gradients and optimiser state need {certain / _GB:.1f} GB on "
            f"{found.device}, and {found.free_memory / _GB:.1f} GB are free; take a smaller "
            "drafter, optimizer adamw_8bit, more processes that share them, or another device"
        )
    if found.disk > found.free_disk:
        raise UserError(
            f"checkpoints need {found.disk / _GB:.1f} GB on the disk, and "
            f"{found.free_disk / _GB:.1f} GB are free; lower train.keep, or free some"
        )


def lines(recipe: Recipe, drafter: Drafter, found: DryRun) -> list[str]:
    """What is printed of a dry run."""
    section = recipe.train
    told = {
        "drafter": f"{drafter.family}, {_millions(found.trained + found.frozen)} parameters: "
        f"{_millions(found.trained)} trained, {_millions(found.frozen)} frozen",
        "target": f"{_millions(found.target_parameters)} parameters, {found.use} while training",
        "records": f"{'' if found.exact else 'at most '}{found.records} to train on with "
        f"{found.supervised} supervised tokens; {found.held_out} held-out ones for evaluations; "
        f"the longest has {found.longest} tokens",
        "steps": f"{found.steps} optimiser steps, each of {found.tokens_per_step:.0f} supervised "
        f"tokens on average: {found.batches} batches an epoch, {section.accumulation} of them a "
        f"step on {_counted(found.world, 'process')}",
        "time": f"about {_time(found.seconds_per_epoch)} an epoch, "
        f"{_time(found.seconds_per_epoch * _epochs(recipe, found))} in all: an estimate, at "
        f"{UTILISATION:.0%} of the {found.rate / 1e9:.0f} GFLOP/s that matrix products reach here",
        "memory": f"about {_size_of(sum(found.memory.values()))} on {found.device}, where "
        f"{_size_of(found.free_memory)} are free: "
        + ", ".join(f"{name} {_size_of(size)}" for name, size in found.memory.items())
        + " (activations are an estimate, for the largest batch)",
        "disk": f"{_size_of(found.disk)} for {section.keep} checkpoints of "
        f"{_size_of(found.checkpoint)}, one being written, and drafters; "
        f"{_size_of(found.free_disk)} are free",
    }
    notes = []
    if sum(found.memory.values()) > found.free_memory:
        notes.append(
            "it may not fit: lower train.tokens_per_batch, or set train.gradient_checkpointing"
        )
    host = free_memory(torch.device("cpu"))
    if found.use != "replicated" and found.target_bytes * found.world > host:
        notes.append(
            f"each process reads the whole target before it lets go of its layers: "
            f"{_size_of(found.target_bytes)}, where {_size_of(host)} are free"
        )
    if found.batches == found.records:
        notes.append("every batch is one record: train.tokens_per_batch is no more than they have")
    return [f"{name:<9} {text}" for name, text in told.items()] + notes


def _epochs(recipe: Recipe, found: DryRun) -> float:
    return found.steps * recipe.train.accumulation * found.world / found.batches


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}es"


def _size_of(size: float) -> str:
    return f"{size / _GB:.1f} GB" if size >= _GB else f"{size / 1e6:.0f} MB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
