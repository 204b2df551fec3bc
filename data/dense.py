"""Weights of layers as they multiply, however a quantised model stores them."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_CHUNK = 512  # columns of the identity fed at a time: a quantised head may be wide


@torch.no_grad()
def dense_weight(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weight `[out, in]` that a linear layer multiplies by, in floating point."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(weight, DTensor) or (type(weight) is nn.Parameter and weight.is_floating_point()):
        return whole(weight.detach())
    size, bias = int(getattr(layer, "in_features", weight.shape[-1])), getattr(layer, "bias", None)
    columns = []
    for part in torch.eye(size, dtype=dtype, device=weight.device).split(_CHUNK):
        out = layer(part)  # [n, out]
        columns.append((out if bias is None else out - bias).T)
    return torch.cat(columns, 1)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over processes, all of which ask for it at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
