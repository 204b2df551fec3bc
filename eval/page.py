"""One report as one HTML file: tables and inline SVG plots, nothing fetched from anywhere.

The page renders what it is given: report.py decides what a table or a banner says. Plots are
drawn by matplotlib (the `report` extra) through its object interface, so that no display and no
global backend is touched; without matplotlib the tables stand alone.
"""

import html
import importlib.util
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]

NO_PLOTS = "The plots need matplotlib: pip install 'draftsmith[report]'"

# Readable on white and on black. One colour is one domain, in every plot of the page.
PALETTE = ("#2f86c9", "#d9822b", "#1f9e77", "#c26ba8", "#8f8a1c", "#c94f4f", "#7a6fd0", "#5f8a8b")
# What is drawn in INK becomes `currentColor`, so that axes and labels follow the page's theme.
INK = "#010203"
LABEL_LENGTH = 24

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


def render_page(
    report: Report,
    *,
    title: str,
    summary: str,
    banners: Sequence[Banner],
    tables: Sequence[Table],
    details: Sequence[Table],
) -> str:
    """The whole page. `tables` stand above the plots and the glossary, `details` below them."""
    parts = [
        f"<header><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p></header>",
        *(_banner(banner) for banner in banners),
        *(_table(table) for table in tables),
        _plots(report),
        _glossary(),
        *(_table(table) for table in details),
    ]
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(parts))


def _banner(banner: Banner) -> str:
    return f'<p class="banner {html.escape(banner.tone)}">{html.escape(banner.text)}</p>'


def _table(table: Table) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ["name" if i < table.labels else "number" for i in range(len(row))]
        return "".join(
            f'<{tag} class="{kind}">{html.escape(text)}</{tag}>'
            for kind, text in zip(kinds, row, strict=True)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f"<section><h2>{html.escape(table.title)}</h2>{note}"
        f'<div class="scroll"><table><thead><tr>{cells("th", table.headers)}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div></section>"
    )


def _glossary() -> str:
    items = "\n".join(
        f"<dt>{html.escape(symbol)}</dt><dd>{html.escape(meaning)}</dd>"
        for symbol, meaning in GLOSSARY
    )
    return f"<section><h2>Glossary</h2><dl>\n{items}\n</dl></section>"


def _plots(report: Report) -> str:
    plots = draw_plots(report)
    if plots is None:
        return f"<section><h2>Plots</h2><p>{html.escape(NO_PLOTS)}</p></section>"
    figures = "\n".join(
        f'<figure><figcaption>{html.escape(caption)}</figcaption><div class="scroll">{svg}</div>'
        "</figure>"
        for caption, svg in plots
    )
    return f"<section><h2>Plots</h2>\n{figures}\n</section>" if plots else ""


# ----------------------------------------------------------------------------- plots


def draw_plots(report: Report) -> list[tuple[str, str]] | None:
    """Pairs (caption, SVG), or None where matplotlib is not installed. Colour = domain.

    One column of panels a law: domains and laws are never averaged. A plot without a single
    number to show is left out.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    cells, sweep = report["cells"], report.get("sweep") or []
    wanted: list[tuple[str, str, Callable[[Any], None], bool]] = [
        (
            "overlap",
            "Overlap α per domain: the chance that one drafted token is accepted.",
            lambda figure: _draw_overlap(figure, cells),
            any(cell["overlap"]["value"] is not None for cell in cells),
        ),
        (
            "position",
            "Acceptance by position in the draft: P(accepted | all before it accepted), and "
            "S_k = P(A ≥ k).",
            lambda figure: _draw_positions(figure, cells),
            any(cell["acceptance_by_position"] for cell in cells),
        ),
        (
            "speedup",
            "Speedup against draft length γ: lines predicted from S_k and measured costs, points "
            "measured.",
            lambda figure: _draw_speedup(figure, sweep),
            bool(sweep),
        ),
    ]
    return [
        (caption, _draw(name, caption, paint))
        for name, caption, paint, present in wanted
        if present
    ]


def _draw(name: str, caption: str, paint: Callable[[Any], None]) -> str:
    """Paint a figure and return its SVG, the same bytes for the same report."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE_OF_PLOTS, "svg.hashsalt": f"draftsmith-{name}"}
    with matplotlib.rc_context(style):
        figure = Figure(layout="constrained")
        paint(figure)
        buffer = io.StringIO()
        # Fields set to None are left out: a date would make every file differ.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), name, caption)


_STYLE_OF_PLOTS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and it takes the theme's colour
    "text.parse_math": False,  # a domain may be called "$x$"
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "lines.markersize": 4,
    "lines.linewidth": 1.5,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": INK,
}


def _inline(svg: str, name: str, caption: str) -> str:
    """Fit matplotlib's SVG file into an HTML page: no prolog, own ids, the theme's ink."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows both namespaces by itself
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several figures share one page, and matplotlib calls the parts of each by the same names.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    label = html.escape(caption)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _axes(figure: Any, rows: int, laws: Sequence[str], height: float, **shared: Any) -> Any:
    """Panels [rows, laws], each column headed by its law."""
    figure.set_size_inches(max(4.2 * len(laws), 5.6), height)
    axes = figure.subplots(rows, max(len(laws), 1), squeeze=False, **shared)
    for column, law in enumerate(laws):
        axes[0, column].set_title(law, fontsize=10)
    return axes


def _distinct(cells: Sequence[Report], key: str) -> list[str]:
    return list(dict.fromkeys(cell[key] for cell in cells))


def _short(name: str) -> str:
    return name if len(name) <= LABEL_LENGTH else name[: LABEL_LENGTH - 1] + "…"


def _colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _errors(point: Report) -> list[list[float]] | None:
    """Distances [[below], [above]] for matplotlib, or None without an interval."""
    value, low, high = (point.get(key) for key in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return None
    return [[max(value - low, 0.0)], [max(high - value, 0.0)]]


def _legend(figure: Any, domains: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_colour(i), marker="o") for i in range(len(domains))]
    names = [_short(name) for name in domains]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(domains), 4))


def _draw_overlap(figure: Any, cells: Sequence[Report]) -> None:
    domains, laws = _distinct(cells, "domain"), _distinct(cells, "law")
    axes = _axes(figure, 1, laws, 0.9 + 0.36 * len(domains), sharex=True, sharey=True)
    for cell in cells:
        ax, row = axes[0, laws.index(cell["law"])], domains.index(cell["domain"])
        overlap = cell["overlap"]
        if overlap["value"] is None:
            continue
        errors = _errors(overlap)
        ax.barh(row, overlap["value"], 0.7, color=_colour(row), alpha=0.8)
        if errors is not None:
            ax.errorbar(overlap["value"], row, xerr=errors, fmt="none", ecolor=INK, capsize=3)
        end = max(overlap["value"], overlap.get("high") or 0.0)
        ax.text(end + 0.02, row, f"{overlap['value']:.2f}", va="center", fontsize=9)
    for ax in axes[0]:
        ax.set(xlim=(0, 1.12), xlabel="overlap α", xticks=[0, 0.25, 0.5, 0.75, 1])
        ax.grid(False, axis="y")
    axes[0, 0].set_yticks(range(len(domains)), [_short(name) for name in domains])
    axes[0, 0].set_ylim(len(domains) - 0.4, -0.6)


def _draw_positions(figure: Any, cells: Sequence[Report]) -> None:
    domains, laws = _distinct(cells, "domain"), _distinct(cells, "law")
    axes = _axes(figure, 2, laws, 5.2, sharex=True, sharey=True)
    kinds = (("conditional", "conditional"), ("survival", "survival S_k"))
    for cell in cells:
        column, colour = laws.index(cell["law"]), _colour(domains.index(cell["domain"]))
        for row, (key, _) in enumerate(kinds):
            points = [p for p in cell["acceptance_by_position"] if p[key] is not None]
            places = [p["position"] for p in points]
            axes[row, column].plot(places, [p[key] for p in points], marker="o", color=colour)
    for row, (_, label) in enumerate(kinds):
        axes[row, 0].set_ylabel(label)
    last = max((len(cell["acceptance_by_position"]) for cell in cells), default=1)
    axes[0, 0].set(ylim=(0, 1.03), xlim=(0.8, last + 0.2), xticks=range(1, last + 1))
    for ax in axes[1]:
        ax.set_xlabel("position k in the draft")
    _legend(figure, domains)


def _draw_speedup(figure: Any, sweep: Sequence[Report]) -> None:
    domains, laws = _distinct(sweep, "domain"), _distinct(sweep, "law")
    axes = _axes(figure, 1, laws, 3.6, sharex=True, sharey=True)
    longest = 1
    for line in sweep:
        ax, index = axes[0, laws.index(line["law"])], domains.index(line["domain"])
        lengths = line["num_draft_tokens"]
        predicted = [float("nan") if v is None else v for v in line["predicted"]]
        ax.plot(lengths, predicted, color=_colour(index))
        # Points of one draft length stand side by side, so that no interval hides another.
        shift = 0.07 * (index - (len(domains) - 1) / 2)
        for point in line["measured"]:
            if point["value"] is None:
                continue
            where = point["num_draft_tokens"] + shift
            ax.errorbar(
                where, point["value"], yerr=_errors(point), fmt="o", capsize=2, color=_colour(index)
            )
        measured = [point["num_draft_tokens"] for point in line["measured"]]
        longest = max([longest, *lengths, *measured])
    for ax in axes[0]:
        ax.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
        ax.set_xlabel("draft length γ")
    axes[0, 0].set(ylabel="speedup", xticks=range(1, longest + 1))
    _legend(figure, domains)


# ----------------------------------------------------------------------------- the shell

# The policy keeps the page from loading anything, even if a string slipped through.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2126; --soft: #5b6670; --line: #d8dde2;
  --good: #1a7f4b; --warn: #9a6700; --bad: #b3261e; --stripe: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181c; --ink: #e4e8ec; --soft: #9aa5b0; --line: #333b43;
    --good: #4cc38a; --warn: #e0b040; --bad: #ff7b72; --stripe: #1b2127; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
header p, section > p, figcaption { color: var(--soft); margin: .2rem 0 .6rem; }
.banner { border: 1px solid; border-left-width: 6px; border-radius: 4px; padding: .6rem .9rem;
  margin: .7rem 0; font-weight: 600; }
.good { border-color: var(--good); color: var(--good); }
.warn { border-color: var(--warn); color: var(--warn); }
.bad { border-color: var(--bad); color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; text-align: right; }
th { color: var(--soft); font-weight: 600; }
.name { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
figure { margin: 1rem 0 1.6rem; }
svg { display: block; min-width: 36rem; max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
@media (max-width: 40rem) { dl { display: block; } dd { margin-bottom: .5rem; } }
"""
