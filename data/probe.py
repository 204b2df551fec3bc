"""A short run that tells whether a model family can be decoded as draftsmith does it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..configs.errors import UserError

if TYPE_CHECKING:
    from .target import Target

_TOKENS = 8
_TOLERANCE = 1e-3  # of the largest logit, in float32
_ROUNDINGS = 8  # in low precision: so many units of the dtype's own rounding

# Two texts through the cache: tokens fed to both rows, and how many of them each row keeps. What is
# not kept is a wrong guess that must leave no trace.
_PLAN = ((4, (4, 1)), (3, (1, 3)), (4, (3, 4)))
_RAISED = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError)


@torch.no_grad()
def check_family(target: "Target") -> None:
    """Refuse a target whose logits do not come back when it is run as decoding runs it.

    That is: logits rebuilt from the final state (field report B037), several tokens at once, rows
    of different lengths, and a cache that is cut back. Raises `UserError` naming the family.
    """
    name, kind = target.provenance["name"], target.model.config.model_type
    ids = torch.arange(2 * _TOKENS, device=target.device).view(2, -1) % target.vocab_size
    try:
        theirs = target.model(input_ids=ids, use_cache=False).logits.float()  # [2, T, V]
        ours = _through_cache(target, ids)
    except (*_RAISED, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"target '{name}' ({kind}) cannot be run by draftsmith ({reason[0]}); this family is "
            "not supported"
        ) from error
    worst = (theirs[..., : target.vocab_size] - ours).abs().max().item()
    allowed = max(_TOLERANCE, _ROUNDINGS * torch.finfo(target.dtype).eps)
    if not worst < allowed * max(1.0, theirs.abs().max().item()):
        raise UserError(
            f"target '{name}' ({kind}): its logits cannot be rebuilt from its final hidden state "
            f"and a cache that is cut back (they differ by {worst:.3g}); this family is not "
            "supported"
        )


def _through_cache(target: "Target", ids: Tensor) -> Tensor:
    """Logits `[2, T, V]` of two texts `[2, T]`, fed as decoding does."""
    logits = torch.zeros(2, _TOKENS, target.vocab_size, device=target.device)
    cache = target.new_cache(2, _TOKENS)
    for width, counts in _PLAN:
        fed = ids.flip(1)[:, :width].clone()  # guesses, wrong at every place
        places = [range(n, n + count) for n, count in zip(cache.lengths, counts, strict=True)]
        for row, place in enumerate(places):
            fed[row, : len(place)] = ids[row, place.start : place.stop]
        found = target.logits(target.forward(fed, cache).hidden)
        cache.advance(counts)
        for row, place in enumerate(places):
            logits[row, place.start : place.stop] = found[row, : len(place)]
    return logits
