"""α on held-out records while training, per domain and per unrolled step."""

from collections.abc import Sequence

import torch

from ..data.records import Record
from ..drafters.batch import collate
from .step import Scorer

_ROWS = 8


@torch.no_grad()
def held_out_overlap(
    scorer: Scorer,
    records: Sequence[Record],
    domains: Sequence[str],
    steps: int,
    device: torch.device,
) -> dict[str, float]:
    """Pooled overlap of the first step per domain, of every step over all, and captured mass."""
    scorer.eval()
    shared = torch.zeros(steps, len(domains), dtype=torch.float64)
    count = torch.zeros(steps, len(domains), dtype=torch.float64)
    mass = torch.zeros(len(domains), dtype=torch.float64)
    ordered = sorted(records, key=lambda r: len(r.ids))
    for start in range(0, len(ordered), _ROWS):
        batch = collate(ordered[start : start + _ROWS], domains)
        for k, sums in enumerate(scorer(batch.to(device), steps)):
            domain = batch.domain[sums.token.cpu()]
            shared[k].index_add_(0, domain, sums.overlap.double().cpu())
            count[k].index_add_(0, domain, torch.ones(len(domain), dtype=torch.float64))
            if k == 0:
                mass.index_add_(0, domain, sums.mass.double().cpu())
    scorer.train()
    values = {"captured_mass": float(mass.sum() / count[0].sum())}
    for k in range(steps):
        if count[k].sum() > 0:
            values[f"overlap_step_{k + 1}"] = float(shared[k].sum() / count[k].sum())
    for i, name in enumerate(domains):
        if count[0, i] > 0:
            values[f"overlap/{name}"] = float(shared[0, i] / count[0, i])
    return values
