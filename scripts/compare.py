"""`draftsmith compare`: evaluations side by side, with intervals on what lies between them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..data.files import write_json
from ..eval.compare import FIGURES, SPEEDUP, Evaluation, compare
from ..eval.page import Table
from ..eval.report import print_table
from ..eval.tables import MIN_CONVERSATIONS, MISSING, interval_text

_DIGITS = {SPEEDUP: 2, **{figure.name: figure.digits for figure in FIGURES}}
_LABELS = {**{figure.name: figure.label for figure in FIGURES}, SPEEDUP: "speedup"}


def compare_folders(folders: Sequence[Path], out: Path | None, console: Console) -> None:
    """Print how every evaluation compares with the first; `out` takes it as JSON."""
    found = compare([Evaluation.read(folder) for folder in folders])
    if out is not None:
        write_json(out, found)
    first = found["baseline"]
    console.print(Text(f"baseline  {_title(first)}", style="bold"))
    for other in found["comparisons"]:
        console.print(Text(f"against   {_title(other)}", style="bold"))
        for line in _circumstances(other):
            console.print(Text(line), soft_wrap=True)
        for table in tables(other):
            print_table(table, console)
            if table.note:
                console.print(Text(table.note, style="dim"))
    rows = sum(len(other["rows"]) for other in found["comparisons"])
    console.print(
        Text(
            f"Verdicts allow a chance of {found['level']:.0%} of one false alarm among all {rows} "
            "rows of a figure (Holm). p: how often two sides that draft alike differ as much; "
            "intervals are of one row each, 95 %, over conversations.",
            style="dim",
        )
    )


def _title(about: dict[str, Any]) -> str:
    drafter = about["drafter"]
    return (
        f"{about['name']}: {drafter['family']}, {drafter['parameters']:,} parameters, weights "
        f"{str(drafter['weights_sha256'])[:8]}"
    )


def _circumstances(other: dict[str, Any]) -> list[str]:
    lines = [f"{other['pairs']} requests are paired"]
    for key, whose in (("only_first", "the baseline"), ("only_other", "the other")):
        if other[key]:
            lines.append(f"{other[key]} requests are in {whose} only, and left out")
    if other["other_prompts"]:
        lines.append(
            f"{other['other_prompts']} of the pairs were asked in other tokens: the tokenizer or "
            "its chat template is another"
        )
    return lines + [f"differs   {name}: {one} | {two}" for name, one, two in other["differs"]]


def tables(other: dict[str, Any]) -> list[Table]:
    """A table for each figure that was measured on both sides."""
    made = []
    for name, label in _LABELS.items():
        rows = [row for row in other["rows"] if row["figures"][name] is not None]
        if not rows:
            continue
        change = "ratio" if name == SPEEDUP else "difference"
        headers = ("domain", "law", "n", "baseline", "other", change, "p adjusted", "verdict")
        note = ""
        if any(_counted(row, name) < MIN_CONVERSATIONS for row in rows):
            note = f"* fewer than {MIN_CONVERSATIONS} conversations"
        made.append(Table(label, headers, tuple(_line(row, name) for row in rows), 2, note))
    return made


def _counted(row: dict[str, Any], name: str) -> int:
    return int(row["timed" if name == SPEEDUP else "conversations"])


def _line(row: dict[str, Any], name: str) -> tuple[str, ...]:
    found, count = row["figures"][name], _counted(row, name)
    digits = _DIGITS[name]
    p = found["p_adjusted"]
    return (
        *(row["domain"], row["law"], f"{count}{'' if count >= MIN_CONVERSATIONS else '*'}"),
        *(f"{found[side]:.{digits}f}" for side in ("one", "other")),
        interval_text(found["change"], digits),
        MISSING if p is None else f"{p:.3f}",
        found["verdict"],
    )
