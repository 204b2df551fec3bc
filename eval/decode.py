"""Plain and speculative decoding: one loop on one target path, ragged batches, per-row seeds.

Plain decoding is the loop with no draft. Every row draws from a stream of uniforms of its own, laid
out by round, so its output does not depend on its neighbours (ties of rounding aside).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..data.cache import SlabCache
from ..data.gather import Request
from ..data.records import row_uniforms
from ..data.target import Target
from ..data.warp import Law, log_probs, sample
from ..drafters.base import Drafter
from ..train.score import Drafting, draft_law
from . import verify

RULES = {"token": verify.token, "block": verify.block}
"""Acceptance rules above temperature 0; at 0 it is always `verify.greedy`."""


@dataclass(frozen=True)
class DecodeSettings:
    """How a batch is decoded. `num_draft_tokens` 0 decodes plainly.

    drafting: "sampled" draws drafts from the draft's own law, "greedy" takes its most probable
    token; either way the rule is told what the draft was really drawn from.
    """

    max_new_tokens: int
    num_draft_tokens: int
    verifier: str = "token"
    drafting: Drafting = "sampled"

    def __post_init__(self) -> None:
        if self.verifier not in RULES:
            raise UserError(f"unknown verifier '{self.verifier}' (known: {', '.join(RULES)})")


@dataclass
class Output:
    """One reply. rounds: (drafted, accepted) of every round after prefill, in order."""

    ids: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Clock:
    """Seconds inside model forwards and in all, prefill apart."""

    prefill: float = 0.0
    decode: float = 0.0
    target: float = 0.0
    draft_first: float = 0.0
    draft_later: float = 0.0
    rounds: int = 0
    drafting_rounds: int = 0
    later_steps: int = 0

    @property
    def outside(self) -> float:
        """Decode time outside of model forwards: sampling, verification, cache work, Python."""
        return self.decode - self.target - self.draft_first - self.draft_later


@dataclass
class _Row:
    place: int
    uniforms: Tensor
    budget: int
    out: Output

    def emit(self, tokens: Sequence[int], accepted: int, drafted: int, eos: Sequence[int]) -> None:
        """Take a round's tokens up to the first end token or the limit."""
        kept = list(tokens[: self.budget - len(self.out.ids)])
        stop = next((i for i, t in enumerate(kept) if t in eos), None)
        if stop is not None:
            kept, self.out.finish = kept[: stop + 1], "stop"
        self.out.ids += kept
        if not self.out.finish and len(self.out.ids) == self.budget:
            self.out.finish = "length"
        self.out.rounds.append((drafted, min(accepted, len(kept))))


@torch.inference_mode()
def decode(
    target: Target,
    requests: Sequence[Request],
    settings: DecodeSettings,
    drafter: Drafter | None = None,
    clock: Clock | None = None,
) -> list[Output]:
    """Answer `requests`, all under one law, as one batch; outputs in their order.

    Raises `UserError` for an empty prompt, or requests under several laws.
    """
    laws = {r.law for r in requests}
    if len(laws) != 1:
        raise UserError(f"one batch is decoded under one law, got {sorted(x.label for x in laws)}")
    if any(not r.ids for r in requests):
        raise UserError("a prompt without any token cannot be decoded")
    run = _Batch(target, drafter, laws.pop(), settings, clock or Clock(), requests)
    start = run.now()
    run.prefill()
    run.clock.prefill += run.now() - start
    start = run.now()
    while run.rows:
        run.round()
    run.clock.decode += run.now() - start
    return run.outputs


class _Batch:
    """The state of one batch: rows still decoding, both models' caches, the last tokens."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        law: Law,
        settings: DecodeSettings,
        clock: Clock,
        requests: Sequence[Request],
    ):
        self.target, self.drafter, self.law, self.clock = target, drafter, law, clock
        self.gamma = settings.num_draft_tokens if drafter is not None else 0
        self.taps = drafter.taps if drafter is not None else ()
        self.rule = RULES[settings.verifier]
        self.draft_law = draft_law(law, settings.drafting)
        self.requests = requests
        self.outputs = [Output() for _ in requests]
        budget = settings.max_new_tokens
        stream = 1 + budget * (2 * self.gamma + 1)
        self.rows = [
            _Row(i, row_uniforms(r.seed, stream), budget, out)
            for i, (r, out) in enumerate(zip(requests, self.outputs, strict=True))
        ]
        self.capacity = max(len(r.ids) for r in requests) + budget + self.gamma + 1
        self.cache: SlabCache = target.new_cache(len(requests), self.capacity)
        self.state: Any = None
        self.last = torch.empty(0)
        self._sync = target.device.type == "cuda"

    def now(self) -> float:
        if self._sync:
            torch.cuda.synchronize()
        return time.perf_counter()

    def prefill(self) -> None:
        """Run the prompts, draw every row's first token, hand prompts and states to the draft."""
        device = self.target.device
        lengths = [len(r.ids) for r in self.requests]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)  # [B, n]
        for b, request in enumerate(self.requests):
            ids[b, : lengths[b]] = torch.tensor(request.ids)
        ids = ids.to(device)
        out = self.target.forward(ids, self.cache, self.taps)
        self.cache.advance(lengths)
        at = torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device) - 1
        logits = self.target.logits(out.hidden[at])  # [B, V]
        if self.law.temperature == 0:
            first = logits.argmax(-1)
        else:
            first = sample(log_probs(logits, self.law), self._uniforms(0, 1)[:, 0])
        self.last = first  # [B]
        if self.drafter is not None:
            self.state = self.drafter.start(len(lengths), self.capacity)
            self.drafter.prefill(self.state, ids, lengths, out.taps)
            taps = out.taps[at][:, None]  # [B, 1, L*h]
            self.drafter.commit(self.state, first[:, None], [1] * len(lengths), taps)
        for row, token in zip(self.rows, first.tolist(), strict=True):
            row.emit([token], 0, 0, self.target.eos_ids)
            row.out.rounds.clear()  # prefill is no round
        self._drop_finished()

    def round(self) -> None:
        """Draft, verify in one target pass, emit, and drop the rows that are done."""
        drafted = [min(self.gamma, row.budget - len(row.out.ids) - 1) for row in self.rows]
        count = max(drafted)
        base = 1 + len(self.rows[0].out.rounds) * (2 * self.gamma + 1)
        draft, log_q = self._draft(count, base)
        ids = torch.cat([self.last[:, None], draft], 1)  # [B, γ+1]
        start = self.now()
        out = self.target.forward(ids, self.cache, self.taps)
        logits = self.target.logits(out.hidden)  # [B, γ+1, V]
        self.clock.target += self.now() - start
        accepted, following = self._verify(draft, log_q, logits, drafted, base)
        tokens = torch.cat([draft, following[:, None]], 1)  # [B, γ+1]
        tokens.scatter_(1, accepted[:, None], following[:, None])
        counts = [a + 1 for a in accepted.tolist()]
        self.cache.advance(counts)
        if self.drafter is not None:
            self.drafter.commit(self.state, tokens, counts, out.taps)
        self.last = following
        self.clock.rounds += 1
        for row, ids_row, n, d in zip(self.rows, tokens.tolist(), counts, drafted, strict=True):
            row.emit(ids_row[:n], n - 1, d, self.target.eos_ids)
        self._drop_finished()

    def _draft(self, count: int, base: int) -> tuple[Tensor, Tensor | None]:
        """Draft tokens `[B, count]` and, above temperature 0, log q `[B, count, V]`."""
        if self.drafter is None or count == 0:
            none = self.last.new_empty(len(self.rows), 0)
            return none, None if self.law.temperature == 0 else self._log_q(0)
        greedy = self.law.temperature == 0
        log_q = None if greedy else self._log_q(count)
        uniforms = self._uniforms(base, count)  # [B, γ]
        ids_of = self.drafter.draft_ids
        clock, since = self.clock, self.now()

        def draw(logits: Tensor, k: int) -> Tensor:
            nonlocal since
            spent = self.now() - since
            if k == 0:
                clock.draft_first += spent
            else:
                clock.draft_later += spent
                clock.later_steps += 1
            if ids_of is None:
                logits = logits[:, : self.target.vocab_size]
            if greedy:
                chosen = logits.argmax(-1)
            else:
                assert log_q is not None
                law_q = log_probs(logits, self.draft_law)  # [B, V_d]
                chosen = sample(law_q, uniforms[:, k])
                if ids_of is None:
                    log_q[:, k, : law_q.shape[1]] = law_q
                else:
                    log_q[:, k, ids_of] = law_q
            tokens = chosen if ids_of is None else ids_of[chosen]
            since = self.now()
            return tokens

        clock.drafting_rounds += 1
        return self.drafter.propose(self.state, count, draw), log_q

    def _log_q(self, count: int) -> Tensor:
        shape = (len(self.rows), count, self.target.vocab_size)
        return torch.full(shape, -torch.inf, device=self.target.device)

    def _verify(
        self,
        draft: Tensor,
        log_q: Tensor | None,
        logits: Tensor,
        drafted: Sequence[int],
        base: int,
    ) -> tuple[Tensor, Tensor]:
        really = torch.tensor(list(drafted), device=draft.device)
        if log_q is None:
            return verify.greedy(draft, logits.argmax(-1), really)
        u = self._uniforms(base + self.gamma, self.gamma + 1)  # [B, γ+1]
        count = draft.shape[1]
        log_p = log_probs(logits, self.law)
        return self.rule(draft, log_q, log_p, u[:, :count], u[:, self.gamma], really)

    def _uniforms(self, start: int, count: int) -> Tensor:
        parts = [row.uniforms[start : start + count] for row in self.rows]
        return torch.stack(parts).to(self.target.device)  # [B, count]

    def _drop_finished(self) -> None:
        keep = [b for b, row in enumerate(self.rows) if not row.out.finish]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in keep]
        if keep:
            self.cache.select(keep)
            self.last = self.last[torch.tensor(keep, device=self.last.device)]
            if self.drafter is not None:
                self.state.select(keep)
