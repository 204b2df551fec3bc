"""Bytes that serving holds: weights once, keys and values for every token of every conversation."""

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..data.target import Target
from ..drafters.base import Drafter
from .candidates import weights
from .machine import Memory

_PROMPT = 3
_MORE = 64  # tokens of room, by which what is held for each token is told from the rest


@torch.inference_mode()
def footprint(target: Target, drafter: Drafter) -> Memory:
    """What target and drafter hold as they run; that for each token is seen from their caches."""
    every = {id(p): p.numel() * p.element_size() for p in target.model.parameters()}
    small, large = (_held(target, drafter, _PROMPT + 2 + more) for more in (0, _MORE))
    target_kv, drafter_kv = ((b - a) / _MORE for a, b in zip(small, large, strict=True))
    return Memory(float(sum(every.values())), float(weights(drafter).bytes), target_kv, drafter_kv)


def _held(target: Target, drafter: Drafter, capacity: int) -> tuple[int, int]:
    """Bytes of both caches of one conversation with room for `capacity` tokens."""
    cache = target.new_cache(1, capacity)
    ids = torch.zeros(1, _PROMPT, dtype=torch.long, device=target.device)
    taps = target.forward(ids, cache, drafter.taps).taps  # [1, n, L*h]
    cache.advance([_PROMPT])
    state = drafter.start(1, capacity)
    drafter.prefill(state, ids, [_PROMPT], taps)
    drafter.commit(state, ids[:, :1], [1], taps[:, -1:])
    drafter.first(state)
    return _bytes(cache), _bytes(state)


def _bytes(holder: object) -> int:
    """Of all tensors that an object holds, those of models apart."""
    return sum({id(t): t.numel() * t.element_size() for t in _tensors(holder, set())}.values())


def _tensors(holder: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(holder) in seen or isinstance(
        holder, nn.Module | FunctionType | MethodType | BuiltinFunctionType | type | str
    ):
        return
    seen.add(id(holder))
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, Mapping):
        for item in holder.values():
            yield from _tensors(item, seen)
    elif isinstance(holder, list | tuple):
        for item in holder:
            yield from _tensors(item, seen)
    elif hasattr(holder, "__dict__"):
        yield from _tensors(vars(holder), seen)
