"""Heads over all tokens by two factors: W ≈ U D, with U `[V, r]` and D `[r, h]`.

They keep the support that a reduced vocabulary gives up, at about the price of r / h of its rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.records import Record
from .batch import StateReader

_POSITIONS = 8192  # enough to tell directions apart; beyond it only the time grows


@torch.no_grad()
def factors(rows: Tensor, rank: int, moment: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """U `[V, r]` and D `[r, h]` whose product is nearest to the head's `rows [V, h]`.

    With the second moment E[x xᵀ] `[h, h]` of what the head reads it is the logits that are
    nearest, in the mean square over such x; without, the rows themselves (Eckart and Young, 1936).
    What all tokens' logits have in common changes no distribution, and is left out.
    """
    rows = rows.float() - rows.float().mean(0)  # [V, h]
    products = (rows.T @ rows).double()  # [h, h]
    if moment is None:
        basis = torch.linalg.eigh(products).eigenvectors[:, -rank:].float()  # [h, r]
        return rows @ basis, basis.T.contiguous()
    values, vectors = torch.linalg.eigh(moment.double().to(rows.device))
    roots = values.clamp_min(1e-6 * values[-1]).sqrt()  # a direction that was never seen keeps some
    half, inverse = vectors * roots, vectors / roots  # [h, h], whose products are moment and 1
    basis = torch.linalg.eigh(half.T @ products @ half).eigenvectors[:, -rank:]  # [h, r]
    return rows @ (half @ basis).float(), (inverse @ basis).T.float().contiguous()


def second_moment(records: Sequence[Record]) -> Tensor | None:
    """E[x xᵀ] `[h, h]` of the target's head inputs over draftable positions, float64.

    Of evenly spread conversations; None if the records hold no states.
    """
    known = records.rows if isinstance(records, StateReader) else records  # states are not read yet
    step = max(1, sum(len(r.reply) - 1 for r in known) // _POSITIONS)
    total, count = None, 0
    for record in (records[i] for i in range(0, len(records), step)):
        if record.states is None:
            continue
        hidden = record.states.hidden[1:].double()  # [n, h]
        products = hidden.T @ hidden
        total, count = products if total is None else total + products, count + len(hidden)
    return None if total is None or not count else total / count
