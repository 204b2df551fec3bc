"""The page needs nothing but itself, tells what the report says, and trusts no string in it."""

import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.page import NO_PLOTS, draw_plots
from draftsmith.eval.report import page

SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "report.json"
MALICIOUS = "<script>alert('x')</script>--><b>$\\frac$&\""


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


class Elements(HTMLParser):
    """Tags, attributes and ids of a page, and the text of its table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def test_nothing_is_fetched(report: dict[str, Any]) -> None:
    text = page(report)
    found = Elements(text)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(found.tags)
    links = [value for name, value in found.attributes if name in ("src", "href", "xlink:href")]
    assert links, "the plots point to their own markers"
    assert [value for value in links if not value.startswith("#")] == []
    assert "://" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text


def test_every_pointer_inside_the_page_is_met(report: dict[str, Any]) -> None:
    text = page(report)
    ids = [value for name, value in Elements(text).attributes if name == "id"]
    pointers = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert {left or right for left, right in pointers} <= set(ids)
    assert len(ids) == len(set(ids)), "plots share a page, so no id may come twice"


def test_rows_hold_the_numbers(report: dict[str, Any]) -> None:
    rows = Elements(page(report)).rows
    for cell in report["cells"]:
        alpha = cell["overlap"]
        shown = f"{alpha['value']:.3f} [{alpha['low']:.3f}–{alpha['high']:.3f}]"
        assert any(row[:2] == [cell["domain"], cell["law"]] and row[3] == shown for row in rows)
        for place in cell["acceptance_by_position"]:
            assert [
                *(cell["domain"], cell["law"], str(place["position"])),
                *(str(place["attempts"]), str(place["accepted"])),
                *(f"{place['conditional']:.3f}", f"{place['survival']:.3f}"),
            ] in rows
    for line in report["sweep"]:
        point = line["measured"][0]
        shown = f"{point['value']:.2f} [{point['low']:.2f}–{point['high']:.2f}]"
        predicted = f"{line['predicted'][1]:.2f}"
        tau = f"{line['tokens_per_round_estimated'][1]:.2f}"
        assert [line["domain"], line["law"], "2", tau, predicted, shown] in rows
    for row in (
        ["c_first, T=0", "0.108"],
        ["o_plain, T=1", "0.021"],
        ["num_draft_tokens", "4"],
        ["target.quantisation", "Q8_0"],
        ["drafter.config.taps", "[2, 14, 26]"],
        ["collect", "181.2"],
        ["near-tie", "9f2c41aa0b7d6e13", "41", "3.10e-06"],
    ):
        assert row in rows


@pytest.mark.parametrize(
    ("verdict", "tone", "words"),
    [
        ("equal", "good", "Lossless"),
        ("equal except near-ties", "good", "near-ties: 1"),
        ("different", "bad", "NOT LOSSLESS"),
        ("not checked", "warn", "not checked"),
    ],
)
def test_the_verdict_is_a_banner(
    verdict: str, tone: str, words: str, report: dict[str, Any]
) -> None:
    report["lossless"]["verdict"] = verdict
    banner = re.search(r'<p class="banner (\w+)">([^<]*)</p>', page(report))
    assert banner is not None
    assert banner[1] == tone
    assert words in banner[2]


def test_strings_of_the_report_stay_strings(report: dict[str, Any]) -> None:
    harmless = Elements(page(report)).tags
    for part in (*report["cells"], *report["sweep"]):
        if part["domain"] == "chat":
            part["domain"] = MALICIOUS
    report["provenance"]["target"]["name"] = MALICIOUS
    report["settings"]["verifier"] = MALICIOUS
    report["stages"][0]["stage"] = MALICIOUS
    report["alarms"] = [MALICIOUS]
    text = page(report)
    assert "<script" not in text
    assert "-->" not in re.sub(r"<!-- [^<>]* -->", "", text)
    tags = Elements(text).tags
    assert len(tags) == len(harmless) + 1, "only the alarm's banner is new"
    assert html.escape(MALICIOUS) in text


def test_plots_show_every_domain_and_law(report: dict[str, Any]) -> None:
    plots = draw_plots(report)
    assert plots is not None
    assert len(plots) == 3
    for _, svg in plots:
        for word in ("chat", "code", "extract", "math", "T=0", "T=1"):
            assert f">{word}</text>" in svg
        assert "currentColor" in svg, "ink follows the theme"
        assert "#010203" not in svg
    overlap = plots[0][1]
    for cell in report["cells"]:
        assert f">{cell['overlap']['value']:.2f}</text>" in overlap


def test_the_same_report_makes_the_same_page(report: dict[str, Any]) -> None:
    assert page(report) == page(json.loads(json.dumps(report)))


def test_plots_leave_out_what_was_not_measured(report: dict[str, Any]) -> None:
    report["sweep"] = []
    report["cells"][0]["overlap"] = {"value": None, "low": None, "high": None}
    report["cells"][1]["overlap"].update(low=None, high=None)
    report["cells"][2]["acceptance_by_position"][3].update(attempts=0, conditional=None)
    plots = draw_plots(report)
    assert plots is not None
    assert len(plots) == 2
    report["cells"] = []
    assert draw_plots(report) == []


def test_without_matplotlib_the_tables_stand_alone(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page(report)
    assert "<svg" not in text
    assert html.escape(NO_PLOTS) in text
    assert "draftsmith[report]" in text
    assert ["c_first, T=0", "0.108"] in Elements(text).rows
