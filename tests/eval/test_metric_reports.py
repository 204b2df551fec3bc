"""Figures that others got wrong, by the numbers of the known faults, on drafters of known answers.

The target counts and the drafter follows a script, so every figure is worked out by hand. B116 is
in test_field_reports, B113 and B115 in test_metric_reports_speed.
"""

import io
import random
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from counting import Table, counting_target, counting_world, scripted_world
from rich.console import Console
from worlds import World

from draftsmith.eval.evaluate import Measured
from draftsmith.eval.page import GLOSSARY
from draftsmith.eval.page import Table as Printed
from draftsmith.eval.report import print_report
from draftsmith.eval.request_rows import read_requests, write_requests
from draftsmith.eval.tables import detail_tables, summary_tables

pytestmark = pytest.mark.usefixtures("one_thread")


def printed(found: Measured) -> str:
    console = Console(file=io.StringIO(), width=400)
    print_report(found.report, console)
    return str(console.file.getvalue())


def table(report: dict[str, Any], title: str) -> Printed:
    (found,) = (t for t in [*summary_tables(report), *detail_tables(report)] if t.title == title)
    return found


def shown(report: dict[str, Any], title: str, row: int = 0) -> dict[str, str]:
    """A row of a printed table, by its headers."""
    found = table(report, title)
    return dict(zip(found.headers, found.rows[row], strict=True))


def value(text: str) -> float:
    """The figure of a printed cell, its interval left out."""
    return float(text.split()[0])


# ---- B108: all rounds of all prompts

PATTERNS = ((4, 0, 4, 0), (4, 0, 4))


@pytest.fixture(scope="module")
def alternating(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Measured, Path]:
    """Two prompts, γ = 4."""
    folder = tmp_path_factory.mktemp("alternating")
    world = scripted_world(folder, 4, {"x": PATTERNS})
    return world, world.run(folder / "eval"), folder


def test_b108_the_mean_is_over_all_rounds_and_prompts(
    alternating: tuple[World, Measured, Path],
) -> None:
    """12 + 11 tokens in 4 + 3 rounds, 8 + 8 of 28 drafted ones accepted.

    The last round of the last prompt would say 5 tokens, the last rounds' mean 3.
    """
    _, found, _ = alternating
    (cell,) = found.report["cells"]
    assert (cell["tokens"], cell["rounds"], cell["accepted"], cell["drafted"]) == (23, 7, 16, 28)
    assert cell["tokens_per_round"]["value"] == pytest.approx(23 / 7)
    assert cell["mean_accepted"] == pytest.approx(16 / 7)
    assert cell["draft_acceptance_rate"] == pytest.approx(16 / 28)
    assert cell["tokens_per_round_estimated"]["value"] == pytest.approx(23 / 7)
    row = shown(found.report, "Tokens per round")
    assert value(row["τ decoded"]) == 3.29 and value(row["accepted a round"]) == 2.29
    assert row["τ decoded"] in printed(found)


def test_b108_every_round_is_stored(alternating: tuple[World, Measured, Path]) -> None:
    """So that anyone can compute the mean again from the file."""
    _, found, folder = alternating
    write_requests(folder, found.requests)
    rows = read_requests(folder)
    assert [row.rounds for row in rows] == [
        tuple((4, accepted) for accepted in pattern) for pattern in PATTERNS
    ]
    assert [row.tokens for row in rows] == [13, 12], "the first token comes from prefill"
    rounds = [r for row in rows for r in row.rounds]
    mean = sum(a for _, a in rounds) / len(rounds)
    assert mean == pytest.approx(found.report["cells"][0]["mean_accepted"])


# ---- B109: pooled, or the mean of means


def test_b109_the_pooled_and_the_mean_by_reply_are_told_apart(tmp_path: Path) -> None:
    """500 tokens in 143 rounds (3.49 each) and nine times 5 tokens in 4 rounds (1.0 each).

    Pooled (499 + 36) ÷ (143 + 36) = 2.99; by reply (3.49 + 9 · 1.0) ÷ 10 = 1.25.
    """
    long = [3, 2] * 71 + [1]
    world = scripted_world(tmp_path, 3, {"x": [long, *[[0] * 4] * 9]})
    found = world.run(tmp_path / "one")
    (cell,) = found.report["cells"]
    assert sorted(row.tokens for row in found.requests) == [5] * 9 + [500]
    assert (cell["tokens"], cell["rounds"]) == (499 + 36, 143 + 36)
    pooled, by_reply = cell["tokens_per_round"], cell["tokens_per_round_by_reply"]
    assert pooled["value"] == pytest.approx(535 / 179)
    assert by_reply["value"] == pytest.approx((499 / 143 + 9) / 10)
    for figure in (pooled, by_reply):
        assert figure["low"] <= figure["value"] <= figure["high"]
    row = shown(found.report, "Tokens per round")
    assert (value(row["τ decoded"]), value(row["τ by reply"])) == (2.99, 1.25)
    text = printed(found)
    assert "τ is pooled, tokens ÷ rounds of all replies together; by reply: the mean of" in text


def test_b109_an_evaluation_counts_nothing_of_another(tmp_path: Path) -> None:
    """Two in one process, on the same drafter and target."""
    world = scripted_world(tmp_path, 3, {"x": [[3, 0], [1]], "y": [[2, 2, 2]]})
    counts = ("tokens", "rounds", "drafted", "tested", "accepted", "prompts", "replies")
    first, second = (world.run(tmp_path / name).report for name in ("one", "two"))
    for part in ("cells", "totals"):
        one, two = ([{k: row[k] for k in counts} for row in r[part]] for r in (first, second))
        assert one == two
    assert [cell["rounds"] for cell in second["cells"]] == [3, 3]


# ---- B110: which denominator


def test_b110_drafted_tested_and_accepted_are_counted_from_what_happened(tmp_path: Path) -> None:
    """Replies of 7 tokens, γ = 5, drafts that end early, and rounds without a draft.

    (drafted, accepted) by hand, reply token 0 being prefill's:
      all right                               1-5 and the bonus              (5, 5)
      little confidence in tokens 2 and 5     1-2, bonus 3 | 4-5, bonus 6    (2, 2) (2, 2)
      nothing to propose for 1, 3 is wrong    - | 2-5 | 4-5, bonus 6         (0, 0) (4, 1) (2, 2)
      1 is wrong                              1-5 | 2-5 and the bonus        (5, 0) (4, 4)
    """
    size, limit, starts = 50, 7, [0, 10, 20, 30]
    proposed = {t: t + 1 for t in range(size - 1)} | {size - 1: size - 1}
    for start, place in ((20, 3), (30, 1)):  # reply token r is start + 1 + r, proposed behind it
        proposed[start + place] = size - 1
    del proposed[20 + 1]
    drafter: Any = Table(size, proposed, unsure=[10 + 2, 10 + 5])
    world = counting_world(
        tmp_path, {"x": starts}, counting_target(size), drafter, limit,
        num_draft_tokens=5, policy={"name": "confidence", "threshold": 0.5},
    )  # fmt: skip
    found = world.run(tmp_path / "eval")
    assert {row.prompt_id: row.rounds for row in found.requests} == {
        "p0": ((5, 5),),
        "p10": ((2, 2), (2, 2)),
        "p20": ((0, 0), (4, 1), (2, 2)),
        "p30": ((5, 0), (4, 4)),
    }
    assert all((row.tokens, row.finish) == (7, "length") for row in found.requests)
    (cell,) = found.report["cells"]
    assert cell["tokens"] == 4 * 6
    assert (cell["rounds"], cell["undrafted_rounds"]) == (8, 1)
    assert cell["drafted"] == 5 + (2 + 2) + (4 + 2) + (5 + 4)
    assert cell["tested"] == 5 + (2 + 2) + (2 + 2) + (1 + 4), "up to the first that is refused"
    assert cell["accepted"] == 5 + (2 + 2) + (1 + 2) + (0 + 4)
    assert cell["draft_acceptance_rate"] == pytest.approx(16 / 24), "and not 16 ÷ (8 · 5)"
    assert cell["tokens_per_round"]["value"] == pytest.approx(24 / 8)
    places = cell["acceptance_by_position"]
    assert [p["attempts"] for p in places] == [7, 7, 4, 4, 2]
    assert [p["accepted"] for p in places] == [6, 5, 2, 2, 1]
    row = shown(found.report, "Tokens per round")
    counts = ("rounds", "undrafted", "drafted", "tested", "accepted")
    assert [row[name] for name in counts] == ["8", "1", "24", "18", "16"]
    text = printed(found)
    assert dict(GLOSSARY)["accepted ÷ drafted (draft_acceptance_rate)"] in text
    assert "tested: drafted tokens up to the first that was refused" in text


# ---- B112: conditional, cumulative and mean acceptance

COUNTS = [0] * 20 + [1] * 30 + [3] * 50


def shuffled(replies: int) -> list[Sequence[int]]:
    """The hundred rounds in some order, as so many replies."""
    counts = list(COUNTS)
    random.Random(0).shuffle(counts)
    size = len(counts) // replies
    return [counts[i : i + size] for i in range(0, len(counts), size)]


@pytest.mark.parametrize("replies", [1, 4])
def test_b112_cumulative_conditional_and_mean_are_named(tmp_path: Path, replies: int) -> None:
    world = scripted_world(tmp_path, 3, {"x": shuffled(replies)})
    found = world.run(tmp_path / "eval")
    (cell,) = found.report["cells"]
    assert (cell["rounds"], cell["drafted"], cell["accepted"]) == (100, 300, 180)
    places = cell["acceptance_by_position"]
    cumulative, conditional = [0.8, 0.5, 0.5], [0.8, 0.625, 1.0]
    assert [p["survival"] for p in places] == cumulative
    assert [p["conditional"] for p in places] == conditional
    assert cell["mean_accepted"] == pytest.approx(1.8)
    assert cell["tokens_per_round"]["value"] == pytest.approx(2.8), "with the bonus"
    expected = [s["value"] for s in cell["survival_estimated"]]
    assert expected == pytest.approx(cumulative), "without decoding, too"

    # Identities that hold for any counts, where no round was cut short.
    assert cell["accepted"] == sum(p["accepted"] for p in places)
    assert cell["drafted"] == sum(p["attempts"] for p in places)
    assert cell["mean_accepted"] == pytest.approx(sum(p["survival"] for p in places))
    assert cell["tokens_per_round"]["value"] == pytest.approx(1 + cell["mean_accepted"])
    for k, place in enumerate(places, start=1):
        assert place["survival"] == pytest.approx(prod(conditional[:k]))

    row = shown(found.report, "Acceptance")
    assert [row[f"S_{k}"] for k in (1, 2, 3)] == ["0.80", "0.50", "0.50"]
    row = shown(found.report, "Tokens per round")
    assert (value(row["τ decoded"]), value(row["accepted a round"])) == (2.8, 1.8)
    for k in (1, 2, 3):
        row = shown(found.report, "Acceptance by position", k - 1)
        assert row["position"] == str(k)
        assert float(row["conditional"]) == conditional[k - 1]
        assert float(row["survival S_k"]) == cumulative[k - 1]
