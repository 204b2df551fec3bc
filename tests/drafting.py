"""A drafter's decode-time protocol driven by hand, for tests of drafters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter


def propose(
    drafter: Drafter, state: Any, count: int, draw: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Draft a chain of `count` tokens `[B, count]`, each chosen by `draw(logits [B, V_d], k)`."""
    words = [draw(drafter.first(state), 0)]
    for k in range(1, count):
        words.append(draw(drafter.extend(state, words[-1][:, None])[:, 0], k))
    return torch.stack(words, 1)
