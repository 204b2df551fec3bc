"""What an engine should count: our estimator under its way of drafting, and how far it is off.

Engines accept token by token. What they count beyond the end of a reply nobody knows from its
record, so a position's share has two bounds: nothing accepted there, and all that could be. Shares
are of all rounds, whether or not a round drafted that many tokens, and so mean the same everywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...data.gather import recompute_states
from ...data.records import Record
from ...data.target import Target
from ...train import accepted_length as al
from ...train.score import Conversation, survivals
from ..intervals import standard_errors_apart

NEAR_TIES = 0.03
"""Share of the rounds that may come out otherwise at T = 0: where two tokens tie within rounding,
engines may draft the other one."""
FEW = 5.0
"""Tokens that are expected to be accepted, from which on none at all is no chance."""

SEVERAL = 4
"""Greedy replies that do not all part from the target's by rounding alone."""

Rows = NDArray[np.float64]
Judge = Callable[[Sequence[Record]], Rows]
"""log p of replies, each summed over its tokens."""


@dataclass(frozen=True)
class Rounds:
    """Figures of B conversations: ids; tokens after the first and rounds, `[B]` each; and rounds
    that accepted k tokens or more, at least and at most, `[B, γ]` each."""

    ids: tuple[str, ...]
    tokens: Rows
    rounds: Rows
    least: Rows
    most: Rows

    def of(self, chosen: NDArray[np.bool_]) -> "Rounds":
        """Those of some conversations."""
        ids = tuple(i for i, kept in zip(self.ids, chosen, strict=True) if kept)
        return Rounds(
            ids, self.tokens[chosen], self.rounds[chosen], self.least[chosen], self.most[chosen]
        )


def foretold(
    conversations: Sequence[Conversation], num_draft_tokens: int, overruns: bool
) -> Rounds:
    """What an engine should count; `overruns` as an `Engine` has it."""
    m, length = survivals(conversations, num_draft_tokens, "token")
    rounds, weights = al.expected_rounds(m, length)
    budget = length.new_tensor([c.limit for c in conversations])
    if overruns:
        budget = budget + num_draft_tokens
    drafted = al.drafted_tokens(length, budget, m.shape[1], num_draft_tokens)
    least, _ = al.survival(m, weights, length, drafted)
    most, _ = al.survival(m, weights, length + num_draft_tokens, drafted)
    return Rounds(
        tuple(c.prompt_id for c in conversations),
        length.double().numpy(), rounds.numpy(), least.numpy(), most.numpy(),
    )  # fmt: skip


def deviations(measured: Rounds, expected: Rounds, same: NDArray[np.bool_] | None) -> list[str]:
    """In what the measured figures cannot be what is expected; one phrase each.

    `same` [B] at T = 0: the conversations whose replies are those of the records. Their rounds
    leave nothing to chance. Otherwise, and where fewer than half are the same, figures are compared
    in the mean over conversations.
    """
    if measured.rounds.sum() == 0:
        return ["it drafted nothing"]
    if measured.most.sum() == 0 and expected.least.sum() >= FEW:
        return [f"it accepted no token where {expected.least.sum():.0f} are expected"]
    if same is None:
        return _in_the_mean(measured, expected)
    found = _exact(measured.of(same), expected.of(same))
    if 2 * same.sum() < len(same):
        found += _in_the_mean(measured, expected)
    if len(same) >= SEVERAL and not same.any():
        found.append(
            f"none of its {len(same)} greedy replies is the target's own: it serves another "
            "target, or one of another precision"
        )
    return found


def _exact(measured: Rounds, expected: Rounds) -> list[str]:
    found, mine = [], measured.rounds.sum()
    spare = max(1.0, NEAR_TIES * expected.rounds.sum())
    if abs(mine - expected.rounds.sum()) > spare:
        found.append(f"it took {mine:.0f} rounds where {expected.rounds.sum():.0f} are expected")
    for k in range(measured.least.shape[1]):
        count, low, high = (
            float(a[:, k].sum()) for a in (measured.most, expected.least, expected.most)
        )
        if not low - spare <= count <= high + spare:
            found.append(
                f"{count:.0f} rounds accepted position {k + 1} where {low:.0f} to {high:.0f} are "
                "expected"
            )
    return found


def _in_the_mean(measured: Rounds, expected: Rounds) -> list[str]:
    ids = (measured.ids, expected.ids)
    if len({*measured.ids, *expected.ids}) < 2:
        return []
    found = []
    rows = [np.stack([r.tokens, r.rounds], 1) for r in (measured, expected)]
    values = [r[:, 0].sum() / r[:, 1].sum() for r in rows]
    if _apart(rows[0], rows[1], ids):
        found.append(f"τ is {values[0]:.2f} where {values[1]:.2f} is expected")
    for k in range(measured.least.shape[1]):
        mine = np.stack([measured.most[:, k], measured.rounds], 1)
        low, high = (
            np.stack([bound[:, k], expected.rounds], 1) for bound in (expected.least, expected.most)
        )
        share, least, most = (float(r[:, 0].sum() / r[:, 1].sum()) for r in (mine, low, high))
        bound = low if share < least else high
        if not least <= share <= most and _apart(mine, bound, ids):
            found.append(
                f"the share of rounds that accept position {k + 1} is {share:.2f} where "
                f"{least:.2f} to {most:.2f} is expected"
            )
    return found


def _apart(one: Rows, two: Rows, ids: tuple[Sequence[str], Sequence[str]]) -> bool:
    far, most = standard_errors_apart(one, two, ids)
    return far > most


@torch.inference_mode()
def log_probs(target: Target, records: Sequence[Record]) -> Rows:
    """Σ log p of the tokens of each reply `[B]`, at its law's temperature and not truncated."""
    found = []
    for record in records:
        (told,) = recompute_states(target, [record], ())
        assert told.states is not None
        logits = target.logits(told.states.hidden.to(target.device)).float()  # [R, V]
        log_p = (logits / record.law.temperature).log_softmax(-1).cpu()
        found.append(float(log_p.gather(1, record.reply[:, None]).sum()))
    return np.array(found)


def law_figures(
    drawn: Sequence[Record], told: Sequence[Record], judge: Judge
) -> tuple[dict[str, Any], list[str]]:
    """Mean log p of a token in an engine's replies, and in the target's own; what is wrong."""
    rows = [
        np.stack([judge(side), np.array([float(len(r.reply)) for r in side])], 1)
        for side in (told, drawn)
    ]
    ids = [[r.prompt_id for r in side] for side in (told, drawn)]
    mine, theirs = (float(r[:, 0].sum() / r[:, 1].sum()) for r in rows)
    odd = []
    if len(set(ids[0])) > 1 and _apart(rows[0], rows[1], (ids[0], ids[1])):
        odd.append(
            f"the mean log-probability of its tokens is {mine:.2f} where {theirs:.2f} is expected: "
            "it does not draw from the target's law"
        )
    return {"measured": mine, "expected": theirs}, odd
