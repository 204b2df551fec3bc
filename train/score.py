"""Teacher-forced scores of records: what a drafter's acceptance will be, without decoding.

Valid on samples of exactly the law in question: callers pass records of one law.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..data.records import Record
from ..data.target import Target
from ..data.warp import Law, log_probs
from ..drafters.base import Drafter, TrainBatch
from ..drafters.batch import collate
from ..drafters.distribution import DraftVocabularyP, reply_columns
from . import accepted_length as al
from .chunks import Head, Heads, Unrolled
from .fused import measure

_ROWS = 8

Drafting = Literal["sampled", "greedy"]


def draft_law(law: Law, drafting: Drafting) -> Law:
    """The law that drafts are drawn from: the served one, or the greedy one."""
    return Law(0.0) if drafting == "greedy" else law


def unrolled(
    drafter: Drafter,
    p: DraftVocabularyP,
    batch: TrainBatch,
    steps: int,
    warp: Callable[[Tensor], Tensor],
) -> tuple[Unrolled, list[Head]]:
    """A batch as `fused` takes it, and the head of each step.

    `warp` turns finished draft logits `[n, V_d]` into served ones. Rows of a head beyond the
    tokenizer's ids are left out.
    """
    width = p.target.vocab_size if drafter.draft_ids is None else len(drafter.draft_ids)
    found = drafter.unroll(batch, steps)
    heads = {which: _head(drafter, which, width, warp) for which in {s.head for s in found}}
    x = Unrolled(
        [drafter.head_inputs(step.hidden, step.head) for step in found],
        [step.token for step in found],
        partial(p.rows, batch),
        reply_columns(batch, drafter.draft_ids, width),
        p.width,
    )
    return x, [heads[step.head] for step in found]


def _head(drafter: Drafter, which: int, width: int, warp: Callable[[Tensor], Tensor]) -> Head:
    weight, bias = drafter.head_rows(which)
    if len(weight) > width:
        weight, bias = weight[:width], None if bias is None else bias[:width]
    return Head(weight, bias, lambda raw: warp(drafter.finish_logits(raw)))


@dataclass(frozen=True)
class Conversation:
    """What one record says about the drafter, N = reply tokens after the first.

    prompt_id: of the whole conversation, of which this may be one turn among others; overlap: K x
    (sum over the tokens step k scores of Σ min(p, q), their number); mass: sum of P(V_d) over the N
    tokens; uncaptured: tokens with P(V_d) = 0; excluded: sampled tokens that p as rebuilt gives no
    probability (ties, and tokens beyond the most probable ones where no others are known);
    log_ratio: `[N, γ]` log q/p of the sampled tokens by start and position, 0 beyond the end;
    limit: tokens that decoding was allowed after the first.
    """

    prompt_id: str
    domain: str
    tokens: int
    overlap: tuple[tuple[float, int], ...]
    mass: float
    uncaptured: int
    excluded: int
    log_ratio: Tensor
    limit: int


@torch.no_grad()
def score(
    target: Target,
    drafter: Drafter,
    records: Sequence[Record],
    law: Law,
    steps: int,
    limit: int,
    drafting: Drafting | Law = "sampled",
) -> list[Conversation]:
    """Scores of `records`, all sampled under `law`, for drafts of up to `steps` tokens.

    `limit` is the collection's max_new_tokens. `drafting` may be the very law that drafts are drawn
    from. Replies of one token say nothing and are left out.
    """
    found: dict[str, Conversation] = {}
    longer = sorted((r for r in records if len(r.reply) > 1), key=lambda r: len(r.ids))
    p = DraftVocabularyP(target, drafter.draft_ids, law)
    q_law = drafting if isinstance(drafting, Law) else draft_law(law, drafting)
    for start in range(0, len(longer), _ROWS):
        part = longer[start : start + _ROWS]
        batch = collate(part, sorted({r.domain for r in part})).to(target.device)
        x, heads = unrolled(drafter, p, batch, steps, partial(_warped, law=q_law))
        for record, conversation in zip(
            part, _split(x, heads, batch, part, drafter.one_pass, steps, limit - 1), strict=True
        ):
            found[record.key] = conversation
    return [found[r.key] for r in records if r.key in found]


def _warped(logits: Tensor, law: Law) -> Tensor:
    """`log_probs`, but rows that propose nothing (-inf alone) stay as they are."""
    silent = (logits == -torch.inf).all(-1, keepdim=True)
    return log_probs(logits, law).masked_fill(silent, -torch.inf)


def _split(
    x: Unrolled,
    heads: Heads,
    batch: TrainBatch,
    records: Sequence[Record],
    one_pass: bool,
    steps: int,
    limit: int,
) -> list[Conversation]:
    """A batch's figures, row by row."""
    measured = measure(x, heads)
    length = batch.reply_lens - 1
    index, inside = al.start_index(batch.first, length, steps)
    by_position = al.by_position(measured.log_ratio, steps, one_pass)
    ratio = al.from_tokens(by_position, index, inside).cpu()  # [B, N, γ]
    rows = len(records)
    row = torch.arange(rows).repeat_interleave(batch.reply_lens.cpu())  # [R]

    def sums(values: Tensor, token: Tensor) -> list[float]:
        total = torch.zeros(rows, dtype=torch.float64)
        return total.index_add_(0, row[token.cpu()], values.double().cpu()).tolist()

    overlap = [sums(o, t) for t, o in zip(x.token, measured.overlap, strict=True)]
    counts = [sums(torch.ones(len(t)), t) for t in x.token]
    mass, none = (sums(m, x.token[0]) for m in (measured.mass, measured.mass == 0))
    excluded = sums(measured.excluded, torch.arange(len(row)))
    return [
        Conversation(
            prompt_id=record.prompt_id,
            domain=record.domain,
            tokens=int(length[b]),
            overlap=tuple((o[b], int(n[b])) for o, n in zip(overlap, counts, strict=True)),
            mass=mass[b],
            uncaptured=int(none[b]),
            excluded=int(excluded[b]),
            log_ratio=ratio[b, : int(length[b])].clone(),
            limit=limit,
        )
        for b, record in enumerate(records)
    ]


@dataclass(frozen=True)
class Expected:
    """Decoding's expected course: rounds `[B]` of each conversation, its tokens `[B]`, and by
    draft position the rounds that draft it and those that accept it, `[B, γ]` each."""

    tokens: Tensor
    rounds: Tensor
    accepted: Tensor
    attempts: Tensor

    @property
    def survival(self) -> tuple[float, ...]:
        """S_k, the share of the rounds drafting position k that accept it."""
        return tuple((self.accepted.sum(0) / self.attempts.sum(0).clamp_min(1e-12)).tolist())

    @property
    def tokens_per_round(self) -> float:
        return float(al.tokens_per_round(self.rounds, self.tokens))


def expected(
    conversations: Sequence[Conversation], num_draft_tokens: int, verifier: str
) -> Expected:
    """What decoding with `num_draft_tokens` and `verifier` ("token" or "block") would do.

    At T = 0, and for greedy drafts, both verifiers are the same.
    """
    m, length = survivals(conversations, num_draft_tokens, verifier)
    rounds, weights = al.expected_rounds(m, length)
    budget = torch.tensor([c.limit for c in conversations])
    drafted = al.drafted_tokens(length, budget, m.shape[1], num_draft_tokens)
    accepted, attempts = al.survival(m, weights, length, drafted)
    return Expected(length.double(), rounds, accepted, attempts)


def survivals(
    conversations: Sequence[Conversation], num_draft_tokens: int, verifier: str
) -> tuple[Tensor, Tensor]:
    """P(A >= k) of a round by its start, `[B, N, γ]`, and how many starts there are, `[B]`."""
    length = torch.tensor([c.tokens for c in conversations])  # [B]
    longest = int(length.max())
    ratio = torch.zeros(len(conversations), longest, num_draft_tokens, dtype=torch.float64)
    for b, c in enumerate(conversations):
        ratio[b, : c.tokens] = c.log_ratio[:, :num_draft_tokens]
    m = al.survival_block(ratio) if verifier == "block" else al.survival_token(ratio)
    return m, length
