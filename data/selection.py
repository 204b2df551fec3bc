"""Which of the usable prompts are kept: none twice, and no more than caps and weights allow."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..configs.collection import DomainSection
from .duplicates import HOW, Marked, Sketch, Twins, find_twins, user_text
from .prompts import Rejection

Rows = NDArray[np.int64]
_CAP, _WEIGHT = len(HOW), len(HOW) + 1


@dataclass(frozen=True)
class Selection:
    """Of N rows, in the order in which they were read, those that are kept `[N]`."""

    kept: NDArray[np.bool_]
    _twins: Twins
    _section: Rows
    _line: Rows
    _source: pa.Array  # one of its names each
    _sections: Sequence[DomainSection]

    def reason(self, row: int) -> tuple[str, Rejection]:
        """Why a row is not kept: the kind of reason, and all of it."""
        how = int(self._twins.how[row])
        section = self._sections[self._section[row]]
        if how == _CAP:
            kind = reason = f"beyond max_rows {section.max_rows}"
        elif how == _WEIGHT:
            kind = reason = f"beyond its weight {section.weight:g}"
        else:
            kind = f"{HOW[how]} another"
            reason = f"{HOW[how]} {self._place(int(self._twins.twin[row]))}"
        return kind, Rejection(self._source[row].as_py(), int(self._line[row]), reason)

    def _place(self, row: int) -> str:
        return f"{self._source[row].as_py()}:{self._line[row]}"


def select(table: pa.Table, sections: Sequence[DomainSection], sketch: Sketch | None) -> Selection:
    """Duplicates go first, whatever the section; of the rest each section keeps `max_rows`, and of
    its training prompts as many as its weight lets. Those of the smallest ids stay, so that more
    or fewer rows elsewhere change nothing.

    Args:
        table: rows of `workers.MARKED`, N of at least one.
        sketch: what made their bands; None compares prompts whole.
    """
    heldout = np.fromiter((split.as_py() == "heldout" for split in table["split"]), dtype=bool)
    marked = Marked(
        heldout=heldout,
        key=table["mark_key"].to_numpy(),
        first=table["mark_first"].to_numpy(),
        whole=table["mark_whole"].to_numpy(),
        frame=table["mark_frame"].to_numpy(),
        ids=table["mark_ids"].to_numpy(),
        asked=table["asked"],
        bands=table["bands"],
    )
    messages = table["messages"]
    twins = find_twins(marked, sketch, lambda row: user_text(json.loads(messages[row].as_py())))
    kept = twins.twin < 0
    ids = np.fromiter((int(name.as_py(), 16) for name in table["id"]), dtype=np.uint64)
    section = table["section"].to_numpy()
    for number, settings in enumerate(sections):
        if settings.max_rows is not None:
            mine = np.flatnonzero(kept & (section == number))
            _cut(mine, ids, settings.max_rows, kept, twins, _CAP)
    weights = {n: s.weight for n, s in enumerate(sections) if s.weight is not None}
    training = {n: np.flatnonzero(kept & (section == n) & ~heldout) for n in weights}
    scale = min((len(rows) / weights[n] for n, rows in training.items() if len(rows)), default=0.0)
    for number, rows in training.items():
        _cut(rows, ids, max(1, round(scale * weights[number])), kept, twins, _WEIGHT)
    sources = table["source"].combine_chunks().dictionary_encode()
    return Selection(kept, twins, section, table["line"].to_numpy(), sources, sections)


def _cut(
    rows: Rows, ids: NDArray[np.uint64], most: int, kept: NDArray[np.bool_], twins: Twins, how: int
) -> None:
    """Of some rows, keep `most`."""
    beyond = rows[np.argsort(ids[rows])[most:]]
    kept[beyond] = False
    twins.how[beyond] = how
