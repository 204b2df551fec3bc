"""The tables of a report: rows of text, one for each domain and law, nothing averaged over them."""

import math
from collections.abc import Iterator
from typing import Any

from .page import Report, Table

MISSING = "–"
MIN_CONVERSATIONS = 8
"""Intervals from fewer are too narrow to say that two figures exclude each other."""
TOGETHER = "(all, pooled)"
"""The row of all domains' counts together."""


def summary_tables(report: Report) -> list[Table]:
    """What the terminal prints and the page begins with."""
    makers = (_acceptance, _rounds, _servings, _speed, _costs, _near_ties)
    tables = [make(report) for make in makers]
    for engine in report.get("engines") or []:
        tables += [_engine_rounds(engine), _engine_speed(engine)]
    return [table for table in tables if table.rows]


def detail_tables(report: Report) -> list[Table]:
    """What only the page has room for: per position, per draft length, and the conditions."""
    settings = tuple((key, str(value)) for key, value in _flat(report["settings"]))
    provenance = tuple((key, str(value)) for key, value in _flat(report["provenance"]))
    header = ("what", "value")
    tables = [
        _positions(report),
        _sweep(report),
        Table("Settings", header, settings, labels=2),
        Table("Provenance", header, provenance, labels=2),
        stages_table(report),
    ]
    return [table for table in tables if table.rows]


def _acceptance(report: Report) -> Table:
    cells = _with_totals(report)
    gamma = max(len(cell.get("acceptance_by_position") or []) for cell in cells)
    reduced = any(cell.get("captured_mass") is not None for cell in cells)
    ceiling = ("P(V_d)",) if reduced else ()
    rows = []
    for cell in cells:
        survival = [place["survival"] for place in cell.get("acceptance_by_position") or []]
        survival += [None] * (gamma - len(survival))
        mass = (_number(cell.get("captured_mass"), 3),) if reduced else ()
        rows.append(
            (
                *(cell["domain"], cell["law"], _conversations(cell["prompts"])),
                *(interval_text(cell["overlap"], 3), *mass),
                *(_number(value, 2) for value in survival),
            )
        )
    survivals = tuple(f"S_{k}" for k in range(1, gamma + 1))
    headers = ("domain", "law", "n", "α overlap", *ceiling, *survivals)
    notes = []
    if reduced:
        notes.append("P(V_d): the target's mass on the reduced draft vocabulary, a ceiling for α.")
    if any(cell["prompts"] < MIN_CONVERSATIONS for cell in cells):
        notes.append(f"* fewer than {MIN_CONVERSATIONS} conversations: a narrow interval may lie.")
    if len(cells) > len(report["cells"]):
        notes.append(f"{TOGETHER}: all domains' counts as one, in which long replies weigh more.")
    return Table("Acceptance", headers, tuple(rows), 2, " ".join(notes))


def _conversations(count: int) -> str:
    return str(count) if count >= MIN_CONVERSATIONS else f"{count}*"


def _with_totals(report: Report) -> list[Report]:
    """The cells, and behind those of each law that several domains share their counts together."""
    rows: list[Report] = list(report["cells"])
    for total in report.get("totals") or []:
        if sum(cell["law"] == total["law"] for cell in rows) > 1:
            rows.append({"domain": TOGETHER, **total})
    return rows


def _rounds(report: Report) -> Table:
    counts = ("rounds", "undrafted", "drafted", "tested", "accepted")
    figures = ("τ decoded", "τ estimated", "τ by reply", "accepted a round", "accepted ÷ drafted")
    rows = tuple(
        (
            *(cell["domain"], cell["law"]),
            *(MISSING if cell.get(key) is None else str(cell[key]) for key in
              ("rounds", "undrafted_rounds", "drafted", "tested", "accepted")),
            interval_text(cell["tokens_per_round"], 2),
            interval_text(cell.get("tokens_per_round_estimated"), 2),
            interval_text(cell.get("tokens_per_round_by_reply"), 2),
            _number(cell["mean_accepted"], 2),
            _number(cell["draft_acceptance_rate"], 3),
        )
        for cell in _with_totals(report)
    )  # fmt: skip
    note = (
        "τ is pooled, tokens ÷ rounds of all replies together; by reply: the mean of each one's "
        "own. tested: drafted tokens up to the first that was refused."
    )
    headers = ("domain", "law", *counts, *figures)
    return Table("Tokens per round", headers, rows, 2, note)


def _servings(report: Report) -> Table:
    """Expected τ however the drafter might be served; at T = 0 all ways are the same."""
    cells = [cell for cell in report["cells"] if cell["tokens_per_round_by_serving"]]
    ways = tuple(dict.fromkeys(way for c in cells for way in c["tokens_per_round_by_serving"]))
    rows = tuple(
        (
            *(cell["domain"], cell["law"]),
            *(interval_text(cell["tokens_per_round_by_serving"].get(way), 2) for way in ways),
        )
        for cell in cells
    )
    return Table(
        "τ estimated, by how drafts are drawn and verified", ("domain", "law", *ways), rows, 2
    )


def _speed(report: Report) -> Table:
    speeds = ("plain tok/s", "speculative tok/s", "speedup measured", "speedup predicted")
    headers = ("domain", "law", "n", "prefill ms, plain", "speculative", *speeds)
    rows = tuple(
        (
            *(cell["domain"], cell["law"], str(speed.get("prompts", MISSING))),
            _milliseconds(speed.get("plain_prefill_seconds")),
            _milliseconds(speed.get("speculative_prefill_seconds")),
            _number(speed.get("plain_tokens_per_s"), 1),
            _number(speed.get("speculative_tokens_per_s"), 1),
            interval_text(speed.get("speedup"), 2),
            _number(speed.get("predicted"), 2),
        )
        for cell, speed in ((cell, cell.get("speed")) for cell in report["cells"])
        if speed
    )
    gamma = report["settings"]["num_draft_tokens"]
    note = f"Draft length γ = {gamma}, one row at a time; prefill is not part of the speeds."
    return Table("Speed", headers, rows, 2, note)


def _costs(report: Report) -> Table:
    cost = report.get("cost") or {}
    if not cost:
        return Table("Costs", (), ())
    passes = zip(cost.get("rows") or [], cost.get("v") or [], strict=False)
    plain = cost.get("plain_seconds_per_token")
    rows = (
        *((f"v({n})", _number(value, 3)) for n, value in passes),
        *(
            (f"{name}, {law}", _number(values.get(name), 3))
            for law, values in (cost.get("by_law") or {}).items()
            for name in ("c_first", "c", "o", "o_plain")
        ),
        ("plain ms per token", _milliseconds(plain)),
        ("plain loop ÷ transformers generate", interval_text(cost.get("generate_ratio"), 2)),
    )
    note = (
        f"c, v, o in one-token target passes, at {cost.get('context', MISSING)} tokens of context."
    )
    return Table("Costs", ("cost", "value"), rows, 1, note)


def _near_ties(report: Report) -> Table:
    lossless = report.get("lossless") or {}
    rows = tuple(
        (kind, str(place["prompt_id"]), str(place["position"]), f"{place['margin']:.2e}")
        for kind, key in (("different", "different"), ("near-tie", "near_ties"))
        for place in lossless.get(key) or []
    )
    headers = ("kind", "prompt", "position", "top-2 margin")
    return Table("Where greedy outputs part", headers, rows, 2)


def _served_by(engine: Report) -> str:
    version = f" {engine['version']}" if engine.get("version") else ""
    return (
        f"{engine['engine']}{version} ({engine['method']}, γ = {engine['num_draft_tokens']}, "
        f"{engine['draft_sampling']} drafts)"
    )


def _engine_rounds(engine: Report) -> Table:
    """What an engine counted beside what was expected; shares are of all its rounds."""
    positions = range(1, engine["num_draft_tokens"] + 1)
    rows = []
    for cell in engine["cells"]:
        shares = []
        for place in cell["positions"]:
            least, most = (_number(place[bound]["value"], 2) for bound in ("least", "most"))
            bounds = least if least == most else f"{least}–{most}"
            shares += [_number(place["share"]["value"], 2), bounds]
        same = cell["same_replies"]
        rows.append(
            (
                *(cell["domain"], cell["law"], _conversations(cell["prompts"])),
                MISSING if same is None else f"{same}/{cell['replies']}",
                str(cell["rounds"]),
                interval_text(cell["tokens_per_round"], 2),
                interval_text(cell["tokens_per_round_expected"], 2),
                *shares,
                *(
                    _number((cell["log_prob"] or {}).get(key), 2)
                    for key in ("measured", "expected")
                ),
            )
        )
    figures = ("same replies", "rounds", "τ", "τ expected")
    shares = [name for k in positions for name in (f"S_{k}", f"S_{k} expected")]
    note = (
        "S_k: share of all rounds; a range, as what is counted beyond the end of a reply is not "
        "known. log p: mean of the replies' tokens under the target."
    )
    title = f"Acceptance in {_served_by(engine)}"
    headers = ("domain", "law", "n", *figures, *shares, "log p", "log p expected")
    return Table(title, headers, tuple(rows), 2, note)


def _engine_speed(engine: Report) -> Table:
    rows = tuple(
        (
            *(cell["domain"], cell["law"], str(speed["concurrency"])),
            _number(speed["plain_tokens_per_s"], 1),
            _number(speed["speculative_tokens_per_s"], 1),
            interval_text(speed["speedup"], 2),
        )
        for cell in engine["cells"]
        for speed in cell["speed"]
    )
    headers = ("domain", "law", "concurrency", "plain tok/s", "speculative tok/s", "speedup")
    note = "Prefill included; plain and speculative ran one after the other."
    return Table(f"Speed in {_served_by(engine)}", headers, rows, 2, note)


def _positions(report: Report) -> Table:
    rows = tuple(
        (
            *(cell["domain"], cell["law"], str(place["position"])),
            *(str(place["attempts"]), str(place["accepted"])),
            *(_number(place["conditional"], 3), _number(place["survival"], 3)),
        )
        for cell in report["cells"]
        for place in cell["acceptance_by_position"]
    )
    headers = ("domain", "law", "position", "attempts", "accepted", "conditional", "survival S_k")
    return Table("Acceptance by position", headers, rows, 2)


def _sweep(report: Report) -> Table:
    rows = []
    for line in report.get("sweep") or []:
        measured = {point["num_draft_tokens"]: point for point in line["measured"]}
        lengths = line["num_draft_tokens"]
        predicted = line["predicted"] or [None] * len(lengths)
        estimated = zip(line["tokens_per_round_estimated"], predicted, strict=True)
        known = dict(zip(lengths, estimated, strict=True))
        for gamma in sorted({*known, *measured}):
            tau, speedup = known.get(gamma, (None, None))
            rows.append(
                (
                    *(line["domain"], line["law"], str(gamma)),
                    *(interval_text(tau, 2), _number(speedup, 2)),
                    interval_text(measured.get(gamma), 2),
                )
            )
    headers = ("domain", "law", "γ", "τ estimated", "speedup predicted", "speedup measured")
    return Table("Speedup by draft length", headers, tuple(rows), 2)


def stages_table(report: Report) -> Table:
    stages = report.get("stages") or []
    rows = tuple((stage["stage"], _number(stage["seconds"], 1)) for stage in stages)
    return Table("Stages", ("stage", "seconds"), rows)


def _flat(mapping: Report, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys, in their own order."""
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", MISSING if value is None else value


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else 1000 * seconds, 1)


def interval_text(estimate: Report | None, digits: int) -> str:
    """`0.52 [0.49–0.55]`, without brackets where there is no interval."""
    low, high = ((estimate or {}).get(key) for key in ("low", "high"))
    value = _number((estimate or {}).get("value"), digits)
    if low is None or high is None:
        return value
    return f"{value} [{_number(low, digits)}–{_number(high, digits)}]"
