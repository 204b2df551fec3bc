"""The maps of a draft vocabulary: target id = i + d2t[i], and t2d marks its tokens."""

from pathlib import Path

import torch
from torch import Tensor

from ...configs.errors import UserError

MAPS = ("d2t", "t2d")


def take_ids(
    tensors: dict[str, Tensor], folder: Path, size: int, vocab: int, needed: tuple[str, ...] = MAPS
) -> Tensor | None:
    """Target ids of the draft vocabulary `[size]`, ascending; the maps are taken out of `tensors`.

    None for a head of all `vocab` tokens that has no maps. Raises `UserError` for maps that are
    `needed` and missing, of another shape, or no such tokens.
    """
    found = {name: tensors.pop(name) for name in MAPS if name in tensors}
    if size == vocab and not found:
        return None
    told = (("d2t", size, "draft_vocab_size"), ("t2d", vocab, "vocab_size"))
    for name, count, key in told:
        if name in needed and name not in found:
            raise UserError(f"{folder}: tensor '{name}' (of the draft vocabulary) is missing")
        if name in found and tuple(found[name].shape) != (count,):
            raise UserError(
                f"{folder}: tensor '{name}' is {list(found[name].shape)}, must be [{count}], the "
                f"{key} of config.json"
            )
    ids = found["d2t"].long().cpu() + torch.arange(size)
    if "t2d" in found and not torch.equal(found["t2d"].cpu().nonzero().flatten(), ids):
        raise UserError(f"{folder}: tensors 'd2t' and 't2d' name different tokens")
    if bool((ids.diff() <= 0).any()) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab:
        raise UserError(
            f"{folder}: tensor 'd2t' must name different tokens below {vocab} in ascending order"
        )
    return ids
