"""What drafters that begin as parts of a target take over from it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..configs.errors import UserError
from ..data.dense import dense_weight, whole
from ..data.target import Target


def nothing_taken(target: Target) -> UserError:
    """Of a recipe that asks for the target's layers, where none fit."""
    return UserError(
        f"drafter.init 'target' takes over no layers of '{target.provenance['name']}' "
        f"({target.model.config.model_type}), which are not Llama's in names, shapes and norms; "
        "leave drafter.init out"
    )


def full_rope(source: Any) -> dict[str, Any] | None:
    """A target's RoPE, for heads rotated whole.

    Of several kinds that of full attention, or else the first.
    """
    rope = getattr(source, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)]
    rope = rope.get("full_attention", kinds[0] if kinds else rope)
    return {name: v for name, v in rope.items() if name != "partial_rotary_factor"} or None


def layer_weights(layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The layer's weights by name, of linear ones as they multiply."""
    found = {}
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            found[f"{name}.weight"] = dense_weight(module, dtype)
        elif isinstance(weight, Tensor):
            found[f"{name}.weight"] = whole(weight.detach())
    return found


@torch.no_grad()
def multiplies(norm: Any) -> bool:
    """Whether a norm scales by its weight as it stands; Gemma's scales by one more."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return False
    weight = whole(weight.detach())
    out = functional_call(norm, {"weight": weight}, (torch.ones_like(weight),))
    return torch.allclose(out.float(), weight.float(), rtol=0.02, atol=1e-3)


@torch.no_grad()
def fill_rows(mine: Tensor, theirs: Tensor) -> None:
    """Put rows `[V_t, h_t]` into `[V, h]`; columns and rows beyond theirs stay what they are.

    Where `mine` is narrower they are multiplied with the directions in which they differ most, so
    that no other rows of that width have products with each other that are nearer to theirs (Eckart
    and Young, 1936).
    """
    theirs = theirs.to(mine.device, torch.float32)
    if mine.shape[1] < theirs.shape[1]:
        products = (theirs.T @ theirs).double()  # [h_t, h_t]
        directions = torch.linalg.eigh(products).eigenvectors  # by ascending eigenvalue
        theirs = theirs @ directions[:, -mine.shape[1] :].float()  # [V_t, h]
    rows, width = min(len(mine), len(theirs)), theirs.shape[1]
    mine[:rows, :width] = theirs[:rows]
