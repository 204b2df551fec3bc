"""`draftsmith simulate`: what a rate of requests would meet, with and without speculation."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..configs.errors import UserError
from ..configs.load import parse, set_key, to_dict
from ..data.files import write_json
from ..eval.advice import sweep_of
from ..eval.compare import Evaluation
from ..eval.machine import Machine, machine_of
from ..eval.page import Table
from ..eval.report import print_table
from ..eval.simulate import Serving, capacity, load, pays_up_to, serving
from ..eval.tables import interval_text

_RUNS = 4
_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_NOTE = (
    "Simulated from costs by batch size: {runs} runs of {requests} requests, 95 % intervals over "
    "runs. latency: from arriving to the last token; first: to the first; – where more comes than "
    "can be served. busy: share of the time at work; at once: conversations in the batch."
)


@dataclass(frozen=True)
class Asked:
    """What is to be simulated.

    rates: requests a second; batch: most conversations at a time, None for the largest measured;
    memory: bytes, None without a limit; domains, laws: none for all; tokens: prompt and reply, None
    for those measured; draft: tokens of a draft, None for the served length; costs: a file of a
    `Machine`, None for the measured one; changes: key=value in it.
    """

    rates: tuple[float, ...]
    batch: int | None = None
    memory: float | None = None
    domains: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    tokens: tuple[int, int] | None = None
    draft: int | None = None
    costs: Path | None = None
    changes: tuple[str, ...] = ()
    requests: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not all(0 < rate < float("inf") for rate in self.rates):
            raise UserError("--rate takes requests a second, numbers above 0")
        least = {"batch": 1, "draft": 1, "requests": 100, "seed": 0}
        for name, least_value in least.items():
            value = getattr(self, name)
            if value is not None and value < least_value:
                raise UserError(f"--{name} is {value}, must be {least_value} or more")
        if self.tokens is not None and min(self.tokens) < 1:
            raise UserError("--tokens takes the tokens of a prompt and of a reply, 1 or more each")


def bytes_of(text: str) -> float:
    """A size such as 16GiB or 80GB; raises `UserError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", text.strip())
    if found is None:
        raise UserError(f"--memory is '{text}', must be a size such as 16GiB or 80GB")
    number, unit, binary = found.groups()
    return float(number) * (1024.0 if binary else 1000.0) ** _UNITS[unit]


def simulate(folder: Path, asked: Asked, out: Path | None, console: Console) -> None:
    """Simulate the domains and laws of the evaluation in `folder`, print a table and what it says.

    `out` takes all as JSON; its `machines` are what --costs reads.
    """
    evaluation = Evaluation.read(folder)
    cells = _cells(evaluation.report, asked)
    machines = {law: _machine(evaluation, law, asked) for _, law in cells}
    found = [_simulated(evaluation, cell, machines[cell[1]], asked) for cell in cells]
    note = _NOTE.format(requests=asked.requests, runs=_RUNS)
    print_table(_table([row for one in found for row in one["rows"]]), console)
    console.print(Text(note, style="dim"), soft_wrap=True)
    for one in found:
        console.print(Text(_sentence(one)), soft_wrap=True)
    if out is not None:
        about = {"evaluation": evaluation.name, "asked": _plain(asked)}
        plain = {law: to_dict(machine) for law, machine in machines.items()}
        write_json(out, {**about, "machines": plain, "cells": found})


def _plain(asked: Asked) -> dict[str, Any]:
    return {**asdict(asked), "costs": None if asked.costs is None else asked.costs.name}


def _cells(report: dict[str, Any], asked: Asked) -> list[tuple[str, str]]:
    """Domains and laws to simulate. Raises `UserError` for one that the report has not."""
    for key, wanted in (("domain", asked.domains), ("law", asked.laws)):
        known = list(dict.fromkeys(cell[key] for cell in report["cells"]))
        for name in wanted:
            if name not in known:
                told = f"the report has no {key} '{name}' (known: {', '.join(known)})"
                raise UserError(told)
    every = [(cell["domain"], cell["law"]) for cell in report["cells"]]
    found = [
        (domain, law)
        for domain, law in every
        if domain in (asked.domains or (domain,)) and law in (asked.laws or (law,))
    ]
    if not found:
        raise UserError("the report has none of these domains under none of these laws")
    return found


def _machine(evaluation: Evaluation, law: str, asked: Asked) -> Machine:
    """As measured, or as the user has it."""
    if asked.costs is None:
        mapping, where = to_dict(machine_of(evaluation.report, evaluation.rows, law)), "--set"
    else:
        where = str(asked.costs)
        try:
            mapping = json.loads(asked.costs.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {where} as JSON: {error}") from None
        if isinstance(mapping, dict) and isinstance(mapping.get("machines"), dict):
            if law not in mapping["machines"]:
                raise UserError(f"{where} has no machine under '{law}'")
            mapping = mapping["machines"][law]
    if asked.changes and not isinstance(mapping, dict):
        raise UserError(f"{where} must hold a mapping, to be changed by --set")
    for change in asked.changes:
        set_key(mapping, change)
    return parse(Machine, mapping, where)


def _simulated(
    evaluation: Evaluation, cell: tuple[str, str], machine: Machine, asked: Asked
) -> dict[str, Any]:
    domain, law = cell
    survival = _survival(evaluation.report, cell, asked.draft)
    batch = machine.largest if asked.batch is None else asked.batch
    lengths = [asked.tokens] if asked.tokens else [
        (row.prompt_tokens, row.tokens) for row in evaluation.rows
        if (row.domain, row.law) == cell
    ]  # fmt: skip
    ways = [serving(machine, s, batch, asked.memory) for s in ((), survival)]
    most = [capacity(way, lengths, asked.requests, asked.seed) for way in ways]
    limit = pays_up_to(ways[0], ways[1], lengths, asked.requests, asked.seed, (most[0], most[1]))
    seeds = range(asked.seed, asked.seed + _RUNS)
    rows = [
        {
            **{"domain": domain, "law": law, "num_draft_tokens": len(way.survival)},
            **asdict(load(way, lengths, rate, asked.requests, seeds, own)),
        }
        for rate in asked.rates
        for way, own in zip(ways, most, strict=True)
    ]
    return {
        "domain": domain,
        "law": law,
        "batch": batch,
        "num_draft_tokens": len(survival),
        "plain_capacity": most[0],
        "speculative_capacity": most[1],
        "pays_up_to": limit,
        "conversations": [_conversations(way, lengths) for way in ways],
        "rows": rows,
    }


def _survival(
    report: dict[str, Any], cell: tuple[str, str], draft: int | None
) -> tuple[float, ...]:
    """S_k at the draft length. Raises `UserError` for one that was not estimated."""
    sweep = sweep_of(report, *cell)
    gamma = report["settings"]["num_draft_tokens"] if draft is None else draft
    if gamma not in sweep["num_draft_tokens"]:
        known = ", ".join(str(n) for n in sweep["num_draft_tokens"])
        raise UserError(f"drafts of {gamma} tokens were not estimated (known: {known})")
    return tuple(sweep["survival_estimated"][sweep["num_draft_tokens"].index(gamma)])


def _conversations(way: Serving, lengths: Sequence[tuple[int, int]]) -> int | None:
    """How many conversations of mean length memory holds; None without a limit."""
    if way.room is None or not way.kv:
        return None
    held = [way.held(prompt, reply) for prompt, reply in lengths]
    return int(way.room // (sum(held) / len(held)))


# ---- said


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    headers = (
        "domain", "law", "requests/s", "γ", "tokens/s", "latency p50, s", "p99, s",
        "ms/token p50", "p99", "first p50, s", "busy", "at once",
    )  # fmt: skip
    lines = tuple(
        (
            *(row["domain"], row["law"], f"{row['rate']:g}"),
            str(row["num_draft_tokens"] or "plain"),
            interval_text(row["tokens_per_s"], 1),
            *(interval_text(row[name], 2) for name in ("latency_p50", "latency_p99")),
            *(interval_text(_thousandfold(row[f"per_token_{p}"]), 1) for p in ("p50", "p99")),
            interval_text(row["wait_p50"], 2),
            interval_text(row["utilisation"], 2),
            interval_text(row["concurrent"], 1),
        )
        for row in rows
    )
    return Table("Under a rate of requests", headers, lines, 2)


def _thousandfold(figure: dict[str, Any] | None) -> dict[str, Any] | None:
    """Seconds as milliseconds."""
    return figure and {k: None if x is None else 1000 * x for k, x in figure.items()}


def _sentence(one: dict[str, Any]) -> str:
    plain, fast = one["plain_capacity"], one["speculative_capacity"]
    rate = one["pays_up_to"]
    if rate is None:
        pays = "it answers sooner at every rate that plain decoding can serve"
    elif rate == 0:
        pays = "it does not answer sooner at any rate"
    else:
        pays = f"it answers sooner up to {rate:.3g} requests/s"
    held = [n for n in one["conversations"] if n is not None]
    memory = "" if not held else (
        f"; memory holds {held[0]} conversations plainly, {held[-1]} beside the drafter"
    )  # fmt: skip
    return (
        f"{one['domain']}, {one['law']}, up to {one['batch']} at a time: plain decoding serves at "
        f"most {plain:.3g} requests/s, speculation (γ = {one['num_draft_tokens']}) {fast:.3g}; "
        f"{pays}{memory}."
    )
