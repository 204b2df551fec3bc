"""The command line: every stage on a tiny local target, and one sentence for every mistake."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from transformers import AutoTokenizer

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import load_target
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.report import read_report
from draftsmith.scripts import pipeline
from draftsmith.scripts.cli import main


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr."""
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith:")]
    assert len(said) == 1, said
    return said[0].removeprefix("draftsmith: ")


# ---- the stages


@pytest.fixture(scope="module")
def finished(shared_recipe_file: Path) -> tuple[Path, Path]:
    """(recipe, runs folder) after collect, train, eval and publish."""
    recipe, runs = shared_recipe_file, shared_recipe_file.parent / "runs"
    for command in ("collect", "train", "eval"):
        assert main([command, str(recipe), "--runs", str(runs)]) == 0, command
    drafter = only(runs / "tiny", "train-*/drafter")
    report = only(runs / "tiny", "eval-*")
    arguments = ["--drafter", str(drafter), "--report", str(report), "--runs", str(runs)]
    assert main(["publish", str(recipe), *arguments]) == 0
    return recipe, runs


def test_the_stages_meet_in_the_run_folder(finished: tuple[Path, Path], saved_target: Path) -> None:
    root = finished[1] / "tiny"
    names = sorted(path.name.split("-")[0] for path in root.iterdir())
    assert names == ["eval", "published", "records", "stages.json", "train"]
    report = read_report(only(root, "eval-*"))
    assert {(c["domain"], c["law"]) for c in report["cells"]} == {
        (domain, law) for domain in ("chat", "math") for law in ("T=0", "T=1")
    }
    assert report["lossless"]["verdict"] == "equal"
    assert [s["stage"] for s in report["stages"]] == ["collect", "train", "eval"]
    stages = json.loads((root / "stages.json").read_text(encoding="utf-8"))
    assert list(stages) == ["collect", "train", "eval", "publish"]


def test_the_published_folder_loads(finished: tuple[Path, Path], saved_target: Path) -> None:
    folder = finished[1] / "tiny" / "published" / "tiny-eagle3"
    target = load_target(TargetSection(str(saved_target), device="cpu"), few_rows=False)
    drafter = load_drafter(folder, target)
    assert drafter.family == "eagle3" and len(drafter.draft_ids) == 120  # type: ignore[arg-type]
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| chat |" in card and str(saved_target.parent) not in card


def test_the_same_command_finds_everything_done(
    finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, runs = finished
    monkeypatch.setattr(pipeline, "evaluate", lambda *args: pytest.fail("evaluated again"))
    before = sorted(path.name for path in (runs / "tiny").iterdir())
    assert main(["eval", str(recipe), "--runs", str(runs)]) == 0
    assert sorted(path.name for path in (runs / "tiny").iterdir()) == before


def test_a_drafter_is_measured_on_other_prompts(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, runs = finished
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(f'{{"prompt": "other {i}"}}\n' for i in range(6)))
    drafter = only(runs / "tiny", "train-*/drafter")
    own = tmp_path / "runs"
    arguments = [
        "eval", str(recipe), "eval.timing_prompts=0", "--drafter", str(drafter), "--runs", str(own),
        "--prompts", str(prompts), "--prompts", f"two={prompts}", "--max-rows", "3",
    ]  # fmt: skip
    assert main(arguments) == 0
    report = read_report(only(own, "tiny-*/eval-*"))
    assert {c["domain"] for c in report["cells"]} <= {"mine", "two"}
    assert all(c["prompts"] <= 3 for c in report["cells"])
    assert "α overlap" in capsys.readouterr().out


def test_demo_is_all_stages_at_once(
    recipe_file: Path, saved_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = recipe_file.parent / "prompts" / "chat.jsonl"
    changes = [
        f"target.name={saved_target}",
        f"domains=[{{name: chat, source: {prompts}, holdout: 0.5}}]",
        "collect.temperatures=[1.0]",
        "collect.max_new_tokens=8",
        "drafter.draft_vocab_size=60",
        "drafter.taps=[0, 1, 2]",
        "train.steps=2",
        "eval.timing_prompts=0",
        "eval.bootstrap=20",
    ]
    assert main(["demo", "--runs", str(tmp_path / "runs"), *changes]) == 0
    said = capsys.readouterr().out
    for words in ("Lossless: greedy outputs equal", "publish", "report.html"):
        assert words in said.replace("\n", "")
    assert only(tmp_path / "runs" / "demo", "published/demo-eagle3/config.json")


def test_a_draft_lm_goes_the_same_way(recipe_file: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    changes = ["drafter={family: causal}", "eval.timing_prompts=0"]
    arguments = [str(recipe_file), *changes, "--runs", str(runs)]
    assert main(["eval", *arguments]) == 0
    drafter = only(runs / "tiny", "train-*/drafter")
    report = only(runs / "tiny", "eval-*")
    published = ["publish", *arguments, "--drafter", str(drafter), "--report", str(report)]
    assert main(published) == 0
    assert only(runs / "tiny", "published/tiny-causal/model.safetensors")


# ---- mistakes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.stepz=3"], ["unknown key 'train.stepz'", "the command line", "'train.steps'"]),
        (["drafter={family: eagel3}"], ["'eagel3'", "drafter.family", "did you mean 'eagle3'"]),
        (["drafter.tapz=[1]"], ["unknown key 'drafter.tapz'", "recipe 'tiny'", "drafter.taps"]),
        (["objective.loss=kll"], ["'kll'", "fkl", "lk_hybrid"]),
        (["train.lr=fast"], ["'train.lr'", "must be a number", '"fast"']),
        (["train.lr"], ["'train.lr'", "section.key=value"]),
        (["domains.0.source=cod"], ["no prompts at 'cod'", "did you mean 'code'"]),
        (["domains.0.holdout=2"], ["domains.0.holdout", "between 0 and 1", "2"]),
        (["target.name=/no/such/model"], ["cannot load target '/no/such/model'", "local model"]),
        (["publish.dtype=int7"], ["publish.dtype", "'float32'"]),
    ],
)
def test_a_wrong_option_is_one_sentence(
    changes: list[str],
    words: list[str],
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(recipe_file), *changes, "--runs", str(tmp_path / "runs")]) == 2
    said = complaint(capsys)
    for word in words:
        assert word in said, said


def test_a_wrong_key_in_a_file_names_the_file(
    recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_file.write_text(recipe_file.read_text().replace("steps: 3", "step: 3"))
    assert main(["train", str(recipe_file)]) == 2
    said = complaint(capsys)
    assert f"unknown key 'train.step' in {recipe_file}" in said
    assert "did you mean 'train.steps'" in said


@pytest.mark.parametrize(
    ("name", "words"), [("dem", "did you mean 'demo'"), ("no/such.yaml", "'no/such.yaml'")]
)
def test_an_unknown_recipe_is_one_sentence(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", name]) == 2
    assert words in complaint(capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no usable prompt among the 0 rows of '{file}'"),
        ('{{"prompt": "a"}}\n{{"prompt": \n', "{file}:2: not one JSON object a line"),
        ('{{"answer": 3}}\n', "no usable prompt among the 1 rows of '{file}'"),
    ],
)
def test_bad_prompt_files_are_one_sentence(
    text: str,
    words: str,
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text.format())
    arguments = [str(recipe_file), f"domains.1.source={file}", "--runs", str(tmp_path / "runs")]
    assert main(["collect", *arguments]) == 2
    assert words.format(file=file) in complaint(capsys)


def test_a_target_without_a_template_is_one_sentence(
    recipe_file: Path, saved_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare-target"
    shutil.copytree(saved_target, bare)
    (bare / "chat_template.jinja").unlink()
    assert AutoTokenizer.from_pretrained(bare).chat_template is None
    arguments = [str(recipe_file), f"target.name={bare}", "--runs", str(tmp_path / "runs")]
    assert main(["collect", *arguments]) == 2
    said = complaint(capsys)
    assert "no chat template" in said and "kind: raw" in said and str(bare) in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "{recipe}", "--prompts", "chat"], "--drafter"),
        (["eval", "{recipe}", "--drafter", "{tmp}"], "is no drafter folder"),
        (["train", "{recipe}", "--records", "{tmp}"], "holds no records"),
        (["publish", "{recipe}", "--drafter", "{tmp}", "--report", "{tmp}"], "no report at"),
    ],
)
def test_a_folder_that_is_not_one_of_ours_is_one_sentence(
    arguments: list[str],
    words: str,
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.format(recipe=recipe_file, tmp=tmp_path) for a in arguments]
    assert main([*filled, "--runs", str(tmp_path / "runs")]) == 2
    assert words in complaint(capsys)


def test_options_and_overrides_may_be_mixed(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert main(["train", str(recipe_file), "seed=1", *runs, "train.stepz=3"]) == 2
    assert "unknown key 'train.stepz'" in complaint(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "demo", "--runz", "x"], "--runz x"),
        (["train", "demo", "--runs", "x", "seed"], "seed"),
        (["doctor", "seed=1"], "seed=1"),
    ],
)
def test_unknown_arguments_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {words}" in capsys.readouterr().err


def test_a_missing_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate"])
    assert stopped.value.code == 2
    assert "invalid choice: 'evaluate'" in capsys.readouterr().err


# ---- what comes from outside


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def test_ctrl_c_says_how_to_go_on(
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pipeline, "collect", raising(KeyboardInterrupt()))
    assert main(["collect", str(recipe_file), "--runs", str(tmp_path / "runs")]) == 130
    assert "the same command goes on from there" in complaint(capsys)


@pytest.mark.parametrize("place", ["collect", "store", "drafter"])
def test_a_full_disk_is_one_sentence(
    place: str,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = raising(OSError(errno.ENOSPC, "No space left on device", "/disk/file"))
    if place == "collect":
        monkeypatch.setattr(pipeline, "collect", full)
    elif place == "store":
        monkeypatch.setattr("draftsmith.data.store.save_file", full)
    else:
        words = "Error while serializing: I/O error: No space left on device (os error 28)"
        monkeypatch.setattr("draftsmith.train.loop.save_drafter", raising(SafetensorError(words)))
    assert main(["train", str(recipe_file), "--runs", str(tmp_path / "runs")]) == 2
    said = complaint(capsys)
    assert "space" in said and "run the same command again" in said
    assert place == "drafter" or "/disk/file" in said or "shard-00000" in said


def test_other_system_errors_keep_their_traceback(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "collect", raising(PermissionError(errno.EACCES, "denied")))
    with pytest.raises(PermissionError):
        main(["collect", str(recipe_file), "--runs", str(tmp_path / "runs")])
