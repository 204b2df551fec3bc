"""report.json is whole and strict, the terminal shows every number, and the alarms ring."""

import copy
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from draftsmith.configs.errors import UserError
from draftsmith.eval.report import (
    MIN_CONVERSATIONS,
    alarms,
    print_report,
    read_replies,
    read_report,
    write_report,
)

SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "report.json"


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


def printed(report: dict[str, Any], width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(report, console)
    return console.file.getvalue()


def test_what_is_written_is_read_back(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path / "new")
    assert read_report(tmp_path / "new" / "report.json") == report
    assert read_report(tmp_path / "new") == report
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "report.html",
        "report.json",
    ]


def test_replies_stand_beside_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    """Numbers alone are in report.json: replies are texts, which not everyone may pass on."""
    pieces = [("It is ", "first", 0), ("spelt", "accepted", 1)]
    reply = {"domain": "chat", "law": "T=0", "prompt_id": "p1", "pieces": pieces}
    write_report(report, tmp_path, [reply])
    assert "spelt" not in (tmp_path / "report.json").read_text(encoding="utf-8")
    kept = read_replies(tmp_path)
    assert kept == [{**reply, "pieces": [list(piece) for piece in pieces]}]
    write_report(report, tmp_path)  # as when a later stage adds its part
    assert read_replies(tmp_path) == kept
    assert '"spelt"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    write_report(report, tmp_path, [])
    assert "spelt" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_failed_write_keeps_the_old_report(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(report, tmp_path)
    before = (tmp_path / "report.json").read_bytes()

    def full_disk(self: Path, text: str, encoding: str) -> int:
        with open(self, "w", encoding=encoding) as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report({**report, "created": "later"}, tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before


def test_the_numbers_survive_a_page_that_fails(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> str:
        raise RuntimeError("no page today")

    monkeypatch.setattr("draftsmith.eval.report.page", broken)
    with pytest.raises(RuntimeError):
        write_report(report, tmp_path)
    assert read_report(tmp_path) == report


def test_numbers_that_json_lacks(report: dict[str, Any], tmp_path: Path) -> None:
    report["cells"][0]["overlap"]["low"] = float("nan")
    report["cells"][0]["tokens"] = np.int64(7)
    report["cost"]["by_law"]["T=0"]["c"] = np.float32(0.5)
    write_report(report, tmp_path)
    back = read_report(tmp_path)
    assert back["cells"][0]["overlap"]["low"] is None
    assert back["cells"][0]["tokens"] == 7
    assert back["cost"]["by_law"]["T=0"]["c"] == 0.5
    assert "NaN" not in (tmp_path / "report.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no report at"),
        ("{", "not valid JSON"),
        ("[]", "report format None"),
        ('{"format": 99}', "report format 99; this version reads format 2"),
    ],
)
def test_what_is_not_a_report_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_report(path)


def test_every_domain_and_law_has_its_row(report: dict[str, Any]) -> None:
    lines = [line.split() for line in printed(report, 400).splitlines()]
    for cell in report["cells"]:
        alpha, tau = cell["overlap"], cell["tokens_per_round"]
        rows = [line for line in lines if line[:2] == [cell["domain"], cell["law"]]]
        sampled = cell["law"] != "T=0"
        assert len(rows) == 3 + sampled, "acceptance, rounds and speed; servings where they differ"
        acceptance, rounds, *_, speed = rows
        survivals = [f"{place['survival']:.2f}" for place in cell["acceptance_by_position"]]
        assert acceptance[3:5] == [
            f"{alpha['value']:.3f}",
            f"[{alpha['low']:.3f}–{alpha['high']:.3f}]",
        ]
        assert acceptance[-4:] == survivals
        counts = ("rounds", "undrafted_rounds", "drafted", "tested", "accepted")
        assert rounds[2:7] == [str(cell[name]) for name in counts]
        assert rounds[7:9] == [f"{tau['value']:.2f}", f"[{tau['low']:.2f}–{tau['high']:.2f}]"]
        assert rounds[9] == f"{cell['tokens_per_round_estimated']['value']:.2f}"
        assert rounds[11] == f"{cell['tokens_per_round_by_reply']['value']:.2f}"
        assert rounds[-2] == f"{cell['mean_accepted']:.2f}"
        assert rounds[-1] == f"{cell['draft_acceptance_rate']:.3f}"
        timed = cell["speed"]
        assert speed[3:8] == [
            f"{1000 * timed['plain_prefill_seconds']:.1f}",
            f"{1000 * timed['speculative_prefill_seconds']:.1f}",
            f"{timed['plain_tokens_per_s']:.1f}",
            f"{timed['speculative_tokens_per_s']:.1f}",
            f"{timed['speedup']['value']:.2f}",
        ]
        assert speed[-1] == f"{timed['predicted']:.2f}"
    domains = {cell["domain"] for cell in report["cells"]}
    laws = {cell["law"] for cell in report["cells"]}
    rows = [line for line in lines if len(line) > 2 and not line[0].endswith(",")]  # costs have one
    named = {tuple(line[:2]) for line in rows if line[1] in laws}
    assert named == {(domain, law) for domain in domains for law in laws}, "no averaged row"
    for total in report["totals"]:
        own = [line for line in lines if line[:3] == ["(all,", "pooled)", total["law"]]]
        assert len(own) == 2, "acceptance and rounds of all domains' counts, and nothing else"
        tau = total["tokens_per_round"]
        assert own[0][3] == str(total["prompts"]) and own[1][8] == f"{tau['value']:.2f}"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_digit_is_cut_in_a_narrow_terminal(report: dict[str, Any], width: int) -> None:
    text = printed(report, width)
    assert "…" not in text
    wide = printed(report, 400).split()
    assert sorted(word for word in text.split() if word[:1].isdigit()) == sorted(
        word for word in wide if word[:1].isdigit()
    )


def test_costs_verdict_stages_and_glossary_are_printed(report: dict[str, Any]) -> None:
    text = printed(report)
    for words in (
        "c_first, T=0 0.108",
        "c_first, T=1 0.111",
        "o_plain, T=0 0.012",
        "v(5) 1.120",
        "o, T=1 0.035",
        "plain loop ÷ transformers generate 1.02",
        "9f2c41aa0b7d6e13",
        "train 240.7",
        "α (overlap): Σ min(p, q)",
        "S_k: P(A ≥ k)",
        "τ (tokens_per_round): tokens per target pass, the bonus token included",
        "float32 from Q8_0 weights",
    ):
        assert words in " ".join(text.split()), words
    assert "Lossless: greedy outputs equal on 96 prompts, except" in " ".join(text.split())
    assert "Alarm" not in text


def test_names_are_text_and_not_markup(report: dict[str, Any]) -> None:
    report["cells"][0]["domain"] = "[red]x[/red]"
    assert "[red]x[/red]" in printed(report)


def test_a_report_without_timing_or_check(report: dict[str, Any]) -> None:
    for cell in report["cells"]:
        cell["speed"] = None
        cell["captured_mass"] = None
        cell["tokens_per_round_estimated"] = None
    for part in ("cost", "lossless", "sweep", "stages", "alarms", "parity", "totals"):
        report[part] = None
    text = printed(report)
    assert "Losslessness was not checked" in text
    assert "P(V_d)" not in text
    assert "speculative tok/s" not in text
    assert alarms(report) == []


def too_fast(report: dict[str, Any]) -> None:
    cell = report["cells"][3]
    high = cell["tokens_per_round"]["high"]
    cell["speed"]["speedup"] = {"value": high + 0.2, "low": high + 0.1, "high": high + 0.3}
    cell["speed"]["predicted"] = high + 0.2


def changed_output(report: dict[str, Any]) -> None:
    place = {"prompt_id": "ab", "position": 3, "margin": 0.4}
    report["lossless"] |= {"verdict": "different", "different": [place]}


def slow_baseline(report: dict[str, Any]) -> None:
    report["cost"]["generate_ratio"] = {"value": 0.9, "low": 0.85, "high": 0.95}


def estimate_above(report: dict[str, Any]) -> None:
    report["cells"][3]["tokens_per_round_estimated"] = {"value": 2.6, "low": 2.5, "high": 2.7}


def estimate_below(report: dict[str, Any]) -> None:
    report["cells"][3]["tokens_per_round_estimated"] = {"value": 1.2, "low": 1.1, "high": 1.3}


def nothing_accepted(report: dict[str, Any]) -> None:
    report["cells"][3]["draft_acceptance_rate"] = 0.0


def predicted_otherwise(report: dict[str, Any]) -> None:
    report["cells"][3]["speed"]["predicted"] = 1.45  # measured: 1.26, at most 1.32


def served_otherwise(report: dict[str, Any]) -> None:
    report["parity"]["ok"] = False
    report["parity"]["parts"][1]["verdict"] = "different"


PLANTED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (too_fast, "code, T=1: measured speedup .* lies above τ"),
    (changed_output, "changed the target's output"),
    (slow_baseline, "the plain loop reaches only 0.90"),
    (estimate_above, "code, T=1: estimated τ 2.60 .* exclude each other"),
    (estimate_below, "code, T=1: estimated τ 1.20 .* exclude each other"),
    (nothing_accepted, "code, T=1: no drafted token was accepted although the overlap is 0.5"),
    (predicted_otherwise, r"code, T=1: speedup 1.45 was predicted and 1.26 \[1.20–1.32\] measured"),
    (served_otherwise, r"what was trained is not what decodes \(logits differ\)"),
]


def test_a_good_report_raises_no_alarm(report: dict[str, Any]) -> None:
    assert alarms(report) == []


@pytest.mark.parametrize(("plant", "pattern"), PLANTED)
def test_each_alarm_rings_alone(
    plant: Callable[[dict[str, Any]], None], pattern: str, report: dict[str, Any], tmp_path: Path
) -> None:
    plant(report)
    (sentence,) = alarms(report)
    assert re.search(pattern, sentence), sentence
    assert f"Alarm: {sentence}." in " ".join(printed(report, 1000).split())
    write_report(report, tmp_path)
    assert read_report(tmp_path)["alarms"] == [sentence]
    assert "Alarm: " in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_few_conversations_do_not_exclude_anything(report: dict[str, Any]) -> None:
    estimate_above(report)
    report["cells"][3]["prompts"] = MIN_CONVERSATIONS
    assert len(alarms(report)) == 1
    report["cells"][3]["prompts"] = MIN_CONVERSATIONS - 1
    assert alarms(report) == []


def test_alarms_at_their_edges_are_silent(report: dict[str, Any]) -> None:
    cell = copy.deepcopy(report["cells"][3])
    high = cell["tokens_per_round"]["high"]
    cell["speed"]["speedup"] = {"value": high + 0.1, "low": high, "high": high + 0.2}
    cell["speed"]["predicted"] = high + 0.2
    cell["tokens_per_round_estimated"] = {"value": high + 0.1, "low": high, "high": high + 0.2}
    useless = copy.deepcopy(report["cells"][0])
    useless["draft_acceptance_rate"] = 0.0
    useless["overlap"] = {"value": 0.05, "low": 0.04, "high": 0.06}
    report["cost"]["generate_ratio"]["value"] = 0.97
    far = copy.deepcopy(report["cells"][5])  # outside the interval, and off by less than 15 %
    far["speed"]["predicted"] = 1.14 * far["speed"]["speedup"]["value"]
    assert far["speed"]["predicted"] > far["speed"]["speedup"]["high"]
    report["cells"] = [cell, useless, far]
    report["parity"] |= {"checked": False, "ok": False}
    assert alarms(report) == []


def test_alarms_of_the_run_are_kept_once(report: dict[str, Any], tmp_path: Path) -> None:
    slow_baseline(report)
    report["alarms"] = ["the processor was busy", *alarms(report)]
    write_report(report, tmp_path)
    assert read_report(tmp_path)["alarms"] == report["alarms"]
