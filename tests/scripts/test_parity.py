"""`draftsmith parity` on a tiny target: verdict, exit code, what it may be asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.eval import courses
from draftsmith.scripts.cli import main


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def trained(shared_recipe_file: Path) -> tuple[Path, Path]:
    """(recipe, runs folder) with records and a drafter."""
    recipe, runs = shared_recipe_file, shared_recipe_file.parent / "runs"
    assert main(["train", str(recipe), "--runs", str(runs)]) == 0
    return recipe, runs


def test_a_trained_drafter_is_what_is_served(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, runs = trained
    drafter, out = only(runs / "tiny", "train-*/drafter"), tmp_path / "parity.json"
    command = ["parity", str(recipe), "--runs", str(runs), "--drafter", str(drafter)]
    assert main([*command, "--rows", "6", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "parity holds" in said and "teacher-forced top-1 agreement" in said
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and {p["name"]: p["verdict"] for p in found["parts"]} == {
        "states": "equal", "logits": "equal", "rounds at T=0": "equal",
        "rounds at T=1": "not checked",  # six prompts are too few
    }  # fmt: skip
    assert {"agreement", "first_accepted", "tokens_per_round"} <= found["figures"].keys()


@pytest.mark.parametrize("kept", ["none", "top"])
def test_records_without_states_do_as_well(
    kept: str, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [f"collect.distributions={kept}"]
    if kept == "top":  # a head needs states
        changes += ["collect.top=8", "drafter={family: causal}"]
    assert main(["parity", str(recipe_file), *changes, "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "states: not checked" in said and "parity holds" in said


@pytest.mark.parametrize("family", ["lookup", "skip"])
def test_families_without_training_are_compared_too(
    family: str, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [f"drafter={{family: {family}}}", "--runs", str(tmp_path / "runs")]
    assert main(["parity", str(recipe_file), *changes]) == 0
    assert f"parity    {family} on" in capsys.readouterr().out


def test_a_fault_is_named_and_is_exit_code_1(
    trained: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Teacher forcing that is one token ahead of decoding."""
    honest = courses.score

    def ahead(*args: Any, **options: Any) -> Any:
        found = honest(*args, **options)
        for conversation in found:
            conversation.log_ratio[:] = conversation.log_ratio.roll(1, 0)
        return found

    monkeypatch.setattr(courses, "score", ahead)
    recipe, runs = trained
    drafter = only(runs / "tiny", "train-*/drafter")
    command = ["parity", str(recipe), "--runs", str(runs), "--drafter", str(drafter)]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "rounds at T=0: different" in said and "parity FAILS" in said
    assert "training foretells" in said and "round " in said and "position " in said


def test_a_drafter_that_accepts_nothing_rings(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides agree about a head of noise, so that nothing differs; the warning is all."""
    recipe, runs = trained
    folder = tmp_path / "noise"
    shutil.copytree(only(runs / "tiny", "train-*/drafter"), folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    tensors["lm_head.weight"] = torch.randn_like(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    command = ["parity", str(recipe), "--runs", str(runs), "--drafter", str(folder)]
    assert main(command) == 0
    assert "warning: acceptance is exactly 0 in" in capsys.readouterr().out


def test_where_nothing_can_be_checked_it_says_so_and_fails(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["collect.max_new_tokens=2", "collect.distributions=none", "drafter={family: lookup}"]
    assert main(["parity", str(recipe_file), *changes, "--runs", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().out
    assert "nothing could be checked" in said and "parity holds" not in said
    assert ": equal" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "1"], "--rows is 1, must be 2 or more"),
        (["--drafter", "{tmp}"], "is no drafter folder"),
        (["--records", "{tmp}"], "holds no records"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    arguments: list[str],
    words: str,
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.format(tmp=tmp_path) for a in arguments]
    assert main(["parity", str(recipe_file), *filled, "--runs", str(tmp_path / "runs")]) == 2
    assert words in capsys.readouterr().err
