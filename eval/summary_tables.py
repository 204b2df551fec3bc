"""The tables of a benchmark: drafters side by side, a row for each domain and law."""

from typing import Any

from .page import Table
from .tables import MIN_CONVERSATIONS, MISSING, TOGETHER, interval_text


def summary_tables(summary: dict[str, Any]) -> list[Table]:
    """α, τ and speedups of every entry."""
    entries = summary["entries"]
    headers = ("domain", "law", "n", *(entry["name"] for entry in entries))
    makers = (
        ("α overlap", _overlap, ""),
        ("τ decoded | expected", _tau, "Expected by the estimator, without decoding; of chains."),
        ("speedup measured | predicted", _speedup, "One row at a time, prefill apart."),
        ("accepted ÷ drafted", _rate, ""),
    )
    return [
        Table(title, headers, _rows(entries, cell), 2, note) for title, cell, note in makers
    ] + [_costs(entries)]


def _rows(entries: list[dict[str, Any]], cell: Any) -> tuple[tuple[str, ...], ...]:
    by_place = [
        {
            **{(row["domain"], row["law"]): row for row in e["rows"]},
            **{(TOGETHER, row["law"]): {"predicted": None, **row} for row in e["totals"]},
        }
        for e in entries
    ]
    places = {place for known in by_place for place in known}
    rows = []
    for place in sorted(places, key=lambda place: (place[0] == TOGETHER, place)):
        own = [known.get(place) for known in by_place]
        prompts = max(row["prompts"] for row in own if row is not None)
        flag = "" if prompts >= MIN_CONVERSATIONS else "*"
        texts = (MISSING if row is None else cell(row) for row in own)
        rows.append((*place, f"{prompts}{flag}", *texts))
    return tuple(rows)


def _overlap(row: dict[str, Any]) -> str:
    return interval_text(row["overlap"], 3)


def _tau(row: dict[str, Any]) -> str:
    expected = row["tokens_per_round_expected"]
    found = interval_text(row["tokens_per_round"], 2)
    return found if expected is None else f"{found} | {expected:.2f}"


def _speedup(row: dict[str, Any]) -> str:
    if row["speedup"] is None:
        return MISSING
    predicted = MISSING if row["predicted"] is None else f"{row['predicted']:.2f}"
    return f"{interval_text(row['speedup'], 2)} | {predicted}"


def _rate(row: dict[str, Any]) -> str:
    return f"{row['draft_acceptance_rate']:.3f}"


def _costs(entries: list[dict[str, Any]]) -> Table:
    rows = []
    for entry in entries:
        for law, cost in ((entry["cost"] or {}).get("by_law") or {}).items():
            passes = " ".join(f"{value:.2f}" for value in cost["v"])
            figures = (f"{cost[name]:.3f}" for name in ("c_first", "c", "o", "o_plain"))
            rows.append((entry["name"], law, *figures, passes))
    headers = ("entry", "law", "c_first", "c", "o", "o_plain", "v(1), v(2), ...")
    note = "In one-token target passes."
    return Table("Costs", headers, tuple(rows), 2, note)
