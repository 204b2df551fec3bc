"""A known reply decoded again by the loop as it is, and the draft's logits on the way.

All that decoding leaves to chance comes through `Draws`. With a script in their place any text is
what happens to be decoded, whatever its law: the draft "draws" the text where it can, and of that
as much is "accepted" as the script says. So rounds of every length begin everywhere, right guesses
are refused as well as kept, and the draft is seen at every place where training scores it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.gather import request_of
from ..data.records import Record
from ..data.target import Target
from ..data.warp import Law, float32_or_better
from ..drafters.base import Drafter
from ..drafters.batch import collate
from .decode import DecodeSettings, decode


class Place(NamedTuple):
    """The `k`-th token, from 0, drafted in a round that began `start` tokens behind the reply's
    first one."""

    start: int
    k: int


@dataclass
class _Script:
    """`Draws`, `Policy` and `Round` of one row, whose reply comes out whatever the laws say.

    Of the right guesses of round i no more than i modulo γ + 1 are accepted.
    """

    reply: list[int]
    draft_ids: list[int] | None
    limit: int
    looks_at_batch = False
    seen: dict[Place, Tensor] = field(default_factory=dict)
    """Draft logits `[V_d]` of places that only tokens of the reply lead to."""
    _emitted: int = 0
    _rounds: int = 0
    _drafting: bool = False
    _right: int = 0
    """This round's guesses from its beginning that are the reply's tokens."""
    _astray: bool = False

    def begin(self, rows: int, device: torch.device) -> "_Script":
        self._drafting, self._right, self._astray = True, 0, False
        return self

    def go_on(self, k: int, logits: Tensor, chosen: Tensor) -> Tensor:
        if k <= self._right and self._emitted + k < len(self.reply):
            self.seen[Place(self._emitted - 1, k)] = float32_or_better(logits[0]).cpu()
        return torch.full_like(chosen, k + 1 < self.limit, dtype=torch.bool)

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        if not self._drafting:
            self._emitted += 1
            return torch.full_like(where, self.reply[self._emitted - 1], dtype=torch.long)
        column = self._column(weights.shape[1]) if bool(where[0]) and not self._astray else None
        self._astray = column is None
        self._right += column is not None
        return torch.full_like(where, column or 0, dtype=torch.long)

    def _column(self, width: int) -> int | None:
        """Which of the draft's `width` tokens the reply goes on with, if it has it."""
        at = self._emitted + self._right
        if at >= len(self.reply):
            return None
        token = self.reply[at]
        if self.draft_ids is not None:
            return self.draft_ids.index(token) if token in self.draft_ids else None
        return token if token < width else None

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        kept = min(self._right if self._drafting else 0, self._rounds % (self.limit + 1))
        self._drafting = False
        self._rounds += 1
        self._emitted += kept
        return (torch.arange(p.shape[1], device=p.device) < kept) & where

    def select(self, rows: Sequence[int]) -> None:
        """One row stays one row."""


def decoded_logits(
    target: Target, drafter: Drafter, record: Record, num_draft_tokens: int
) -> dict[Place, Tensor]:
    """Draft logits `[V_d]`, before any law, as the decode loop has them along the record's reply.

    A draft that proposes nothing has zeros alone.
    """
    ids = None if drafter.draft_ids is None else drafter.draft_ids.tolist()
    script = _Script(record.reply.tolist(), ids, num_draft_tokens)
    request = replace(request_of(record), law=Law(1.0))
    how = DecodeSettings(len(record.reply), num_draft_tokens, "token", policy=script)
    decode(target, [request], how, drafter, draws=script)
    return script.seen


class Forced:
    """The training forward of records that have the target's states, as one batch."""

    @torch.no_grad()
    def __init__(self, target: Target, drafter: Drafter, records: Sequence[Record], steps: int):
        batch = collate(records, sorted({r.domain for r in records})).to(target.device)
        self.drafter, self.first = drafter, batch.first.tolist()
        self.steps = drafter.unroll(batch, steps)
        self.width = target.vocab_size if drafter.draft_ids is None else None

    @torch.no_grad()
    def logits(self, row: int, places: Sequence[Place]) -> Tensor:
        """What training makes of a record's places: `[n, V_d]`, as `decoded_logits` has them."""
        found = []
        for start, k in places:
            step = self.steps[0 if self.drafter.one_pass else k]
            wanted = torch.tensor([self.first[row] + 1 + start + k], device=step.token.device)
            hidden = step.hidden[torch.searchsorted(step.token, wanted)]  # [1, h_d]
            found.append(self.drafter.head(hidden, step.head))
        logits = float32_or_better(torch.cat(found))[:, : self.width]
        silent = (logits == -torch.inf).all(-1, keepdim=True)
        return logits.masked_fill(silent, 0.0).cpu()
