"""Engines are started, asked and counted, each round put where it belongs, and faults are named."""

import copy
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_scripts import KINDS, engine, expectations, greedy_cells, plan, serving
from rich.console import Console
from worlds import GAMMA, World

from draftsmith.configs.errors import UserError
from draftsmith.data import served
from draftsmith.drafters.base import Drafter
from draftsmith.eval.engines.expected import log_probs
from draftsmith.eval.engines.measure import measure
from draftsmith.eval.report import alarms, print_report, read_report, write_report

SAMPLE = Path(__file__).resolve().parents[2] / "fixtures" / "report.json"
Measured = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(served, "POLL", 0.02)


@pytest.fixture
def measured(world: World, tmp_path: Path) -> Measured:
    """`measured(kind, drafter, fault)`: the entry of a report."""

    def run(
        kind: str = "vllm",
        drafter: Drafter | None = None,
        fault: str | None = None,
        limit: float = 60.0,
        concurrencies: tuple[int, ...] = (1,),
    ) -> dict[str, Any]:
        cells = greedy_cells(world)
        made = engine(world, cells, drafter or world.drafter, kind, tmp_path, fault)
        layout = "eagle3" if world.drafter.family == "eagle3" else "transformers"
        serve = serving(tmp_path, layout, limit)
        expected = expectations(world, cells, made.overruns)
        target: Any = world.target
        judge = partial(log_probs, world.target)
        return measure(
            made, serve, target, plan(cells, concurrencies), expected, judge, lambda line: None
        )

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_engine_counts_what_is_expected(
    kind: str, world: World, measured: Measured, tmp_path: Path
) -> None:
    found = measured(kind)
    assert found["num_draft_tokens"] == GAMMA and found["version"] == "0.0.7"
    cells = greedy_cells(world)
    assert [c["domain"] for c in found["cells"]] == [c.domain for c in cells]
    for row, cell in zip(found["cells"], cells, strict=True):
        assert row["same_replies"] == row["replies"] == len(cell.records)
        assert row["tokens"] == sum(len(r.reply) - 1 for r in cell.records)
        assert row["tokens_per_round"]["value"] == pytest.approx(
            row["tokens_per_round_expected"]["value"]
        )
        for place in row["positions"]:
            least, most = place["least"]["value"], place["most"]["value"]
            assert least - 1e-9 <= place["share"]["value"] <= most + 1e-9
        assert row["accepted"] == sum(place["accepted"] for place in row["positions"])
        assert row["deviations"] == []
        (speed,) = row["speed"]
        ratio = speed["speculative_tokens_per_s"] / speed["plain_tokens_per_s"]
        assert speed["speedup"]["value"] == pytest.approx(ratio)
    assert list(tmp_path.glob("draftsmith-server-*")) == [], "no log is kept"


def test_speed_in_a_crowd_has_no_interval(measured: Measured) -> None:
    row = measured(concurrencies=(1, 3))["cells"][0]
    assert [s["concurrency"] for s in row["speed"]] == [1, 3]
    assert row["speed"][1]["speedup"]["low"] is None
    assert row["speed"][1]["plain_tokens_per_s"] > 0


def test_where_no_speed_is_wanted_no_plain_engine_runs(measured: Measured, tmp_path: Path) -> None:
    assert all(row["speed"] == [] for row in measured(concurrencies=())["cells"])
    assert (tmp_path / "drafted.json").exists() and not (tmp_path / "plain.json").exists()


class Misled:
    """A drafter that is given its states in another order, as by a wrong layer id."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def first(self, state: Any) -> Any:
        return self._drafter.first(state).flip(-1)

    def extend(self, *args: Any) -> Any:
        return self._drafter.extend(*args).flip(-1)


def test_an_engine_that_serves_it_otherwise_rings(
    world: World, measured: Measured, tmp_path: Path
) -> None:
    wrong: Any = Misled(copy.copy(world.drafter))
    found = measured(drafter=wrong)
    assert all(row["same_replies"] == row["replies"] for row in found["cells"])
    assert any(row["deviations"] for row in found["cells"])
    report = json.loads(SAMPLE.read_text(encoding="utf-8"))
    quiet = alarms(report)
    report["engines"] = [found]
    rung = [line for line in alarms(report) if line not in quiet]
    assert rung and all(line.startswith("Replayed, ") for line in rung)


def test_a_report_shows_what_an_engine_did(measured: Measured, tmp_path: Path) -> None:
    report = json.loads(SAMPLE.read_text(encoding="utf-8"))
    report["engines"] = [measured()]
    write_report(report, tmp_path / "report")
    console = Console(file=io.StringIO(), width=200)
    print_report(read_report(tmp_path / "report"), console)
    printed = console.file.getvalue()
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    row = report["engines"][0]["cells"][0]
    for text in (
        "Acceptance in Replayed 0.0.7 (",
        "Speed in Replayed 0.0.7 (",
        f"{row['same_replies']}/{row['replies']}",
        f"{row['tokens_per_round']['value']:.2f}",
        f"{row['speed'][0]['plain_tokens_per_s']:.1f}",
        "S_1 expected",
    ):
        assert text in printed and text in page, text


@pytest.mark.parametrize(
    ("fault", "limit", "message"),
    [
        ("dies", 60.0, r"(?s)cannot be reached.*\nthe engine ended with status 7.*out of memory"),
        ("hangs", 3.0, r"(?s)\nthe engine was ended after 3 s; its output is kept in .*  up \d+"),
        ("tells nothing", 60.0, r"/metrics has no counters vllm:spec_decode_num_drafts"),
    ],
)
def test_an_engine_that_fails_is_gone_and_its_log_is_named(
    fault: str, limit: float, message: str, measured: Measured, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=message) as error:
        measured(fault=fault, limit=limit)
    assert time.monotonic() - start < 45
    logs = list(tmp_path.glob("draftsmith-server-*.log"))
    assert len(logs) == (fault != "tells nothing"), "it runs, and has nothing to tell of itself"
    for log in logs:
        assert str(log) in str(error.value)
        pid = int(log.read_text().split()[1])
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_engine_that_cannot_be_started(world: World, tmp_path: Path) -> None:
    cells = greedy_cells(world)
    made = engine(world, cells, world.drafter, "vllm", tmp_path)
    serve = replace(serving(tmp_path, "eagle3"), python="/no/such/python")
    target: Any = world.target
    judge = partial(log_probs, world.target)
    with pytest.raises(UserError, match=r"the engine cannot be run: .*/no/such/python"):
        measure(
            made, serve, target, plan(cells), expectations(world, cells), judge, lambda line: None
        )
