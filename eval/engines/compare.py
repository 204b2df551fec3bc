"""An engine's answers as the figures of a report, beside what was expected of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...data.records import Record
from ..cells import Cell
from ..intervals import Interval, ratio_interval, speedup_interval
from .counters import NOTHING, Counts
from .expected import Judge, Rounds, deviations, law_figures


@dataclass(frozen=True)
class Answer:
    """A reply of the engine, the rounds behind it, and its seconds."""

    record: Record
    counts: Counts
    seconds: float

    def rounds(self, overruns: bool) -> int:
        """All rounds behind the first token, those without a draft included.

        An engine that drafts to the end has none of those. Another has them only at the limit,
        where all that is accepted is also said.
        """
        if overruns or self.record.finish == "stop":
            return self.counts.rounds
        return len(self.record.reply) - 1 - self.counts.accepted


def cell_row(
    cell: Cell,
    answers: Sequence[Answer],
    expected: Rounds,
    overruns: bool,
    judge: Judge,
    bootstrap: int,
) -> dict[str, Any]:
    """A cell's acceptance beside the expected one; `overruns` as an `Engine` has it."""
    gamma, counts = expected.least.shape[1], sum((a.counts for a in answers), NOTHING)
    reached = [(a.counts.by_position + (0,) * gamma)[:gamma] for a in answers]
    by_position = np.array(reached, np.float64).reshape(len(answers), gamma)
    measured = Rounds(
        tuple(a.record.prompt_id for a in answers),
        np.array([len(a.record.reply) - 1.0 for a in answers]),
        np.array([float(a.rounds(overruns)) for a in answers]),
        by_position, by_position,
    )  # fmt: skip
    same = None
    if cell.law.temperature == 0:
        pairs = zip(cell.records, answers, strict=True)
        same = np.array([r.reply.tolist() == a.record.reply.tolist() for r, a in pairs])
    law: dict[str, Any] | None = None
    odd: list[str] = []
    if same is None:
        law, odd = law_figures(cell.records, [a.record for a in answers], judge)
    return {
        "domain": cell.domain,
        "law": cell.law.label,
        "prompts": len(set(measured.ids)),
        "replies": len(answers),
        "same_replies": None if same is None else int(same.sum()),
        "tokens": int(measured.tokens.sum()),
        "rounds": int(measured.rounds.sum()),
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "tokens_per_round": _tau(measured, bootstrap),
        "tokens_per_round_expected": _tau(expected, bootstrap),
        "positions": [_position(measured, expected, k, bootstrap) for k in range(gamma)],
        "log_prob": law,
        "deviations": [*odd, *deviations(measured, expected, same)],
    }


def _tau(rounds: Rounds, bootstrap: int) -> dict[str, Any]:
    return ratio_interval(rounds.tokens, rounds.rounds, bootstrap, rounds.ids).to_dict()


def _position(measured: Rounds, expected: Rounds, k: int, bootstrap: int) -> dict[str, Any]:
    def share(accepted: Any, rounds: Rounds) -> Interval:
        return ratio_interval(accepted[:, k], rounds.rounds, bootstrap, rounds.ids)

    return {
        "position": k + 1,
        "accepted": int(measured.most[:, k].sum()),
        "share": share(measured.most, measured).to_dict(),
        "least": share(expected.least, expected).to_dict(),
        "most": share(expected.most, expected).to_dict(),
    }


def speeds(
    concurrencies: Sequence[int],
    fast: Sequence[Answer],
    plain: Sequence[Answer],
    crowd: dict[int, float],
    plain_crowd: dict[int, float],
) -> list[dict[str, Any]]:
    """One entry for each concurrency; only at 1 there is an interval, over prompts."""
    found = []
    for concurrency in concurrencies:
        if concurrency == 1:
            sides = [
                (np.array([a.seconds for a in side]),
                 np.array([float(len(a.record.reply)) for a in side]))
                for side in (plain, fast)
            ]  # fmt: skip
            bare, with_draft = (float(tokens.sum() / seconds.sum()) for seconds, tokens in sides)
            ratio = speedup_interval(*sides[0], *sides[1])
        else:
            bare, with_draft = plain_crowd[concurrency], crowd[concurrency]
            ratio = Interval(with_draft / bare, None, None)
        found.append(
            {
                "concurrency": concurrency,
                "plain_tokens_per_s": bare,
                "speculative_tokens_per_s": with_draft,
                "speedup": asdict(ratio),
            }
        )
    return found
