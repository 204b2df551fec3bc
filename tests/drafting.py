"""A drafter's decode-time protocol driven by hand, and what its target says without it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.drafters.base import Drafter


def propose(
    drafter: Drafter, state: Any, count: int, draw: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Draft a chain of `count` tokens `[B, count]`, each chosen by `draw(logits [B, V_d], k)`."""
    words = [draw(drafter.first(state), 0)]
    for k in range(1, count):
        words.append(draw(drafter.extend(state, words[-1][:, None])[:, 0], k))
    return torch.stack(words, 1)


def greedy_reference(target: Target, request: Request, limit: int, eos: list[int]) -> list[int]:
    """What transformers' generate answers."""
    ids = torch.tensor([request.ids])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=eos or [10_000],
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :].tolist()
