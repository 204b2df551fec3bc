"""Figures of many held-out replies together, from the lines that evaluations keep of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .intervals import ratio_interval, speedup_interval
from .request_rows import RequestRow


def pooled(rows: Sequence[RequestRow], bootstrap: int) -> dict[str, Any]:
    """α, τ and speed of `rows`, which are of one drafter served in one way.

    Ratios of pooled counts with intervals over conversations; a figure that nothing is known of is
    None. Rows may be of several runs with seeds of their own.
    """
    ids = [row.prompt_id for row in rows]
    drafted = sum(d for row in rows for d, _ in row.rounds)
    accepted = sum(a for row in rows for _, a in row.rounds)

    def ratio(above: list[float], below: list[float]) -> dict[str, Any]:
        return ratio_interval(np.array(above), np.array(below), bootstrap, ids).to_dict()

    return {
        "prompts": len(set(ids)),
        "replies": len(rows),
        "tokens": sum(row.tokens - 1 for row in rows),
        "rounds": sum(len(row.rounds) for row in rows),
        "overlap": ratio([r.overlap.sum for r in rows], [float(r.overlap.count) for r in rows]),
        "tokens_per_round": ratio(
            [row.tokens - 1.0 for row in rows], [float(len(row.rounds)) for row in rows]
        ),
        "tokens_per_round_expected": _expected(rows),
        "draft_acceptance_rate": accepted / max(1, drafted),
        "timed": sum(row.timing is not None for row in rows),
        "speedup": _speedup(rows),
    }


def _expected(rows: Sequence[RequestRow]) -> float | None:
    known = [row.expected for row in rows if row.expected is not None]
    rounds = sum(expected.rounds for expected in known)
    return sum(expected.tokens for expected in known) / rounds if rounds else None


def _speedup(rows: Sequence[RequestRow]) -> dict[str, Any] | None:
    laps = [row.timing for row in rows if row.timing is not None]
    if not laps:
        return None
    plain, fast = (
        (np.array([seconds for seconds, _ in side]), np.array([tokens for _, tokens in side]))
        for side in (
            [(lap.plain_seconds, lap.plain_tokens) for lap in laps],
            [(lap.fast_seconds, lap.fast_tokens) for lap in laps],
        )
    )
    return speedup_interval(*plain, *fast).to_dict()
