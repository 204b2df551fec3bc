"""Save and load drafters. A saved drafter *is* its engine layout, plus one file of our own.

`draftsmith.json` names the family, the target it was trained for (tokenizer hash included) and, for
a standalone LM with a reduced vocabulary, its ids. Everything else is what engines read.

A family that has nothing to train keeps its options there, and nothing else: loading it makes it
anew from the target at hand.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import UserError, did_you_mean
from ..data.files import whole_folder
from ..data.target import Target
from .base import Drafter
from .causal import CausalDrafter
from .eagle3 import Eagle3Drafter
from .formats import eagle3_flat, hf_causal
from .formats.tensors import FILE
from .lookup import LookupDrafter
from .reading import FORMAT, OWN, read_about, read_head, read_lm
from .registry import FAMILIES, UntrainedConfig, family_config, untrained_drafter
from .skip import SkipDrafter

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
    own = read_about(folder)
    if own is None:
        raise UserError(f"{folder} is no drafter folder (no {OWN})")
    if own["family"] not in FAMILIES:
        raise UserError(
            f"{folder / OWN}: unknown family '{own['family']}'"
            f"{did_you_mean(own['family'], FAMILIES)}"
        )
    return own


def load_drafter(folder: Path, target: Target) -> Drafter:
    """Load a drafter for `target`, on its device. Raises `UserError` as `reading.read_head`."""
    own = read_own(folder)
    if "options" in own:
        return _from_options(folder, own, target)
    tokenizer = own["target"]["tokenizer"]
    if own["family"] == "eagle3":
        drafter: Eagle3Drafter | CausalDrafter = read_head(folder, target, tokenizer)
    else:
        drafter = read_lm(folder, target, tokenizer, own["draft_ids"])
    return drafter.to(target.device).eval()


def _from_options(folder: Path, own: Mapping[str, Any], target: Target) -> Drafter:
    section = {"family": own["family"], **own["options"]}
    _, config = family_config(section, str(folder / OWN))
    assert isinstance(config, UntrainedConfig)
    return untrained_drafter(config, target)


def weights_hash(folder: Path) -> str:
    """SHA-256 of the folder's weights; where it has none, of the options that stand for them."""
    own = read_own(folder)
    if "options" in own:
        said = {name: own[name] for name in ("family", "options")}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
