"""The serving law: logits -> the distribution that tokens are really drawn from.

One definition for collecting, training, estimating and decoding: the warpers are those of
`transformers.generate`, applied in its order (temperature, top-k, top-p, min-p, typical-p).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..configs.errors import UserError
from ..configs.recipe import LawSection


@dataclass(frozen=True)
class Law:
    """How the next token is drawn. Two laws are equal exactly if they draw alike.

    At temperature 0 truncation changes nothing, so it is dropped there.
    """

    temperature: float = 1.0
    """0 takes the most probable token; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep this many of the most probable tokens (more only if tied); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this mass; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most probable one's mass; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the most typical tokens (information nearest the entropy) of this mass; 1 keeps all."""

    def __post_init__(self) -> None:
        # Below that, logits divided by it would overflow.
        if self.temperature != 0 and not 1e-30 <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature}, but must be 0 (greedy) or at least 1e-30"
            )
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise UserError(f"top_k is {self.top_k}, but must be a whole number from 0 (off) up")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (off)")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p is {self.min_p}, but must be between 0 (off) and 1")
        if not 0.0 < self.typical_p <= 1.0:
            raise UserError(f"typical_p is {self.typical_p}, but must be above 0, at most 1 (off)")
        if self.temperature == 0:
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("typical_p", 1.0)):
                object.__setattr__(self, name, off)

    @property
    def truncates(self) -> bool:
        """Whether tokens are excluded, the greedy law's argmax aside."""
        return bool(self.top_k or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1)

    @property
    def label(self) -> str:
        """Short name for tables: "T=0", "T=0.7 top_k=50"."""
        parts = [f"T={_exact(self.temperature)}"]
        if self.top_k:
            parts.append(f"top_k={self.top_k}")
        if self.top_p < 1.0:
            parts.append(f"top_p={_exact(self.top_p)}")
        if self.min_p > 0:
            parts.append(f"min_p={_exact(self.min_p)}")
        if self.typical_p < 1.0:
            parts.append(f"typical_p={_exact(self.typical_p)}")
        return " ".join(parts)


def law_of(section: LawSection) -> Law:
    """The law that a recipe's section describes."""
    return Law(**asdict(section))


def _exact(number: float) -> str:
    """A number in so many digits that no other has them: labels are parts of keys."""
    return repr(float(number)).removesuffix(".0")


def float32_or_better(values: Tensor) -> Tensor:
    """float64 as it is, anything else in float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_probs(logits: Tensor, law: Law) -> Tensor:
    """Log-probabilities of the law, `[..., V] -> [..., V]`, excluded tokens at -inf.

    float32 whatever the model's dtype (float64 stays float64). At T = 0 the result is one-hot
    at the argmax; among equals the lowest id wins.
    """
    logits = float32_or_better(logits)  # [..., V]
    if law.temperature == 0:
        best = logits.argmax(-1, keepdim=True)  # [..., 1]
        return torch.full_like(logits, -math.inf).scatter(-1, best, 0.0)
    rows = logits.reshape(-1, logits.shape[-1])  # [N, V], the only shape that top-p takes
    no_ids: Any = rows.new_empty((rows.shape[0], 0), dtype=torch.long)
    if law.temperature != 1.0:
        rows = TemperatureLogitsWarper(float(law.temperature))(no_ids, rows)
    if law.top_k:
        rows = TopKLogitsWarper(int(law.top_k))(no_ids, rows)
    if law.top_p < 1.0:
        rows = TopPLogitsWarper(float(law.top_p))(no_ids, rows)
    if law.min_p > 0:
        rows = MinPLogitsWarper(float(law.min_p))(no_ids, rows)
    if law.typical_p < 1.0:
        rows = TypicalLogitsWarper(float(law.typical_p))(no_ids, rows)
    return rows.log_softmax(-1).view(logits.shape)  # [..., V]


def row_log_probs(logits: Tensor, laws: Sequence[Law]) -> Tensor:
    """`log_probs` with a law for each row, `[B, ..., V] -> [B, ..., V]`."""
    kinds = dict.fromkeys(laws)
    if len(kinds) == 1:
        return log_probs(logits, laws[0])
    parts = float32_or_better(logits).clone()
    for law in kinds:
        index = torch.tensor([b for b, other in enumerate(laws) if other == law])
        parts[index] = log_probs(logits[index], law)
    return parts


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw from unnormalised weights, `[B, V], [B] -> [B]` ids.

    Each row of `weights` (>= 0) must have positive mass; `u` is uniform in [0, 1), best in
    float64: float32 uniforms know only 2^24 values. A token of weight 0 is never returned, nor
    is the id a function of other rows.
    """
    cumulative = weights.double().cumsum(-1)  # [B, V]
    total = cumulative[:, -1:].contiguous()  # [B, 1]
    point = u.double()[:, None] * total
    index = torch.searchsorted(cumulative, point, right=True)  # first with cumulative > point
    # Rounding may lift `point` to the total: the last token of positive weight is meant.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(index, last).squeeze(-1)


def sample(log_p: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sample of each row, `[B, V], [B] -> [B]`; see `pick` for `u`."""
    return pick(log_p.double().exp(), u)
