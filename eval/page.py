"""Reports as one HTML file: it opens offline, prints, and shows what its reader chooses.

The page renders what it is given: report.py decides what a table or a banner says, page_data.py
what is drawn. Its script (web/page.js) draws with nothing but the browser; without it, the tables
stand alone. The page's policy runs this script and no other, and loads nothing from anywhere.
"""

import html
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

Report = dict[str, Any]

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "α (overlap)",
        "Σ min(p, q) over the vocabulary, p the target's and q the draft's distribution under the "
        "serving law: the chance that a drafted token is accepted. Mean over held-out tokens.",
    ),
    ("n", "prompts measured; those of the speed table are timed prompts"),
    ("[low–high]", "bootstrap interval over conversations, not over tokens"),
    ("A", "draft tokens accepted in one round; the bonus token is not counted"),
    ("S_k", "P(A ≥ k): the share of rounds that accept at least the first k draft tokens"),
    (
        "τ (tokens_per_round)",
        "tokens per target pass, the bonus token included; decoded by the speculative loop, and "
        "estimated from target samples alone",
    ),
    (
        "accepted ÷ drafted (draft_acceptance_rate)",
        "what serving engines call the acceptance rate; falls with the draft length, unlike α",
    ),
    ("γ", "draft length: tokens drafted in one round"),
    (
        "c, c_first",
        "time of a draft step, and of the first one of a round ÷ a one-token target pass",
    ),
    ("v(n)", "time of a target pass over n tokens ÷ over one token"),
    (
        "o, o_plain",
        "time of a round, and of a plain step, outside model passes ÷ a one-token target pass",
    ),
    (
        "speedup",
        "speculative ÷ plain tokens per second, same target path, one row, prefill excluded",
    ),
    (
        "predicted",
        "(1 + Σ S_k)·(1 + o_plain) / (c_first + (γ − 1)·c + v(γ + 1) + o), k = 1..γ",
    ),
)


@dataclass(frozen=True)
class Table:
    """A table of ready-made strings, printed alike in the terminal and on the page."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    """Leading columns that hold names (aligned left); the others hold numbers."""
    note: str = ""


@dataclass(frozen=True)
class Banner:
    """One sentence at the top of a report."""

    tone: str
    """`good`, `warn` or `bad`."""
    text: str


@dataclass(frozen=True)
class Entry:
    """One drafter on the page. `tables` come first, `details` are folded away on the screen."""

    name: str
    summary: str
    banners: Sequence[Banner]
    tables: Sequence[Table]
    details: Sequence[Table]
    card: str
    """The table to paste into a model card, in Markdown."""


def render_page(
    title: str, summary: str, beside: Table | None, entries: Sequence[Entry], data: Report
) -> str:
    """The whole page. `beside` puts several entries side by side, `data` is for the script."""
    parts = [
        f"<header><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p></header>",
        *(_banners(entry, len(entries)) for entry in entries),
        _table(beside, "beside") if beside is not None else "",
        _EXPLORE,
        *(_entry(entry, index, len(entries)) for index, entry in enumerate(entries)),
        _glossary(),
    ]
    style, script = _asset("page.css"), _asset("page.js")
    return _PAGE.format(
        title=html.escape(title),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        style=style,
        body="\n".join(parts),
        data=_inert(data),
        script=script,
    )


def _asset(name: str) -> str:
    return (Path(__file__).parent / "web" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls exactly this text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _inert(data: Report) -> str:
    """JSON in which no browser can find the end of its script element, or a comment's start."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _banners(entry: Entry, entries: int) -> str:
    """A box for the first, the verdict, and one for every run of others of one tone."""
    owner = f"{html.escape(entry.name)}: " if entries > 1 else ""
    boxes = []
    runs = groupby(entry.banners[1:], lambda banner: banner.tone)
    for group in [entry.banners[:1], *(list(run) for _, run in runs)]:
        texts = [html.escape(banner.text) for banner in group]
        inner = owner + texts[0]
        if len(texts) > 1:
            inner = f"{owner}<ul><li>{'</li><li>'.join(texts)}</li></ul>"
        tag = "div" if len(texts) > 1 else "p"
        boxes.append(f'<{tag} class="banner {html.escape(group[0].tone)}">{inner}</{tag}>')
    return "\n".join(boxes)


def _entry(entry: Entry, index: int, entries: int) -> str:
    """What one drafter's report says, whatever the reader chooses."""
    name = f"drafter-{index}"
    tables = [_table(table, f"{name}-{i}") for i, table in enumerate(entry.tables)]
    details = [_table(table, f"{name}-detail-{i}") for i, table in enumerate(entry.details)]
    heading = ""
    if entries > 1:
        heading = f"<h2>{html.escape(entry.name)}</h2><p>{html.escape(entry.summary)}</p>"
    return (
        f'<section class="entry">{heading}\n'
        + "\n".join(tables)
        + f'\n<section><h2>Table for a model card</h2><p>Markdown. <button type="button" hidden '
        f'data-copies="{name}-card">Copy</button></p>'
        f'<pre id="{name}-card" tabindex="0">{html.escape(entry.card)}</pre></section>\n'
        + "<details><summary>Positions, draft lengths, settings and provenance</summary>\n"
        + "\n".join(details)
        + "\n</details></section>"
    )


def _table(table: Table, name: str) -> str:
    def cells(row: Sequence[str], scope: str) -> str:
        made = []
        for index, text in enumerate(row):
            is_name = index < table.labels
            tag = f'th scope="{scope}"' if is_name or scope == "col" else "td"
            kind = "name" if is_name else "number"
            made.append(f'<{tag} class="{kind}">{html.escape(text)}</{tag[:2]}>')
        return "".join(made)

    body = "\n".join(f"<tr>{cells(row, 'row')}</tr>" for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    # A region that scrolls has to be reached by the keyboard.
    return (
        f'<section><h2 id="{name}">{html.escape(table.title)}</h2>{note}'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}">'
        f"<table><thead><tr>{cells(table.headers, 'col')}</tr></thead>"
        f"<tbody>\n{body}\n</tbody></table></div></section>"
    )


def _glossary() -> str:
    items = "\n".join(
        f"<dt>{html.escape(symbol)}</dt><dd>{html.escape(meaning)}</dd>"
        for symbol, meaning in GLOSSARY
    )
    return f"<section><h2>Glossary</h2><dl>\n{items}\n</dl></section>"


# Shown by the script, which fills it.
_EXPLORE = """<div id="explore" hidden>
<div id="controls" role="group" aria-label="What is shown">
<label>Drafter <select id="drafter"></select></label>
<label>Domain <select id="domain"></select></label>
<label>Law <select id="law"></select></label>
<label>γ <select id="length"></select></label>
<label>Side by side <select id="lines"></select></label>
</div>
<h2>Chosen: <span id="selection"></span></h2>
<div id="cards" aria-live="polite"></div>
<div id="figures" class="figures"></div>
<div id="elsewhere"></div>
<section id="replies" hidden><h2>Where the tokens of a reply came from</h2>
<p><label>Reply <select id="reply"></select></label> <span id="told"></span></p>
<ul id="kinds" class="kinds"></ul>
<div id="tokens"></div></section>
</div>"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
