"""The contract every drafter family keeps: one train-time forward, one decode-time protocol.

Both are stated for ragged batches. Positions count from 0 in prompt plus reply, in whichever column
a conversation begins; its *reply token r* is its token `prompt_len + r`. Reply token 0 comes from
prefill and is never drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..data.records import Top


@dataclass(frozen=True)
class TrainBatch:
    """C conversations in B rows of T tokens, with R reply tokens in all.

    Conversation c fills row `row[c]` from column `begin[c]` on; they are in the order in which they
    lie there, row after row. Padded rows hold one each, from column 0; where rows are *packed* they
    hold several behind each other, which neither see nor predict one another.

    ids: `[B, T]`; row, begin, lengths, prompt_lens: `[C]`; taps: `[B, T-1, L*h]` (last dimension 0
    for families that read none); domain: `[R]` index of the domain of each reply token,
    conversation after conversation; first: `[C]` where a conversation's reply begins in those R.
    The target's distributions where they were drawn are told by hidden `[R, h]` and log_z `[R]`, or
    else by top of R rows. keys: `Record.key` of each conversation.
    """

    ids: Tensor
    row: Tensor
    begin: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    taps: Tensor
    domain: Tensor
    first: Tensor
    hidden: Tensor | None = None
    log_z: Tensor | None = None
    top: Top | None = None
    keys: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether some row holds more than one conversation."""
        return len(self.row) > len(self.ids)

    @cached_property
    def conversation(self) -> Tensor:
        """Which conversation each token is part of, -1 for padding: `[B, T]`."""
        column = torch.arange(self.ids.shape[1], device=self.ids.device)  # [T]
        end = self.begin + self.lengths  # [C]
        inside = (column >= self.begin[:, None]) & (column < end[:, None])  # [C, T]
        own, at = inside.nonzero(as_tuple=True)
        found = torch.full_like(self.ids, -1)
        found[self.row[own], at] = own
        return found

    @cached_property
    def position(self) -> Tensor:
        """Each token's position within its conversation, 0 for padding: `[B, T]`."""
        column = torch.arange(self.ids.shape[1], device=self.ids.device)  # [T]
        own = self.conversation
        return (column - self.begin[own]).masked_fill(own < 0, 0)

    @property
    def reply_lens(self) -> Tensor:
        return self.lengths - self.prompt_lens

    @property
    def supervised(self) -> int:
        """Reply tokens a drafter can ever propose: all but the first of each reply."""
        return int((self.reply_lens - 1).sum())

    def to(self, device: torch.device) -> "TrainBatch":
        return TrainBatch(**{f.name: _moved(getattr(self, f.name), device) for f in fields(self)})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Top):
        return replace(value, ids=value.ids.to(device), log_probs=value.log_probs.to(device))
    return value.to(device) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Step:
    """Predictions of unrolled step k: q_k of the reply tokens whose round began k tokens earlier.

    hidden: `[N, h_d]` inputs of `Drafter.head`; token: `[N]` which of the batch's R reply tokens
    each predicts, ascending; head: which of the drafter's heads reads them.
    """

    hidden: Tensor
    token: Tensor
    head: int = 0


class DraftState(Protocol):
    """What a drafter remembers of a batch while decoding."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""


class Drafter(Protocol):
    """A draft model. Families are `nn.Module`s that have these members."""

    family: str
    taps: tuple[int, ...]
    """Target states it reads, as `Target.forward` takes them; empty for a standalone LM."""
    one_pass: bool
    """True if q of a token does not depend on where the round began (a draft LM)."""

    may_abstain: bool
    """Whether it may have nothing to propose, see `first`."""

    @property
    def layout(self) -> str | None:
        """What it is written as, a name of `layouts.LAYOUTS`; None if it has no weights."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of its parameters that are the target's own: never trained, never written."""

    @property
    def unserved(self) -> str | None:
        """What of it no engine reads, as the end of a sentence; None if all is read."""

    @property
    def options(self) -> dict[str, Any]:
        """What a recipe's `drafter:` section would say of a drafter built like this one."""

    @property
    def max_draft_tokens(self) -> int | None:
        """Most tokens it drafts in a round, as many as it was unrolled for. None for any."""

    @property
    def max_positions(self) -> int | None:
        """Longest text it was made for; nothing is drafted beyond. None for any."""

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids of a reduced draft vocabulary `[V_d]`, ascending; None for the full one."""

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Step k of the result predicts reply tokens r ≥ 1 + k; one step if `one_pass`."""

    def checkpoint(self, on: bool) -> None:
        """Whether `unroll` forgets what is inside the layers and computes it again for gradients.

        In training mode alone, and only where a gradient is wanted. Raises `UserError` if the
        layers cannot do so.
        """

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        """Draft logits `[N, h_d] -> [N, V_d]`, made of the three below.

        `which` of several heads, here and there; families with a single one do not look at it.
        """

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        """What the head multiplies: `[N, h_d] -> [N, r]`, where r is mostly h_d."""

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        """The head's weight `[V_d, r]` and bias `[V_d]`, one row a draft token."""

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What follows the product, such as a soft cap; elementwise."""

    def start(self, rows: int, capacity: int) -> Any:
        """An empty `DraftState` for `rows` sequences of at most `capacity` tokens."""

    def prefill(self, state: Any, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        """Take in prompts `[B, n]` (right-padded) and the target's taps `[B, n, L*h]` on them."""

    def commit(
        self,
        state: Any,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        """Take in what a round emitted: the first `counts[b]` of `tokens [B, m]`.

        `taps [B, m, L*h]` are the target's at the positions *before* each token, that is where the
        token was decided. Whatever was drafted beyond is forgotten. `path [B, m]` tells which of
        the tokens fed to `extend` the emitted ones are, in the order of feeding; -1 for one that
        was never fed. None if each was fed behind the other, as in a chain.
        """

    def first(self, state: Any) -> Tensor:
        """Draft logits `[B, V_d]` of the token that follows all committed ones.

        A row of -inf alone has nothing to propose. Called once a round, before `extend`.
        """

    def extend(self, state: Any, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Feed drafted tokens `[B, w]`; draft logits after each, `[B, w, V_d]`.

        `parents [B, w]` are the tokens they follow, by the order of feeding in this round, -1 for
        the committed text; None for one token behind the one fed last.
        """

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that training changes."""


def reply_index(batch: TrainBatch, column: Tensor) -> Tensor:
    """Reply index r of the tokens in columns `[W]`, or `[B, W]` of each row: `[B, W]`.

    Negative outside of replies. A column may lie beyond the batch, where there is only padding.
    """
    at = _of_rows(batch, column)
    own = batch.conversation.gather(1, at)  # [B, W]
    r = batch.position.gather(1, at) - batch.prompt_lens[own]
    return r.masked_fill((own < 0) | (column > at), -1)


def supervised_at(batch: TrainBatch, column: Tensor, step: int) -> Tensor:
    """Which tokens in columns `[W]` or `[B, W]` step k may be scored on: bool `[B, W]`."""
    return reply_index(batch, column) >= 1 + step


def token_index(batch: TrainBatch, column: Tensor) -> Tensor:
    """Index among the batch's R reply tokens, `[B, W]`, of those in columns `[W]` or `[B, W]`.

    Any number for other tokens.
    """
    own = batch.conversation.gather(1, _of_rows(batch, column))  # [B, W]
    return batch.first[own] + reply_index(batch, column)


def _of_rows(batch: TrainBatch, column: Tensor) -> Tensor:
    rows, length = batch.ids.shape
    return column.expand(rows, -1).clamp_max(length - 1)  # [B, W]
