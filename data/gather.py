"""The target answers prompts itself: batched decoding that keeps the states it computed.

Rows leave a batch when they finish and waiting requests take their places, so the batch stays full.
Every row draws from its own stream of uniforms, whatever its neighbours are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..configs.errors import UserError
from .cache import SlabCache
from .records import Record, States, Top, row_uniforms
from .rules import Rules
from .shards import finite
from .target import Target
from .top import top_of
from .warp import Law, log_probs, sample

NO_RULES = Rules()
Keep = Literal["hidden", "top", "none"]


@dataclass(frozen=True)
class Request:
    """One prompt to be answered under one law with a seed of its own.

    stop: texts that end the reply with the token that completes one; rules: what it asks of its
    tokens beyond the law. Records are of requests with neither. turn: which reply of the
    conversation is asked for, from 0.
    """

    prompt_id: str
    domain: str
    split: str
    ids: tuple[int, ...]
    law: Law
    seed: int
    stop: tuple[str, ...] = ()
    rules: Rules = NO_RULES
    turn: int = 0


After = Callable[[Record], Request | None]
"""What follows a reply in its conversation: the request of the next turn, or None."""


def last_turn(record: Record) -> Request | None:
    """Conversations of one reply."""
    return None


class Backend(Protocol):
    """Whatever lets the target answer: this process, or servers."""

    def answer(
        self,
        requests: Sequence[Request],
        settings: "GatherSettings",
        progress: Callable[[int], None],
        after: After,
    ) -> list[Record]:
        """Records of all requests and of those that follow them, by request, then by turn."""
        ...


@dataclass
class _Row:
    request: Request
    uniforms: Tensor
    first: int
    """Place of the conversation's first request among all."""
    reply: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    log_z: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    finish: str = ""
    settled: bool = False
    """Its record has been made."""


def request_of(record: Record) -> Request:
    """What was asked to get this record."""
    ids = tuple(record.ids[: record.prompt_len].tolist())
    return Request(
        record.prompt_id, record.domain, record.split, ids, record.law, record.seed,
        turn=record.turn,
    )  # fmt: skip


@dataclass(frozen=True)
class GatherSettings:
    max_new_tokens: int
    batch_size: int
    taps: tuple[int, ...]
    keep: Keep
    top: int = 0
    """Tokens kept of each distribution, where top ones are."""


def refuse_rules(requests: Sequence[Request]) -> None:
    """Raises `UserError` for rules or stop strings, which records do not keep."""
    for request in requests:
        if request.stop or request.rules.any:
            raise UserError(
                f"prompt {request.prompt_id}: stop strings and rules are for decoding, records are "
                "collected under a law alone"
            )


@dataclass(frozen=True)
class TargetBackend:
    """The target of this process."""

    target: Target

    def answer(
        self,
        requests: Sequence[Request],
        settings: GatherSettings,
        progress: Callable[[int], None],
        after: After,
    ) -> list[Record]:
        return answer(self.target, requests, settings, progress, after)


@torch.inference_mode()
def answer(
    target: Target,
    requests: Sequence[Request],
    settings: GatherSettings,
    progress: Callable[[int], None] = lambda tokens: None,
    after: After = last_turn,
) -> list[Record]:
    """Answer all requests and what follows them; records come back by request, then by turn.

    `progress` is called with the number of new tokens of every step. Raises `UserError` for rules
    or stop strings.
    """
    refuse_rules(requests)
    waiting = sorted(
        ((request, place) for place, request in enumerate(requests)),
        key=lambda entry: (len(entry[0].ids), entry[0].prompt_id, entry[0].seed),
        reverse=True,
    )
    batch = _Batch(target, settings)
    done: dict[tuple[int, int], Record] = {}
    while waiting or batch.rows:
        progress(batch.fill(waiting))
        progress(batch.step())
        for row in batch.newly_finished():
            record = done[row.first, row.request.turn] = _record(row, settings)
            following = after(record)
            if following is not None:  # it goes on at once: its conversation waits for nothing
                waiting.append((following, row.first))
        if not waiting:
            batch.shrink()
    return [done[place] for place in sorted(done)]


@dataclass
class _Batch:
    """Rows that are decoded together; a finished row's place is taken by the next request."""

    target: Target
    settings: GatherSettings
    rows: list[_Row] = field(default_factory=list)
    cache: SlabCache | None = None

    def fill(self, waiting: list[tuple[Request, int]]) -> int:
        """Start as many of the last of `waiting` as there is room for; their first tokens."""
        ended = [i for i, row in enumerate(self.rows) if row.finish]
        size = self.settings.batch_size
        room = size - len(self.rows) + len(ended)
        if not waiting or room < max(1, size // 8):  # prefill of a few rows at a time is slow
            return 0
        fresh = [waiting.pop() for _ in range(min(room, len(waiting)))]
        rows, cache = _prefill(self.target, fresh, self.settings)
        places = ended[: len(rows)]
        for place, row in zip(places, rows, strict=False):
            self.rows[place] = row
        if self.cache is None:
            self.rows, self.cache = rows, cache
            return len(rows)
        self.cache.put(places, cache)
        if len(rows) > len(places):
            cache.select(range(len(places), len(rows)))
            self.cache.join(cache)
            self.rows += rows[len(places) :]
        return len(rows)

    def step(self) -> int:
        """One token for every unfinished row; how many that are."""
        alive = [not row.finish for row in self.rows]
        if not any(alive):
            return 0
        assert self.cache is not None
        last = [[row.reply[-1]] for row in self.rows]
        ids = torch.tensor(last, device=self.target.device)  # [B, 1]
        out = self.target.forward(ids, self.cache, self.settings.taps)
        self.cache.advance([int(a) for a in alive])
        if self.settings.keep == "hidden":
            for b, row in enumerate(self.rows):
                if alive[b]:
                    row.taps.append(out.taps[b])
        _draw(self.target, self.rows, out.hidden[:, -1], self.settings)
        return sum(alive)

    def newly_finished(self) -> list[_Row]:
        """Rows that have ended since the last call."""
        found = [row for row in self.rows if row.finish and not row.settled]
        for row in found:
            row.settled = True
        return found

    def shrink(self) -> None:
        """Drop finished rows, once they are a good part of the batch: dropping copies the rest."""
        keep = [i for i, row in enumerate(self.rows) if not row.finish]
        if keep and len(keep) > 0.75 * len(self.rows):
            return
        self.rows = [self.rows[i] for i in keep]
        if self.rows and self.cache is not None:
            self.cache.select(keep)
        else:
            self.cache = None


def _prefill(
    target: Target, requests: Sequence[tuple[Request, int]], settings: GatherSettings
) -> tuple[list[_Row], SlabCache]:
    lengths = [len(r.ids) for r, _ in requests]
    ids = torch.zeros(len(requests), max(lengths), dtype=torch.long)  # [B, n]
    for b, (request, _) in enumerate(requests):
        ids[b, : lengths[b]] = torch.tensor(request.ids)
    cache = target.new_cache(len(requests), max(lengths) + settings.max_new_tokens)
    out = target.forward(ids.to(target.device), cache, settings.taps)
    cache.advance(lengths)
    rows = [_Row(r, row_uniforms(r.seed, settings.max_new_tokens), at) for r, at in requests]
    last = out.hidden[torch.arange(len(rows)), torch.tensor(lengths) - 1]  # [B, h]
    if settings.keep == "hidden":
        for b, row in enumerate(rows):
            row.taps.append(out.taps[b, : lengths[b]].clone())
    _draw(target, rows, last, settings)
    return rows, cache


def _draw(target: Target, rows: Sequence[_Row], hidden: Tensor, settings: GatherSettings) -> None:
    """Draw the next token of every unfinished row from its head input `[B, h]`."""
    logits = target.logits(hidden)  # [B, V]
    log_z = logits.logsumexp(-1)  # [B]
    if not torch.isfinite(log_z).all():  # no token could be drawn
        wrong = [row for row, z in zip(rows, log_z, strict=True) if not torch.isfinite(z)]
        raise _not_finite("logits", wrong[0].request.prompt_id)
    tokens = draw_tokens(
        logits,
        [row.request.law for row in rows],
        torch.stack([row.uniforms[min(len(row.reply), len(row.uniforms) - 1)] for row in rows]),
    )
    top = top_of(logits, settings.top) if settings.keep == "top" else None
    for b, row in enumerate(rows):
        if row.finish:
            continue
        if settings.keep == "hidden":
            row.hidden.append(hidden[b].float())
            row.log_z.append(log_z[b])
        if top is not None:
            row.top.append((top.ids[b], top.log_probs[b]))
        row.reply.append(tokens[b])
        if tokens[b] in target.eos_ids:
            row.finish = "stop"
        elif len(row.reply) == settings.max_new_tokens:
            row.finish = "length"


def draw_tokens(logits: Tensor, laws: Sequence[Law], uniforms: Tensor) -> list[int]:
    """One token per row of logits `[B, V]`, each under its own law with its own uniform `[B]`."""
    tokens = torch.empty(len(laws), dtype=torch.long, device=logits.device)
    for law in dict.fromkeys(laws):
        index = torch.tensor([b for b, other in enumerate(laws) if other == law])
        if law.temperature == 0:
            tokens[index] = logits[index].argmax(-1)
        else:
            u = uniforms[index].to(logits.device)
            tokens[index] = sample(log_probs(logits[index], law), u)
    return [int(t) for t in tokens]


def _record(row: _Row, settings: GatherSettings) -> Record:
    request = row.request
    states, top = None, None
    if settings.keep == "hidden":
        states = States(
            hidden=torch.stack(row.hidden).cpu(),
            log_z=torch.stack(row.log_z).cpu(),
            taps=torch.cat(row.taps).cpu(),
        )
        _check_finite(states, request.prompt_id)
    if settings.keep == "top":
        ids, log_probs = zip(*row.top, strict=True)
        top = Top(torch.stack(ids).cpu(), torch.stack(log_probs).cpu())
    return Record(
        prompt_id=request.prompt_id,
        domain=request.domain,
        split=request.split,
        law=request.law,
        seed=request.seed,
        finish=row.finish,
        ids=torch.tensor([*request.ids, *row.reply]),
        prompt_len=len(request.ids),
        states=states,
        turn=request.turn,
        top=top,
    )


def _check_finite(states: States, prompt_id: str) -> None:
    for name in ("hidden", "log_z", "taps"):
        if not finite(getattr(states, name)):
            raise _not_finite(f"states ({name})", prompt_id)


def _not_finite(what: str, prompt_id: str) -> UserError:
    return UserError(
        f"the target's {what} for prompt {prompt_id} are not finite; try target.dtype=float32"
    )


@torch.inference_mode()
def recompute_states(
    target: Target,
    records: Sequence[Record],
    taps: tuple[int, ...],
) -> Iterator[Record]:
    """The same records with states from one teacher-forced pass."""
    lengths = [len(r.ids) - 1 for r in records]
    ids = torch.zeros(len(records), max(lengths), dtype=torch.long)  # [B, n]
    for b, record in enumerate(records):
        ids[b, : lengths[b]] = record.ids[:-1]
    cache = target.new_cache(len(records), max(lengths))
    out = target.forward(ids.to(target.device), cache, taps)
    for b, record in enumerate(records):
        hidden = out.hidden[b, record.prompt_len - 1 : lengths[b]]  # [R, h]
        states = States(
            hidden=hidden.float().cpu(),
            log_z=target.logits(hidden).logsumexp(-1).cpu(),
            taps=out.taps[b, : lengths[b]].cpu(),
        )
        _check_finite(states, record.prompt_id)
        yield replace(record, states=states)
