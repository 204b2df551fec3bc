"""Evaluations side by side, paired by request: what differs between them, and whether it is chance.

A request is one turn of a prompt under one law, with one seed. What only one side has is counted
and left out. A difference is called one only if it would be rare among all the rows at which the
same figure is looked at.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ..configs.errors import UserError
from .paired import Difference, Pairs, holm, ratio_difference, speedup_ratio
from .report import read_report
from .request_rows import RequestRow, read_requests

LEVEL = 0.05
"""Chance of one false alarm among all rows of a figure."""
RESAMPLES = 10_000
SPEEDUP = "speedup"


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation as `draftsmith eval` keeps it; name: of its folder."""

    name: str
    report: dict[str, Any]
    rows: list[RequestRow]

    @classmethod
    def read(cls, folder: Path) -> "Evaluation":
        """Raises `UserError` where its report or its requests are missing or damaged."""
        folder = Path(folder)
        return cls(folder.resolve().name, read_report(folder), read_requests(folder))


@dataclass(frozen=True)
class Figure:
    """A ratio of counts that are pooled; parts: what one reply adds to (numerator, denominator)."""

    name: str
    label: str
    parts: Callable[[RequestRow], tuple[float, float]]
    digits: int = 3


def _expected(row: RequestRow) -> tuple[float, float]:
    return (row.expected.tokens, row.expected.rounds) if row.expected else (0.0, 0.0)


def _accepted(row: RequestRow) -> tuple[float, float]:
    return float(sum(a for _, a in row.rounds)), float(sum(d for d, _ in row.rounds))


FIGURES = (
    Figure("overlap", "α overlap", lambda r: (r.overlap.sum, float(r.overlap.count))),
    Figure("tokens_per_round", "τ decoded", lambda r: (r.tokens - 1.0, float(len(r.rounds)))),
    Figure("tokens_per_round_estimated", "τ estimated", _expected),
    Figure("draft_acceptance_rate", "accepted ÷ drafted", _accepted),
)


class Paired(Protocol):
    """A reply's place: what it shares with the same one on the other side."""

    @property
    def domain(self) -> str: ...
    @property
    def law(self) -> str: ...
    @property
    def pair(self) -> tuple[str, str, str, int, int]: ...


One = TypeVar("One", bound=Paired)
Other = TypeVar("Other", bound=Paired)


def pairs_by_cell(
    one: Sequence[One], other: Sequence[Other]
) -> dict[tuple[str, str], list[tuple[One, Other]]]:
    """The replies that both sides have, by domain and law."""
    theirs = {row.pair: row for row in other}
    cells: dict[tuple[str, str], list[tuple[One, Other]]] = {}
    for row in sorted(one, key=lambda r: r.pair):
        if row.pair in theirs:
            cells.setdefault((row.domain, row.law), []).append((row, theirs[row.pair]))
    return cells


def compare(evaluations: Sequence[Evaluation], resamples: int = RESAMPLES) -> dict[str, Any]:
    """Every evaluation against the first, as JSON; see `rows_of` for the rows.

    Verdicts hold for all rows of a figure together, however many evaluations were named (Holm's
    adjustment). Raises `UserError` for fewer than two, and for two that share no request.
    """
    if len(evaluations) < 2:
        raise UserError("one evaluation alone compares with nothing: name two folders or more")
    first, others = evaluations[0], evaluations[1:]
    comparisons = [_against(first, other, resamples) for other in others]
    judge(row["figures"] for c in comparisons for row in c["rows"])
    return {
        "format": 1,
        "level": LEVEL,
        "resamples": resamples,
        "baseline": _about(first),
        "comparisons": comparisons,
    }


def _about(evaluation: Evaluation) -> dict[str, Any]:
    drafter = evaluation.report["provenance"]["drafter"]
    return {
        "name": evaluation.name,
        "created": evaluation.report.get("created"),
        "drafter": {k: drafter.get(k) for k in ("family", "parameters", "weights_sha256")},
    }


def _against(first: Evaluation, other: Evaluation, resamples: int) -> dict[str, Any]:
    cells = pairs_by_cell(first.rows, other.rows)
    if not cells:
        raise UserError(_nothing_shared(first, other))
    pairs = [pair for own in cells.values() for pair in own]
    return {
        **_about(other),
        "differs": differs(first.report, other.report),
        "pairs": len(pairs),
        "only_first": len(first.rows) - len(pairs),
        "only_other": len(other.rows) - len(pairs),
        "other_prompts": sum(a.prompt_sha256 != b.prompt_sha256 for a, b in pairs),
        "rows": rows_of(cells, resamples),
    }


def _nothing_shared(first: Evaluation, other: Evaluation) -> str:
    message = f"{first.name} and {other.name} share no request"
    asked = [{(r.domain, r.law, r.prompt_id) for r in e.rows} for e in (first, other)]
    if asked[0] & asked[1]:
        return f"{message}: the same prompts were asked with other seeds; take one recipe's seed"
    told = []
    for evaluation in (first, other):
        cells = dict.fromkeys(f"{row.domain} {row.law}" for row in evaluation.rows)
        told.append(f"{evaluation.name} has {', '.join(cells)}")
    return f"{message}, which is a prompt's turn of one domain under one law: {'; '.join(told)}"


def differs(one: dict[str, Any], other: dict[str, Any]) -> list[list[str]]:
    """What of two reports' settings, targets, records and machines is not the same: [what, the
    first's, the other's]. That drafters differ is not told, for it is what is compared."""
    sides = [_circumstances(report) for report in (one, other)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    texts = [[name, *(str(side.get(name, "–")) for side in sides)] for name in names]
    return [line for line in texts if line[1] != line[2]]


def _circumstances(report: dict[str, Any]) -> dict[str, Any]:
    stand = report["provenance"]
    found = {f"settings.{key}": value for key, value in report["settings"].items()}
    for part in ("target", "versions", "machine"):
        found |= {f"{part}.{key}": value for key, value in (stand.get(part) or {}).items()}
    found["laws"] = ", ".join(sorted({cell["law"] for cell in report["cells"]}))
    return found | {"records": stand.get("prompts_sha256")}


def rows_of(
    cells: dict[tuple[str, str], list[tuple[RequestRow, RequestRow]]], resamples: int
) -> list[dict[str, Any]]:
    """One row for each domain and law: every figure of both sides and what lies between them.

    change is other - first with its 95 % interval over conversations, of speedups their ratio; p
    as in `paired`; None stands for a figure that a side does not have.
    """
    rows = []
    for (domain, law), pairs in cells.items():
        names = [a.prompt_id for a, _ in pairs]
        figures = {f.name: difference(f, pairs, resamples) for f in FIGURES}
        timed = [(a, b) for a, b in pairs if a.timing is not None and b.timing is not None]
        figures[SPEEDUP] = _speedup(timed)
        rows.append(
            {
                "domain": domain,
                "law": law,
                "conversations": len(set(names)),
                "replies": len(pairs),
                "timed": len(timed),
                "figures": {k: None if d is None else d.to_dict() for k, d in figures.items()},
            }
        )
    return rows


def difference(
    figure: Figure, pairs: Sequence[tuple[RequestRow, RequestRow]], resamples: int
) -> Difference | None:
    """Between the two sides' pooled figures."""
    one, other = (np.array([figure.parts(p[i]) for p in pairs], np.float64) for i in (0, 1))
    return ratio_difference(one, other, [a.prompt_id for a, _ in pairs], resamples)


def _speedup(pairs: Sequence[tuple[RequestRow, RequestRow]]) -> Difference | None:
    def side(i: int) -> Pairs:
        times = [pair[i].timing for pair in pairs]
        kept = [
            (t.plain_seconds, t.plain_tokens, t.fast_seconds, t.fast_tokens)
            for t in times
            if t is not None
        ]
        return np.array(kept, np.float64)

    return speedup_ratio(side(0), side(1), [a.prompt_id for a, _ in pairs])


def judge(rows: Iterable[dict[str, dict[str, Any] | None]]) -> None:
    """Say of each figure in every row whether the other side is "higher" or "lower", or that "no
    difference" was "found", with the p-value adjusted for all rows of that figure (p_adjusted).
    "too few" says that a single conversation tells nothing."""
    by_figure: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for name, found in row.items():
            if found is not None:
                by_figure.setdefault(name, []).append(found)
    for every in by_figure.values():
        known = [found for found in every if found["p"] is not None]
        for found, adjusted in zip(known, holm([f["p"] for f in known]), strict=True):
            higher = found["other"] > found["one"]
            direction = "higher" if higher else "lower"
            verdict = direction if adjusted <= LEVEL else "no difference found"
            found |= {"p_adjusted": adjusted, "verdict": verdict}
        for found in every:
            if found["p"] is None:
                found |= {"p_adjusted": None, "verdict": "too few"}
