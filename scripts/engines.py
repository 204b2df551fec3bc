"""`draftsmith serve-check`: a drafter in a real engine, beside what was expected of it there."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..configs.errors import UserError
from ..data.records import Record
from ..data.store import RecordStore
from ..data.target import target_info
from ..data.warp import Law
from ..drafters.about import about
from ..drafters.base import Drafter
from ..drafters.batch import records_with_states
from ..drafters.layouts import layout_of
from ..eval.cells import Cell, cells_of
from ..eval.engines.engine import Engine, Serving, method_of, python_of
from ..eval.engines.expected import Rounds, Rows, foretold, log_probs
from ..eval.engines.measure import Plan, measure
from ..eval.engines.registry import ENGINES, WHOLE
from ..eval.report import read_report, write_report
from ..eval.serving import check_length
from ..train.score import score
from .pipeline import Run


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    engine: its name in the table; python: the interpreter that has it, None for the one known;
    sampled: drafts are drawn; prompts: of each domain under each law; concurrencies: requests at a
    time; limit: seconds that each of the two servers may run.
    """

    engine: str
    python: str | None
    sampled: bool
    prompts: int
    concurrencies: tuple[int, ...]
    limit: float


def check_engine(
    run: Run, store: RecordStore, folder: Path, report: Path | None, asked: Asked
) -> bool:
    """Measure the drafter in `folder`; whether all is as expected.

    The result goes into the report in the folder `report`, by default that of its evaluation, in
    place of one of the same engine drafting in the same way.
    """
    known = ENGINES[asked.engine]
    python = python_of(known.variable, known.module, asked.python)
    with tempfile.TemporaryDirectory(prefix="draftsmith-engine-") as work:
        serving, plan, expected = _planned(run, store, folder, asked, python, Path(work))
        place = report or run.evaluate(store, folder)
        read_report(place)  # one that cannot be read shows before anything is measured
        run.release()

        def judge(records: Sequence[Record]) -> Rows:
            return log_probs(run.target, records)

        info = target_info(run.recipe.target)
        found = measure(known.engine, serving, info, plan, expected, judge, run.console.print)
    _add(place, found)
    for cell in found["cells"]:
        for deviation in cell["deviations"]:
            run.console.print(f"{cell['domain']} {cell['law']}: {deviation}", soft_wrap=True)
    return not any(cell["deviations"] for cell in found["cells"])


def _planned(
    run: Run, store: RecordStore, folder: Path, asked: Asked, python: str, work: Path
) -> tuple[Serving, Plan, list[Rounds]]:
    """What is served, what it is asked, and what should be counted of each cell."""
    engine = ENGINES[asked.engine].engine
    drafter, layout = run.drafter(folder), layout_of(folder, about(folder))
    limit, gamma = int(store.settings["max_new_tokens"]), run.recipe.serving.num_draft_tokens
    check_served(engine, drafter, layout, gamma, asked.sampled)
    cells = _cells(run, store, drafter, asked.prompts)
    expected = [_expected(run, drafter, c, limit, engine, asked.sampled) for c in cells]
    longest = max(r.prompt_len for c in cells for r in c.records) + limit
    serving = Serving(
        target=target_info(run.recipe.target).place,
        drafter=folder.resolve(),
        layout=layout,
        reduced=drafter.draft_ids is not None,
        num_draft_tokens=gamma,
        sampled=asked.sampled,
        dtype=str(run.target.dtype).removeprefix("torch."),
        cpu=run.target.device.type == "cpu",
        context=longest + 2 * gamma + 8,
        rows=max(asked.concurrencies, default=1),
        work=work,
        limit=asked.limit,
        python=python,
    )
    return serving, Plan(cells, limit, asked.concurrencies, run.recipe.eval.bootstrap), expected


def check_served(
    engine: Engine, drafter: Drafter, layout: str, num_draft_tokens: int, sampled: bool
) -> None:
    """Raises `UserError` for what the engine does not read, or would not serve as it is here."""
    method_of(engine, layout, drafter.family)
    if sampled and (not engine.samples or layout in engine.greedy):
        raise UserError(f"{engine.name} draws no drafts of the layout '{layout}': take greedy ones")
    most = drafter.max_draft_tokens
    check_length(drafter.family, most, num_draft_tokens)
    if layout in WHOLE and num_draft_tokens != most:
        raise UserError(
            f"{engine.name} lets a drafter of family '{drafter.family}' see as many places as it "
            f"drafts: set serving.num_draft_tokens to {most}, which it was trained for"
        )
    if layout in engine.unread and drafter.draft_ids is not None:
        raise UserError(
            f"{engine.name} drafts with the target's head, not with this drafter's of "
            f"{len(drafter.draft_ids)} tokens (drafter.draft_vocab_size)"
        )


def _cells(run: Run, store: RecordStore, drafter: Drafter, prompts: int) -> list[Cell]:
    """The report's cells with some of the records that can be drafted, spread over all of them."""
    records = records_with_states(store, run.target, drafter.taps, "heldout", run.accept)
    found = []
    for cell in cells_of(run.recipe, records):
        usable = [r for r in cell.records if len(r.reply) > 1]
        step = max(1, len(usable) // prompts)
        found.append(replace(cell, records=usable[::step][:prompts]))
    return found


def _expected(
    run: Run, drafter: Drafter, cell: Cell, limit: int, engine: Engine, sampled: bool
) -> Rounds:
    """What the engine should count on the cell's replies."""
    law = Law(cell.law.temperature) if sampled else Law(0.0)
    gamma = run.recipe.serving.num_draft_tokens
    conversations = score(run.target, drafter, cell.records, cell.law, gamma, limit, law)
    return foretold(conversations, gamma, engine.overruns)


def _add(folder: Path, found: dict[str, object]) -> None:
    report = read_report(folder)
    same = ("engine", "draft_sampling", "num_draft_tokens", "layout")
    others = [e for e in report.get("engines") or [] if any(e[n] != found[n] for n in same)]
    report["engines"] = [*others, found]
    report["alarms"] = [a for a in report.get("alarms") or [] if not a.startswith(found["engine"])]
    write_report(report, folder)
