"""Plain and speculative decoding: one loop on one target path, ragged batches, per-row seeds.

Plain decoding is the loop with no draft. Rows may differ in everything a request says; each draws
from a stream of its own, so its output does not depend on its neighbours (ties of rounding aside,
and policies that look at the size of the batch).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law, row_log_probs
from ..drafters.base import Drafter
from ..train.score import Drafting, draft_law
from . import verify
from .draft import Clock, Drafted, Proposer, now
from .draws import Draws, Streams
from .gamma import Policy
from .rows import Output, Row, apply_rules, ruled
from .tree import TreeShape, check_sampled_shape
from .verify_tree import greedy_tree
from .verify_tree import tree as verify_tree

RULES: dict[str, verify.Rule] = {"token": verify.token, "block": verify.block}
"""Acceptance rules above temperature 0; at 0 it is always `verify.greedy`."""


@dataclass(frozen=True)
class DecodeSettings:
    """How a batch is decoded. `num_draft_tokens` 0 decodes plainly.

    drafting: "sampled" draws drafts from the draft's own law, "greedy" takes its most probable
    token; either way the rule is told what the draft was really drawn from. policy: ends drafts
    before `num_draft_tokens`, which is its limit. tree: drafts trees no deeper than that, of
    probable tokens (a `TreeShape`) or of so many sampled children at each depth (a tuple); they
    are verified by recursive rejection, whatever the verifier for chains. together: the batch stops
    when the first of its rows ends, so that every round was of all rows; for timing.
    """

    max_new_tokens: int
    num_draft_tokens: int
    verifier: str = "block"
    drafting: Drafting = "sampled"
    policy: Policy | None = None
    tree: TreeShape | tuple[int, ...] | None = None
    together: bool = False

    def __post_init__(self) -> None:
        if self.verifier not in RULES:
            raise UserError(f"unknown verifier '{self.verifier}' (known: {', '.join(RULES)})")
        if self.policy is not None and self.tree is not None:
            raise UserError("a draft length policy is for chains, a tree has its own shape")
        if isinstance(self.tree, tuple):
            check_sampled_shape(self.tree)

    @property
    def nodes(self) -> int:
        """Most tokens that a round submits."""
        if isinstance(self.tree, TreeShape):
            return self.tree.budget
        if self.tree is not None:
            return sum(math.prod(self.tree[: d + 1]) for d in range(len(self.tree)))
        return self.num_draft_tokens


@torch.inference_mode()
def decode(
    target: Target,
    requests: Sequence[Request],
    settings: DecodeSettings,
    drafter: Drafter | None = None,
    clock: Clock | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    draws: Draws | None = None,
) -> list[Output]:
    """Answer `requests` as one batch; outputs in their order.

    `on_tokens(request index, ids)` is called with every row's new tokens as they become final.
    `draws` replaces the rows' own streams of chance, for proofs. Raises `UserError` for a prompt
    that is empty or leaves no room in the target's context.
    """
    if any(not request.ids for request in requests):
        raise UserError("a prompt without any token cannot be decoded")
    run = _Batch(target, drafter, settings, clock or Clock(), requests, on_tokens, draws)
    start = now(target.device)
    run.prefill()
    run.clock.prefill += now(target.device) - start
    start = now(target.device)
    while run.rows and not (settings.together and len(run.rows) < len(requests)):
        run.round()
    run.clock.decode += now(target.device) - start
    return run.outputs


def _budget(target: Target, request: Request, settings: DecodeSettings) -> int:
    """Tokens the reply may have: the limit, or what the target's context leaves."""
    limit = target.max_positions
    left = settings.max_new_tokens if limit is None else limit - len(request.ids)
    if left < 1:
        raise UserError(
            f"prompt {request.prompt_id} has {len(request.ids)} tokens, the target's context "
            f"holds {limit}; a prompt must leave room for a reply"
        )
    return min(settings.max_new_tokens, left)


class _Batch:
    """The state of one batch: rows still decoding, the target's cache, the last tokens."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: DecodeSettings,
        clock: Clock,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], None] | None,
        draws: Draws | None,
    ):
        self.target, self.settings, self.clock, self.on_tokens = target, settings, clock, on_tokens
        self.rows = [
            Row(i, r, _budget(target, r, settings), target) for i, r in enumerate(requests)
        ]
        self.outputs = [row.out for row in self.rows]
        self.rule = RULES[settings.verifier]
        seeds = [r.seed for r in requests]
        self.draws: Draws = Streams(seeds, target.device) if draws is None else draws
        gamma = settings.num_draft_tokens if drafter is not None else 0
        most = settings.nodes if gamma else 0
        capacity = max(len(row.request.ids) + row.budget for row in self.rows) + most + 1
        self.cache: SlabCache = target.new_cache(len(requests), capacity)
        self.draft: Proposer | None = None
        if drafter is not None and gamma:
            self.draft = Proposer(drafter, target, len(requests), capacity, clock)
        self.taps = drafter.taps if drafter is not None and self.draft is not None else ()
        self.last = torch.empty(0)  # [B]
        self._set_laws()

    def _set_laws(self) -> None:
        self.laws = [row.request.law for row in self.rows]
        self.draft_laws = [draft_law(law, self.settings.drafting) for law in self.laws]
        self.greedy = all(law.temperature == 0 for law in self.laws)

    def prefill(self) -> None:
        """Run the prompts, draw every row's first token, hand prompts and states to the draft."""
        device = self.target.device
        lengths = [len(row.request.ids) for row in self.rows]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)  # [B, n]
        for b, row in enumerate(self.rows):
            ids[b, : lengths[b]] = torch.tensor(row.request.ids)
        ids = ids.to(device)
        out = self.target.forward(ids, self.cache, self.taps)
        self.cache.advance(lengths)
        at = torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device) - 1
        logits = self.target.logits(out.hidden[at])  # [B, V]
        logits = apply_rules(self.rows, logits[:, None], lambda b, i: [])[:, 0]
        if self.greedy:
            self.last = logits.argmax(-1)  # [B]
        else:
            law = row_log_probs(logits, self.laws).exp()
            everywhere = torch.ones(len(lengths), dtype=torch.bool, device=device)
            self.last = self.draws.categorical(law, everywhere)
        if self.draft is not None:
            self.draft.prefill(ids, lengths, out.taps)
            self.draft.commit(self.last[:, None], [1] * len(lengths), out.taps[at][:, None], None)
        for row, token in zip(self.rows, self.last.tolist(), strict=True):
            self._tell(row, row.emit([token]))  # prefill is no round
        self._drop_finished()

    def round(self) -> None:
        """Draft, verify in one target pass, emit, and drop the rows that are done."""
        drafted = self._drafted()
        ids = torch.cat([self.last[:, None], drafted.tokens], 1)  # [B, N+1]
        since, branch = list(self.cache.lengths), None
        if drafted.parents is not None:  # the last emitted token is the root
            branch = Branch(since, pad(drafted.parents + 1, (1, 0), value=-1))
        start = now(self.target.device)
        out = self.target.forward(ids, self.cache, self.taps, branch)
        logits = self.target.logits(out.hidden)  # [B, N+1, V]
        spent = now(self.target.device) - start
        self.clock.target += spent
        self.clock.passes.append((ids.shape[1], spent))
        path, accepted, following = self._verify(drafted, logits)
        tokens = torch.cat([drafted.tokens.gather(1, path), following[:, None]], 1)  # [B, D+1]
        tokens.scatter_(1, accepted[:, None], following[:, None])
        counts = [a + 1 for a in accepted.tolist()]
        taps = out.taps
        if branch is None:
            self.cache.advance(counts)
        else:
            kept = pad(path + 1, (1, 0))  # [B, D+1], among root and nodes
            self.cache.keep(since, kept, counts)
            taps = taps.gather(1, kept[..., None].expand(-1, -1, taps.shape[-1]))
        if self.draft is not None:
            fed = None
            if drafted.fed is not None:
                fed = pad(drafted.fed.gather(1, path), (0, 1), value=-1)  # [B, D+1]
            self.draft.commit(tokens, counts, taps, fed)
        self.last = following
        self.clock.rounds += 1
        depth = drafted.depth.tolist()
        for row, ids_row, n, d in zip(self.rows, tokens.tolist(), counts, depth, strict=True):
            kept_ids = row.emit(ids_row[:n])
            row.out.rounds.append((d, min(n - 1, len(kept_ids))))
            self._tell(row, kept_ids)
        self._drop_finished()

    def _tell(self, row: Row, kept: list[int]) -> None:
        if self.on_tokens is not None and kept:
            self.on_tokens(row.place, kept)

    def _drafted(self) -> Drafted:
        if self.draft is not None:
            room = [self.draft.room(row, self.settings.num_draft_tokens) for row in self.rows]
            # Budgets and contexts only shrink: once none is left to draft, none ever will be.
            if max(room) > 0:
                return self._propose(self.draft, room)
        rows, device = len(self.rows), self.target.device
        none = torch.zeros(rows, 0, dtype=torch.long, device=device)
        no_law = (
            None if self.greedy else torch.zeros(rows, 0, self.target.vocab_size, device=device)
        )
        return Drafted(none, torch.zeros(rows, dtype=torch.long, device=device), no_law)

    def _propose(self, draft: Proposer, room: list[int]) -> Drafted:
        how = self.settings
        if how.tree is None:
            draws = None if self.greedy else self.draws
            return draft.chain(self.rows, room, self.draft_laws, how.policy, draws)
        laws = self.draft_laws
        if isinstance(how.tree, TreeShape):  # a greedy law would leave one probable token
            laws = [law if law.temperature else Law() for law in laws]
        return draft.tree(self.rows, room, laws, how.tree, self.draws)

    def _verify(self, drafted: Drafted, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The accepted nodes' path `[B, D]` (of a chain all), their number, what follows: `[B]`."""
        tokens, count = drafted.tokens, drafted.count
        size = count.tolist() if ruled(self.rows) else []
        logits = apply_rules(
            self.rows, logits, lambda b, i: drafted.path_to(b, i - 1) if i <= size[b] else None
        )
        if drafted.parents is not None:
            if self.greedy:
                found = greedy_tree(tokens, drafted.parents, logits.argmax(-1), count)
            else:
                log_p = row_log_probs(logits, self.laws)  # [B, N+1, V]
                found = verify_tree(
                    tokens, drafted.parents, drafted.log_q, log_p, count, self.draws
                )
            path, accepted, following = found
            return path.clamp_min(0), accepted, following
        path = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.greedy:
            return path, *verify.greedy(tokens, logits.argmax(-1), count)
        assert drafted.log_q is not None
        log_p = row_log_probs(logits, self.laws)  # [B, γ+1, V]
        return path, *self.rule(tokens, drafted.log_q, log_p, count, self.draws)

    def _drop_finished(self) -> None:
        keep = [b for b, row in enumerate(self.rows) if not row.out.finish]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[b] for b in keep]
        if keep:
            self._set_laws()
            self.draws.select(keep)
            self.cache.select(keep)
            self.last = self.last[torch.tensor(keep, device=self.last.device)]
            if self.draft is not None:
                self.draft.select(keep)
