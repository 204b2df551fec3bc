"""Reduced draft vocabularies: the tokens a drafter is able to propose."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..data.records import Record
from ..data.target import Target

_ROWS = 256  # states turned into full distributions at a time
_POSITIONS = 8192  # enough to rank tokens; beyond it only the time grows


@torch.inference_mode()
def captured_mass(target: Target, records: Sequence[Record]) -> Tensor:
    """Target probability per token over evenly spread reply positions: `[V]` float64.

    Counts what the target *would* say at temperature 1, not only what was sampled; records without
    states count their words.
    """
    stride = max(1, sum(len(r.reply) for r in records) // _POSITIONS)
    mass = torch.zeros(target.vocab_size, dtype=torch.float64)
    for record in records:
        if record.states is None:
            mass.index_add_(0, record.reply, torch.ones(len(record.reply), dtype=torch.float64))
            continue
        for part in record.states.hidden[::stride].split(_ROWS):
            p = target.logits(part.to(target.device)).softmax(-1)  # [n, V]
            mass += p.sum(0).double().cpu()
    return mass


def choose_draft_ids(mass: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The `size` ids of largest mass `[V]`, with `always` among them: ascending `[size]`."""
    if size > len(mass):
        raise UserError(f"drafter.draft_vocab_size {size} exceeds the target's {len(mass)} tokens")
    if len(always) > size:
        raise UserError(
            f"drafter.draft_vocab_size {size} cannot hold the {len(always)} special tokens"
        )
    ranked = mass.clone()
    ranked[torch.tensor(list(always), dtype=torch.long)] = torch.inf
    return ranked.topk(size).indices.sort().values


def special_ids(target: Target) -> list[int]:
    """Ids that must stay in any draft vocabulary: end tokens and the tokenizer's special ones."""
    known = {*target.eos_ids, *target.tokenizer.all_special_ids}
    return sorted(i for i in known if i < target.vocab_size)
