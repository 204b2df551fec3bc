"""What an engine that drafts whole rounds to the end should count, by our own decoding."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode


@dataclass(frozen=True)
class Counted:
    """A reply, how it ended, and what every round drafted and accepted."""

    ids: list[int]
    finish: str
    rounds: list[tuple[int, int]]


def counted(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    limit: int,
    num_draft_tokens: int,
    drafting: Literal["sampled", "greedy"] = "sampled",
) -> list[Counted]:
    """Replies that go on beyond their end, and are cut there with the rounds that reached it."""
    endless = copy.copy(target)
    endless.eos_ids = ()
    how = DecodeSettings(limit + num_draft_tokens, num_draft_tokens, "token", drafting)
    outputs = decode(endless, [replace(r) for r in requests], how, drafter)
    found = []
    for output in outputs:
        known, rounds = 1, []
        while known < limit and not set(output.ids[:known]) & set(target.eos_ids):
            rounds.append(output.rounds[len(rounds)])
            known += rounds[-1][1] + 1
        ends = [i for i, token in enumerate(output.ids[:limit]) if token in target.eos_ids]
        reply = output.ids[: ends[0] + 1] if ends else output.ids[:limit]
        found.append(Counted(reply, "stop" if ends else "length", rounds))
    return found
