"""One file of records: tensors laid end to end, and in its header a row about each record."""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..configs.errors import UserError
from .records import Origin, Record, States, Top
from .warp import Law

FORMAT = 2

# One key alone: safetensors writes several in an order of its own, and a batch that is collected
# again shall give the same bytes.
_KEY = "draftsmith"

HOLDS = {
    "ids": "tokens of each conversation, its reply last",
    "hidden": "inputs of the target's head, after the final norm, where reply tokens were drawn",
    "log_z": "logsumexp of their logits over the whole vocabulary at temperature 1",
    "taps": "outputs of the tapped decoder layers at every position but the last",
    "top_ids": "the most probable tokens where each reply token was drawn, -1 for none",
    "top_log_probs": "their log-probabilities under the distribution over the whole vocabulary",
}
"""What the tensors of a shard are, as its header says."""


class Damaged(Exception):
    """A file is no whole shard; the text says what is wrong with it."""


class Place(NamedTuple):
    """Where the parts of a record begin in the tensors of its shard."""

    ids: int = 0
    reply: int = 0
    taps: int = 0
    top: int = 0


@dataclass(frozen=True, slots=True)
class RowInfo:
    """What is known of a record without its tensors, and where in shard `shard` it lies.

    top: tokens K kept of each distribution, 0 for none, at `temperature`.
    """

    key: str
    prompt_id: str
    turn: int
    domain: str
    split: str
    law: Law
    origin: Origin
    exact: bool
    seed: int
    finish: str
    tokens: int
    prompt_len: int
    states: bool
    top: int
    temperature: float
    shard: str
    row: int
    place: Place

    @property
    def reply(self) -> range:
        """Places of the reply's tokens in the conversation."""
        return range(self.prompt_len, self.tokens)

    def drawn_from(self, law: Law) -> bool:
        """Whether the reply is a sample of `law`, as `Record.drawn_from`."""
        return self.origin == "target" and self.exact and self.law == law


# ---- writing


def pack(
    records: Sequence[Record], fingerprint: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a shard, the same for the same records; taps are cast to `dtype`.

    Raises `UserError` naming a record with values that are not finite, or do not fit `dtype`.
    """
    parts: dict[str, list[Tensor]] = {"ids": [torch.empty(0, dtype=torch.long)]}
    widest = max((r.top.ids.shape[1] for r in records if r.top is not None), default=0)
    for record in records:
        parts["ids"].append(record.ids)
        if record.states is not None:
            states = _stored(record.states, dtype, record.key)
            for name in ("hidden", "log_z", "taps"):
                parts.setdefault(name, []).append(getattr(states, name))
        if record.top is not None:
            _check_top(record.top, f"record {record.key}")
            ids, log_probs = _widened(record.top, widest)
            parts.setdefault("top_ids", []).append(ids)
            parts.setdefault("top_log_probs", []).append(log_probs)
    tensors = {name: torch.cat(part).contiguous() for name, part in parts.items()}
    about = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "holds": {name: HOLDS[name] for name in tensors},
        "rows": [_row(record) for record in records],
    }
    return tensors, {_KEY: json.dumps(about, ensure_ascii=False)}


def _row(record: Record) -> dict[str, Any]:
    return {
        "key": record.key,
        "prompt_id": record.prompt_id,
        "turn": record.turn,
        "domain": record.domain,
        "split": record.split,
        "law": list(astuple(record.law)),
        "origin": record.origin,
        "exact": record.exact,
        "seed": record.seed,
        "finish": record.finish,
        "tokens": len(record.ids),
        "prompt_len": record.prompt_len,
        "states": record.states is not None,
        "top": 0 if record.top is None else record.top.ids.shape[1],
        "temperature": 1.0 if record.top is None else record.top.temperature,
    }


def _stored(states: States, dtype: torch.dtype, key: str) -> States:
    _check_states(states, f"record {key}")
    taps = states.taps.to(dtype)
    if not finite(taps):
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"record {key}: value {float(states.taps.abs().max()):.3g} of 'taps' does not fit "
            f"{name}; set collect.store_dtype to float32 or bfloat16"
        )
    return States(states.hidden, states.log_z, taps)


def _widened(top: Top, width: int) -> tuple[Tensor, Tensor]:
    missing = (0, width - top.ids.shape[1])
    ids = torch.nn.functional.pad(top.ids.int(), missing, value=-1)  # [R, width]
    return ids, torch.nn.functional.pad(top.log_probs.float(), missing, value=-torch.inf)


def finite(tensor: Tensor) -> bool:
    """Whether all values are finite."""
    # A sum is many times as fast as a look at each value, and tells of all that are not finite.
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return True
    return bool(torch.isfinite(tensor).all())


def _check_states(states: States, where: str) -> None:
    for name in ("hidden", "log_z", "taps"):
        if not finite(getattr(states, name)):
            raise UserError(f"{where}: '{name}' holds values that are not finite")


def _check_top(top: Top, where: str) -> None:
    if not torch.equal(torch.isfinite(top.log_probs), top.ids >= 0):
        raise UserError(f"{where}: 'top_log_probs' holds values that are not finite")


# ---- reading


def head_length(start: bytes, size: int) -> int:
    """Bytes of the header of a file of `size` bytes, told by its first eight.

    Raises `Damaged` if the file ends before its header does.
    """
    length = 8 + int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > size:
        raise Damaged(f"it ends within its header, after {size} bytes")
    return length


def read_head(head: bytes, size: int, shard: str) -> tuple[str, list[RowInfo]]:
    """Fingerprint and rows of a shard of `size` bytes, from the bytes of its header.

    Raises `Damaged` if it holds no records or is cut off, `UserError` for another format.
    """
    try:
        header = json.loads(head[8:])
        about = json.loads(header.pop("__metadata__")[_KEY])
        if about["format"] != FORMAT:
            raise UserError(
                f"shard {shard} has format {about['format']}; this version reads {FORMAT}"
            )
        fingerprint, rows = about["fingerprint"], _rows(about["rows"], shard)
        whole = len(head) + max(entry["data_offsets"][1] for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Damaged("it has no header of records") from error
    if whole != size:
        raise Damaged(f"it has {size} of {whole} bytes")
    return fingerprint, rows


def _rows(rows: Sequence[dict[str, Any]], shard: str) -> list[RowInfo]:
    found = []
    laws: dict[tuple[Any, ...], Law] = {}
    at = Place()
    for number, row in enumerate(rows):
        how = tuple(row.pop("law"))
        if how not in laws:
            laws[how] = Law(*how)
        info = RowInfo(**row, law=laws[how], shard=shard, row=number, place=at)
        found.append(info)
        reply, states = len(info.reply), info.states
        at = Place(
            at.ids + info.tokens,
            at.reply + reply * states,
            at.taps + (info.tokens - 1) * states,
            at.top + reply * (info.top > 0),
        )
    return found


def read_record(handle: Any, info: RowInfo, where: str) -> Record:
    """The record of `info` from its shard's open safetensors `handle`; tensors are mapped.

    Raises `UserError` beginning with `where` for values that are not finite.
    """

    def part(name: str, begin: int, count: int) -> Tensor:
        return handle.get_slice(name)[begin : begin + count]

    reply, at, states, top = len(info.reply), info.place, None, None
    if info.states:
        states = States(
            hidden=part("hidden", at.reply, reply),
            log_z=part("log_z", at.reply, reply),
            taps=part("taps", at.taps, info.tokens - 1),
        )
        _check_states(states, f"{where}, record {info.key}")
    if info.top:
        top = Top(
            ids=part("top_ids", at.top, reply)[:, : info.top],
            log_probs=part("top_log_probs", at.top, reply)[:, : info.top],
            temperature=info.temperature,
        )
        _check_top(top, f"{where}, record {info.key}")
    return Record(
        prompt_id=info.prompt_id,
        domain=info.domain,
        split=info.split,
        law=info.law,
        seed=info.seed,
        finish=info.finish,
        ids=part("ids", at.ids, info.tokens),
        prompt_len=info.prompt_len,
        states=states,
        turn=info.turn,
        origin=info.origin,
        top=top,
        exact=info.exact,
    )
