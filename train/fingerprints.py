"""What training may and must change: hashes of a drafter's weights, tensor by tensor."""

import hashlib
from collections.abc import Mapping

from torch import nn

from ..configs.errors import UserError


def fingerprints(module: nn.Module, trained: bool) -> dict[str, str]:
    """SHA-256 of each parameter by name: of those that training changes, or of the frozen ones."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == trained:
            whole = parameter.detach().cpu().float().contiguous()
            found[name] = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    return found


def together(prints: Mapping[str, str]) -> str:
    """One short hash of all."""
    said = "".join(f"{name}{found}" for name, found in sorted(prints.items()))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def check_trained(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Refuse a drafter with a tensor that training never touched, naming it."""
    idle = [name for name, found in after.items() if before[name] == found]
    if idle:
        raise UserError(
            f"training left {len(idle)} of {len(after)} tensors as they were ({_some(idle)}): no "
            "loss reaches them, and what is saved would be partly untrained"
        )


def check_frozen(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Refuse a drafter whose frozen tensors have changed, naming them."""
    changed = [name for name, found in after.items() if before[name] != found]
    if changed:
        raise UserError(f"training changed frozen tensors: {_some(changed)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
