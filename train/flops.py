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
    that predicts in one pass; sighted: for each pair of tokens that are read, where they see each
    other before anything is drafted; prompted: for each query of a prompt with one key, in layers
    whose outputs there others have keys of.
    """

    context: float
    drafted: float
    attended: float
    head: float
    target: float
    steps: int | None
    sighted: float = 0.0
    prompted: float = 0.0

    @classmethod
    def of(cls, drafter: Drafter, p: DraftVocabularyP, steps: int) -> "TrainingFlops":
        """Of a drafter that is trained on `p` with `steps` unrolled steps."""
        grown = _GROWN[drafter.family](drafter, steps)
        weights = {id(w): w for w in (drafter.head_rows(k)[0] for k in range(steps))}
        head = grown.scored + sum(map(_matrix, weights.values())) / len(weights)
        target = 2.0 * p.width * p.target.hidden_size  # forward alone
        return cls(
            *(grown.context, grown.drafted, grown.attended, head, target, grown.steps),
            *(grown.sighted, grown.prompted),
        )

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
        found += self.sighted * read * read + self.prompted * (read - reply) * read
        found += self.head * scored.sum(0)
        return found + self.target * scored[0] if states else found

    def batch(self, batch: TrainBatch) -> float:
        """FLOPs of one batch."""
        states = batch.hidden is not None
        return float(self.conversations(batch.lengths, batch.prompt_lens, states).sum())


class _Grown(NamedTuple):
    """The fields of `TrainingFlops` that are a family's own, and what adds to its `head`."""

    context: float
    drafted: float
    attended: float
    steps: int | None
    sighted: float = 0.0
    prompted: float = 0.0
    scored: float = 0.0


def _of_eagle3(drafter: Any, steps: int) -> _Grown:
    *earlier, last = drafter.layers
    known = _matrix(last.self_attn.k_proj.weight) + _matrix(last.self_attn.v_proj.weight)
    own = _matrices(last) - known
    before = sum(map(_matrices, earlier))  # of the true text, too: the last layer has keys of it
    down = 0.0 if drafter.head_down is None else _matrix(drafter.head_down.weight)
    pair = _pair(drafter.config)
    return _Grown(
        context=_matrix(drafter.fc.weight, inputs=False) + known + before,  # the taps are given
        drafted=steps * (own + down) + (steps - 1) * (known + before),
        attended=pair,
        steps=steps,
        prompted=pair * len(earlier) / len(drafter.layers),
    )


def _of_text(drafter: Any, steps: int) -> _Grown:
    text = drafter.body.config.get_text_config(decoder=True)
    read = _matrices(drafter.body, getattr(text, "num_experts_per_tok", None) or 1)
    return _Grown(read, 0.0, _pair(text), None)


def _of_medusa(drafter: Any, steps: int) -> _Grown:
    first, *later = drafter.blocks[0].layers
    # The target's state is given, and every head reads those alone that it is scored on.
    own = _matrix(first.weight, inputs=False) + sum(_matrix(layer.weight) for layer in later)
    return _Grown(context=0.0, drafted=0.0, attended=0.0, steps=steps, scored=own)


def _of_mlp(drafter: Any, steps: int) -> _Grown:
    last = len(drafter.proj) - 1
    own = sum(_matrix(drafter.proj[min(k, last)].weight, inputs=k > 0) for k in range(steps))
    return _Grown(context=0.0, drafted=own, attended=0.0, steps=steps)


def _of_jump(drafter: Any, steps: int) -> _Grown:
    body = drafter.span.body
    text = body.config.get_text_config(decoder=True)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    layers, predictor = _matrices(body, experts), _matrices(drafter.blocks)
    return _Grown(
        context=layers / 2,  # the true text needs no gradient
        drafted=steps * (layers + predictor + _matrix(drafter.fc.weight)),
        attended=_pair(text),
        steps=steps,
        sighted=_pair(text) / 3,
    )


def _of_block(drafter: Any, steps: int) -> _Grown:
    layers = drafter.layers
    known = sum(
        _matrix(a.k_proj.weight) + _matrix(a.v_proj.weight) for a in (x.self_attn for x in layers)
    )
    own = drafter.block_size * _matrices(layers)
    if drafter.correction is not None:
        own += steps * _matrices(drafter.correction)
    return _Grown(
        context=_matrix(drafter.fc.weight, inputs=False) + known,  # the taps are given
        drafted=own,
        attended=_pair(drafter.config) * drafter.block_size / steps,
        steps=steps,
    )


_GROWN: dict[str, Callable[[Any, int], _Grown]] = {
    "eagle3": _of_eagle3,
    "causal": _of_text,
    "dflash": _of_block,
    "jump": _of_jump,
    "medusa": _of_medusa,
    "mlp": _of_mlp,
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
