"""A measured report: written to report.json and report.html, read back, printed, doubted.

Every table keeps one row per domain and law. Nothing is averaged over domains or laws: a mean
would hide the domain on which the draft does not pay.
"""

import json
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from ..configs.errors import UserError
from ..drafters.card_table import measured_table
from .advice import advice, sentences
from .all_tables import first_tables, further_tables
from .beside import side_by_side
from .page import GLOSSARY, Banner, Entry, Report, Table, render_page
from .page_data import page_data
from .tables import MIN_CONVERSATIONS, interval_text, stages_table

FORMAT = 2
JSON_NAME = "report.json"
HTML_NAME = "report.html"
REPLIES_NAME = "replies.json"

MIN_GENERATE_RATIO = 0.97
"""A plain loop slower than this share of transformers' generate flatters every speedup."""
MAX_PREDICTION_GAP = 0.15
"""A prediction further from what was measured, and outside its interval, explains nothing."""
MIN_OVERLAP_TO_ACCEPT = 0.05
"""Above this overlap, a decoder that accepts nothing at all is broken, not unlucky."""


def write_report(report: Report, folder: Path, replies: Sequence[Report] | None = None) -> None:
    """Write report.json and report.html into `folder`, each whole or not at all.

    Alarms found here join those the report already holds. A number that is not finite is written
    as null, which reads as "not measured": JSON has no other word for it. The numbers go first,
    so that they are safe whatever happens to the page.

    `replies` are shown on the page, and stand in replies.json, as report.json carries no text: a
    list of {domain, law, prompt_id, pieces}, the pieces as `heatmap` has them. None keeps those
    that the folder has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = _plain({**report, "alarms": _all_alarms(report)})
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    _write_whole(folder / JSON_NAME, text)
    if replies is not None:
        _write_whole(folder / REPLIES_NAME, json.dumps(list(replies), ensure_ascii=False) + "\n")
    _write_whole(folder / HTML_NAME, page(report, read_replies(folder)))


def read_report(path: Path) -> Report:
    """The report at `path` (the file, or the folder that holds it).

    Raises UserError if there is none, if it is not JSON, or if its format is not known here.
    """
    path = Path(path)
    if path.is_dir():
        path = path / JSON_NAME
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no report at {path}; an evaluation writes one") from None
    except ValueError as error:
        raise UserError(f"{path} is not a report: it is not valid JSON ({error})") from None
    found = report.get("format") if isinstance(report, dict) else None
    if found != FORMAT:
        raise UserError(f"{path} has report format {found!r}; this version reads format {FORMAT}")
    return report


def read_replies(folder: Path) -> list[Report]:
    """The replies that an evaluation kept in `folder` for its page; none if it kept none."""
    path = folder / REPLIES_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def _write_whole(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a half."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _plain(value: Any) -> Any:
    """JSON types all the way down; numpy's numbers become Python's, non-finite ones None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def alarms(report: Report) -> list[str]:
    """What cannot be true, or should not be trusted, in this report; one sentence each."""
    found = [sentence for cell in report["cells"] for sentence in _cell_alarms(cell)]
    lossless = report.get("lossless") or {}
    if lossless.get("verdict") == "different":
        places = len(lossless.get("different") or [])
        found.append(
            f"speculative decoding changed the target's output beyond rounding, in "
            f"{places} of {lossless.get('prompts')} prompts: no speed counts"
        )
    ratio = ((report.get("cost") or {}).get("generate_ratio") or {}).get("value")
    if ratio is not None and ratio < MIN_GENERATE_RATIO:
        found.append(
            f"the plain loop reaches only {ratio:.2f} of transformers generate's tokens per "
            "second: measured speedups are against a slow baseline"
        )
    parity = report.get("parity") or {}
    if parity.get("checked") and not parity["ok"]:
        parts = [part["name"] for part in parity["parts"] if part["verdict"] == "different"]
        found.append(
            f"what was trained is not what decodes ({', '.join(parts)} differ): "
            "`draftsmith parity` says where"
        )
    return found + [sentence for e in report.get("engines") or [] for sentence in engine_alarms(e)]


def engine_alarms(engine: Report) -> list[str]:
    """In what an engine did not do with the drafter what was expected."""
    return [
        f"{engine['engine']}, {cell['domain']}, {cell['law']}: {deviation}"
        for cell in engine["cells"]
        for deviation in cell["deviations"]
    ]


def _cell_alarms(cell: Report) -> Iterator[str]:
    where = f"{cell['domain']}, {cell['law']}"
    decoded = cell["tokens_per_round"]
    estimated = cell.get("tokens_per_round_estimated") or {}
    speedup = (cell.get("speed") or {}).get("speedup") or {}
    if _above(speedup, decoded):
        yield (
            f"{where}: measured speedup {interval_text(speedup, 2)} lies above τ "
            f"{interval_text(decoded, 2)}, which is impossible: the plain baseline is wrong"
        )
    predicted = (cell.get("speed") or {}).get("predicted")
    if predicted is not None and _is_off(predicted, speedup):
        yield (
            f"{where}: speedup {predicted:.2f} was predicted and {interval_text(speedup, 2)} "
            "measured: costs differ between the two, or the draft length is not kept"
        )
    enough = cell["prompts"] >= MIN_CONVERSATIONS
    if enough and (_above(estimated, decoded) or _above(decoded, estimated)):
        yield (
            f"{where}: estimated τ {interval_text(estimated, 2)} and decoded τ "
            f"{interval_text(decoded, 2)} exclude each other: the decoder and the estimator do not "
            "see the same draft"
        )
    overlap = cell["overlap"]["value"]
    if (
        cell["draft_acceptance_rate"] == 0
        and overlap is not None
        and overlap > MIN_OVERLAP_TO_ACCEPT
    ):
        yield (
            f"{where}: no drafted token was accepted although the overlap is {overlap:.2f}: the "
            "draft is not decoded as it was trained"
        )


def _is_off(predicted: float, measured: Report) -> bool:
    value, low, high = (measured.get(key) for key in ("value", "low", "high"))
    if value is None or low is None or high is None or low <= predicted <= high:
        return False
    return abs(predicted / value - 1) > MAX_PREDICTION_GAP


def _above(upper: Report, lower: Report) -> bool:
    """Whether one interval lies wholly above another; False where either is not known."""
    low, high = upper.get("low"), lower.get("high")
    return low is not None and high is not None and low > high


def _all_alarms(report: Report) -> list[str]:
    return list(dict.fromkeys([*(report.get("alarms") or []), *alarms(report)]))


def banners(report: Report) -> list[Banner]:
    """The verdict on losslessness, then every alarm."""
    lossless = report.get("lossless") or {"verdict": "not checked"}
    verdict, prompts = lossless["verdict"], lossless.get("prompts", 0)
    near = len(lossless.get("near_ties") or [])
    texts = {
        "equal": ("good", f"Lossless: greedy outputs equal on {prompts} prompts."),
        "equal except near-ties": (
            "good",
            f"Lossless: greedy outputs equal on {prompts} prompts, except where the "
            f"target's two best tokens tie within rounding (near-ties: {near}).",
        ),
        "different": ("bad", f"NOT LOSSLESS: greedy outputs differ ({prompts} prompts checked)."),
        "not checked": ("warn", "Losslessness was not checked in this run."),
    }
    tone, text = texts.get(verdict, ("warn", f"Losslessness: {verdict}."))
    return [
        Banner(tone, text),
        *(Banner("bad", f"Alarm: {alarm}.") for alarm in _all_alarms(report)),
    ]


def page(report: Report, replies: Iterable[Report] = ()) -> str:
    """The HTML page of a report; `replies` as `write_report` takes them."""
    stand = report["provenance"]
    title = f"draftsmith: {stand['drafter']['family']} draft for {stand['target']['name']}"
    return benchmark_page(title, _headline(report), [(stand["drafter"]["family"], report)], replies)


def benchmark_page(
    title: str,
    summary: str,
    entries: Sequence[tuple[str, Report]],
    replies: Iterable[Report] = (),
) -> str:
    """One HTML page of several drafters' reports, (name, report) each.

    With more than one entry, a reply says by `entry` which name it belongs to.
    """
    return render_page(
        title,
        summary,
        side_by_side(entries) if len(entries) > 1 else None,
        [
            Entry(
                name,
                _headline(report),
                banners(report),
                first_tables(report),
                further_tables(report),
                measured_table(report),
            )
            for name, report in entries
        ],
        page_data(entries, replies),
    )


def _headline(report: Report) -> str:
    target, draft = report["provenance"]["target"], report["provenance"]["drafter"]
    settings, machine = report["settings"], report["provenance"].get("machine") or {}
    quantisation = target.get("quantisation")
    kept = f" from {quantisation} weights" if quantisation else ""
    return (
        f"Target {target['name']} ({target['parameters']:,} parameters, {target['dtype']}{kept}); "
        f"{draft['family']} draft ({draft['parameters']:,} parameters); "
        f"γ = {settings['num_draft_tokens']}, {settings['verifier']} verification, draft "
        f"{settings['draft_sampling']}; {machine.get('processor', 'unknown processor')}, "
        f"{report.get('created', '')}"
    )


def print_report(report: Report, console: Console) -> None:
    """The report for a terminal: verdict, tables, glossary."""
    stand = report["provenance"]
    title = f"{stand['drafter']['family']} draft for {stand['target']['name']}"
    # Text, never markup: a domain may be called "[bold]", and intervals stand in brackets.
    console.print(Text(title, style="bold"))
    console.print(Text(_headline(report), style="dim"))
    styles = {"good": "bold green", "warn": "bold yellow", "bad": "bold red"}
    for banner in banners(report):
        console.print(Text(banner.text, style=styles[banner.tone]))
    for table in [*first_tables(report), stages_table(report)]:
        if table.rows:
            print_table(table, console)
            if table.note:
                console.print(Text(table.note, style="dim"))
    advised = advice(report)
    for sentence in sentences(advised) if advised else ():
        console.print(Text(sentence), soft_wrap=True)
    for symbol, meaning in GLOSSARY:
        console.print(Text.assemble((symbol, "bold"), f": {meaning}"))


def print_table(table: Table, console: Console) -> None:
    """A value and its interval may take two lines. No digit is cut: a wide table runs over."""
    drawn = rich_table.Table(
        title=Text(table.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD
    )
    needed = 2 + 3 * len(table.headers)
    for index, header in enumerate(table.headers):
        is_name = index < table.labels
        texts = [header, *(row[index] for row in table.rows)]
        words = texts if is_name else [word for text in texts for word in text.split()]
        longest = max(len(word) for word in words)
        justify: Literal["left", "right"] = "left" if is_name else "right"
        drawn.add_column(Text(header), justify=justify, min_width=longest, no_wrap=is_name)
        needed += longest
    for row in table.rows:
        drawn.add_row(*(Text(text) for text in row))
    console.print(drawn, width=max(console.width, needed), crop=False)
