"""The table of measured figures that model cards and reports share, in Markdown."""

from collections.abc import Sequence
from typing import Any

from .public import one_line

Report = dict[str, Any]

_MISSING = "–"


def measured_table(report: Report) -> str:
    """One row per domain and law; no mean over either."""
    cells = report["cells"]
    gamma = max((len(cell["acceptance_by_position"]) for cell in cells), default=0)
    survivals = [f"S_{k}" for k in range(1, gamma + 1)]
    header = ["domain", "law", "prompts", "α overlap", *survivals, "τ", "accepted/drafted"]
    header += ["speedup measured", "predicted"]
    rows = []
    for cell in cells:
        speed = cell.get("speed") or {}
        survival = [place["survival"] for place in cell["acceptance_by_position"]]
        survival += [None] * (gamma - len(survival))
        rows.append(
            [
                *(one_line(cell["domain"]), one_line(cell["law"]), str(cell["prompts"])),
                _interval(cell["overlap"], 3),
                *(_number(value, 2) for value in survival),
                _interval(cell["tokens_per_round"], 2),
                _number(cell["draft_acceptance_rate"], 3),
                _interval(speed.get("speedup"), 2),
                _number(speed.get("predicted"), 2),
            ]
        )
    return markdown_table(header, rows)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of ready-made cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return _MISSING if value is None else f"{value:.{digits}f}"


def _interval(estimate: Report | None, digits: int) -> str:
    low, high = ((estimate or {}).get(key) for key in ("low", "high"))
    value = _number((estimate or {}).get("value"), digits)
    return value if low is None or high is None else f"{value} [{low:.{digits}f}–{high:.{digits}f}]"
