"""Costs and measured speed of several conversations decoded together.

Chains of a fixed length alone: trees and policies are measured one conversation at a time. Every
round that counts is of the whole batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from statistics import median
from typing import Any

from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from .decode import DecodeSettings
from .machine import Steps
from .speed import Calibration, Cost, long_enough, measure_rows
from .timing import Timing, time_groups


@dataclass(frozen=True)
class AtBatch:
    """What was found at one batch size, under one law.

    cost: in plain passes of the whole batch; timings: by domain, a lap of every group of so many
    conversations; a domain with fewer held-out conversations has none.
    """

    batch: int
    cost: Cost
    timings: Mapping[str, Timing]


def grouped(requests: Sequence[Request], batch: int, most: int) -> list[list[Request]]:
    """Up to `most` groups of `batch` requests, no request twice."""
    count = min(most, len(requests) // batch)
    return [list(requests[i * batch : (i + 1) * batch]) for i in range(count)]


def measure_batch(
    target: Target,
    drafter: Drafter,
    law: Law,
    groups: Mapping[str, Sequence[Sequence[Request]]],
    calibration: Sequence[Request],
    rows: Sequence[int],
    context: int,
    settings: DecodeSettings,
    batch: int,
) -> AtBatch:
    """Time `groups` of `batch` requests by domain, and in turns with them what rounds cost.

    Args:
        calibration: requests of other prompts, gone round to fill batches. Their replies go on
            behind an end token: costs do not depend on what is said.
        rows: target passes whose cost is wanted, 1 among them.
        context: tokens before those passes.
        settings: how the groups are decoded; half of the tokens, and two drafted tokens at least
            if the drafter makes them, calibrate.
    """
    half = long_enough(replace(settings, max_new_tokens=settings.max_new_tokens // 2), drafter)
    turns = Calibration(replace(target, eos_ids=()), drafter, law, half)
    batches = _batches(calibration, batch)
    turns.run(*next(batches), counted=False)
    passes, timings = [], {}
    for domain, own in groups.items():
        passes.append(measure_rows(target, context, rows, batch))
        if own:
            timings[domain] = time_groups(
                target, drafter, own, settings, between=lambda: turns.run(*next(batches))
            )
        else:
            turns.run(*next(batches))
    medians = {n: median(found[n] for found in passes) for n in passes[0]}
    return AtBatch(batch, turns.cost(medians), timings)


def _batches(requests: Sequence[Request], batch: int) -> Iterator[list[Request]]:
    """Batches without end; where requests come again, chance does not."""
    endless = (
        replace(request, seed=request.seed + turn) for turn in count() for request in requests
    )
    while True:
        yield list(islice(endless, batch))


def batch_rows(
    found: Sequence[AtBatch],
    law: str,
    survival: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    """The report's `batches` under one law, one entry a batch size.

    `found` holds batch size 1, whose plain pass is the unit of all costs; `survival` is S_k at the
    served draft length, by domain.
    """
    (unit,) = (one.cost.seconds for one in found if one.batch == 1)
    return [
        {
            "batch": one.batch,
            "law": law,
            "seconds": unit,
            "cost": asdict(Steps.of(one.cost, unit)),
            "domains": [
                _domain_row(domain, s, one.cost, one.timings.get(domain))
                for domain, s in survival.items()
            ],
        }
        for one in sorted(found, key=lambda one: one.batch)
    ]


def _domain_row(
    domain: str, survival: Sequence[float], cost: Cost, timing: Timing | None
) -> dict[str, Any]:
    gamma = len(survival)
    row = {"domain": domain, "num_draft_tokens": gamma, "predicted": cost.speedup(survival)}
    if timing is None:
        return {**row, "groups": 0, "measured": None}
    return {
        **row,
        "groups": timing.prompts,
        "plain_tokens_per_s": timing.tokens_per_s(0),
        "speculative_tokens_per_s": timing.tokens_per_s(gamma),
        "measured": timing.speedup(gamma).to_dict(),
    }
