"""The target answers prompts itself: batched decoding that keeps the states it computed.

Rows leave a batch when they finish and waiting requests take their places, so the batch stays full.
Every row draws from its own stream of uniforms, whatever its neighbours are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..configs.errors import UserError
from .cache import SlabCache
from .records import Record, States, row_uniforms
from .rules import Rules
from .target import Target
from .warp import Law, log_probs, sample

NO_RULES = Rules()


@dataclass(frozen=True)
class Request:
    """One prompt to be answered under one law with a seed of its own.

    stop: texts that end the reply with the token that completes one; rules: what it asks of its
    tokens beyond the law. Records are of requests with neither.
    """

    prompt_id: str
    domain: str
    split: str
    ids: tuple[int, ...]
    law: Law
    seed: int
    stop: tuple[str, ...] = ()
    rules: Rules = NO_RULES


@dataclass
class _Row:
    request: Request
    uniforms: Tensor
    reply: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    log_z: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    finish: str = ""


def request_of(record: Record) -> Request:
    """What was asked to get this record."""
    ids = tuple(record.ids[: record.prompt_len].tolist())
    return Request(record.prompt_id, record.domain, record.split, ids, record.law, record.seed)


@dataclass(frozen=True)
class GatherSettings:
    max_new_tokens: int
    batch_size: int
    taps: tuple[int, ...]
    keep_states: bool
    store_dtype: torch.dtype = torch.float32
    """Of the taps; hidden states and partition stay float32 because p is rebuilt from them."""


@torch.inference_mode()
def answer(
    target: Target,
    requests: Sequence[Request],
    settings: GatherSettings,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Record]:
    """Answer all requests; records come back in the order of `requests`.

    `progress` is called with the number of new tokens of every step. Raises `UserError` for rules
    or stop strings, which records do not keep.
    """
    for request in requests:
        if request.stop or request.rules.any:
            raise UserError(
                f"prompt {request.prompt_id}: stop strings and rules are for decoding, records are "
                "collected under a law alone"
            )
    waiting = sorted(requests, key=lambda r: (len(r.ids), r.prompt_id, r.seed), reverse=True)
    rows: list[_Row] = []
    cache: SlabCache | None = None
    done: dict[int, Record] = {}
    while waiting or rows:
        room = settings.batch_size - len(rows)
        if waiting and room >= max(1, settings.batch_size // 4):
            fresh = [waiting.pop() for _ in range(min(room, len(waiting)))]
            new_rows, new_cache = _prefill(target, fresh, settings)
            rows, cache = [*rows, *new_rows], _joined(cache, new_cache)
            progress(len(fresh))
        assert cache is not None
        _step(target, rows, cache, settings, progress)
        finished = sum(bool(row.finish) for row in rows)
        if finished == len(rows) or finished >= max(1, len(rows) // 4):
            done |= {id(r.request): _record(r, settings) for r in rows if r.finish}
            keep = [i for i, row in enumerate(rows) if not row.finish]
            rows = [rows[i] for i in keep]
            if rows:
                cache.select(keep)
            else:
                cache = None
    return [done[id(request)] for request in requests]


def _joined(cache: SlabCache | None, fresh: SlabCache) -> SlabCache:
    if cache is None:
        return fresh
    cache.join(fresh)
    return cache


def _prefill(
    target: Target, requests: Sequence[Request], settings: GatherSettings
) -> tuple[list[_Row], SlabCache]:
    lengths = [len(r.ids) for r in requests]
    ids = torch.zeros(len(requests), max(lengths), dtype=torch.long)  # [B, n]
    for b, request in enumerate(requests):
        ids[b, : lengths[b]] = torch.tensor(request.ids)
    cache = target.new_cache(len(requests), max(lengths) + settings.max_new_tokens)
    out = target.forward(ids.to(target.device), cache, settings.taps)
    cache.advance(lengths)
    rows = [_Row(r, row_uniforms(r.seed, settings.max_new_tokens)) for r in requests]
    last = out.hidden[torch.arange(len(rows)), torch.tensor(lengths) - 1]  # [B, h]
    if settings.keep_states:
        for b, row in enumerate(rows):
            row.taps.append(out.taps[b, : lengths[b]].clone())
    _draw(target, rows, last, settings)
    return rows, cache


def _step(
    target: Target,
    rows: Sequence[_Row],
    cache: SlabCache,
    settings: GatherSettings,
    progress: Callable[[int], None],
) -> None:
    alive = [not row.finish for row in rows]
    if not any(alive):
        return
    ids = torch.tensor([[row.reply[-1]] for row in rows], device=target.device)  # [B, 1]
    out = target.forward(ids, cache, settings.taps)
    cache.advance([int(a) for a in alive])
    if settings.keep_states:
        for b, row in enumerate(rows):
            if alive[b]:
                row.taps.append(out.taps[b])
    _draw(target, rows, out.hidden[:, -1], settings)
    progress(sum(alive))


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
    for b, row in enumerate(rows):
        if row.finish:
            continue
        if settings.keep_states:
            row.hidden.append(hidden[b].float())
            row.log_z.append(log_z[b])
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
    states = None
    if settings.keep_states:
        states = States(
            hidden=torch.stack(row.hidden).cpu(),
            log_z=torch.stack(row.log_z).cpu(),
            taps=torch.cat(row.taps).to(settings.store_dtype).cpu(),
        )
        _check_finite(states, request.prompt_id)
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
    )


def _check_finite(states: States, prompt_id: str) -> None:
    for name in ("hidden", "log_z", "taps"):
        if not torch.isfinite(getattr(states, name)).all():
            raise _not_finite(f"states ({name})", prompt_id)


def _not_finite(what: str, prompt_id: str) -> UserError:
    return UserError(
        f"the target's {what} for prompt {prompt_id} are not finite; try target.dtype=float32"
    )


@torch.inference_mode()
def recompute_states(
    target: Target, records: Sequence[Record], taps: tuple[int, ...]
) -> Iterator[Record]:
    """The same records with states from one teacher-forced pass, `collect.distributions: none`."""
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
        yield Record(**{**record.__dict__, "states": states})
