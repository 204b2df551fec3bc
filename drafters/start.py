"""How drafters begin: anew for a target, or going on from a published one that fits it.

The layouts are those of `layouts.LAYOUTS`; of pickles nothing but tensors is taken.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor, nn

from ..configs.errors import UserError
from ..data.dense import dense_weight
from ..data.records import Record
from ..data.target import Target
from .about import About, about
from .base import Drafter
from .causal import CausalConfig
from .eagle3 import Eagle3Drafter
from .eagle3_begin import begin_head
from .eagle3_config import Eagle3Config
from .formats import hf_causal
from .formats.config import read_config
from .formats.fits import check_shared
from .formats.tensors import weight_files
from .jump import JumpConfig
from .layouts import LAYOUTS, layout_of
from .lowrank import second_moment
from .medusa import MedusaConfig
from .reading import check, read
from .registry import (
    FAMILIES,
    FamilyConfig,
    TrainedConfig,
    UntrainedConfig,
    family_of,
    trained_families,
)
from .sized import check_drafts
from .vocab import captured_mass, choose_draft_ids, special_ids

_FETCHED = (
    *("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"),
    *("medusa_lm_head.*", "mask_embedding.pt"),  # one is read, where the other lies it is refused
)
_LEARNING = ("train_head",)
"""Options that say what is trained: going on, a recipe may say otherwise than the drafter was."""


def new_drafter(config: FamilyConfig, target: Target, records: Sequence[Record]) -> Drafter:
    """A drafter for `target` to be trained, its draft vocabulary chosen on training `records`.

    With `config.start` it is that drafter, draft vocabulary included. Raises `UserError` for a
    family that has nothing to train, and as `started`.
    """
    config = learning(config)
    if config.start is not None:
        return started(config, target)
    ids = _draft_ids(config, target, records)
    drafter = FAMILIES[family_of(config)].build(target, config, ids)
    if isinstance(drafter, Eagle3Drafter) and drafter.head_down is not None:
        begin_head(drafter, target, second_moment(records))  # of what it is going to read
    return drafter


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
    for path in [*files, *weight_files(folder)]:
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
    weight_files(folder)
    known = about(folder, getattr(config, "taps", None))
    _check_kind(folder, known, family_of(config))
    if isinstance(config, CausalConfig):
        _check_lm(folder, config)
    shape = check(folder, target, known)
    size = target.vocab_size if shape.draft_ids is None else len(shape.draft_ids)
    for name, value in (shape.options | {"draft_vocab_size": size}).items():
        if name not in _LEARNING:
            _check_said(name, getattr(config, name, None), value, config.start)
    _learn(shape, config, target)
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
        _take_shared(start.folder, name, drafter, target)
    _learn(drafter, config, target)
    return drafter.train()


def _learn(drafter: Any, config: TrainedConfig, target: Target) -> None:
    """Let a drafter learn what the recipe says.

    Raises `UserError` for a language model that cannot draft for `target`, or not be adapted so.
    """
    if isinstance(config, CausalConfig):
        check_drafts(drafter.model, target, f"drafter.start '{config.start}'")
        if config.lora is not None:
            drafter.adapt(config.lora, config.start or "")
    if isinstance(config, Eagle3Config):
        drafter.learn(config.train_head, config.train_embedding)
    if isinstance(config, JumpConfig | MedusaConfig) and config.train_head is not None:
        drafter.learn(config.train_head)


def _take_shared(folder: Path, name: str, drafter: Any, target: Target) -> None:
    """Put the target's own weights where a drafter shares them, whatever precision it is in.

    Of the head its rows of the draft vocabulary, or those and their biases.
    """
    mine: nn.Parameter = drafter.get_parameter(name)
    kind = "embedding" if name.startswith("embed_tokens") else "head"
    if kind == "embedding":
        whole = target.embedding.detach()
    elif name.endswith("bias"):
        whole = target.head.bias.detach()
    else:
        whole = dense_weight(target.head, target.dtype)
    rows = slice(len(mine)) if kind == "embedding" else drafter.draft_ids
    theirs = whole[slice(len(mine)) if rows is None else rows].cpu().float()  # [V, h]
    check_shared(folder, name, mine, theirs)
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


def _check_kind(folder: Path, known: About, family: str) -> None:
    """Raise `UserError` for a folder of another kind than the recipe's family."""
    found = known.family or LAYOUTS[layout_of(folder, known)].family
    if found != family:
        raise UserError(
            f"{folder} is a drafter of family '{found}', and drafter.family is '{family}'"
        )
