"""Folders of every layout that engines read, and what preflight says of them."""

from pathlib import Path
from typing import Any

import torch
from starting import build
from torch import Tensor

from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.formats import eagle3_speculators
from draftsmith.eval.preflight.preflight import Preflight, files_of, preflight

GOOD = {
    "eagle3": "eagle3",
    "eagle3 speculators": "eagle3",
    "dflash": "dflash",
    "medusa": "medusa",
    "transformers": "causal",
}
"""By layout: the kind of drafter, as `starting.build` has them."""


def written(
    layout: str, target: Target, folder: Path, dtype: torch.dtype = torch.float32, kind: str = ""
) -> tuple[Any, Path]:
    """(drafter, its folder in that layout), without checksums."""
    drafter = build(target, kind or GOOD[layout])
    return drafter, laid_out(drafter, layout, target, folder, dtype)


def laid_out(
    drafter: Any, layout: str, target: Target, folder: Path, dtype: torch.dtype = torch.float32
) -> Path:
    if layout != "eagle3 speculators":
        return save_drafter(drafter, folder, target, {}, dtype)
    folder.mkdir()
    eagle3_speculators.write(drafter, folder, dtype, "owner/target", "LlamaForCausalLM", 3)
    return folder


def seen(folder: Path, engine: str, target: Target, trained: Any = None) -> Preflight:
    return preflight(files_of(folder), engine, target, trained)


def only_fault(found: Preflight, *words: str) -> str:
    """The one fault that has all these words; there is one."""
    told = [fault for fault in found.faults if all(word in fault for word in words)]
    assert len(told) == 1, (words, found.faults)
    return told[0]


def absolute(tensors: dict[str, Tensor]) -> None:
    """`d2t` as others mean it: the target's ids themselves."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def without(name: str) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def names(found: Preflight, *becomes: str) -> set[str]:
    """Tensors of a report that become one of these."""
    return {t.name for t in found.tensors if t.becomes in becomes}
