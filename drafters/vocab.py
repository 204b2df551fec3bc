"""Reduced draft vocabularies: the tokens a drafter is able to propose."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..data.records import Record
from ..data.target import Target
from .batch import StateReader

_ROWS = 256  # states turned into full distributions at a time
_POSITIONS = 8192  # enough to rank tokens; beyond it only the time grows


@torch.inference_mode()
def captured_mass(target: Target, records: Sequence[Record]) -> Tensor:
    """Target probability per token over evenly spread draftable positions: `[D, V]` float64.

    A row for each domain, by name. A reply's first token comes from prefill and is never drafted.
    Counts what the target *would* say at temperature 1, not only what was sampled; records without
    states count their words.
    """
    known = records.rows if isinstance(records, StateReader) else records  # states are not read yet
    stride = max(1, sum(len(r.reply) - 1 for r in known) // _POSITIONS)
    domains = sorted({r.domain for r in known})
    mass = torch.zeros(len(domains), target.vocab_size, dtype=torch.float64)
    passed = 0
    step = max(1, stride // 8)  # of many records some are enough, and the others are not read
    stride = max(1, stride // step)
    for record in records if step == 1 else (records[i] for i in range(0, len(records), step)):
        own, words = mass[domains.index(record.domain)], record.reply[1:]
        if record.states is None:
            own.index_add_(0, words, torch.ones(len(words), dtype=torch.float64))
            continue
        begin, passed = -passed % stride, passed + len(words)  # the stride runs on over records
        for part in record.states.hidden[1:][begin::stride].split(_ROWS):
            p = target.logits(part.to(target.device)).softmax(-1)  # [n, V]
            own += p.sum(0).double().cpu()
    return mass


def choose_draft_ids(mass: Tensor, size: int, always: Sequence[int], floor: float) -> Tensor:
    """The `size` ids of largest mass, with `always` among them: ascending `[size]`.

    `mass` `[D, V]` by domain. The share `floor` of the places is dealt out equally, to each
    domain's own best tokens; the rest goes by the mass of all domains together. So a small domain
    is not left without its words, and a large one not without its tail.
    """
    count = mass.shape[1]
    if size > count:
        raise UserError(f"drafter.draft_vocab_size {size} exceeds the target's {count} tokens")
    if len(always) > size:
        raise UserError(
            f"drafter.draft_vocab_size {size} cannot hold the {len(always)} special tokens"
        )
    ranked = mass.sum(0)
    each = int(floor * (size - len(always)) / len(mass))
    for own in mass:
        best = own.topk(each)
        ranked[best.indices[best.values > 0]] = torch.inf
    ranked[torch.tensor(list(always), dtype=torch.long)] = torch.inf
    return ranked.topk(size).indices.sort().values


def special_ids(target: Target) -> list[int]:
    """Ids that must stay in any draft vocabulary: end tokens and the tokenizer's special ones."""
    known = {*target.eos_ids, *target.tokenizer.all_special_ids}
    return sorted(i for i in known if i < target.vocab_size)


def check_init(init: str | None, start: str | None) -> None:
    """Raises `UserError` for a `drafter.init` that is unknown, or that `start` contradicts."""
    if init not in ("target", "random", None):
        raise UserError(f"drafter.init is '{init}', must be 'target' or 'random'")
    if init is not None and start is not None:
        raise UserError(
            f"drafter.init '{init}' begins anew and drafter.start '{start}' goes on from other "
            "weights; leave one of them out"
        )


def check_floor(floor: float) -> None:
    """Raises `UserError` for a `drafter.domain_floor` that is no share."""
    if not 0.0 <= floor <= 1.0:
        raise UserError(f"drafter.domain_floor is {floor}, must lie between 0 and 1")
