"""`draftsmith parity`: is what was trained what is served?"""

from pathlib import Path

from ..configs.errors import UserError
from ..data.files import write_json
from ..data.records import Record
from ..data.shards import RowInfo
from ..data.store import RecordStore
from ..data.warp import law_of
from ..drafters.base import Drafter
from ..drafters.batch import StateReader, check_identity
from ..eval.parity import parity
from .pipeline import Run


def check_parity(
    run: Run, store: RecordStore, folder: Path, rows: int, out: Path | None = None
) -> bool:
    """Compare the drafter in `folder` with itself as training sees it; whether it is the same.

    On up to `rows` replies of every served law. Prints what was found; `out` takes it as JSON.
    """
    drafter = run.drafter(folder)
    records = _records(run, store, drafter, rows)
    run.console.print(f"parity    {drafter.family} on {len(records)} replies")
    limit = int(store.settings["max_new_tokens"])
    found = parity(run.target, drafter, records, run.recipe.serving, limit)
    for line in found.lines:
        run.console.print(line, soft_wrap=True)
    if not found.checked:
        run.console.print("nothing could be checked: take longer replies, and several of each law")
    else:
        run.console.print("parity holds" if found.ok else "parity FAILS: see above what differs")
    if out is not None:
        write_json(out, found.to_dict())
    return found.ok


def _records(run: Run, store: RecordStore, drafter: Drafter, rows: int) -> list[Record]:
    """Replies spread over the store, with the states that it keeps.

    What is compared in the mean must be held out.
    """
    keeps = store.settings["distributions"] == "hidden"
    check_identity(store, run.target, drafter.taps if keeps else (), run.accept)
    index = store.index()
    laws = [law_of(section) for section in run.recipe.serving.laws]
    chosen = []
    for law in laws:
        own = [r for r in index if r.drawn_from(law) and (not law.temperature or _held_out(r))]
        chosen += _spread(own, rows)
    chosen = chosen or _spread(index, rows)
    if not chosen:
        raise UserError(f"{store.folder} holds no records to compare anything on")
    if keeps:
        return StateReader(store, run.target, drafter.taps, chosen).read(range(len(chosen)))
    return store.read(chosen)


def _held_out(row: RowInfo) -> bool:
    return row.split == "heldout"


def _spread(index: list[RowInfo], count: int) -> list[RowInfo]:
    step = max(1, len(index) // count)
    return index[::step][:count]
