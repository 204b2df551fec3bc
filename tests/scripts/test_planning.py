"""`draftsmith train --dry-run`: with records and without, and nothing of a run left behind."""

import json
import re
import shutil
from pathlib import Path

import pytest

from draftsmith.scripts.cli import main

LINES = ("drafter", "target", "records", "steps", "time", "memory", "disk")


def said_of(name: str, text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{name} "))


def test_a_plan_by_prompts_bounds_the_one_by_records(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert main(["train", str(recipe_file), "--dry-run", *runs, "train.steps=null"]) == 0
    before = capsys.readouterr().out
    assert "no records of this recipe yet" in before
    assert all(said_of(name, before) for name in LINES)
    assert not (tmp_path / "runs").exists(), "nothing was begun"
    assert main(["collect", str(recipe_file), *runs]) == 0
    capsys.readouterr()
    assert main(["train", str(recipe_file), "--dry-run", *runs, "train.steps=null"]) == 0
    after = capsys.readouterr().out
    assert "no records" not in after
    assert said_of("drafter", before) == said_of("drafter", after)
    counts = [re.findall(r"(\d+) supervised", said_of("records", t))[0] for t in (before, after)]
    assert int(counts[0]) >= int(counts[1]) > 0
    assert "at most" in said_of("records", before)
    assert "at most" not in said_of("records", after)
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "runs" / "tiny").iterdir())
    assert names == ["records", "stages.json"]


def test_folders_that_cannot_be_read_are_passed_over(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a manifest, of another format, with a shard cut off: none is this recipe's."""
    runs = ["--runs", str(tmp_path / "runs")]
    assert main(["collect", str(recipe_file), *runs]) == 0
    (own,) = (tmp_path / "runs" / "tiny").glob("records-*")
    for name in ("records-", "records-0none", "records-0old", "records-zcut"):
        shutil.copytree(own, own.parent / name)
    (own.parent / "records-" / "manifest.json").write_text("{", encoding="utf-8")
    (own.parent / "records-0none" / "manifest.json").unlink()
    old = json.loads((own / "manifest.json").read_text(encoding="utf-8"))
    (own.parent / "records-0old" / "manifest.json").write_text(json.dumps({**old, "format": 0}))
    next((own.parent / "records-zcut").glob("*.safetensors")).write_bytes(b"")
    capsys.readouterr()
    assert main(["train", str(recipe_file), "--dry-run", *runs]) == 0
    assert "no records" not in capsys.readouterr().out
    shutil.rmtree(own)
    assert main(["train", str(recipe_file), "--dry-run", *runs]) == 0
    assert "no records of this recipe yet" in capsys.readouterr().out


def test_records_may_be_named(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert main(["collect", str(recipe_file), *runs]) == 0
    (records,) = (tmp_path / "runs" / "tiny").glob("records-*")
    other = ["--records", str(records), "--runs", str(tmp_path / "other")]
    capsys.readouterr()
    assert main(["train", str(recipe_file), "--dry-run", *other]) == 0
    assert "3 optimiser steps" in said_of("steps", capsys.readouterr().out)


def test_what_cannot_work_is_one_sentence(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    options = ["train.domains=[chatt]"]
    assert main(["train", str(recipe_file), "--dry-run", *runs, *options]) == 2
    assert "domain 'chatt'" in (error := capsys.readouterr().err)
    assert "did you mean 'chat'?" in error
