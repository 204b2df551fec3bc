"""Several drafters side by side: one row for each domain, law and drafter."""

from collections.abc import Sequence

from .page import Report, Table
from .tables import interval_text


def side_by_side(entries: Sequence[tuple[str, Report]]) -> Table:
    """`entries` are (name, report). A drafter has no row for what it was not measured on."""
    order = dict.fromkeys(
        (cell["domain"], cell["law"]) for _, report in entries for cell in report["cells"]
    )
    found = {
        (cell["domain"], cell["law"], name): (cell, report["settings"]["num_draft_tokens"])
        for name, report in entries
        for cell in report["cells"]
    }
    names = [name for name, _ in entries]
    places = [(*place, name) for place in order for name in names]
    rows = tuple(_row(place, *found[place]) for place in places if place in found)
    figures = ("α overlap", "τ", "accepted ÷ drafted", "speedup measured", "speedup predicted")
    headers = ("domain", "law", "drafter", "γ", "n", *figures)
    note = "Each drafter at its own draft length γ. Nothing is averaged over domains or laws."
    return Table("Drafters side by side", headers, rows, 3, note)


def _row(place: tuple[str, str, str], cell: Report, length: int) -> tuple[str, ...]:
    speed = cell.get("speed") or {}
    return (
        *place,
        *(str(length), str(cell["prompts"])),
        interval_text(cell["overlap"], 3),
        interval_text(cell["tokens_per_round"], 2),
        interval_text({"value": cell["draft_acceptance_rate"]}, 3),
        interval_text(speed.get("speedup"), 2),
        interval_text({"value": speed.get("predicted")}, 2),
    )
