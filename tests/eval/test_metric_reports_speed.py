"""B113 and B115: acceptance that does not pay, and acceptance that is known without decoding."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counting import Ticks, counting_target, counting_world, scripted_world
from rich.console import Console
from scripted import copy_of
from worlds import World

from draftsmith.data.gather import Request
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.estimate import estimate
from draftsmith.eval.evaluate import Measured
from draftsmith.eval.report import alarms, print_report
from draftsmith.eval.tables import detail_tables, summary_tables
from draftsmith.train.score import score

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- B113: more accepted tokens, and no speedup

GAMMA = 3
STEP, FURTHER = 1.0, 0.1
"""Ticks of a target pass over one token, and for each further one."""


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    clock = Ticks()
    clock.install(monkeypatch)
    return clock


def timed(world: World, folder: Path) -> Measured:
    return world.run(folder, timing_prompts=2)


def figures(found: Measured) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only cell, and its law's costs."""
    (cell,) = found.report["cells"]
    (cost,) = found.report["cost"]["by_law"].values()
    return cell, cost


def text_of(found: Measured) -> str:
    console = Console(file=io.StringIO(), width=400)
    print_report(found.report, console)
    return " ".join(console.file.getvalue().split())


def test_b113_the_target_as_its_own_draft_is_slower(ticks: Ticks, tmp_path: Path) -> None:
    """Every draft is accepted, and a draft step costs what a target pass does.

    20 tokens: four rounds of 3 · 1 + 1.3 ticks make 4 each, then 2 · 1 + 1.2 make the last 3; 19
    plain ones take 19. Whole rounds alone would be 4 ÷ 4.3 as fast.
    """
    target = counting_target(100)
    drafter = copy_of(target)
    ticks.charge_target(target, STEP, FURTHER)
    ticks.charge_drafter(drafter, STEP)
    world = counting_world(
        tmp_path, {"x": [0, 30, 60]}, target, drafter, 20, num_draft_tokens=GAMMA
    )
    found = timed(world, tmp_path / "eval")
    cell, cost = figures(found)
    assert cell["overlap"]["value"] == pytest.approx(1.0)
    assert cell["draft_acceptance_rate"] == 1.0
    assert (cost["c_first"], cost["c"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert cost["v"][:4] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert (cost["o"], cost["o_plain"]) == (pytest.approx(0.0), pytest.approx(0.0))
    speed = cell["speed"]
    assert speed["predicted"] == pytest.approx(4 / (3 * 1 + 1.3)) and speed["predicted"] < 1
    assert speed["speedup"]["value"] == pytest.approx(19 / (4 * 4.3 + 3.2))
    assert speed["speedup"]["high"] < 1
    assert found.report["cost"]["generate_ratio"]["value"] == pytest.approx(1.0)
    assert alarms(found.report) == [], "predicted and measured agree, however slow"


def test_b113_a_draft_that_accepts_less_may_be_faster(ticks: Ticks, tmp_path: Path) -> None:
    """A tenth of a pass a step, and one draft in two is refused at its first token.

    3 + 0 accepted of 6: 4 + 1 tokens in two rounds of 3 · 0.1 + 1.3 ticks.
    """
    world = scripted_world(tmp_path, GAMMA, {"x": [[3, 0] * 6, [0, 3] * 6]})
    ticks.charge_target(world.target, STEP, FURTHER)
    ticks.charge_drafter(world.drafter, 0.1)
    found = timed(world, tmp_path / "eval")
    cell, cost = figures(found)
    assert cell["draft_acceptance_rate"] == pytest.approx(0.5)
    assert (cost["c_first"], cost["c"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert cell["speed"]["predicted"] == pytest.approx(2.5 / 1.6)
    seven_rounds, last = 7 * (3 * 0.1 + 1.3), 2 * 0.1 + 1.2  # of 20 tokens, the limit being near
    assert cell["speed"]["speedup"]["value"] == pytest.approx(38 / (2 * seven_rounds + last))


def test_b113_baseline_and_costs_are_told(ticks: Ticks, tmp_path: Path) -> None:
    """The same prompts and token counts on both sides, and all that explains the ratio in print."""
    world = scripted_world(tmp_path, GAMMA, {"x": [[3, 0] * 6, [0, 3] * 6]})
    ticks.charge_target(world.target, STEP, FURTHER)
    ticks.charge_drafter(world.drafter, 0.1)
    found = timed(world, tmp_path / "eval")
    laps = [row.timing for row in found.requests]
    assert len(laps) == 2 and all(lap is not None for lap in laps)
    for lap in laps:
        assert lap is not None and lap.plain_tokens == lap.fast_tokens == 19
        assert lap.plain_seconds == pytest.approx(19 * STEP)
    settings, machine = found.report["settings"], found.report["provenance"]["machine"]
    assert (settings["timing_prompts"], settings["timing_tokens"]) == (2, 20)
    assert machine["threads"] == 1
    text = text_of(found)
    for words in (
        "c, T=0 0.100",
        "c_first, T=0 0.100",
        "v(4) 1.300",
        "plain ms per token 1000.0",
        "plain loop ÷ transformers generate 1.00",
        "predicted: (1 + Σ S_k)·(1 + o_plain) / (c_first + (γ − 1)·c + v(γ + 1) + o), k = 1..γ",
        "one row at a time; prefill is not part of the speeds",
    ):
        assert words in text, words
    (speed,) = (t for t in summary_tables(found.report) if t.title == "Speed")
    row = dict(zip(speed.headers, speed.rows[0], strict=True))
    assert row["speedup predicted"] == f"{2.5 / 1.6:.2f}"
    assert row["plain tok/s"] == "1.0"
    assert row["prefill ms, plain"] == "1000.0"


# ---- B115: acceptance without decoding

ROWS, SEEDS, LIMIT = 30, 12, 16
LENGTHS = range(1, 7)


@pytest.mark.parametrize("kind", ["eagle3", "causal"])
@pytest.mark.parametrize(
    ("law", "within"), [(Law(0.0), 1e-9), (Law(1.0), 0.05)], ids=["T=0", "T=1"]
)
def test_b115_the_estimate_is_what_decoding_finds(
    kind: str,
    law: Law,
    within: float,
    small_target: Target,
    make_drafter: Callable[[str, Target], Drafter],
    make_requests: Callable[..., list[Request]],
    answers: Callable[..., list[Record]],
) -> None:
    """30 rows and γ of 1 to 6: exactly at T = 0, within 5 % at T = 1, where each row is drawn and
    decoded with 20 seeds of its own, as one draw of 30 rows is further off by chance alone."""
    seeds = SEEDS if law.temperature else 1
    rows = make_requests(small_target, [1 + i % 7 for i in range(ROWS)], law)
    asked = [replace(r, seed=s * ROWS + i) for s in range(seeds) for i, r in enumerate(rows)]
    drafter = make_drafter(kind, small_target)
    records = answers(small_target, asked, LIMIT)
    scores = score(small_target, drafter, records, law, max(LENGTHS), LIMIT)
    others = [replace(r, seed=10_000 + r.seed) for r in asked]
    for gamma in LENGTHS:
        expected = estimate(scores, gamma, "block", 10).tokens_per_round.value
        outputs = decode(small_target, others, DecodeSettings(LIMIT, gamma, "block"), drafter)
        decoded = sum(len(o.ids) - 1 for o in outputs) / sum(len(o.rounds) for o in outputs)
        assert expected == pytest.approx(decoded, rel=within), gamma
        assert decoded > 1.02, "some drafts are accepted, or there would be nothing to find"


def test_b115_an_estimate_is_never_called_measured(tmp_path: Path) -> None:
    world = scripted_world(tmp_path, 2, {"x": [[2, 0], [1, 1]]})
    report = world.evaluate(tmp_path / "eval")
    (cell,), (line,) = report["cells"], report["sweep"]
    known = [cell["tokens_per_round_estimated"], *line["tokens_per_round_estimated"]]
    assert all(figure["value"] is not None for figure in known)
    assert line["measured"] == [] and cell["speed"] is None
    headers = {h for t in [*summary_tables(report), *detail_tables(report)] for h in t.headers}
    assert {"τ estimated", "τ decoded"} <= headers
    assert not {h for h in headers if "estimated" in h and ("measured" in h or "decoded" in h)}
