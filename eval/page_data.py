"""What the page's script draws: the curves and cards of every domain, law and draft length.

Every number comes with the text that shows it, made here by the same functions as the tables.
A curve has a line ([x, y, text]), a band around it ([x, low, high]) and measured points
([x, y, low, high, text]; low and high are null without an interval). Ratios are without unit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .heatmap import KINDS
from .page import Report
from .tables import interval_text

Curve = dict[str, list[list[Any]]]

PREDICTED = "Filled: measured, with its interval; hollow: predicted."


@dataclass(frozen=True)
class Plot:
    """One plot of the page."""

    key: str
    source: str
    """Which curve of a cell, or of the whole entry, it draws."""
    kind: Literal["ranges", "curves"]
    """`ranges` is one row for each of the series, `curves` is over whole numbers."""
    title: str
    x: str
    y: str
    caption: str
    include: tuple[float, ...] = ()
    """Values that the axis of y reaches in any case."""
    reference: float | None = None
    by_length: bool = False
    """Over draft lengths: `ranges` shows the chosen one, `curves` marks it."""


_ALPHA = "overlap α"
_TAU = "tokens per round τ"
_POSITION = "position k in the draft"
_LENGTH = "draft length γ"
PLOTS = (
    Plot(
        "overlap", "overlap", "ranges", "Overlap α", "", _ALPHA,
        "The chance that one drafted token is accepted.", (0.0, 1.0),
    ),
    Plot(
        "speedups", "speedup", "ranges", "Speedup at the chosen γ", "", "speedup",
        PREDICTED, (1.0,), 1.0, True,
    ),
    Plot(
        "survival", "survival", "curves", "Survival S_k", _POSITION, "S_k",
        "Share of rounds that accept at least k draft tokens. Points: decoded; line and band: "
        "estimated from target samples alone.", (0.0, 1.0),
    ),
    Plot(
        "conditional", "conditional", "curves", "Acceptance by position", _POSITION,
        "P(accepted | all before it)",
        "Conditional on the acceptance of all tokens before it. Decoded counts, without an "
        "interval; the attempts are in the table.", (0.0, 1.0),
    ),
    Plot(
        "tau", "tau", "curves", "Tokens per round by draft length", _LENGTH, _TAU,
        "Bonus token included. Line and band: estimated; point: decoded.", (1.0,), 1.0, True,
    ),
    Plot(
        "speedup", "speedup", "curves", "Speedup by draft length", _LENGTH, "speedup",
        "Line: predicted from S_k and measured costs; points: measured.", (1.0,), 1.0, True,
    ),
    Plot(
        "cost", "cost", "curves", "Cost of a target pass", "tokens in the pass, n", "v(n)",
        "Time over n tokens of each conversation ÷ time over one token of one conversation.",
        (1.0,), 1.0,
    ),
    Plot(
        "batch", "batch", "curves", "Speedup by batch size", "conversations at once", "speedup",
        "Line: predicted; points: measured. At the draft length that was measured.", (1.0,), 1.0,
    ),
)  # fmt: skip


def page_data(entries: Sequence[tuple[str, Report]], replies: Iterable[Report]) -> Report:
    """JSON-ready. `entries` are (name, report); `replies` as `report.write_report` takes them."""
    return {
        "entries": [_entry(name, report) for name, report in entries],
        "plots": [asdict(plot) for plot in PLOTS],
        "kinds": KINDS,
        "replies": list(replies),
    }


def _entry(name: str, report: Report) -> Report:
    served = report["settings"]["num_draft_tokens"]
    sweep = {(line["domain"], line["law"]): line for line in report.get("sweep") or []}
    lengths = sorted({served, *(g for line in sweep.values() for g in line["num_draft_tokens"])})
    return {
        "name": name,
        "served": served,
        "lengths": lengths,
        "curves": {"cost": _passes(report)},
        "cells": [
            _cell(report, cell, sweep.get((cell["domain"], cell["law"])) or {}, lengths, served)
            for cell in report["cells"]
        ],
    }


def _passes(report: Report) -> list[Report]:
    """v(n) of every batch size that was measured; it is the target's, the same under any law."""
    cost, batches = report.get("cost") or {}, report.get("batches") or []
    found = {
        part["batch"]: [(int(n), value) for n, value in part["cost"]["v"].items()]
        for part in batches
        if part["law"] == batches[0]["law"]
    }
    if not found:
        found = {1: list(zip(cost.get("rows") or [], cost.get("v") or [], strict=False))}
    return [
        {"name": f"batch {size}", **_curve(((n, {"value": v}) for n, v in passes), [], 2)}
        for size, passes in found.items()
    ]


def _cell(
    report: Report, cell: Report, line: Report, lengths: Sequence[int], served: int
) -> Report:
    places = cell["acceptance_by_position"]
    conditional = _bare(places, "conditional")
    estimated = enumerate(cell.get("survival_estimated") or [], 1)
    expected = dict(
        zip(
            line.get("num_draft_tokens") or [],
            line.get("tokens_per_round_estimated") or [],
            strict=False,
        )
    )
    speed = _Speed(cell, line, served)
    return {
        "domain": cell["domain"],
        "law": cell["law"],
        "curves": {
            "overlap": _curve([], [(0, cell["overlap"])], 3),
            "survival": _curve(estimated, _bare(places, "survival"), 3),
            "conditional": _curve(conditional, conditional, 3),
            "tau": _curve(expected.items(), [(served, cell["tokens_per_round"])], 2),
            "speedup": _curve(
                ((g, {"value": v}) for g, v in speed.predicted.items()), speed.measured.items(), 2
            ),
            "batch": _batches(report, cell),
        },
        "cards": {g: _cards(cell, speed, expected.get(g), g, served) for g in lengths},
    }


class _Speed:
    """Speedups of a cell by draft length: predicted numbers and measured intervals."""

    def __init__(self, cell: Report, line: Report, served: int):
        lengths, values = line.get("num_draft_tokens") or [], line.get("predicted") or []
        own = cell.get("speed") or {}
        self.predicted: dict[int, float | None] = dict(zip(lengths, values, strict=False))
        self.measured: dict[int, Report] = {
            point["num_draft_tokens"]: point for point in line.get("measured") or []
        }
        if own.get("speedup"):
            self.measured[served] = own["speedup"]
        # What is served may end drafts early or draft trees, which the sweep of chains does not.
        if own.get("predicted") is not None:
            self.predicted[served] = own["predicted"]


def _bare(places: Iterable[Report], key: str) -> list[tuple[int, Report]]:
    return [(place["position"], {"value": place[key]}) for place in places]


def _curve(
    line: Iterable[tuple[int, Report]], points: Iterable[tuple[int, Report]], digits: int
) -> Curve:
    """A curve of estimates {value, low, high}, those without a value left out."""
    known = sorted((x, one) for x, one in line if one["value"] is not None)
    measured = sorted((x, one) for x, one in points if one["value"] is not None)
    return {
        "line": [[x, one["value"], interval_text(one, digits)] for x, one in known],
        "band": [[x, one["low"], one["high"]] for x, one in known if one.get("low") is not None],
        "points": [
            [x, one["value"], one.get("low"), one.get("high"), interval_text(one, digits)]
            for x, one in measured
        ],
    }


def _batches(report: Report, cell: Report) -> Curve:
    line, points = [], []
    for part in report.get("batches") or []:
        for row in part["domains"]:
            if (part["law"], row["domain"]) == (cell["law"], cell["domain"]):
                line.append((part["batch"], {"value": row["predicted"]}))
                points.append((part["batch"], row["measured"] or {"value": None}))
    return _curve(line, points, 2)


def _cards(
    cell: Report, speed: _Speed, expected: Report | None, length: int, served: int
) -> list[Report]:
    """What the chosen domain, law and draft length come to. Decoding ran at one length."""
    decoded, elsewhere = length == served, f"decoded at γ = {served} alone"
    own = cell.get("tokens_per_round_estimated")
    measured, predicted = speed.measured.get(length), speed.predicted.get(length)
    if not decoded:
        told = f"estimated; {elsewhere}"
    elif own is not None:
        told = f"estimated {interval_text(own, 2)}"
    else:
        told = f"chains of fixed length: estimated {interval_text(expected, 2)}"
    tau = cell["tokens_per_round"] if decoded else expected
    rate = cell["draft_acceptance_rate"] if decoded else None
    return [
        _card("overlap", "α overlap", cell["overlap"], 3, f"n = {cell['prompts']} conversations"),
        _card("tau", "τ tokens per round", tau, 2, told),
        _card(
            "rate", "accepted ÷ drafted", {"value": rate}, 3,
            f"{cell['rounds']} rounds" if decoded else elsewhere,
        ),
        _card(
            "measured", f"speedup measured, γ = {length}", measured, 2, *_verdict(cell, measured)
        ),
        _card(
            "predicted", f"speedup predicted, γ = {length}", {"value": predicted}, 2,
            "from S_k and measured costs" if predicted is not None else "costs were not measured",
        ),
    ]  # fmt: skip


def _card(
    key: str, label: str, estimate: Report | None, digits: int, note: str, tone: str = ""
) -> Report:
    value, _, interval = interval_text(estimate, digits).partition(" ")
    named = {"key": key, "label": label, "value": value, "interval": interval}
    return {**named, "note": note, "tone": tone}


def _verdict(cell: Report, speedup: Report | None) -> tuple[str, str]:
    """What a measured speedup says in words, and its tone."""
    low, high = ((speedup or {}).get(key) for key in ("low", "high"))
    if (speedup or {}).get("value") is None:
        return ("not timed" if not cell.get("speed") else "not timed at this γ"), ""
    if low is None or high is None:
        return "too few prompts for an interval", ""
    if low > 1:
        return "faster than plain decoding", "good"
    if high < 1:
        return "slower than plain decoding", "bad"
    return "no difference from plain decoding shown", ""
