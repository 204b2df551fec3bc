"""Where a target is put and in which precision, as a recipe names them."""

from typing import Any

import torch

from ..configs.errors import UserError


def pick_device(name: str) -> torch.device:
    """'auto' → CUDA where there is one, else CPU. Raises `UserError` for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"target.device '{name}' cannot be used ({reason}); auto takes what is there"
        ) from error


def pick_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """'auto' → the checkpoint's own dtype on an accelerator, float32 on a CPU."""
    if name != "auto":
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"unknown dtype '{name}' (known: auto, float32, bfloat16, float16)")
        return dtype
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16
