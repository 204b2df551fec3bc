"""`draftsmith compare` on the folders that `draftsmith eval` leaves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from compared import report_of, row, saved

from draftsmith.eval.request_rows import Overlap, read_requests
from draftsmith.scripts.cli import main

PROMPTS = [f"p{i}" for i in range(9)]


@pytest.fixture(scope="module")
def evaluated(shared_recipe_file: Path) -> tuple[Path, Path]:
    """(an evaluation, the same drafter with longer drafts)."""
    recipe, runs = str(shared_recipe_file), str(shared_recipe_file.parent / "runs")
    found: list[Path] = []
    for changes in (["train.unroll=3"], ["train.unroll=3", "serving.num_draft_tokens=3"]):
        drafter = sorted(Path(runs).glob("tiny/train-*/drafter"))
        more = ["--drafter", str(drafter[0])] if drafter else []
        assert main(["eval", recipe, "--runs", runs, *more, *changes]) == 0
        found += [f for f in Path(runs).glob("tiny/eval-*") if f not in found]
    return found[0], found[1]


def test_an_evaluation_and_its_copy_do_not_differ(
    evaluated: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = evaluated[0]
    twin, out = shutil.copytree(folder, tmp_path / "twin"), tmp_path / "found.json"
    capsys.readouterr()
    assert main(["compare", str(folder), str(twin), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))
    (other,) = found["comparisons"]
    rows = read_requests(folder)
    assert other["pairs"] == len(rows) and other["differs"] == []
    assert {(r["domain"], r["law"]) for r in other["rows"]} == {(r.domain, r.law) for r in rows}
    known = [f for r in other["rows"] for f in r["figures"].values() if f is not None]
    assert {f["verdict"] for f in known} <= {"no difference found", "too few"}
    assert all(f["one"] == f["other"] for f in known)
    for words in ("α overlap", "τ decoded", "accepted ÷ drafted", "speedup", "(Holm)"):
        assert words in said
    assert f"{len(rows)} requests are paired" in said and "differs" not in said
    assert str(tmp_path) not in out.read_text(encoding="utf-8"), "places stay here"


def test_what_was_served_differently_is_told(
    evaluated: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, evaluated)]) == 0
    said = capsys.readouterr().out
    assert "differs   settings.num_draft_tokens: 2 | 3" in said
    assert "differs   records" not in said and "differs   target" not in said


def test_several_are_compared_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(p) for p in PROMPTS]
    better = [replace(r, overlap=Overlap(3.0, 4), prompt_sha256="zz") for r in rows]
    folders = [
        saved(tmp_path / name, own, report_of())
        for name, own in (("base", rows), ("better", better), ("fewer", rows[:4]))
    ]
    assert main(["compare", *map(str, folders)]) == 0
    said = capsys.readouterr().out
    assert "[0.250–0.250]" in said and "higher" in said
    assert "5 requests are in the baseline only, and left out" in said
    assert "9 of the pairs were asked in other tokens" in said
    assert "fewer than 8 conversations" in said and "4*" in said
    assert "all 2 rows of a figure" in said


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (["nowhere"], "there is no report at"),
        ([], "name two folders or more"),
        (["alien"], "share no request"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2(
    others: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "base", [row()], report_of())
    saved(tmp_path / "alien", [row(law="T=0.3")], report_of())
    out = tmp_path / "found.json"
    folders = [str(tmp_path / name) for name in ("base", *others)]
    assert main(["compare", *folders, "--out", str(out)]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()
