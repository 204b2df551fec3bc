"""Figures of many held-out replies together, from the lines that evaluations keep of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .compare import FIGURES
from .intervals import ratio_interval, speedup_interval
from .request_rows import RequestRow


def pooled(rows: Sequence[RequestRow], bootstrap: int) -> dict[str, Any]:
    """α, τ and speed of `rows`, which are of one drafter served in one way.

    Ratios of pooled counts with intervals over conversations; a figure that nothing is known of is
    None. Rows may be of several runs with seeds of their own.
    """
    ids = [row.prompt_id for row in rows]
    parts = {f.name: np.array([f.parts(row) for row in rows], np.float64) for f in FIGURES}

    def interval(name: str) -> dict[str, Any]:
        above, below = parts[name].T
        return ratio_interval(above, below, bootstrap, ids).to_dict()

    def value(name: str) -> float | None:
        above, below = parts[name].sum(0)
        return float(above / below) if below else None

    return {
        "prompts": len(set(ids)),
        "replies": len(rows),
        "tokens": sum(row.tokens - 1 for row in rows),
        "rounds": sum(len(row.rounds) for row in rows),
        "overlap": interval("overlap"),
        "tokens_per_round": interval("tokens_per_round"),
        "tokens_per_round_expected": value("tokens_per_round_estimated"),
        "draft_acceptance_rate": value("draft_acceptance_rate") or 0.0,
        "timed": sum(row.timing is not None for row in rows),
        "speedup": _speedup(rows),
    }


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
