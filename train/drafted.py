"""Replies that a drafter writes: the text that comes of it when every one of its guesses is taken.

The target reads the text as it grows, a round at a time as in decoding, so its distribution is
known at every token, and each round but the first begins on its states. No sample of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..data.gather import Request
from ..data.records import Record, States, row_uniforms
from ..data.target import Target
from ..data.warp import Law, log_probs, sample
from ..drafters.base import Drafter
from .objective import Objective
from .score import draft_law


@torch.no_grad()  # not inference_mode: a drafter may keep buffers that it then trains with
def draft_replies(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    limits: Sequence[int],
    objective: Objective,
) -> list[Record]:
    """Replies of up to `limits` tokens that the drafter writes, with the target's states.

    They are one batch. The first token is the target's, under the objective's law; all others are
    drawn from the draft, in rounds of `num_draft_tokens`, as it is served. Each row draws from a
    stream of its own, so that its neighbours change nothing. The drafter must be in evaluation
    mode, and one that never abstains.

    Raises `UserError` if logits are not finite.
    """
    rows = [_Row(request, limit) for request, limit in zip(requests, limits, strict=True)]
    batch = _Batch(target, drafter, objective, rows)
    batch.prefill()
    while batch.rows:
        batch.round()
    return [row.record() for row in rows]


@dataclass
class _Row:
    """A reply that is being written, and the target's states along it."""

    request: Request
    limit: int
    taps: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    log_z: list[Tensor] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    finish: str = ""

    def take(
        self, ids: list[int], hidden: Tensor, log_z: Tensor, taps: Tensor, ends: Sequence[int]
    ) -> None:
        """Take in n tokens up to an end or the limit, and the states where they were decided.

        hidden: `[n, h]`; log_z: `[n]`; taps: `[n, L*h]`.
        """
        ended = next((j + 1 for j, token in enumerate(ids) if token in ends), len(ids) + 1)
        count = min(ended, len(ids), self.limit - len(self.reply))
        self.reply += ids[:count]
        self.hidden.append(hidden[:count])
        self.log_z.append(log_z[:count])
        self.taps.append(taps[:count])
        if count == ended:
            self.finish = "stop"
        elif len(self.reply) == self.limit:
            self.finish = "length"

    def record(self) -> Record:
        asked = self.request
        states = States(torch.cat(self.hidden), torch.cat(self.log_z), torch.cat(self.taps))
        return Record(
            asked.prompt_id, asked.domain, asked.split, asked.law, asked.seed, self.finish,
            torch.tensor([*asked.ids, *self.reply]), len(asked.ids), states, asked.turn, "drafted",
        )  # fmt: skip


class _Batch:
    """Rows that are still written. All have as many tokens: every guess is taken."""

    def __init__(self, target: Target, drafter: Drafter, objective: Objective, rows: list[_Row]):
        self.target, self.drafter, self.objective, self.rows = target, drafter, objective, rows
        most = max(row.limit for row in rows)
        capacity = max(len(row.request.ids) for row in rows) + most
        self.cache = target.new_cache(len(rows), capacity)
        self.state: Any = drafter.start(len(rows), capacity)
        streams = [row_uniforms(row.request.seed, most) for row in rows]
        self.uniforms = torch.stack(streams).to(target.device)  # [B, R]
        self.last = torch.empty(0)  # [B, 1]
        self.made = 0

    def prefill(self) -> None:
        """Run the prompts, and let the target say every row's first token."""
        lengths = [len(row.request.ids) for row in self.rows]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)  # [B, P]
        for b, row in enumerate(self.rows):
            ids[b, : lengths[b]] = torch.tensor(row.request.ids)
        ids = ids.to(self.target.device)
        out = self.target.forward(ids, self.cache, self.drafter.taps)
        self.cache.advance(lengths)
        self.drafter.prefill(self.state, ids, lengths, out.taps)
        for row, taps, n in zip(self.rows, out.taps.cpu(), lengths, strict=True):
            row.taps.append(taps[: n - 1].clone())
        at = torch.arange(len(lengths)), torch.tensor(lengths) - 1
        hidden, taps = out.hidden[at][:, None], out.taps[at][:, None]  # [B, 1, ...]
        logits = self.target.logits(hidden)
        token = _drawn(logits[:, 0], self.objective.law, self.uniforms[:, 0], "target")
        self._take(token[:, None], hidden, logits, taps)

    def round(self) -> None:
        """Draft, take all of it, and let the target read what it has not seen."""
        left = max(row.limit for row in self.rows) - self.made
        tokens = self._draft(min(self.objective.num_draft_tokens, left))  # [B, n]
        unseen = torch.cat([self.last, tokens[:, :-1]], 1)
        out = self.target.forward(unseen, self.cache, self.drafter.taps)
        self.cache.advance([tokens.shape[1]] * len(self.rows))
        self._take(tokens, out.hidden, self.target.logits(out.hidden), out.taps)

    def _draft(self, count: int) -> Tensor:
        """The next `count` tokens of every row, as the target's ids: `[B, count]`."""
        law = draft_law(self.objective.law, self.objective.drafting)
        ids_of, logits = self.drafter.draft_ids, self.drafter.first(self.state)  # [B, V_d]
        tokens = self.last[:, :0]
        for k in range(count):
            if k:
                logits = self.drafter.extend(self.state, tokens[:, -1:])[:, 0]
            if ids_of is None:  # a head may have rows of no token
                logits = logits[:, : self.target.vocab_size]
            column = _drawn(logits, law, self.uniforms[:, self.made + k], "draft")
            new = column if ids_of is None else ids_of[column]  # [B]
            tokens = torch.cat([tokens, new[:, None]], 1)
        return tokens

    def _take(self, tokens: Tensor, hidden: Tensor, logits: Tensor, taps: Tensor) -> None:
        """Take in tokens `[B, n]` with what the target computed where they were decided.

        hidden: `[B, n, h]`; logits: `[B, n, V]`; taps: `[B, n, L*h]`.
        """
        states = hidden.float().cpu(), logits.logsumexp(-1).cpu(), taps.cpu()
        for row, ids, h, z, t in zip(self.rows, tokens.tolist(), *states, strict=True):
            row.take(ids, h, z, t, self.target.eos_ids)
        self.drafter.commit(self.state, tokens, [tokens.shape[1]] * len(self.rows), taps)
        self.last, self.made = tokens[:, -1:], self.made + tokens.shape[1]
        keep = [b for b, row in enumerate(self.rows) if not row.finish]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in keep]
        if keep:
            self.cache.select(keep)
            self.state.select(keep)
            index = torch.tensor(keep, device=tokens.device)
            self.last, self.uniforms = self.last[index], self.uniforms[index]


def _drawn(logits: Tensor, law: Law, u: Tensor, whose: str) -> Tensor:
    """One token a row under the law: `[B, V], [B] -> [B]`."""
    if not torch.isfinite(logits.logsumexp(-1)).all():  # nothing could be drawn
        raise UserError(
            f"the {whose}'s logits are not finite while train.on_policy makes records anew; the "
            "draft's may need a lower train.lr, the target's target.dtype float32"
        )
    return sample(log_probs(logits, law), u)
