"""Folders of every layout, written for the tiny target."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from dflash_folders import H, flat, speculators
from dflash_folders import weights as dflash_weights
from eagle_heads import Published, PublishedEagle
from published import medusa_for_vllm, medusa_native, mlp_speculator

from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import OWN, load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter

SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])


def _eagle3(folder: Path, target: Target) -> None:
    config = Eagle3Config(taps=(0, 1, 2), draft_vocab_size=len(SOME))
    save_drafter(Eagle3Drafter.from_target(target, config, SOME), folder, target, {})
    (folder / OWN).unlink()


def _own_embedding(folder: Path, target: Target) -> None:
    """Only our own file tells that the embedding is not the target's."""
    place = Published(embedding=True, ids=SOME.tolist()).flat(folder.parent / "theirs")
    save_drafter(load_drafter(place, target), folder, target, {})


def _eagle(folder: Path, pickled: bool) -> None:
    told = {"bias": True, "architectures": ["LlamaForCausalLMEagle"]}
    PublishedEagle(fused_bias=True).write(folder, pickled, **told)


def _causal(folder: Path, target: Target) -> None:
    drafter = CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    save_drafter(drafter, folder, target, {})
    (folder / OWN).unlink()


def _own(folder: Path, target: Target) -> None:
    save_drafter(MLPDrafter.from_target(target, MLPConfig(), SOME), folder, target, {})


def _reduced_dflash(folder: Path, target: Target) -> None:
    own = {"lm_head.weight": torch.ones(len(SOME), H), "d2t": SOME - torch.arange(len(SOME))}
    speculators(folder, {**dflash_weights(), **own}, draft_vocab_size=len(SOME))


LAYOUTS: Mapping[str, Callable[[Path, Target], Any]] = {
    "eagle3": _eagle3,
    "eagle3, several layers": lambda folder, _: Published(layers=2, ids=SOME.tolist()).flat(folder),
    "eagle3 speculators": lambda folder, _: Published(
        h=16, embedding=True, norms=("fc_norm",), ids=SOME.tolist()
    ).speculators(folder),
    "eagle3, its own embedding": _own_embedding,
    "eagle": lambda folder, _: _eagle(folder, False),
    "eagle, pickled": lambda folder, _: _eagle(folder, True),
    "transformers": _causal,
    "draftsmith": _own,
    "medusa": lambda folder, _: medusa_for_vllm(folder, bias=True, layers=2),
    "medusa, truncated": lambda folder, _: medusa_for_vllm(folder, map=SOME),
    "medusa, one head's rows": lambda folder, _: medusa_for_vllm(folder, original=True),
    "medusa native": lambda folder, _: medusa_native(folder, layers=2),
    "medusa native, safetensors": lambda folder, _: medusa_native(folder, pickled=False),
    "dflash": lambda folder, _: flat(folder, dflash_weights()),
    "dflash speculators, reduced": _reduced_dflash,
    "mlp speculator": lambda folder, _: mlp_speculator(folder),
    "mlp speculator, tied": lambda folder, _: mlp_speculator(folder, tied=True),
}
"""What writes a folder for a target, without our own file where the layout does not need it."""
