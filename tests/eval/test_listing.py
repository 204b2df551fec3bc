"""A line for each reply: counts and hashes that add up to the report, and no text."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from counting import scripted_world
from worlds import World

from draftsmith.configs.recipe import TreeSection
from draftsmith.data.records import Record
from draftsmith.eval.cells import Found, cell_row, cells_of, total_rows
from draftsmith.eval.evaluate import Measured
from draftsmith.eval.listing import request_rows
from draftsmith.eval.request_rows import RequestRow, read_requests, write_requests
from draftsmith.eval.rows import Output
from draftsmith.train.score import score

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPTS = {"math": [[2, 0, 1], [1, 1]], "co/de": [[0, 0, 2]]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return scripted_world(tmp_path_factory.mktemp("listed"), 2, SCRIPTS)


@pytest.fixture(scope="module")
def found(world: World, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return world.run(tmp_path_factory.mktemp("eval"), timing_prompts=1, timing_tokens=4)


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def test_a_row_says_what_was_asked_and_what_came_of_it(world: World, found: Measured) -> None:
    records = {r.key: r for r in world.store.records("heldout")}
    assert {row.key for row in found.requests} == records.keys()
    for row in found.requests:
        record = records[row.key]
        assert (row.domain, row.prompt_id, row.law) == (record.domain, record.prompt_id, "T=0")
        assert (row.seed, row.turn, row.prompt_tokens) == (record.seed, 0, 1)
        assert row.prompt_sha256 == digest(record.ids[:1].tolist())
        assert row.output_sha256 == digest(record.reply.tolist()), "at T = 0 the target's own"
        assert (row.tokens, row.finish) == (len(record.reply), "stop")


def test_rounds_are_those_of_the_scripts(found: Measured) -> None:
    rounds = [[accepted for _, accepted in row.rounds] for row in found.requests]
    assert rounds == [*SCRIPTS["co/de"], *SCRIPTS["math"]], "in the order of the cells"
    assert {drafted for row in found.requests for drafted, _ in row.rounds} == {2}


def test_expected_rounds_are_the_decoded_ones(found: Measured) -> None:
    """Exactly so at T = 0."""
    for row in found.requests:
        assert row.expected is not None
        assert row.expected.tokens == row.tokens - 1
        assert row.expected.rounds == pytest.approx(len(row.rounds))


def test_overlap_is_the_share_of_tokens_seen_coming(world: World, found: Measured) -> None:
    wrong = {t for t in range(100) if world.drafter.table.get(t - 1, t) != t}  # type: ignore[attr-defined]
    records = {r.key: r for r in world.store.records("heldout")}
    for row in found.requests:
        drafted = records[row.key].reply.tolist()[1:]
        assert row.overlap.count == len(drafted)
        assert row.overlap.sum == pytest.approx(sum(t not in wrong for t in drafted))


def test_only_timed_prompts_have_times(found: Measured) -> None:
    by_domain: dict[str, list[RequestRow]] = {}
    for row in found.requests:
        by_domain.setdefault(row.domain, []).append(row)
    for domain, rows in by_domain.items():
        (lap,) = [row.timing for row in rows if row.timing is not None]
        assert lap.plain_tokens == lap.fast_tokens == 3, domain
        assert lap.plain_seconds > 0 and lap.fast_seconds > 0


def test_rows_add_up_to_the_report(found: Measured) -> None:
    """Cells and totals alike, counted here anew."""
    for part in ("cells", "totals"):
        for told in found.report[part]:
            own = [r for r in found.requests if told.get("domain", r.domain) == r.domain]
            rounds = [r for row in own for r in row.rounds]
            assert told["replies"] == len(own)
            assert told["tokens"] == sum(row.tokens - 1 for row in own)
            assert told["rounds"] == len(rounds)
            assert told["drafted"] == sum(d for d, _ in rounds)
            assert told["accepted"] == sum(a for _, a in rounds)
            overlap = [sum(getattr(r.overlap, k) for r in own) for k in ("sum", "count")]
            assert told["overlap"]["value"] == pytest.approx(overlap[0] / overlap[1])
    for cell in found.report["cells"]:
        laps = [r.timing for r in found.requests if r.timing and r.domain == cell["domain"]]
        speeds = [
            sum(getattr(lap, f"{side}_tokens") for lap in laps)
            / sum(getattr(lap, f"{side}_seconds") for lap in laps)
            for side in ("plain", "fast")
        ]
        assert cell["speed"]["speedup"]["value"] == pytest.approx(speeds[1] / speeds[0])


def test_a_file_of_rows_holds_no_text(world: World, found: Measured, tmp_path: Path) -> None:
    path = write_requests(tmp_path, found.requests)
    assert read_requests(tmp_path) == found.requests
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        words = [value for value in row.values() if isinstance(value, str)]
        named = {"domain", "law", "prompt_id", "key", "finish", "prompt_sha256", "output_sha256"}
        assert {k for k, value in row.items() if isinstance(value, str)} == named
        assert not any(world.target.tokenizer.decode(r.reply) in words for r in _records(world))


def _records(world: World) -> list[Record]:
    return list(world.store.records("heldout"))


# ---- rows of which little is known


def _bare(world: World, reply: int) -> Found:
    """A cell of one reply of so many tokens, decoded without any draft."""
    (cell, *_) = cells_of(world.recipe, _records(world))
    (record, *_) = cell.records
    short = replace(record, ids=record.ids[: record.prompt_len + reply])
    output = Output(short.reply.tolist(), "length", [(0, 0)] * (reply - 1))
    return Found(replace(cell, records=[short]), [], {short.key: output})


def test_a_reply_of_one_token_was_never_drafted(world: World) -> None:
    """It says nothing, and is listed all the same."""
    cell = _bare(world, 1)
    both = _with_another(world, cell)
    rows = {row.key: row for row in request_rows(world.recipe, both)}
    (short,) = (rows[r.key] for r in cell.cell.records)
    assert (short.tokens, short.rounds, short.expected, short.timing) == (1, (), None, None)
    assert asdict(short.overlap) == {"sum": 0.0, "count": 0}
    assert len(rows) == 2 and all(row.expected for key, row in rows.items() if key != short.key)
    told = cell_row(world.recipe, both, {})
    assert (told["replies"], told["tokens"]) == (2, sum(row.tokens - 1 for row in rows.values()))
    by_reply = told["tokens_per_round_by_reply"]["value"]
    assert by_reply == pytest.approx(told["tokens_per_round"]["value"]), "it has no rounds"
    (total,) = total_rows(world.recipe, [both])
    assert {k: told[k] for k in total if k != "law"} == {
        k: v for k, v in total.items() if k != "law"
    }


def _with_another(world: World, cell: Found) -> Found:
    """The cell with a second reply, which was decoded and scored as the world has it."""
    record = _records(world)[-1]
    other = replace(record, prompt_id="other", domain=cell.cell.domain)
    scores = score(world.target, world.drafter, [other], other.law, 2, 20)
    outputs = {**cell.outputs, other.key: Output(other.reply.tolist(), "stop", [(2, 1), (2, 1)])}
    records = [*cell.cell.records, other]
    return replace(cell, cell=replace(cell.cell, records=records), scores=scores, outputs=outputs)


@pytest.mark.parametrize(
    "serving",
    [
        {"policy": {"name": "confidence", "threshold": 0.1}},
        {"tree": TreeSection(width=1, budget=2)},
    ],
    ids=["a policy", "a tree of one child a node"],
)
def test_what_is_no_chain_of_a_fixed_length_expects_nothing(
    serving: dict[str, Any], world: World, tmp_path: Path
) -> None:
    """Rounds are as of plain chains: the drafter is sure of all, and such a tree is one."""
    found = world.run(tmp_path, serving)
    assert all(row.expected is None for row in found.requests)
    assert [[a for _, a in row.rounds] for row in found.requests] == [
        *SCRIPTS["co/de"],
        *SCRIPTS["math"],
    ]
