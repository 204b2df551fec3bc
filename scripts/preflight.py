"""`draftsmith preflight`: would engines serve what is in a folder, as it was trained?"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..configs.errors import UserError
from ..data.files import write_json
from ..data.store import RecordStore
from ..drafters.batch import check_identity
from ..drafters.checkpoint import load_drafter
from ..eval.cells import Cell, cells_of
from ..eval.preflight.acceptance import Rows, measured
from ..eval.preflight.preflight import Preflight, files_of, preflight
from ..eval.preflight.rules import ENGINES, engines_of
from .pipeline import Run


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    engines: by their names in the table, none for all that read the layout; drafter: the folder
    that was published, None for what is in the published one; rows: replies of each domain and law.
    """

    folder: Path
    engines: Sequence[str]
    drafter: Path | None
    rows: int
    out: Path | None


def check_folder(run: Run, store: RecordStore | None, asked: Asked) -> bool:
    """Whether every engine would serve the folder as it was trained.

    Prints what each reads; with `store` also the acceptance that results on held-out replies.
    Raises `UserError` if no engine reads it.
    """
    files = files_of(asked.folder)
    engines = list(dict.fromkeys(asked.engines)) or engines_of(files.layout)
    if not engines:
        raise UserError(
            f"{asked.folder}: no engine is known to read the layout '{files.layout}'; name one "
            "with --engine to see what it reads"
        )
    trained = None if asked.drafter is None else load_drafter(asked.drafter, run.target)
    rows = None if store is None else _rows(run, store, asked.rows)
    found = []
    for engine in engines:
        seen = preflight(files, engine, run.target, trained)
        if rows is not None:
            seen = measured(seen, run.target, rows)
        tell(seen, asked.folder, run.console)
        found.append(seen)
    if asked.out is not None:
        write_json(
            asked.out, {"ok": all(f.ok for f in found), "engines": [f.to_dict() for f in found]}
        )
    return all(f.ok for f in found)


def _rows(run: Run, store: RecordStore, count: int) -> Rows:
    """Held-out replies with something to draft, up to `count` of each domain and law."""
    check_identity(store, run.target, (), run.accept)
    cells = cells_of(run.recipe, list(store.records("heldout")))
    limit = int(store.settings["max_new_tokens"])
    some = [_some(cell, count) for cell in cells]
    return Rows(some, run.recipe.serving, limit, run.recipe.eval.bootstrap)


def _some(cell: Cell, count: int) -> Cell:
    usable = [r for r in cell.records if len(r.reply) > 1]
    return replace(cell, records=usable[:: max(1, len(usable) // count)][:count])


# ---- what is printed


def tell(found: Preflight, folder: Path, console: Console) -> None:
    """Every tensor and option, what differs, and the verdict."""
    name = ENGINES[found.engine]
    console.print(f"{name} reading {folder} (layout '{found.layout}')", soft_wrap=True)
    if found.tensors:
        console.print(_table(("tensor", f"in {name}", "shape", "is"), _tensors(found)))
    if found.keys:
        console.print(_table(("option", "value", "is"), _options(found)))
    if found.acceptance:
        header = ("domain", "law", "replies", "α trained", "α served", "τ trained", "τ served")
        console.print(_table(header, _figures(found)))
    for kind, word in (("note", "note"), ("limit", "LIMIT"), ("fault", "FAULT")):
        for finding in found.of(kind):
            console.print(f"{word}: {finding.sentence}", soft_wrap=True)
    verdict = "would serve what was trained" if found.ok else "would NOT serve what was trained"
    console.print(f"{name} {verdict}")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _tensors(found: Preflight) -> list[tuple[str, ...]]:
    """Layers that are the same but for their number are one line."""
    grouped: Counter[tuple[str, ...]] = Counter()
    for name, called, shape, becomes in found.tensors:
        plain, engines = (re.sub(r"\.\d+\.", ".*.", text) for text in (name, called))
        grouped[plain, engines, "x".join(map(str, shape)), becomes] += 1
    return [
        (name if count == 1 else f"{name} ({count})", called, shape, becomes)
        for (name, called, shape, becomes), count in grouped.items()
    ]


def _options(found: Preflight) -> list[tuple[str, ...]]:
    words = {"read": "read", "not read": "not read", "absent": "absent: this default"}
    return [(name, _short(value), words[becomes]) for name, value, becomes in found.keys]


def _short(value: Any, most: int = 48) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _figures(found: Preflight) -> list[tuple[str, ...]]:
    rows = []
    for cell in found.acceptance:
        figures = [
            _interval((cell.get(side) or {}).get(name))
            for name in ("overlap", "tokens_per_round")
            for side in ("trained", "served")
        ]
        rows.append((cell["domain"], cell["law"], str(cell["replies"]), *figures))
    return rows


def _interval(estimate: dict[str, float | None] | None) -> str:
    if estimate is None:
        return "–"
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    told = f"{value:.3f}"
    return told if low is None or high is None else f"{told} [{low:.3f}–{high:.3f}]"
