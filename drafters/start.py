"""How drafters begin: anew for a target, or going on from a published one that fits it.

The layouts are those of `layouts.LAYOUTS`; weights to go on from are taken as safetensors.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configs.errors import UserError
from ..data.probe import check_family
from ..data.records import Record
from ..data.target import Target
from .about import About, about
from .base import Drafter
from .causal import CausalConfig, CausalDrafter
from .formats import hf_causal
from .formats.config import read_config
from .layouts import LAYOUTS, layout_of
from .reading import check, read
from .registry import (
    FAMILIES,
    FamilyConfig,
    TrainedConfig,
    UntrainedConfig,
    family_of,
    trained_families,
)
from .vocab import captured_mass, choose_draft_ids, special_ids

_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_ROUNDING = 2.0**-7  # of what a 16-bit copy of an embedding differs by


def new_drafter(config: FamilyConfig, target: Target, records: Sequence[Record]) -> Drafter:
    """A drafter for `target` to be trained, its draft vocabulary chosen on training `records`.

    With `config.start` it is that drafter, draft vocabulary included. Raises `UserError` for a
    family that has nothing to train, and as `started`.
    """
    config = learning(config)
    if config.start is not None:
        return started(config, target)
    ids = _draft_ids(config, target, records)
    return FAMILIES[family_of(config)].build(target, config, ids)


def learning(config: FamilyConfig) -> TrainedConfig:
    """`config`, of a family that learns. Raises `UserError` for another one."""
    if isinstance(config, UntrainedConfig):
        *others, last = trained_families()
        raise UserError(
            f"drafter.family '{family_of(config)}' has nothing to train: measure it as it is, with "
            f"eval; families that learn are {', '.join(others)} and {last}"
        )
    return config


def _draft_ids(config: TrainedConfig, target: Target, records: Sequence[Record]) -> Tensor | None:
    if config.vocab_size is None:
        return None
    mass = captured_mass(target, records)
    return choose_draft_ids(mass, config.vocab_size, special_ids(target), config.domain_floor)


def resolved_taps(config: FamilyConfig, num_layers: int) -> tuple[int, ...]:
    """Target states that records for this drafter must hold, as `Target.forward` takes them.

    Raises `UserError` for layers that the target lacks, or that `drafter.start` does not read.
    """
    if isinstance(config, UntrainedConfig) or config.start is None:
        return config.resolved_taps(num_layers)
    folder, named = _folder(config.start), getattr(config, "taps", None)
    known = about(folder, named)
    _check_kind(folder, known, family_of(config))
    taps = LAYOUTS[layout_of(folder, known)].taps(folder, known, num_layers)
    _check_said("taps", named, taps, config.start)
    return taps


# ---- going on


@dataclass(frozen=True)
class Start:
    """A drafter to go on from: where it lies, what is known of it, and its shape on device meta."""

    folder: Path
    known: About
    shape: Drafter


def start_identity(config: FamilyConfig) -> str | None:
    """16 hex digits that change with what `drafter.start` holds; None if nothing is gone on with.

    Of the weights, the configuration and the draft vocabulary. Raises `UserError` for a start that
    cannot be found.
    """
    if isinstance(config, UntrainedConfig) or config.start is None:
        return None
    folder = _folder(config.start)
    known = about(folder)
    digest = hashlib.sha256(json.dumps(known.draft_ids).encode())
    if known.layout == "draftsmith":  # which has no other configuration
        digest.update(json.dumps(known.options).encode())
    files = [path for path in (folder / "config.json",) if path.exists()]
    for path in [*files, *_weights(folder)]:
        digest.update(path.name.encode())
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:16]


def check_start(config: TrainedConfig, target: Target) -> Start:
    """What `config.start` names, judged by its configuration, tokenizer and file names.

    Raises `UserError` for a drafter that does not fit the target, or cannot be trained, and for
    options that say otherwise than it.
    """
    assert config.start is not None
    folder = _folder(config.start)
    _weights(folder)
    known = about(folder, getattr(config, "taps", None))
    _check_kind(folder, known, family_of(config))
    if isinstance(config, CausalConfig):
        _check_lm(folder, config)
    shape = check(folder, target, known)
    size = target.vocab_size if shape.draft_ids is None else len(shape.draft_ids)
    for name, value in (shape.options | {"draft_vocab_size": size}).items():
        _check_said(name, getattr(config, name, None), value, config.start)
    if isinstance(shape, CausalDrafter):
        assert isinstance(config, CausalConfig)
        _check_drafts(shape.model, target, config.start)
        if config.lora is not None:
            shape.adapt(config.lora, config.start)
    return Start(folder, known, shape)


def _check_said(name: str, said: Any, value: Any, start: str) -> None:
    """Raise `UserError` for an option of the recipe that is another than the drafter's own."""
    if said not in (None, value):
        told = [list(v) if isinstance(v, tuple) else v for v in (said, value)]
        raise UserError(
            f"drafter.{name} {told[0]} is another than the {told[1]} of drafter.start '{start}'; "
            f"leave drafter.{name} out"
        )


def started(config: TrainedConfig, target: Target) -> Drafter:
    """The drafter that `config.start` names, in float32, to be trained further for `target`.

    Raises `UserError` as `check_start`, and for weights that are incomplete or do not fit.
    """
    start = check_start(config, target)
    drafter: Any = read(start.folder, target, start.known)
    drafter.float()
    for name in drafter.shared:
        _take_shared(start.folder, name, drafter.get_parameter(name), target)
    if isinstance(drafter, CausalDrafter):
        assert isinstance(config, CausalConfig)
        _check_drafts(drafter.model, target, config.start)
        if config.lora is not None:
            drafter.adapt(config.lora, config.start or "")
    return drafter.train()


def _take_shared(folder: Path, name: str, mine: nn.Parameter, target: Target) -> None:
    """Put the target's own weights where a drafter shares them, whatever precision it is in."""
    whole = target.embedding if name.startswith("embed_tokens") else target.head.weight
    theirs = whole[: len(mine)].detach().cpu().float()  # [V, h]
    scale = theirs.abs().max().item()
    if not torch.allclose(mine.cpu(), theirs, rtol=_ROUNDING, atol=_ROUNDING * scale):
        kind = "embedding" if whole is target.embedding else "head"
        raise UserError(
            f"{folder}: tensor '{name}' is another {kind} than the target's, which a drafter shares"
            " here"
        )
    mine.data.copy_(theirs)


def _check_lm(folder: Path, config: CausalConfig) -> None:
    """Refuse a language model that cannot be trained, or has other layers than the recipe says."""
    if "quantization_config" in read_config(folder):
        raise UserError(f"drafter.start '{config.start}' is quantised, and cannot be trained so")
    count = int(hf_causal.text_config(folder).num_hidden_layers)
    if config.layers is not None and len(config.layers) != count:
        raise UserError(
            f"drafter.layers {list(config.layers)} are {len(config.layers)}, and drafter.start "
            f"'{config.start}' has {count} layers; leave drafter.layers out"
        )


def _check_drafts(model: PreTrainedModel, target: Target, start: str | None) -> None:
    """Refuse a language model that cannot draft; one without weights is not run."""
    try:
        # Decoding asks of a draft what it asks of a target.
        draft = Target(model, target.tokenizer, {"name": start}, (), target.vocab_size)
        if draft.device.type != "meta":
            check_family(draft)
    except UserError as error:
        raise UserError(f"drafter.start '{start}' cannot draft: {error}") from error


# ---- where it lies


def _folder(start: str) -> Path:
    """The folder of that path, or of that Hub id."""
    folder = Path(start).expanduser()
    return folder if folder.is_dir() else _fetched(start)


@functools.cache
def _fetched(start: str) -> Path:
    """Where a Hub id was fetched to, or lies in the Hub's cache; asked for once in a process."""
    try:
        return Path(snapshot_download(start, allow_patterns=list(_FETCHED)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot find drafter.start '{start}': {reason}; it takes a drafter's folder, or a Hub "
            "id that is reachable or already in the Hub cache"
        ) from error


def _weights(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise UserError(f"{folder} holds no weights as safetensors to go on from")
    return found


def _check_kind(folder: Path, known: About, family: str) -> None:
    """Raise `UserError` for a folder of another kind than the recipe's family."""
    found = known.family or LAYOUTS[layout_of(folder, known)].family
    if found != family:
        raise UserError(
            f"{folder} is a drafter of family '{found}', and drafter.family is '{family}'"
        )
