"""The K most probable tokens of each distribution: what servers tell, or what little space holds.

Their probabilities remain those of the whole vocabulary. Of the rest only the mass is known, one
less `captured_mass`: a tail that counts as lost, like the tokens outside of a reduced draft
vocabulary. So the overlap with a draft is a lower bound and total variation an upper one, each off
by no more than the tail; the divergences draw a draft's mass out of the tail; only `ce`, which
needs no p, learns what is said there. A softmax over the K instead would not see how much mass a
draft puts elsewhere. Where a reply goes on with a token of the tail, p of it is taken as 1, its
upper bound: expected acceptance is then rather too low.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..configs.errors import UserError
from .records import Top
from .warp import Law, log_probs


def top_of(logits: Tensor, k: int) -> Top:
    """The `k` most probable tokens (all, if there are fewer) of logits `[R, V]` at temperature 1.

    The first is the one that the greedy law takes, among equals too.
    """
    logits = logits.float()
    best = logits.topk(min(k, logits.shape[-1]))  # [R, K], equals in any order
    first = logits.argmax(-1, keepdim=True)  # [R, 1], the lowest of equals
    ids = torch.where(best.indices == first, best.indices[:, :1], best.indices)
    ids[:, :1] = first
    told = best.values - logits.logsumexp(-1, keepdim=True)
    return Top(ids.masked_fill(told == -torch.inf, -1).int(), told)


def captured_mass(top: Top) -> Tensor:
    """Probability of the told tokens together, `[R]`."""
    return top.log_probs.exp().sum(-1)


def rows_of(top: Top, at: Tensor) -> Top:
    """The rows at indices `[n]`."""
    return replace(top, ids=top.ids[at], log_probs=top.log_probs[at])


def joined(parts: Sequence[Top]) -> Top:
    """All rows as one, as wide as the widest.

    Raises `UserError` if they are of several temperatures.
    """
    found = sorted({part.temperature for part in parts})
    if len(found) > 1:
        raise UserError(
            "the records hold log-probabilities at temperatures "
            f"{', '.join(f'{t:g}' for t in found)}, and one batch can be of one alone; collect "
            "again with a single one in collect.temperatures"
        )
    width = max(part.ids.shape[1] for part in parts)

    def together(rows: list[Tensor], fill: float) -> Tensor:
        missing = [r.new_full((len(r), width - r.shape[1]), fill) for r in rows]
        return torch.cat([torch.cat(pair, 1) for pair in zip(rows, missing, strict=True)])

    ids = together([part.ids for part in parts], -1)
    return Top(ids, together([part.log_probs for part in parts], -torch.inf), found[0])


def check_law(law: Law, kept: int, stored: float) -> None:
    """Raises `UserError` for a law not known from `kept` tokens at the temperature `stored`.

    Three kinds are: the stored temperature without truncation, but for the tail; the greedy law;
    and laws that keep the `top_k` most probable tokens to begin with, if no more than were told,
    for what is left is normalised anew, whatever the tail (but for equals of the last one told).
    """
    cut = 0 < law.top_k <= kept and stored > 0
    if not (cut or law.temperature == 0 or law == Law(stored)):
        raise UserError(
            f"the {kept} most probable tokens at T={stored:g}, which collect.distributions top "
            f"holds, do not tell {law.label}, the first of serving.laws that samples; put "
            f"{Law(stored).label} or a law with top_k of at most {kept} there, or collect with "
            "distributions hidden or none"
        )


def warped(top: Top, law: Law) -> Tensor:
    """log p of the told tokens under a law, `[R, K]`, -inf where it excludes them or none is told.

    Raises `UserError` as `check_law` does. A row of fewer than `top_k` told tokens is -inf all
    over.
    """
    check_law(law, top.ids.shape[1], top.temperature)
    told = top.ids >= 0  # [R, K]
    if law.temperature == 0:
        best = torch.full_like(top.log_probs, -torch.inf)
        best[:, 0] = 0.0
        return best.masked_fill(~told, -torch.inf)
    if law == Law(top.temperature):
        return top.log_probs
    enough = told.sum(-1, keepdim=True) >= law.top_k  # [R, 1]
    logits = torch.where(enough, top.log_probs * top.temperature, 0.0)
    return log_probs(logits, law).masked_fill(~enough, -torch.inf)
