"""A report's numbers in Weights & Biases: its own tables, with numbers that can be plotted."""

import re
from collections.abc import Sequence
from typing import Any

from .all_tables import first_tables, further_tables
from .page import Report, Table
from .tables import MISSING

_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_CELL = re.compile(rf"({_NUMBER})\*?(?: \[({_NUMBER})–({_NUMBER})\])?")

Cell = str | float | None


def log_report(report: Report, run: Any) -> None:
    """Log every table of the report's page to a W&B run, as `report/<title>`.

    The figures are those of the page, rounded as there. An interval takes two columns more, `low`
    and `high`; a column that holds words remains text.
    """
    import wandb

    logged: dict[str, Any] = {}
    for table in [*first_tables(report), *further_tables(report)]:
        columns, rows = plottable(table)
        name = title = f"report/{re.sub(r'[^a-z0-9]+', '_', table.title.lower()).strip('_')}"
        same = 1
        while name in logged:  # two runs of one engine
            same += 1
            name = f"{title}_{same}"
        logged[name] = wandb.Table(columns=columns, data=rows)
    run.log(logged)


def plottable(table: Table) -> tuple[list[str | int], list[list[Cell]]]:
    """Column names and rows of a table whose texts are made numbers again."""
    names: list[str | int] = []  # of W&B's own type
    columns: list[Sequence[Cell]] = []
    for index, header in enumerate(table.headers):
        texts = [row[index] for row in table.rows]
        parts = None if index < table.labels else _numbers(texts)
        if parts is None:
            names.append(header)
            columns.append(texts)
            continue
        value, low, high = ([part[i] for part in parts] for i in range(3))
        found = {header: value}
        if any(end is not None for end in low):
            found |= {f"{header} low": low, f"{header} high": high}
        names += found.keys()
        columns += found.values()
    return names, [list(row) for row in zip(*columns, strict=True)]


def _numbers(texts: Sequence[str]) -> list[list[float | None]] | None:
    """(value, low, high) of every text; None where one of them is neither number nor missing."""
    found: list[list[float | None]] = []
    for text in texts:
        match = _CELL.fullmatch(text)
        if match is None and text != MISSING:
            return None
        groups = (None, None, None) if match is None else match.groups()
        found.append([None if group is None else float(group) for group in groups])
    return found
