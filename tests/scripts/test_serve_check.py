"""`draftsmith serve-check` on a tiny target: what goes into the report, and the exit code."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_counts import counted
from replayed_engine import key
from rich.console import Console

from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.gather import request_of
from draftsmith.data.served import Program
from draftsmith.data.store import RecordStore
from draftsmith.data.target import load_target
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.engines import registry
from draftsmith.eval.engines.engine import Serving
from draftsmith.eval.report import read_report
from draftsmith.scripts.cli import main
from draftsmith.scripts.pipeline import Run

REPLAYED = Path(__file__).resolve().parents[1] / "replayed_engine.py"
Replay = Callable[[RecordStore, bool], None]


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def trained(shared_recipe_file: Path) -> tuple[Path, Path]:
    """(recipe, runs folder) with records, a drafter and a report."""
    recipe, runs = shared_recipe_file, shared_recipe_file.parent / "runs"
    assert main(["eval", str(recipe), "--runs", str(runs)]) == 0
    return recipe, runs / "tiny"


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """`replay(store, odd)`: vLLM is an engine that says what our own decoding of the served
    folder says; an odd one accepts a token in every round."""

    def install(store: RecordStore, odd: bool) -> None:
        known = registry.ENGINES["vllm"]
        files: dict[bool, Path] = {}

        def program(serving: Serving) -> Program:
            plain = serving.drafter is None
            if plain not in files:
                files[plain] = tmp_path / f"plain-{plain}.json"
                files[plain].write_text(said(store, serving, odd, files.get(False)))
            words = [str(REPLAYED), "{port}", str(files[plain])]
            return serving.program("vLLM", words, {})

        engine = replace(known.engine, program=program)
        monkeypatch.setitem(registry.ENGINES, "vllm", known._replace(engine=engine))

    return install


def said(store: RecordStore, serving: Serving, odd: bool, before: Path | None) -> str:
    """The file of a replayed engine: with the drafter, or as `before` without it."""
    if serving.drafter is None:
        assert before is not None
        script = json.loads(before.read_text())
        for reply in script["replies"].values():
            reply["rounds"] = []
        return json.dumps(script)
    target = load_target(TargetSection(name=serving.target, device="cpu"), few_rows=False)
    drafter = load_drafter(serving.drafter, target)
    limit, gamma = int(store.settings["max_new_tokens"]), serving.num_draft_tokens
    replies = {}
    for record in store.records("heldout"):
        request = request_of(record)
        drafting: Any = "sampled" if serving.sampled else "greedy"
        (output,) = counted(target, drafter, [request], limit, gamma, drafting)
        rounds = [(gamma, 1)] * (len(output.ids) // 2) if odd else output.rounds
        place = key(request.ids, request.law.temperature)
        replies[place] = {"ids": output.ids, "finish": output.finish, "rounds": rounds}
    return json.dumps({"kind": "vllm", "replies": replies, "fault": None})


def command(trained: tuple[Path, Path], *more: str) -> list[str]:
    recipe, run = trained
    return [
        "serve-check", str(recipe), "--runs", str(run.parent), "--engine", "vllm",
        "--python", sys.executable, "--drafter", str(only(run, "train-*/drafter")),
        "--prompts", "5", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("drafts", ["greedy", "sampled"])
def test_a_right_engine_is_put_into_the_report(
    drafts: str, trained: tuple[Path, Path], replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(RecordStore.open(only(trained[1], "records-*")), False)
    options = ("--drafts", drafts, "--concurrency", "1", "2")
    assert main(command(trained, *options)) == 0
    assert main(command(trained, *options)) == 0
    report = read_report(only(trained[1], "eval-*"))
    way = {"greedy": "greedy", "sampled": "probabilistic"}[drafts]
    (entry,) = [e for e in report["engines"] if e["draft_sampling"] == way]
    assert {c["law"] for c in entry["cells"]} == {c["law"] for c in report["cells"]}
    assert all(c["deviations"] == [] for c in entry["cells"])
    assert all(c["replies"] <= 5 for c in entry["cells"])
    assert "serve     " in capsys.readouterr().out


def test_an_engine_that_counts_otherwise_rings_until_it_is_mended(
    trained: tuple[Path, Path], replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RecordStore.open(only(trained[1], "records-*"))
    replay(store, True)
    assert main(command(trained)) == 1
    assert "rounds where" in capsys.readouterr().out
    folder = only(trained[1], "eval-*")
    assert any(a.startswith("vLLM, ") for a in read_report(folder)["alarms"])
    replay(store, False)
    assert main(command(trained)) == 0
    assert not any(a.startswith("vLLM, ") for a in read_report(folder)["alarms"])


def test_the_target_makes_room_for_the_engine_and_judges_it_when_that_is_gone(
    trained: tuple[Path, Path],
    replay: Replay,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay(RecordStore.open(only(trained[1], "records-*")), False)
    run = Run(load_recipe(trained[0]), trained[1], Console(quiet=True))
    for device, kept in (("cpu", True), ("cuda", False)):
        there: Any = SimpleNamespace(device=torch.device(device))
        run._target = there
        run.release()
        assert (run._target is there) == kept

    def leave(run: Run) -> None:
        run._target = None

    monkeypatch.setattr(Run, "release", leave)
    assert main(command(trained)) == 0
    assert capsys.readouterr().out.count("loading target") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompts", "0"), "--prompts is 0, must be 1 or more"),
        (("--concurrency", "0"), "--concurrency is 0, must be 1 or more"),
        (("--engine", "llama.cpp", "--drafts", "sampled"), "llama.cpp draws no drafts"),
        (("--report", "no/such/folder"), "no/such/folder"),
    ],
)
def test_what_cannot_be_asked(
    options: tuple[str, ...],
    message: str,
    trained: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(trained, *options)) == 2
    assert message in capsys.readouterr().err
