"""The two sides of train-serve parity, and how a comparison of them is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..configs.recipe import ServingSection
from ..data.gather import recompute_states, request_of
from ..data.records import Record
from ..data.target import Target
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .rows import Output

Verdict = Literal["equal", "different", "not checked"]

TOGETHER = 16
"""Rows that are decoded, or run through the target, at a time."""
_FAULTS = 3  # of a kind that are told


@dataclass(frozen=True)
class Part:
    """One comparison: what was found, and where the two sides first part."""

    name: str
    verdict: Verdict
    lines: tuple[str, ...]


def part_of(
    name: str, faults: Sequence[str], found: str, ties: Sequence[str] = (), checked: bool = True
) -> Part:
    """What a comparison found, after its faults and near-ties; `checked`: of anything at all."""
    more = [f"and {len(faults) - _FAULTS} more"] if len(faults) > _FAULTS else []
    verdict: Verdict = "different" if faults else "equal" if checked else "not checked"
    return Part(name, verdict, (*faults[:_FAULTS], *more, *ties, found))


def gap(one: Tensor, two: Tensor) -> float:
    """Largest difference in units of the largest value; infinite for tensors of other shapes.

    Equal infinities do not differ.
    """
    if one.shape != two.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    one, two = one.double(), two.double()
    apart = (one - two).abs().masked_fill(one == two, 0.0).nan_to_num(float("inf"))
    scale = two.abs().masked_fill(two.isinf(), 0.0).amax().clamp_min(1e-12)
    return float(apart.amax() / scale)


@dataclass(frozen=True)
class Sides:
    """What is compared: the drafter as training has it, and as it is served."""

    target: Target
    trained: Drafter
    served: Drafter
    serving: ServingSection
    limit: int

    @property
    def gamma(self) -> int:
        return self.serving.num_draft_tokens

    @property
    def tolerance(self) -> float:
        """Of logits and states, relative to the largest: passes of other widths round apart."""
        single = self.target.dtype in (torch.float32, torch.float64)
        return 1e-4 if single else 16 * torch.finfo(self.target.dtype).eps

    def decode(self, records: Sequence[Record]) -> list[Output]:
        """The prompts of `records`, answered anew with chains as they are served."""
        served = self.serving
        how = DecodeSettings(self.limit, self.gamma, served.verifier, served.drafting)
        outputs = []
        for i in range(0, len(records), TOGETHER):
            requests = [request_of(r) for r in records[i : i + TOGETHER]]
            outputs += decode(self.target, requests, how, self.served)
        return outputs

    def recomputed(self, records: Sequence[Record]) -> list[Record]:
        """The same records with the states that the target computes now."""
        parts = [records[i : i + TOGETHER] for i in range(0, len(records), TOGETHER)]
        return [r for p in parts for r in recompute_states(self.target, p, self.trained.taps)]
