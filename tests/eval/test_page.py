"""The page needs nothing but itself, tells what the report says, and trusts no string in it."""

import copy
import html
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from draftsmith.drafters.card_table import measured_table
from draftsmith.eval.beside import side_by_side
from draftsmith.eval.page_data import PLOTS, page_data
from draftsmith.eval.report import benchmark_page, page

MALICIOUS = "</script><script>alert('x')</script>--><!--<b>$\\frac$&\" [bold]"
SVG = "http://www.w3.org/2000/svg"
XHTML = "http://www.w3.org/1999/xhtml"


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


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_nothing_is_fetched(sample: dict[str, Any]) -> None:
    text = page(sample)
    found = Elements(text)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(found.tags)
    assert not {"src", "href", "style", "onclick"} & {name for name, _ in found.attributes}
    assert "://" not in text.replace(SVG, "").replace(XHTML, ""), "namespaces are no addresses"
    assert "url(" not in text
    assert "@import" not in text


def test_only_its_own_script_may_run(sample: dict[str, Any]) -> None:
    text = page(sample)
    contents = [value for name, value in Elements(text).attributes if name == "content"]
    (policy,) = [value for value in contents if "default-src" in value]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert text.count("<script") == 2, "the data and the script"


def test_every_label_inside_the_page_is_met(sample: dict[str, Any]) -> None:
    text = benchmark_page("T", "S", [("a", sample), ("b", sample)])
    attributes = Elements(text).attributes
    ids = [value for name, value in attributes if name == "id"]
    pointers = {value for name, value in attributes if name in ("aria-labelledby", "data-copies")}
    assert pointers <= set(ids)
    assert len(ids) == len(set(ids)), "drafters share a page, so no id may come twice"


def test_rows_hold_the_numbers(sample: dict[str, Any]) -> None:
    rows = Elements(page(sample)).rows
    for cell in sample["cells"]:
        alpha = cell["overlap"]
        shown = f"{alpha['value']:.3f} [{alpha['low']:.3f}–{alpha['high']:.3f}]"
        assert any(row[:2] == [cell["domain"], cell["law"]] and row[3] == shown for row in rows)
        for place in cell["acceptance_by_position"]:
            assert [
                *(cell["domain"], cell["law"], str(place["position"])),
                *(str(place["attempts"]), str(place["accepted"])),
                *(f"{place['conditional']:.3f}", f"{place['survival']:.3f}"),
            ] in rows
    for line in sample["sweep"]:
        point = line["measured"][0]
        shown = f"{point['value']:.2f} [{point['low']:.2f}–{point['high']:.2f}]"
        predicted = f"{line['predicted'][1]:.2f}"
        (row,) = [r for r in rows if r[:3] == [line["domain"], line["law"], "2"] and len(r) == 6]
        assert row[3].startswith(f"{line['tokens_per_round_estimated'][1]['value']:.2f}")
        assert row[4:] == [predicted, shown]
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
    verdict: str, tone: str, words: str, sample: dict[str, Any]
) -> None:
    sample["lossless"]["verdict"] = verdict
    banner = re.search(r'<p class="banner (\w+)">([^<]*)</p>', page(sample))
    assert banner is not None
    assert banner[1] == tone
    assert words in banner[2]


def test_alarms_share_a_box(sample: dict[str, Any]) -> None:
    sample["alarms"] = ["one <", "two"]
    text = page(sample)
    listed = "<li>Alarm: one &lt;.</li><li>Alarm: two.</li>"
    assert f'<div class="banner bad"><ul>{listed}</ul></div>' in text


def test_strings_of_the_report_stay_strings(sample: dict[str, Any]) -> None:
    harmless = Elements(page(sample)).tags
    for part in (*sample["cells"], *sample["sweep"]):
        if part["domain"] == "chat":
            part["domain"] = MALICIOUS
    sample["provenance"]["target"]["name"] = MALICIOUS
    sample["settings"]["verifier"] = MALICIOUS
    sample["stages"][0]["stage"] = MALICIOUS
    sample["alarms"] = [MALICIOUS]
    reply = {"domain": MALICIOUS, "law": "T=0", "prompt_id": MALICIOUS}
    text = page(sample, [{**reply, "pieces": [(MALICIOUS, "first", 0)]}])
    assert text.count("<script") == 2
    assert "-->" not in text and "<!--" not in text
    tags = Elements(text).tags
    assert len(tags) == len(harmless) + 1, "only the alarm's banner is new"
    assert html.escape(MALICIOUS) in text
    data = data_of(text)
    assert data["entries"][0]["cells"][0]["domain"] == MALICIOUS
    assert data["replies"][0]["pieces"] == [[MALICIOUS, "first", 0]]


def test_curves_show_every_domain_and_law(sample: dict[str, Any]) -> None:
    data = page_data([("a", sample)], [])
    (entry,) = data["entries"]
    assert entry["lengths"] == sample["sweep"][0]["num_draft_tokens"]
    for cell, drawn in zip(sample["cells"], entry["cells"], strict=True):
        curves, alpha = drawn["curves"], cell["overlap"]
        text = f"{alpha['value']:.3f} [{alpha['low']:.3f}–{alpha['high']:.3f}]"
        assert curves["overlap"]["points"] == [
            [0, *(alpha[k] for k in ("value", "low", "high")), text]
        ]
        assert [point[1] for point in curves["survival"]["points"]] == [
            place["survival"] for place in cell["acceptance_by_position"]
        ]
        (line,) = [
            one for one in sample["sweep"]
            if (one["domain"], one["law"]) == (cell["domain"], cell["law"])
        ]  # fmt: skip
        taus = line["tokens_per_round_estimated"]
        assert [point[1] for point in curves["tau"]["line"]] == [tau["value"] for tau in taus]
        assert [point[0] for point in curves["speedup"]["points"]] == [
            point["num_draft_tokens"] for point in line["measured"]
        ]
        assert curves["batch"] == {"line": [], "band": [], "points": []}
    passes = entry["curves"]["cost"][0]["line"]
    assert [point[:2] for point in passes] == [
        list(pair) for pair in zip(sample["cost"]["rows"], sample["cost"]["v"], strict=True)
    ]
    sources = {*entry["curves"], *entry["cells"][0]["curves"]}
    assert {plot.source for plot in PLOTS} == sources


def test_cards_say_what_was_decoded_and_what_is_estimated(sample: dict[str, Any]) -> None:
    (entry,) = page_data([("a", sample)], [])["entries"]
    cell, cards = sample["cells"][0], entry["cells"][0]["cards"]
    decoded, elsewhere = ({card["key"]: card for card in cards[g]} for g in (entry["served"], 1))
    assert decoded["tau"]["value"] == f"{cell['tokens_per_round']['value']:.2f}"
    assert decoded["tau"]["note"].startswith("estimated 1.66")
    assert elsewhere["tau"]["note"].startswith("estimated; decoded at γ = 4 alone")
    assert decoded["rate"]["value"] == f"{cell['draft_acceptance_rate']:.3f}"
    assert elsewhere["rate"]["value"] == "–"
    assert decoded["predicted"]["value"] == f"{cell['speed']['predicted']:.2f}"
    assert elsewhere["measured"]["note"] == "not timed at this γ"


@pytest.mark.parametrize(
    ("low", "high", "words", "tone"),
    [
        (1.01, 1.2, "faster than plain decoding", "good"),
        (0.8, 0.99, "slower than plain decoding", "bad"),
        (0.9, 1.1, "no difference from plain decoding shown", ""),
        (None, None, "too few prompts for an interval", ""),
    ],
)
def test_a_speedup_is_put_in_words(
    low: float | None, high: float | None, words: str, tone: str, sample: dict[str, Any]
) -> None:
    sample["cells"][0]["speed"]["speedup"] = {"value": 1.0, "low": low, "high": high}
    (entry,) = page_data([("a", sample)], [])["entries"]
    (card,) = [c for c in entry["cells"][0]["cards"][4] if c["key"] == "measured"]
    assert (card["note"], card["tone"]) == (words, tone)


def test_batches_are_a_curve_of_their_cell(sample: dict[str, Any]) -> None:
    measured = {"value": 1.2, "low": 1.1, "high": 1.3}
    sample["batches"] = [
        {
            "batch": batch,
            "law": "T=0",
            "cost": {"v": {"1": batch, "2": batch + 0.5}},
            "domains": [{"domain": "chat", "predicted": 1.5 / batch, "measured": point}],
        }
        for batch, point in ((1, measured), (4, None))
    ]
    (entry,) = page_data([("a", sample)], [])["entries"]
    drawn, other = (entry["cells"][i]["curves"]["batch"] for i in (0, 1))
    assert [point[:2] for point in drawn["line"]] == [[1, 1.5], [4, 0.375]]
    assert drawn["points"] == [[1, 1.2, 1.1, 1.3, "1.20 [1.10–1.30]"]]
    assert other == {"line": [], "band": [], "points": []}
    passes = entry["curves"]["cost"]
    assert [one["name"] for one in passes] == ["batch 1", "batch 4"]
    assert passes[1]["line"] == [[1, 4, "4.00"], [2, 4.5, "4.50"]]


def test_what_was_not_measured_has_no_curve(sample: dict[str, Any]) -> None:
    sample["sweep"] = []
    sample["cost"] = None
    for cell in sample["cells"]:
        cell["speed"] = None
    sample["cells"][0]["overlap"] = {"value": None, "low": None, "high": None}
    sample["cells"][2]["acceptance_by_position"][3].update(attempts=0, conditional=None)
    (entry,) = page_data([("a", sample)], [])["entries"]
    assert entry["lengths"] == [4]
    assert entry["curves"]["cost"][0]["line"] == []
    cells = entry["cells"]
    assert cells[0]["curves"]["overlap"]["points"] == []
    assert len(cells[2]["curves"]["conditional"]["points"]) == 3
    notes = {card["key"]: card["note"] for card in cells[0]["cards"][4]}
    assert (notes["measured"], notes["predicted"]) == ("not timed", "costs were not measured")


def test_the_same_report_makes_the_same_page(sample: dict[str, Any]) -> None:
    assert page(sample) == page(json.loads(json.dumps(sample)))


def test_the_card_and_the_page_share_their_table(sample: dict[str, Any]) -> None:
    table = measured_table(sample)
    assert f">{html.escape(table)}</pre>" in page(sample)
    assert table.splitlines()[2].startswith("| chat | T=0 | 24 | 0.395 [0.368–0.422] |")


def test_drafters_stand_side_by_side(sample: dict[str, Any]) -> None:
    other = copy.deepcopy(sample)
    other["settings"]["num_draft_tokens"] = 2
    other["cells"] = other["cells"][:1]
    other["cells"][0]["overlap"]["value"] = 0.9
    table = side_by_side([("ours", sample), ("theirs", other)])
    assert len(table.rows) == len(sample["cells"]) + 1
    assert [row[:6] for row in table.rows[:3]] == [
        ("chat", "T=0", "ours", "4", "24", "0.395 [0.368–0.422]"),
        ("chat", "T=0", "theirs", "2", "24", "0.900 [0.368–0.422]"),
        ("chat", "T=1", "ours", "4", "24", "0.335 [0.308–0.362]"),
    ]
    text = benchmark_page("Two drafters", "on one target", [("ours", sample), ("theirs", other)])
    assert "theirs: Lossless" in text, "a banner says whose it is"
    assert list(table.rows[1]) in Elements(text).rows
    assert [entry["name"] for entry in data_of(text)["entries"]] == ["ours", "theirs"]
