"""Drafters that have nothing to train, through the stages: measured, never published."""

import json
from pathlib import Path

import pytest

from draftsmith.eval.report import read_report
from draftsmith.scripts.cli import main

OPTIONS = {"lookup": "{family: lookup, max_ngram: 2}", "skip": "{family: skip, layers: [0, 1, 3]}"}


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.parametrize("family", OPTIONS)
def test_it_is_measured_without_training(
    family: str, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, root = ["--runs", str(tmp_path / "runs")], tmp_path / "runs" / "tiny"
    recipe = [str(recipe_file), f"drafter={OPTIONS[family]}", "eval.timing_prompts=0"]
    assert main(["eval", *recipe, *runs]) == 0
    names = sorted(path.name.split("-")[0] for path in root.iterdir())
    assert names == sorted(["eval", "records", "stages.json", family])
    report = read_report(only(root, "eval-*"))
    assert report["lossless"]["verdict"] == "equal"
    assert report["provenance"]["drafter"]["family"] == family
    assert report["provenance"]["drafter"]["parameters"] == 0
    for cell in report["cells"]:
        assert 0 <= cell["overlap"]["value"] <= 1
        assert cell["tokens_per_round"]["value"] >= 1
        json.dumps(cell, allow_nan=False)

    folder = only(root, f"{family}-*")
    assert main(["train", *recipe, *runs]) == 0
    assert f"drafter: {folder}" in capsys.readouterr().out.replace("\n", "")
    arguments = ["--drafter", str(folder), "--report", str(only(root, "eval-*")), *runs]
    assert main(["publish", *recipe, *arguments]) == 2
    assert "has no weights to publish" in capsys.readouterr().err
    assert not (root / "published").exists()


def test_prompts_need_no_folder_of_it(recipe_file: Path, tmp_path: Path) -> None:
    prompts = recipe_file.parent / "prompts" / "chat.jsonl"
    arguments = ["eval", str(recipe_file), f"drafter={OPTIONS['skip']}", "eval.timing_prompts=0"]
    arguments += ["--prompts", f"mine={prompts}", "--runs", str(tmp_path / "runs")]
    assert main(arguments) == 0
    report = read_report(only(tmp_path / "runs", "tiny-*/eval-*"))
    assert {cell["domain"] for cell in report["cells"]} == {"mine"}
