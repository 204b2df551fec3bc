"""A recipe on a tiny local target that runs through every stage in seconds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarking import write_spec

RECIPE = """\
name: tiny
target: {{name: {target}, device: cpu}}
domains:
  - {{name: chat, source: {prompts}/chat.jsonl, holdout: 0.5}}
  - {{name: math, source: {prompts}/math.jsonl, holdout: 0.5}}
collect: {{temperatures: [1.0], max_new_tokens: 10, batch_size: 8}}
drafter: {{family: eagle3, draft_vocab_size: 120, taps: [0, 1, 2]}}
train: {{steps: 3, unroll: 2, tokens_per_batch: 60, warmup_steps: 1, mixed_precision: "no"}}
eval:
  sweep: [1, 2]
  timing_prompts: 1
  timing_tokens: 8
  bootstrap: 50
  calibration_prompts: 1
"""


def write_prompts(folder: Path) -> Path:
    """Two domains of eight short prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("chat", "math"):
        rows = [json.dumps({"prompt": f"{name} {i}?"}) for i in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def saved_target(target_folder: Callable[..., Path]) -> Path:
    """The tiny Llama's folder."""
    return target_folder()


@pytest.fixture
def recipe_file(tmp_path: Path, saved_target: Path) -> Path:
    prompts = write_prompts(tmp_path / "prompts")
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(target=saved_target, prompts=prompts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shared_recipe_file(tmp_path_factory: pytest.TempPathFactory, saved_target: Path) -> Path:
    """The same for tests that only add to a run."""
    folder = tmp_path_factory.mktemp("recipe")
    prompts = write_prompts(folder / "prompts")
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(target=saved_target, prompts=prompts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory, saved_target: Path) -> Path:
    """A benchmark's specification, with what it names beside it."""
    return write_spec(tmp_path_factory.mktemp("bench"), saved_target)
