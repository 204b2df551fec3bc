"""The training entry as `accelerate launch` runs it: by its path, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.configs.recipe import Recipe
from draftsmith.data.collection import collect
from draftsmith.data.target import Target
from draftsmith.data.work import Work
from draftsmith.drafters.checkpoint import read_own
from draftsmith.scripts.distill import main
from draftsmith.scripts.pipeline import prepare_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name: tiny
target: {{name: {target}, device: cpu}}
domains: [{{name: x, source: {prompts}, holdout: 0.25, kind: raw}}]
collect: {{temperatures: [1.0], max_new_tokens: 8}}
drafter: {{family: eagle3, draft_vocab_size: 60}}
train: {{steps: 2, unroll: 2, mixed_precision: "no"}}
"""


def distill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train" / "distill.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
    )


@pytest.fixture
def recipe_file(tmp_path: Path, target_folder) -> Path:  # type: ignore[no-untyped-def]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Say {i} words"}}\n' for i in range(12)))
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(target=target_folder(), prompts=prompts), encoding="utf-8")
    return path


def test_a_drafter_is_trained_by_path(recipe_file: Path, tmp_path: Path) -> None:
    from rich.console import Console

    from draftsmith.configs.load import load_recipe
    from draftsmith.data.target import load_target

    recipe: Recipe = load_recipe(recipe_file)
    target: Target = load_target(recipe.target, few_rows=False)
    records, quiet = tmp_path / "records", Console(quiet=True)
    prepared = prepare_recipe(recipe, target, quiet)
    collect(Work(recipe, target, (1, 1, 2), prepared, records, quiet))
    out = tmp_path / "out"
    done = distill(
        "--config", str(recipe_file), "--records", str(records), "--out", str(out), "train.lr=0.002"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "drafter")
    assert read_own(out / "drafter")["trained"]["steps"] == 2


def test_a_wrong_key_is_one_sentence(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(recipe_file), "--records", str(tmp_path), "--out", str(tmp_path)]
    assert main([*arguments, "train.stepz=3"]) == 2
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()
    assert line.startswith("distill: unknown key 'train.stepz'")
    assert "train.steps" in line and said.out == ""


def test_ctrl_c_says_how_to_go_on(
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.scripts.distill.RecordStore.open", stopped)
    arguments = ["--config", str(recipe_file), "--records", str(tmp_path), "--out", str(tmp_path)]
    assert main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
