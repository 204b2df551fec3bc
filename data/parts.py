"""Copies of models: with one of their modules exchanged and all others shared, or on the CPU."""

import copy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def cpu_copy(module: Model) -> Model:
    """A copy on the CPU. Of no weight is there a second one where `module` lies."""
    known: dict[int, Tensor] = {id(b): b.detach().to("cpu", copy=True) for b in module.buffers()}
    for p in module.parameters():
        known[id(p)] = nn.Parameter(p.detach().to("cpu", copy=True), p.requires_grad)
    return copy.deepcopy(module, known).cpu()


def with_replaced(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """`module` with `new` in place of `old`: what holds it is copied, shallowly, nothing else."""
    if module is old:
        return new
    children = {
        name: child if child is None else with_replaced(child, old, new)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    twin = copy.copy(module)
    twin._modules = children
    return twin
