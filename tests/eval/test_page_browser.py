"""The page as Chromium shows it: choosing, dark and narrow screens, paper, and no script at all."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Shown, chromium, shown
from playwright.sync_api import Browser

from draftsmith.drafters.card_table import measured_table
from draftsmith.eval.report import benchmark_page, page
from draftsmith.eval.tables import interval_text

MALICIOUS = (
    "<!--<script </script ></script><script>window.taken = true</script>-->"
    "<img src=x onerror=alert(1)> [bold] $x$"
)
PIECES = [
    ("Hel", "first", 0), ("lo", "accepted", 1), ("\n", "accepted", 2), ("", "corrected", 3),
    ("🙂", "bonus", 1), (" <b>", "undrafted", 1),
]  # fmt: skip
DARK, LIGHT = {"color_scheme": "dark"}, {"color_scheme": "light"}

Opened = Callable[..., Shown]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """`opened(text, fragment, **context)`: a page of that HTML, closed when the test ends."""
    pages: list[Shown] = []

    def open_text(text: str, fragment: str = "", **context: Any) -> Shown:
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        pages.append(shown(browser, file, fragment, **context))
        return pages[-1]

    yield open_text
    for one in pages:
        one.page.context.close()


def reply(**more: Any) -> dict[str, Any]:
    return {"domain": "chat", "law": "T=0", "prompt_id": "p1", "pieces": PIECES, **more}


def two(sample: dict[str, Any]) -> str:
    """A page of two drafters, the second measured on less."""
    other = copy.deepcopy(sample)
    other["cells"] = other["cells"][:2]
    other["settings"]["num_draft_tokens"] = 2
    other["cells"][0]["overlap"].update(value=0.9, low=0.85, high=0.95)
    return benchmark_page("Two", "on one target", [("ours", sample), ("theirs", other)])


def many(sample: dict[str, Any], count: int) -> dict[str, Any]:
    """The sample's first cell as so many domains with long names."""
    cell = sample["cells"][0]
    names = [
        f"domain {i} of a benchmark with a rather long name {'x' * 5 * i}" for i in range(count)
    ]
    sample["cells"] = [{**copy.deepcopy(cell), "domain": name} for name in names]
    sample["sweep"] = [{**copy.deepcopy(sample["sweep"][0]), "domain": name} for name in names]
    return sample


def test_it_asks_for_nothing_and_complains_of_nothing(
    sample: dict[str, Any], opened: Opened
) -> None:
    found = opened(page(sample, [reply()]))
    assert found.requests == [found.page.url.partition("#")[0]]
    assert found.messages == []
    assert found.texts("#figures figure h3") == [
        "Overlap α",
        "Speedup at the chosen γ",
        "Survival S_k",
        "Acceptance by position",
        "Tokens per round by draft length",
        "Speedup by draft length",
        "Cost of a target pass",
    ]


def test_a_script_that_is_not_its_own_does_not_run(sample: dict[str, Any], opened: Opened) -> None:
    text = page(sample).replace(
        "</main>", "<script>window.taken = 1</script><img src='x.png'></main>"
    )
    found = opened(text)
    assert found.page.evaluate("window.taken") is None
    assert sum("Content Security Policy" in message for message in found.messages) >= 2
    assert found.page.locator(".card").count() == 5, "its own still does"


def test_choosing_changes_the_numbers(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(page(sample))
    for cell in sample["cells"]:
        found.choose("domain", cell["domain"])
        found.choose("law", cell["law"])
        assert found.card("overlap") == interval_text(cell["overlap"], 3)
        assert found.card("tau") == interval_text(cell["tokens_per_round"], 2)
        assert found.card("measured") == interval_text(cell["speed"]["speedup"], 2)
        assert found.card("predicted") == f"{cell['speed']['predicted']:.2f}"
    for line in sample["sweep"]:
        found.choose("domain", line["domain"])
        found.choose("law", line["law"])
        found.choose("length", "2")
        assert found.card("measured") == interval_text(line["measured"][0], 2)
        assert found.card("predicted") == f"{line['predicted'][1]:.2f}"
        assert found.texts("#selection") == [f"{line['domain']}, {line['law']}, γ = 2"]
    assert found.messages == []


def test_plots_follow_the_choice(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(page(sample))
    rows = "#figures [data-plot=overlap] .series"
    values = [c["overlap"] for c in sample["cells"] if c["law"] == "T=1"]
    found.choose("law", "T=1")
    texts = found.texts(f"{rows} > text:nth-of-type(2)")
    assert texts == [interval_text(value, 3) for value in values], "a row for each domain"
    assert found.texts("#figures [data-plot=overlap] .emphasis > text:nth-of-type(1)") == ["chat"]
    found.choose("domain", "math")
    assert found.texts("#figures [data-plot=overlap] .emphasis > text:nth-of-type(1)") == ["math"]
    found.choose("lines", "laws")
    assert found.texts(f"{rows} > text:nth-of-type(1)") == ["T=0", "T=1"]
    heights = found.page.evaluate(
        "[...document.querySelectorAll('#figures [data-plot=overlap] .mark')]"
        ".map((mark) => mark.getBBox().x + mark.getBBox().width / 2)"
    )
    zero, one = [c["overlap"]["value"] for c in sample["cells"] if c["domain"] == "math"]
    assert (heights[0] < heights[1]) == (zero < one), "further right is more"


def test_the_keyboard_is_enough(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(page(sample))
    keyboard = found.page.keyboard
    keyboard.press("Tab")
    assert found.page.evaluate("document.activeElement.id") == "domain", "one drafter: no choice"
    before = found.card("overlap")
    keyboard.press("ArrowDown")
    assert found.texts("#selection")[0].startswith(sample["cells"][2]["domain"])
    assert found.card("overlap") != before


def test_an_address_brings_its_choice(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(page(sample))
    found.choose("domain", "code")
    found.choose("length", "2")
    address = found.page.url
    told = found.texts("#cards")
    again = opened(page(sample), "#" + address.partition("#")[2])
    assert again.texts("#cards") == told
    assert again.page.locator("#domain option:checked").inner_text() == "code"
    lost = opened(page(sample), "#domain=elsewhere&reply=7&__proto__=1")
    assert lost.page.locator("#domain option:checked").inner_text() == "chat"
    assert lost.messages == []


def test_drafters_are_chosen_and_compared(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(two(sample))
    assert found.page.locator("#lines option:checked").inner_text() == "drafters"
    assert found.texts("#figures [data-plot=overlap] .series > text:nth-of-type(1)") == [
        "ours",
        "theirs",
    ]
    found.choose("drafter", "theirs")
    assert found.card("overlap") == "0.900 [0.850–0.950]"
    assert found.texts("#selection") == ["theirs, chat, T=0, γ = 2"], "its own draft length"
    visible = [part.is_visible() for part in found.page.locator(".entry").all()]
    assert visible == [False, True]
    found.choose("domain", "math")
    assert "was not measured" in found.texts("#cards")[0]
    assert found.page.locator("#figures [data-plot=overlap] .series").count() == 1
    assert found.messages == []


def test_a_reply_shows_where_its_tokens_came_from(sample: dict[str, Any], opened: Opened) -> None:
    other = reply(prompt_id="p2", pieces=[("other", "first", 0)])
    found = opened(page(sample, [reply(), other, reply(law="T=1", prompt_id="p3")]))
    assert found.texts("#tokens") == ["".join(text for text, *_ in PIECES)]
    kinds = [re.split(r"\s+", part.get_attribute("class") or "")[1]
             for part in found.page.locator("#tokens .token").all()]  # fmt: skip
    assert kinds == [kind for _, kind, _ in PIECES]
    tip = found.page.locator("#tokens .corrected").get_attribute("title")
    assert tip == "token 4, the target's own, where the draft was rejected, place 3 in its round"
    assert "accepted 2: drafted, and accepted by the target" in found.texts("#kinds li")
    assert found.texts("#reply option") == ["p1", "p2"]
    found.choose("reply", "p2")
    assert found.texts("#tokens") == ["other"]
    found.choose("domain", "code")
    assert found.texts("#tokens") == [""]
    assert "No reply" in found.texts("#told")[0]
    assert not opened(page(sample)).page.locator("#replies").is_visible()


def test_strings_of_the_report_stay_strings(sample: dict[str, Any], opened: Opened) -> None:
    for part in (*sample["cells"], *sample["sweep"]):
        if part["domain"] == "chat":
            part["domain"] = MALICIOUS
    hostile = reply(domain=MALICIOUS, prompt_id=MALICIOUS, pieces=[(MALICIOUS, "first", 0)])
    found = opened(page(sample, [hostile]))
    assert found.page.evaluate("window.taken") is None
    assert found.page.locator("#domain option").first.inner_text() == MALICIOUS
    assert found.texts("#tokens") == [MALICIOUS]
    assert found.page.locator("img").count() == 0
    assert found.messages == []
    assert len(found.requests) == 1


LUMINANCE = """(selector) => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const solid = (part) => {
    const own = getComputedStyle(part).backgroundColor;
    return own === "rgba(0, 0, 0, 0)" && part.parentElement ? solid(part.parentElement) : own;
  };
  return [...document.querySelectorAll(selector)].map((part) => {
    const style = getComputedStyle(part);
    const ink = part instanceof SVGElement ? style.fill : style.color;
    const [low, high] = [light(ink), light(solid(part))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=["dark", "light"])
def test_text_is_readable_in_every_theme(
    theme: dict[str, str], sample: dict[str, Any], opened: Opened
) -> None:
    sample["alarms"] = ["one"]
    sample["lossless"]["verdict"] = "not checked"
    found = opened(page(sample, [reply()]), **theme)
    for selector in ("p", "h1", "h2", "h3", ".value", ".note", ".interval", "td", "th", "dd", "li",
                     "svg text", ".token", "select", "pre", "label", ".banner"):  # fmt: skip
        contrasts = found.page.evaluate(LUMINANCE, selector)
        assert contrasts, selector
        assert min(contrasts) >= 4.5, selector
    page_is = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (page_is == "rgb(255, 255, 255)") == (theme is LIGHT)


@pytest.mark.parametrize("count", [1, 12])
def test_a_narrow_screen_scrolls_down_only(
    count: int, sample: dict[str, Any], opened: Opened
) -> None:
    text = page(many(sample, count), [reply()])
    found = opened(text, viewport={"width": 400, "height": 800})
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert found.page.locator("#figures figure").count() >= 6
    assert found.messages == []


def test_paper_has_everything_but_controls(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(two(sample))
    before = found.page.locator("#figures figure").count()
    found.page.evaluate(
        "addEventListener('beforeprint', () => {"
        " window.printed = document.querySelectorAll('#elsewhere figure').length; })"
    )
    assert found.page.pdf().startswith(b"%PDF")
    assert found.page.evaluate("window.printed") == before, "the plots of the other law"
    assert found.page.locator("#elsewhere figure").count() == 0, "gone from the screen again"
    found.page.emulate_media(media="print")
    for gone in ("#controls", "button"):
        assert not any(part.is_visible() for part in found.page.locator(gone).all()), gone
    for kept in ("table", ".card", "figure", "details table", "pre"):
        parts = found.page.locator(kept).all()
        assert parts, kept
        heights = [box["height"] if (box := part.bounding_box()) else 0 for part in parts]
        assert min(heights) > 10, kept


def test_paper_is_light(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(page(sample), **DARK)
    found.page.emulate_media(media="print", color_scheme="dark")
    assert found.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )


def test_without_a_script_the_tables_stand_alone(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(two(sample), java_script_enabled=False)
    assert not found.page.locator("#explore").is_visible()
    assert not found.page.locator("button").first.is_visible()
    assert all(part.is_visible() for part in found.page.locator(".entry").all())


def test_what_was_not_measured_is_not_drawn(sample: dict[str, Any], opened: Opened) -> None:
    sample.update(sweep=[], cost=None, lossless=None)
    for cell in sample["cells"]:
        cell.update(speed=None, tokens_per_round_estimated=None)
    found = opened(page(sample))
    assert found.texts("#figures figure h3") == [
        "Overlap α",
        "Survival S_k",
        "Acceptance by position",
        "Tokens per round by draft length",
    ]
    assert found.card("measured") == "–"
    assert found.messages == []


def test_the_card_table_is_copied(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(page(sample), permissions=["clipboard-read", "clipboard-write"])
    found.page.click("button[data-copies]")
    found.page.wait_for_function(
        "document.querySelector('button[data-copies]').textContent === 'Copied'"
    )
    assert found.page.evaluate("navigator.clipboard.readText()") == measured_table(sample)


def test_every_control_and_plot_has_a_name(sample: dict[str, Any], opened: Opened) -> None:
    found = opened(two(sample))
    for control in ("Drafter", "Domain", "Law", "γ", "Side by side"):
        assert found.page.get_by_role("combobox", name=control, exact=True).is_visible()
    names = [part.get_attribute("aria-label") for part in found.page.get_by_role("img").all()]
    assert len(names) == len(set(names)) == found.page.locator("figure").count()
    assert found.page.locator("#cards").get_attribute("aria-live") == "polite"
