"""A drafter's decode-time protocol driven by hand, and what its target says without it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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


def drafted(drafter: Drafter) -> Tensor:
    """Draft logits of two draft steps on a fixed prompt, `[2, V_d]`."""
    assert isinstance(drafter, nn.Module)
    width = 32 * len(drafter.taps)
    ids = torch.tensor([[5, 80, 9, 260, 33]])
    taps = torch.linspace(-2, 2, 5 * width).sin().view(1, 5, width)
    logits: list[Tensor] = []

    def draw(step: Tensor, k: int) -> Tensor:
        logits.append(step[0].float())
        return torch.tensor([47])

    training = drafter.training
    drafter.eval()
    with torch.no_grad():
        state = drafter.start(1, 16)
        drafter.prefill(state, ids, [5], taps)
        drafter.commit(state, torch.tensor([[21]]), [1], taps[:, -1:])
        propose(drafter, state, 2, draw)
    drafter.train(training)
    return torch.stack(logits)


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
