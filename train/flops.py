"""Floating-point operations of training by formula, and how fast this machine multiplies.

Model FLOPs: what forward and backward pass need, two for each multiplication with its addition.
Padding, layers computed again for the gradient and keys that a kernel multiplies in vain do not
count; norms, activations and the optimiser are left out, as is usual. Attention counts as if every
token saw its whole conversation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ..drafters.base import Drafter, TrainBatch
from ..drafters.distribution import DraftVocabularyP

_MEASURED = 0.1  # seconds
_LARGEST = 8192


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of training one drafter, by what they grow with; to be made before it is sharded.

    context: for each token that is read; drafted: for each reply token, over all unrolled steps;
    attended: for each query with one key; head: for each token that a step scores; target: for each
    token that the first step scores, of the target's head; steps: unrolled ones, None for a family
    that predicts in one pass.
    """

    context: float
    drafted: float
    attended: float
    head: float
    target: float
    steps: int | None

    @classmethod
    def of(cls, drafter: Drafter, p: DraftVocabularyP, steps: int) -> "TrainingFlops":
        """Of a drafter that is trained on `p` with `steps` unrolled steps."""
        grown = _GROWN[drafter.family](drafter, steps)
        weights = {id(w): w for w in (drafter.head_rows(k)[0] for k in range(steps))}
        head = sum(map(_matrix, weights.values())) / len(weights)
        target = 2.0 * p.width * p.target.hidden_size  # forward alone
        return cls(grown.context, grown.drafted, grown.attended, head, target, grown.steps)

    def conversations(self, lengths: Tensor, prompt_lens: Tensor, states: bool) -> Tensor:
        """FLOPs of conversations of `lengths` tokens with prompts of `prompt_lens`: `[C]` float64.

        states: whether p is rebuilt from the target's states, by its head.
        """
        read = (lengths - 1).double()  # the last token predicts nothing
        reply = (lengths - prompt_lens).double()
        k = torch.arange(self.steps or 1, device=lengths.device)[:, None]  # [K, 1]
        scored = (reply - 1 - k).clamp_min(0)  # [K, C]
        pairs = read * read if self.steps is None else (reply * (read + k)).sum(0)
        found = self.context * read + self.drafted * reply + self.attended * pairs
        found += self.head * scored.sum(0)
        return found + self.target * scored[0] if states else found

    def batch(self, batch: TrainBatch) -> float:
        """FLOPs of one batch."""
        states = batch.hidden is not None
        return float(self.conversations(batch.lengths, batch.prompt_lens, states).sum())


class _Grown(NamedTuple):
    """The fields of `TrainingFlops` that are a family's own."""

    context: float
    drafted: float
    attended: float
    steps: int | None


def _of_eagle3(drafter: Any, steps: int) -> _Grown:
    layer = drafter.midlayer
    known = _matrix(layer.self_attn.k_proj.weight) + _matrix(layer.self_attn.v_proj.weight)
    own = _matrices(layer) - known
    return _Grown(
        context=_matrix(drafter.fc.weight, inputs=False) + known,  # the taps are given
        drafted=steps * own + (steps - 1) * known,
        attended=_pair(drafter.config),
        steps=steps,
    )


def _of_text(drafter: Any, steps: int) -> _Grown:
    text = drafter.body.config.get_text_config(decoder=True)
    read = _matrices(drafter.body, getattr(text, "num_experts_per_tok", None) or 1)
    return _Grown(read, 0.0, _pair(text), None)


_GROWN: dict[str, Callable[[Any, int], _Grown]] = {
    "eagle3": _of_eagle3,
    "causal": _of_text,
}
"""By family, of a drafter that is trained with so many unrolled steps."""


def _matrix(weight: Tensor, inputs: bool = True) -> float:
    """FLOPs for each token of a product with `weight`, with what its gradients need.

    inputs: whether what is multiplied needs a gradient, too.
    """
    return 2.0 * weight.numel() * (1 + inputs + weight.requires_grad)


def _matrices(module: nn.Module, experts: int = 1) -> float:
    """FLOPs for each token of all products within a module; it goes to so many experts."""
    total = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for weight in part.parameters(recurse=False):
            if weight.dim() == 2:
                total += _matrix(weight)
            elif weight.dim() == 3:  # of all experts
                total += _matrix(weight) * experts / weight.shape[0]
    return total


def _pair(config: Any) -> float:
    """FLOPs of one query with one key, in all layers and heads: two products, three times."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 12.0 * config.num_hidden_layers * heads * width


@cache
def device_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of large matrix products in `dtype`, measured once within about 0.3 s.

    What a run is compared with, rather than with what a data sheet says.
    """
    size = 512
    while True:
        a = torch.randn(size, size, device=device).to(dtype)
        # Waits for an accelerator to finish, and warms up.
        timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
        once = timer.timeit(1).median
        if once > _MEASURED / 8 or size == _LARGEST:
            return 2.0 * size**3 / timer.timeit(max(1, round(_MEASURED / once))).median
        size *= 2
