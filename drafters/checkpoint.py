"""Save and load drafters. A saved drafter *is* its engine layout, plus one file of our own.

`draftsmith.json` names the family, the target it was trained for (tokenizer hash included) and, for
a standalone LM with a reduced vocabulary, its ids. Everything else is what engines read.

A family that has nothing to train keeps its options there, and nothing else: loading it makes it
anew from the target at hand.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import UserError, did_you_mean
from ..data.files import whole_folder
from ..data.target import Target
from ..data.vocabulary import same_tokens
from .base import Drafter
from .causal import CausalDrafter
from .eagle3 import Eagle3Drafter
from .formats import eagle3_flat, hf_causal
from .formats.config import read_config
from .formats.tensors import FILE
from .lookup import LookupDrafter
from .registry import FAMILIES, UntrainedConfig, family_config, untrained_drafter
from .skip import SkipDrafter

OWN = "draftsmith.json"
FORMAT = 1
LAYOUTS = {"eagle3": "eagle3", "causal": "transformers"}


def save_drafter(
    drafter: Drafter,
    folder: Path,
    target: Target,
    trained: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a drafter with its tokenizer into `folder`, whole or not at all."""
    with whole_folder(folder) as part:
        own = {
            "format": FORMAT,
            "family": drafter.family,
            "layout": LAYOUTS.get(drafter.family),
            "target": dict(target.provenance),
            "trained": dict(trained),
            "draft_ids": None,
        }
        if isinstance(drafter, LookupDrafter | SkipDrafter):
            own["options"] = asdict(drafter.config)
        elif isinstance(drafter, Eagle3Drafter):
            eagle3_flat.write(drafter, part, dtype)
            _save_tokenizer(target, part)
        else:
            assert isinstance(drafter, CausalDrafter)
            hf_causal.write(drafter, part, dtype)
            _save_tokenizer(target, part)
            if drafter.draft_ids is not None:
                own["draft_ids"] = drafter.draft_ids.tolist()
        (part / OWN).write_text(json.dumps(own, indent=1) + "\n", encoding="utf-8")
    return folder


def _save_tokenizer(target: Target, folder: Path) -> None:
    target.tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":  # unknown before transformers 5
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_own(folder: Path) -> dict[str, Any]:
    """The folder's `draftsmith.json`."""
    path = folder / OWN
    if not path.exists():
        raise UserError(f"{folder} is no drafter folder (no {OWN})")
    own = json.loads(path.read_text(encoding="utf-8"))
    if own.get("format") != FORMAT:
        raise UserError(f"{path} has format {own.get('format')}; this version reads {FORMAT}")
    if own["family"] not in FAMILIES:
        raise UserError(
            f"{path}: unknown family '{own['family']}'{did_you_mean(own['family'], FAMILIES)}"
        )
    return dict(own)


def load_drafter(folder: Path, target: Target) -> Drafter:
    """Load a drafter for `target`, on its device.

    Raises `UserError` if the folder is incomplete or does not fit: trained for another tokenizer,
    reading layers or widths that the target does not have, drafting tokens that it does not know.
    """
    own = read_own(folder)
    if "options" in own:
        return _from_options(folder, own, target)
    shared = _check_tokens(folder, own, target)
    if own["family"] == "eagle3":
        _check_states(folder, target)  # first: reading would blame the shape of some tensor
        drafter: Drafter = eagle3_flat.read(folder, target.embedding.cpu())
    else:
        ids = own["draft_ids"]
        if ids is None and shared < target.vocab_size:
            ids = list(range(shared))
        drafter = hf_causal.read(folder, None if ids is None else torch.tensor(ids))
    _check_ids(folder, drafter, target)
    assert isinstance(drafter, torch.nn.Module)
    return drafter.to(target.device).eval()


def _from_options(folder: Path, own: Mapping[str, Any], target: Target) -> Drafter:
    section = {"family": own["family"], **own["options"]}
    _, config = family_config(section, str(folder / OWN))
    assert isinstance(config, UntrainedConfig)
    return untrained_drafter(config, target)


def _check_tokens(folder: Path, own: Mapping[str, Any], target: Target) -> int:
    """Ids from 0 to this number mean the same to the drafter and to `target`."""
    if own["target"]["tokenizer"] == target.provenance["tokenizer"]:
        return target.vocab_size
    from transformers import AutoTokenizer

    try:
        found = same_tokens(target.tokenizer, AutoTokenizer.from_pretrained(folder))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    if found.note:
        warnings.warn(f"{folder}: {found.note}", stacklevel=3)
    return min(found.shared, target.vocab_size)


def _check_states(folder: Path, target: Target) -> None:
    """Refuse a head whose inputs the target cannot give."""
    raw, name = read_config(folder), target.provenance["name"]
    taps = eagle3_flat.read_taps(raw, folder / "config.json")
    if not all(0 <= tap < target.num_layers for tap in taps):
        raise UserError(
            f"{folder} reads the layers {list(taps)}, those of '{name}' are 0 to "
            f"{target.num_layers - 1}"
        )
    if raw.get("hidden_size") != target.hidden_size:
        raise UserError(
            f"{folder} reads states of width {raw.get('hidden_size')}, those of '{name}' have "
            f"{target.hidden_size}"
        )
    rows = target.embedding.shape[0]
    if raw.get("vocab_size", 0) > rows:
        raise UserError(
            f"{folder} reads embeddings of {raw['vocab_size']} tokens, '{name}' has those of {rows}"
        )


def _check_ids(folder: Path, drafter: Drafter, target: Target) -> None:
    """Refuse draft ids that the target cannot verify."""
    if drafter.draft_ids is None:
        return
    largest = int(drafter.draft_ids.max())
    if largest >= target.vocab_size:
        raise UserError(
            f"{folder} drafts tokens up to id {largest}, those of "
            f"'{target.provenance['name']}' end at {target.vocab_size - 1}"
        )


def weights_hash(folder: Path) -> str:
    """SHA-256 of the folder's weights; where it has none, of the options that stand for them."""
    own = read_own(folder)
    if "options" in own:
        said = {name: own[name] for name in ("family", "options")}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
