"""All tables of a report, in the order in which they are read."""

from .advice_tables import advice_table, batch_costs_table, batch_speed_table
from .page import Report, Table
from .tables import detail_tables, summary_tables


def first_tables(report: Report) -> list[Table]:
    """What the terminal prints and the page begins with."""
    batches = [batch_speed_table(report)] if _several(report) else []
    return _filled([*summary_tables(report), *batches, advice_table(report)])


def further_tables(report: Report) -> list[Table]:
    """What only the page has room for."""
    batches = [batch_costs_table(report)] if _several(report) else []
    return _filled([*batches, *detail_tables(report)])


def _several(report: Report) -> bool:
    """Whether there is more than one batch size; of a single one all is said elsewhere."""
    return len({entry["batch"] for entry in report.get("batches") or []}) > 1


def _filled(tables: list[Table]) -> list[Table]:
    return [table for table in tables if table.rows]
