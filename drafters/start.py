"""Going on from a published drafter: where it lies, what it decides, and whether it fits.

The layouts are those that are written here: folders of our own, bare flat EAGLE-3 heads, and causal
LMs of transformers. Weights are taken as safetensors.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from ..configs.errors import UserError
from ..data.probe import check_family
from ..data.target import Target
from .causal import CausalConfig, CausalDrafter
from .eagle3 import Eagle3Config, Eagle3Drafter
from .formats import eagle3_flat, hf_causal
from .formats.config import read_config
from .reading import check_head, check_lm, check_taps, load_head, load_lm, read_about

_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_ROUNDING = 2.0**-7  # of what a 16-bit copy of an embedding differs by


@dataclass(frozen=True)
class Start:
    """A drafter to go on from, as it shows without its weights.

    draft_ids: those of a standalone LM, None for all of the target's tokens; draft_vocab_size: how
    many tokens it drafts.
    """

    folder: Path
    draft_ids: list[int] | None
    draft_vocab_size: int


def start_identity(config: object) -> str | None:
    """16 hex digits that change with what `drafter.start` holds; None if nothing is gone on with.

    Of the weights, the configuration and the draft vocabulary. Raises `UserError` for a start that
    cannot be found.
    """
    if not isinstance(config, Eagle3Config | CausalConfig) or config.start is None:
        return None
    folder = _folder(config.start)
    digest = hashlib.sha256(json.dumps(_about(folder)["draft_ids"]).encode())
    for path in [folder / "config.json", *_weights(folder)]:
        digest.update(path.name.encode())
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:16]


def start_taps(config: Eagle3Config, num_layers: int) -> tuple[int, ...]:
    """The layers that the head `config.start` reads, of a target with `num_layers` layers.

    Those of the recipe where the head names none. Raises `UserError` for a head that reads others
    than the recipe says, or than there are.
    """
    assert config.start is not None
    folder = _folder(config.start)
    _check_kind(folder, "eagle3")
    taps = eagle3_flat.read_taps(read_config(folder), folder / "config.json", config.taps)
    if config.taps is not None and config.taps != taps:
        raise UserError(
            f"drafter.taps {list(config.taps)} are other layers than the {list(taps)} that "
            f"drafter.start '{config.start}' reads; leave drafter.taps out"
        )
    check_taps(folder, taps, num_layers, "the target")
    return taps


def check_start(config: Eagle3Config | CausalConfig, target: Target) -> Start:
    """What `config.start` names, judged by its configuration, tokenizer and file names.

    Raises `UserError` for a drafter that does not fit the target, or cannot be trained, and for
    options that say otherwise than it.
    """
    assert config.start is not None
    folder = _folder(config.start)
    own = _about(folder)
    ids: list[int] | None = None
    if isinstance(config, Eagle3Config):
        start_taps(config, target.num_layers)
        check_head(folder, target, own["tokenizer"], config.taps)
        raw = read_config(folder)
        size = int(raw.get("draft_vocab_size") or raw["vocab_size"])
    else:
        _check_kind(folder, "causal")
        _check_lm(folder, config)
        ids = check_lm(folder, target, own["tokenizer"], own["draft_ids"])
        size = target.vocab_size if ids is None else len(ids)
    if config.draft_vocab_size not in (None, size):
        raise UserError(
            f"drafter.draft_vocab_size {config.draft_vocab_size} is another than the {size} tokens "
            f"of drafter.start '{config.start}'; leave drafter.draft_vocab_size out"
        )
    return Start(folder, ids, size)


def started(config: Eagle3Config | CausalConfig, target: Target) -> Eagle3Drafter | CausalDrafter:
    """The drafter that `config.start` names, in float32, to be trained further for `target`.

    Raises `UserError` as `check_start`, and for weights that are incomplete or do not fit.
    """
    start = check_start(config, target)
    if isinstance(config, Eagle3Config):
        return _head(start.folder, target, config.taps).train()
    return _lm(start, target, config).train()


def _head(folder: Path, target: Target, unnamed: tuple[int, ...] | None) -> Eagle3Drafter:
    """A head with the target's own embedding, whatever precision the folder is in."""
    drafter = load_head(folder, target, unnamed)
    theirs = target.embedding[: drafter.config.vocab_size].detach().cpu().float()  # [V, h]
    given = drafter.embed_tokens.weight.float()
    scale = theirs.abs().max().item()
    if not torch.allclose(given, theirs, rtol=_ROUNDING, atol=_ROUNDING * scale):
        raise UserError(
            f"{folder}: tensor 'embed_tokens.weight' is another embedding than the target's, which "
            "a head shares here"
        )
    drafter.float()
    drafter.embed_tokens.weight.data.copy_(theirs)
    return drafter


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


def _lm(start: Start, target: Target, config: CausalConfig) -> CausalDrafter:
    drafter = load_lm(start.folder, start.draft_ids).float()
    check_drafts(drafter.model, target, config)
    if config.lora is not None:
        drafter.adapt(config.lora, config.start or "")
    return drafter


def check_drafts(model: PreTrainedModel, target: Target, config: CausalConfig) -> None:
    """Refuse a language model that cannot draft; one without weights is not run.

    Raises `UserError`.
    """
    try:
        # Decoding asks of a draft what it asks of a target.
        draft = Target(model, target.tokenizer, {"name": config.start}, (), target.vocab_size)
        if draft.device.type != "meta":
            check_family(draft)
    except UserError as error:
        raise UserError(f"drafter.start '{config.start}' cannot draft: {error}") from error


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


def _about(folder: Path) -> dict[str, Any]:
    """What `draftsmith.json` tells of the folder: tokenizer hash and draft ids, None if unknown."""
    _weights(folder)
    own = read_about(folder)
    if own is None:
        return {"tokenizer": None, "draft_ids": None}
    return {"tokenizer": own["target"]["tokenizer"], "draft_ids": own["draft_ids"]}


def _check_kind(folder: Path, family: str) -> None:
    """Raise `UserError` for a folder of another kind than the recipe's family."""
    raw, own = read_config(folder), read_about(folder)
    named = " ".join(raw.get("architectures") or ())
    head = "Eagle3" in named or "eagle_config" in raw or "draft_vocab_size" in raw
    found = own["family"] if own else "eagle3" if head else "causal"
    if found != family:
        raise UserError(
            f"{folder} is a drafter of family '{found}', and drafter.family is '{family}'"
        )
