"""Benchmarks: drafters side by side on the same replies, once and for all."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarking import WORDS, loaded, write_head
from rich.console import Console

from draftsmith.configs.benchmark import Benchmark
from draftsmith.configs.load import load_benchmark
from draftsmith.data.store import RecordStore
from draftsmith.eval.report import read_report
from draftsmith.eval.request_rows import RequestRow, read_requests
from draftsmith.scripts import pipeline
from draftsmith.scripts.benchmark import SUMMARY, Bench, _without_places
from draftsmith.scripts.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(spec_file: Path) -> tuple[Path, Path]:
    """(the benchmark's folder, what `--out` wrote) of one run of the command."""
    runs, out = spec_file.parent / "runs", spec_file.parent / "out.json"
    assert main(["bench", str(spec_file), "--runs", str(runs), "--out", str(out)]) == 0
    (folder,) = (runs / "contest").glob("bench-*")
    return folder, out


@pytest.fixture(scope="module")
def summary(finished: tuple[Path, Path]) -> dict[str, Any]:
    return json.loads((finished[0] / SUMMARY).read_text(encoding="utf-8"))


def bench_of(spec: Benchmark, runs: Path) -> Bench:
    return Bench(spec, runs, Console(file=io.StringIO(), width=200))


def files_of(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file with when it was written and what it holds."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


NAMES = ["head, block", "head, greedy drafts", "lookup, block", "lookup, greedy drafts"]

# ---- what a run leaves


def test_every_entry_and_seed_has_its_evaluation(
    finished: tuple[Path, Path], summary: dict[str, Any]
) -> None:
    folder, out = finished
    assert [entry["name"] for entry in summary["entries"]] == NAMES
    for number, entry in enumerate(summary["entries"]):
        assert len(entry["reports"]) == 2
        for seed, place in zip((0, 5), entry["reports"], strict=True):
            assert place.startswith(f"{number:02d}-") and f"/seed-{seed}/eval-" in place
            for name in ("manifest.json", "report.json", "report.html", "requests.jsonl"):
                assert (folder / place / name).is_file(), name
        report = read_report(folder / entry["reports"][0])
        assert entry["settings"] == report["settings"] and entry["cost"] == report["cost"]
        ways = {"block": (2, "block"), "greedy drafts": (1, "token")}
        way = ways[entry["name"].partition(", ")[2]]
        assert (entry["settings"]["num_draft_tokens"], entry["settings"]["verifier"]) == way
    assert (folder / "manifest.json").is_file()
    assert json.loads(out.read_text(encoding="utf-8")) == summary


def test_all_entries_share_one_collection_a_seed(finished: tuple[Path, Path]) -> None:
    root = finished[0].parent
    stores = [RecordStore.open(path) for path in root.glob("records-*")]
    laws = sorted({r.law.label for r in store.records()} for store in stores)
    assert sorted(map(sorted, laws)) == [["T=0", "T=1"], ["T=1"]], "greedy replies have no seed"
    assert not list(finished[0].rglob("records-*")), "and none of their own"
    manifest = json.loads((finished[0] / "manifest.json").read_text(encoding="utf-8"))
    assert set(manifest["records"].values()) == {store.identity for store in stores}


def test_rows_are_pooled_over_the_seeds(
    finished: tuple[Path, Path], summary: dict[str, Any]
) -> None:
    """Counted anew from the lines of the evaluations."""
    for entry in summary["entries"]:
        lines = [r for place in entry["reports"] for r in read_requests(finished[0] / place)]
        cells: dict[tuple[str, str], list[RequestRow]] = {}
        for line in lines:
            cells.setdefault((line.domain, line.law), []).append(line)
        assert {(row["domain"], row["law"]) for row in entry["rows"]} == cells.keys()
        assert len(cells) == 4
        for total in entry["totals"]:
            own = [line for line in lines if line.law == total["law"]]
            parts = [row for row in entry["rows"] if row["law"] == total["law"]]
            for count in ("replies", "tokens", "rounds", "timed"):
                assert total[count] == sum(row[count] for row in parts) > 0
            rounds = sum(len(line.rounds) for line in own)
            assert total["tokens_per_round"]["value"] == pytest.approx(total["tokens"] / rounds)
        assert {total["law"] for total in entry["totals"]} == {law for _, law in cells}
        for row in entry["rows"]:
            own = cells[row["domain"], row["law"]]
            seeds = 1 if row["law"] == "T=0" else 2
            prompts = 5 if row["domain"] == "beasts" else 4
            assert (row["prompts"], row["replies"]) == (prompts, seeds * prompts)
            tokens = sum(line.tokens - 1 for line in own)
            rounds = [r for line in own for r in line.rounds]
            assert (row["tokens"], row["rounds"]) == (tokens, len(rounds))
            assert row["tokens_per_round"]["value"] == pytest.approx(tokens / len(rounds))
            drafted, accepted = (sum(column) for column in zip(*rounds, strict=True))
            assert row["draft_acceptance_rate"] == pytest.approx(accepted / max(1, drafted))
            shared = sum(line.overlap.sum for line in own)
            assert row["overlap"]["value"] == pytest.approx(
                shared / sum(line.overlap.count for line in own)
            )
            laps = [line.timing for line in own if line.timing is not None]
            assert row["timed"] == len(laps) == seeds
            speeds = [
                sum(getattr(lap, f"{side}_tokens") for lap in laps)
                / sum(getattr(lap, f"{side}_seconds") for lap in laps)
                for side in ("plain", "fast")
            ]
            assert row["speedup"]["value"] == pytest.approx(speeds[1] / speeds[0])
            assert row["prompt_ids"] == sorted({line.prompt_id for line in own})


def test_entries_are_compared_with_the_first(summary: dict[str, Any]) -> None:
    compared = summary["compared"]
    assert compared["baseline"]["name"] == NAMES[0]
    assert [other["name"] for other in compared["comparisons"]] == NAMES[1:]
    for other in compared["comparisons"]:
        assert other["pairs"] == 2 * (5 + 4) + (5 + 4) and other["other_prompts"] == 0
        assert (other["only_first"], other["only_other"]) == (0, 0)
        assert len(other["rows"]) == 4
        verdicts = {f["verdict"] for row in other["rows"] for f in row["figures"].values() if f}
        assert verdicts <= {"higher", "lower", "no difference found", "too few"}


def test_greedy_outputs_are_equal(summary: dict[str, Any]) -> None:
    assert [part["entry"] for part in summary["lossless"]] == NAMES
    for part in summary["lossless"]:
        assert (part["verdict"], part["prompts"]) == ("equal", 9)


def strings(value: Any) -> Iterator[str]:
    """Every key and text in a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_figures_carry_neither_text_nor_paths(
    finished: tuple[Path, Path], summary: dict[str, Any], saved_target: Path
) -> None:
    """They are made to be committed."""
    told = list(strings(summary))
    text = json.dumps(summary, ensure_ascii=False)
    for word in (*WORDS, str(saved_target), str(finished[0].parents[2]), "/tmp"):
        assert word not in text, word
    assert not [word for word in told if re.match(r"(/|~|[A-Za-z]:\\)", word)]
    target = loaded(saved_target)
    replies = {
        target.tokenizer.decode(record.reply.tolist(), skip_special_tokens=True).strip()
        for path in finished[0].parent.glob("records-*")
        for record in RecordStore.open(path).records()
    }
    assert len(replies) > 9
    assert not [reply for reply in replies if len(reply) > 4 and reply in text]
    assert summary["provenance"]["target"]["weights"] == target.provenance["weights"]
    sources = [domain["source"] for domain in summary["spec"]["domains"]]
    assert sources == ["beasts.jsonl", "other.jsonl"]


def test_places_of_every_kind_are_left_out(spec_file: Path, tmp_path: Path) -> None:
    """Adapters, servers and sets by name and file have places, too."""
    spec = load_benchmark(
        spec_file,
        [
            f"target.adapter={tmp_path}/lora",
            f"domains.0.source=gsm8k:{tmp_path}/rows.jsonl",
            "domains.1.source=https://host.inside/other.jsonl?signature=secret",
            "collect.server={addresses: ['http://host.inside:8000/v1'], model: tiny}",
            "collect.distributions=none",
        ],
    )
    text = json.dumps(_without_places(spec))
    for place in (str(tmp_path), str(spec_file.parent), "host.inside", "secret"):
        assert place not in text, place
    for name in ("lora", "gsm8k:rows.jsonl", "other.jsonl", "tiny"):
        assert f'"{name}"' in text, name
    public = replace(spec.domains[0], source="datasets:openai/gsm8k:main:test")
    told = _without_places(replace(spec, domains=(public,)))
    assert told["domains"][0]["source"] == public.source, "what is public is named in full"


# ---- once and for all


def test_a_finished_benchmark_is_never_touched(
    finished: tuple[Path, Path],
    spec_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = finished
    before = files_of(folder)
    monkeypatch.setattr(pipeline, "evaluate", lambda *args: pytest.fail("evaluated again"))
    assert main(["bench", str(spec_file), "--runs", str(folder.parents[1])]) == 0
    assert files_of(folder) == before
    said = capsys.readouterr().out
    for words in ("α overlap", "τ decoded | expected", *NAMES, f"benchmark: {folder}"):
        assert words in said.replace("\n", " ") or words in said.replace("\n", ""), words


@pytest.fixture
def quick(spec_file: Path) -> Benchmark:
    """The specification without timing, with one serving."""
    spec = load_benchmark(spec_file, ["eval.timing_prompts=0"])
    return replace(spec, servings=spec.servings[:1])


def test_a_changed_specification_is_another_folder(
    finished: tuple[Path, Path], quick: Benchmark
) -> None:
    runs = finished[0].parents[1]
    before = files_of(finished[0])
    changed = bench_of(quick, runs).measure()
    again = bench_of(replace(quick, eval=replace(quick.eval, bootstrap=7)), runs).measure()
    assert len({finished[0], changed, again}) == 3
    assert files_of(finished[0]) == before
    assert len(list((runs / "contest").glob("records-*"))) == 2, "what is collected is shared"


def test_a_changed_drafter_is_another_folder(
    spec_file: Path, quick: Benchmark, tmp_path: Path, saved_target: Path
) -> None:
    """Though it has the same name and lies in the same place."""
    first = bench_of(quick, tmp_path).measure()
    head = spec_file.parent / "head"
    kept = head.rename(tmp_path / "kept")
    try:
        write_head(head, loaded(saved_target), 1)
        second = bench_of(quick, tmp_path).measure()
    finally:
        shutil.rmtree(head)
        kept.rename(head)
    assert first != second and first.parent == second.parent


@pytest.mark.parametrize("after", [1, 3])
def test_a_stopped_benchmark_goes_on(
    quick: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Two drafters and two seeds are four evaluations; those that are done are kept."""
    evaluate, calls = pipeline.evaluate, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(pipeline, "evaluate", counted)
    with pytest.raises(KeyboardInterrupt):
        bench_of(quick, tmp_path).measure()
    (folder,) = (tmp_path / "contest").glob("bench-*")
    assert not (folder / SUMMARY).exists()
    done = files_of(folder)
    assert sum(path.name == "report.json" for path in done) == after
    assert bench_of(quick, tmp_path).measure() == folder
    assert calls == 1 + 4, "none of the finished ones is run again"
    now = files_of(folder)
    finished = {path.parent for path in done if path.name == "report.json"}
    for path in done:
        if path.parent in finished:
            assert now[path] == done[path], path
    straight = bench_of(quick, tmp_path / "straight").measure()
    one, two = (json.loads((f / SUMMARY).read_text(encoding="utf-8")) for f in (folder, straight))
    assert [entry["rows"] for entry in one["entries"]] == [
        entry["rows"] for entry in two["entries"]
    ]


def test_one_entry_is_compared_with_nothing(quick: Benchmark, tmp_path: Path) -> None:
    spec = replace(quick, drafters=quick.drafters[1:], seeds=(0,))
    folder = bench_of(spec, tmp_path).measure()
    assert json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["compared"] is None


def test_a_drafter_may_be_served_in_some_ways_only(spec_file: Path, tmp_path: Path) -> None:
    spec = load_benchmark(spec_file, ["drafters.0.servings=['greedy drafts']"])
    entries = [entry.name for entry in bench_of(spec, tmp_path).entries]
    assert entries == NAMES[1:]


def test_greedy_laws_alone_need_one_seed(quick: Benchmark, tmp_path: Path) -> None:
    spec = replace(quick, laws=quick.laws[:1])
    assert list(bench_of(spec, tmp_path).seeds) == [0]
    assert list(bench_of(quick, tmp_path).seeds) == [0, 5]


def test_an_alarm_says_whose_it_is(
    quick: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = pipeline.evaluate

    def alarmed(*args: Any) -> Any:
        found = evaluate(*args)
        if found.report["provenance"]["drafter"]["family"] == "lookup":
            found.report["alarms"].append("the clock stood still")
        return found

    monkeypatch.setattr(pipeline, "evaluate", alarmed)
    folder = bench_of(replace(quick, seeds=(0,)), tmp_path).measure()
    told = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["alarms"]
    assert "lookup, block: the clock stood still" in told
    assert not any(alarm.startswith("head, block: the clock") for alarm in told)
