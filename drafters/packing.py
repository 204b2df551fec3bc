"""Whether a drafter keeps conversations apart that lie behind each other in one row."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..configs.errors import UserError
from ..data.records import Record
from .base import Drafter, TrainBatch
from .batch import collate

_FEW = 3  # conversations that are tried, the shortest
_STEPS = 2
_TOLERANCE = 1e-3  # of the largest state, in float32
_RAISED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_packing(drafter: Drafter, records: Sequence[Record], domains: Sequence[str]) -> None:
    """Refuse a drafter that says other things where conversations share a row.

    Tried on a few of `records`, those of one law with drafted tokens of two unrolled steps, which
    are as `collate` takes them; not at all where fewer than two are so. Raises `UserError` naming
    the kind of model.
    """
    few = _few(records)
    if len(few) < 2:
        return
    alone = collate(few, domains)
    together = collate(few, domains, packed=True, width=sum(len(r.ids) for r in few))
    kind = getattr(getattr(drafter, "model", None), "config", None)
    name = f"'{drafter.family}'" + (f" (model type '{kind.model_type}')" if kind else "")
    try:
        expected, found = _states(drafter, alone), _states(drafter, together)
    except _RAISED as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"a drafter {name} cannot read packed rows ({reason[0]}); take train.packing false"
        ) from error
    worst = (found - expected).abs().max().item()
    if not worst <= _TOLERANCE * expected.abs().max().item():
        raise UserError(
            f"a drafter {name} lets packed conversations see each other (its states differ by "
            f"{worst:.3g}); take train.packing false"
        )


def _few(records: Sequence[Record]) -> list[Record]:
    """The shortest that something is scored in, of the commonest law, as they lie in a row."""
    scored = [r for r in records if len(r.reply) > _STEPS]
    laws = Counter(r.law for r in scored).most_common(1)
    own = [r for r in scored if laws and r.law == laws[0][0]]
    return sorted(own, key=lambda r: len(r.ids))[:_FEW][::-1]


@torch.no_grad()
def _states(drafter: Drafter, batch: TrainBatch) -> Tensor:
    """The head's inputs of all unrolled steps, below each other: `[N, h_d]`."""
    assert isinstance(drafter, nn.Module)
    training = drafter.training
    drafter.eval()
    try:
        steps = drafter.unroll(batch.to(drafter.trainable()[0].device), _STEPS)
    finally:
        drafter.train(training)
    return torch.cat([step.hidden for step in steps]).float()
