"""Records with the target's states, and the batches that drafters are trained and scored on."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..configs.errors import UserError
from ..data.gather import recompute_states
from ..data.records import Record
from ..data.store import RecordStore
from ..data.target import Target
from .base import TrainBatch


def records_with_states(
    store: RecordStore, target: Target, taps: tuple[int, ...], split: str | None = None
) -> list[Record]:
    """The store's records with the target's states, `taps` in that order; recomputed if not kept.

    Raises `UserError` if the records are of another target, or do not hold these layers.
    """
    was = store.settings
    if was["target"]["weights"] != target.provenance["weights"]:
        raise UserError(f"{store.folder} was collected from another target than this recipe's")
    records = list(store.records(split))
    if was["distributions"] == "none":
        size = int(was["batch_size"])
        parts = [records[i : i + size] for i in range(0, len(records), size)]
        return [r for part in parts for r in recompute_states(target, part, taps)]
    if not set(taps) <= set(was["taps"]):
        raise UserError(
            f"{store.folder} holds layers {was['taps']}, the drafter reads {list(taps)}; "
            "collect again with this recipe"
        )
    if list(taps) == was["taps"]:
        return records
    places = [was["taps"].index(tap) for tap in taps]
    return [_select_taps(r, places, len(was["taps"])) for r in records]


def _select_taps(record: Record, places: list[int], layers: int) -> Record:
    assert record.states is not None
    taps = record.states.taps.unflatten(-1, (layers, -1))[:, places].flatten(1)  # [T-1, L*h]
    return replace(record, states=replace(record.states, taps=taps))


def collate(records: Sequence[Record], domains: Sequence[str]) -> TrainBatch:
    """Records with states → one right-padded batch; domains are indices into `domains`."""
    longest = max(len(r.ids) for r in records)
    first_states = records[0].states
    assert first_states is not None
    ids = torch.zeros(len(records), longest, dtype=torch.long)
    taps = torch.zeros(len(records), longest - 1, first_states.taps.shape[-1])
    for b, record in enumerate(records):
        assert record.states is not None
        ids[b, : len(record.ids)] = record.ids
        taps[b, : len(record.ids) - 1] = record.states.taps.float()
    replies = torch.tensor([len(r.reply) for r in records])
    index = torch.tensor([domains.index(r.domain) for r in records])
    return TrainBatch(
        ids=ids,
        lengths=torch.tensor([len(r.ids) for r in records]),
        prompt_lens=torch.tensor([r.prompt_len for r in records]),
        taps=taps,
        hidden=torch.cat([r.states.hidden for r in records if r.states is not None]),
        log_z=torch.cat([r.states.log_z for r in records if r.states is not None]),
        domain=index.repeat_interleave(replies),
        first=replies.cumsum(0) - replies,
    )
