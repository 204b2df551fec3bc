"""Records with the target's states, and the batches that drafters are trained and scored on."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..data.gather import recompute_states
from ..data.records import Record
from ..data.shards import RowInfo
from ..data.store import RecordStore
from ..data.target import Target
from ..data.top import joined
from .base import TrainBatch

_IDENTITY = ("weights", "tokenizer", "rules", "template", "vocab_size")
"""What records and drafters depend on, of what is known of a target."""
_UNKNOWN = "a server answered, and whether its weights are this target's cannot be checked"
_TOGETHER = 32  # records that the target runs on at a time, where their states were not kept


def records_with_states(
    store: RecordStore,
    target: Target,
    taps: tuple[int, ...],
    split: str | None = None,
    accept: bool = False,
) -> list[Record]:
    """The store's records with the target's states, `taps` in that order; recomputed if not kept.

    Raises `UserError` as `check_identity` does.
    """
    recompute = store.settings["distributions"] != "hidden"
    check_identity(store, target, () if recompute else taps, accept)
    return _with_states(store, target, taps, list(store.records(split)), recompute)


@dataclass(frozen=True)
class StateReader(Sequence[Record]):
    """Records of `store` to train on, each read when it is asked for.

    Where tokens alone were kept the target runs on them; the most probable ones are left as told.
    at_once: it does so in one pass over all that are asked for together, however many.
    """

    store: RecordStore
    target: Target
    taps: tuple[int, ...]
    rows: Sequence[RowInfo]
    at_once: bool = False

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at these places."""
        records = self.store.read([self.rows[i] for i in indices])
        recompute = self.store.settings["distributions"] == "none"
        together = len(records) if self.at_once else _TOGETHER
        return _with_states(self.store, self.target, self.taps, records, recompute, together)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return self.read(range(len(self))[index])
        return self.read([index])[0]

    def __iter__(self) -> Iterator[Record]:
        for begin in range(0, len(self), _TOGETHER):
            yield from self[begin : begin + _TOGETHER]


def check_identity(
    store: RecordStore, target: Target, taps: tuple[int, ...], accept: bool = False
) -> None:
    """Raises `UserError` if the records are of another target, naming each difference.

    Also if they do not hold the layers `taps`. `accept` makes another target a warning, unless its
    vocabulary is of another size. The weights behind a server are not known: that is a warning.
    """
    was, here = store.settings["target"], target.provenance
    there = here | {name: value for name, value in was.items() if value is not None}
    differ = [name for name in _IDENTITY if there[name] != here[name]]
    if was.get("weights", "") is None:
        warnings.warn(f"{store.folder}: {_UNKNOWN}", stacklevel=2)
    if differ:
        told = ", ".join(f"{name} {there[name]!r} there and {here[name]!r} here" for name in differ)
        message = f"{store.folder} was collected from another target than this recipe's: {told}"
        if not accept or "vocab_size" in differ:
            raise UserError(f"{message}; collect again, or take the target it was collected from")
        warnings.warn(f"{message}; they are read all the same, as asked", stacklevel=2)
    kept = store.settings["distributions"]
    if kept == "top" and taps:
        raise UserError(
            f"{store.folder} holds the target's most probable tokens alone, the drafter reads its "
            f"layers {list(taps)}; take collect.distributions hidden or none, or the family "
            "'causal'"
        )
    if kept == "hidden" and not set(taps) <= set(store.settings["taps"]):
        raise UserError(
            f"{store.folder} holds layers {store.settings['taps']}, the drafter reads "
            f"{list(taps)}; collect again with this recipe"
        )


def _with_states(
    store: RecordStore,
    target: Target,
    taps: tuple[int, ...],
    records: list[Record],
    recompute: bool,
    together: int = _TOGETHER,
) -> list[Record]:
    layers = store.settings["taps"]
    if recompute:
        parts = [records[i : i + together] for i in range(0, len(records), together or 1)]
        return [r for part in parts for r in recompute_states(target, part, taps)]
    if list(taps) == layers:
        return records
    places = [layers.index(tap) for tap in taps]
    return [_select_taps(r, places, len(layers)) for r in records]


def _select_taps(record: Record, places: list[int], layers: int) -> Record:
    assert record.states is not None
    taps = record.states.taps.unflatten(-1, (layers, -1))[:, places].flatten(1)  # [T-1, L*h]
    return replace(record, states=replace(record.states, taps=taps))


def collate(
    records: Sequence[Record],
    domains: Sequence[str],
    packed: bool = False,
    width: int | None = None,
) -> TrainBatch:
    """Records that all have states, or all tops → one batch, without taps for tops.

    Domains are indices into `domains`. Each record has a right-padded row of its own, unless
    `packed`: then rows of `width` tokens (of the longest record, if that is more or None is given)
    are filled with several, and the batch's conversations come in the order of their places, which
    `TrainBatch.keys` tells. Raises `UserError` where some have neither, and for tops of several
    temperatures.
    """
    rows = _filled(records, width or 0) if packed else [[r] for r in records]
    records = [r for own in rows for r in own]
    lengths, begins = [len(r.ids) for r in records], [b for own in rows for b in _begins(own)]
    places = [b for b, own in enumerate(rows) for _ in own]
    ids = torch.zeros(
        len(rows), max(b + n for b, n in zip(begins, lengths, strict=True)), dtype=torch.long
    )
    for record, row, begin in zip(records, places, begins, strict=True):
        ids[row, begin : begin + len(record.ids)] = record.ids
    replies = torch.tensor([len(r.reply) for r in records])
    index = torch.tensor([domains.index(r.domain) for r in records])
    return TrainBatch(
        ids=ids,
        row=torch.tensor(places),
        begin=torch.tensor(begins),
        lengths=torch.tensor(lengths),
        prompt_lens=torch.tensor([r.prompt_len for r in records]),
        domain=index.repeat_interleave(replies),
        first=replies.cumsum(0) - replies,
        keys=tuple(r.key for r in records),
        **_distributions(records, ids, places, begins),
    )


def _filled(records: Sequence[Record], width: int) -> list[list[Record]]:
    """Rows of up to `width` tokens, or as many as the longest record has: first fit, long first.

    The longest's is the cheapest width: what wider rows save in padding they pay in attention.
    """
    rows: list[list[Record]] = []
    room: list[int] = []
    width = max(width, *(len(r.ids) for r in records))
    for record in sorted(records, key=lambda r: len(r.ids), reverse=True):
        size = len(record.ids)
        row = next((i for i, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(record)
        room[row] -= size
    return rows


def _begins(row: Sequence[Record]) -> list[int]:
    return [sum(len(r.ids) for r in row[:i]) for i in range(len(row))]


def _distributions(
    records: Sequence[Record], ids: Tensor, places: Sequence[int], begins: Sequence[int]
) -> dict[str, Any]:
    """The part of a batch of `ids [B, T]` that tells the target's distributions, and taps."""
    states = [r.states for r in records if r.states is not None]
    rows, longest = ids.shape
    if len(states) == len(records):
        taps = torch.zeros(rows, longest - 1, states[0].taps.shape[-1])
        for own, row, begin in zip(states, places, begins, strict=True):
            taps[row, begin : begin + len(own.taps)] = own.taps.float()
        hidden, log_z = torch.cat([s.hidden for s in states]), torch.cat([s.log_z for s in states])
        return {"taps": taps, "hidden": hidden, "log_z": log_z}
    tops = [r.top for r in records if r.top is not None]
    if len(tops) < len(records):
        raise UserError(
            f"of {len(records)} records, {len(states)} hold the target's states and {len(tops)} "
            "its most probable tokens, and a batch needs the one or the other of all; collect "
            "again with one setting of collect.distributions"
        )
    return {"taps": torch.zeros(rows, longest - 1, 0), "top": joined(tops)}
