"""`draftsmith verify` on a tiny local target: a verdict, and an exit status that says so."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.target import load_target
from draftsmith.eval import kernels, verify
from draftsmith.eval.conformance import covering
from draftsmith.eval.decode import RULES
from draftsmith.eval.draws import Streams
from draftsmith.eval.planted import PLANTED, Fault
from draftsmith.scripts import verify as command
from draftsmith.scripts.cli import main

FAULTS = {"q from before truncation in the ratio", "greedy drafts handed in as sampled"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cases, few faults, few draws: what they find is tested where they live."""
    light = [c for c in covering() if c.law.temperature and c.rows > 1 and c.ends]
    monkeypatch.setattr(command, "covering", lambda: light[:3])
    monkeypatch.setattr(command, "kernel_p_values", lambda: {"draws, even": 0.5})
    monkeypatch.setattr(command, "loop_p_values", lambda bench: {})
    monkeypatch.setattr(command, "NEW_TOKENS", 10)
    for name in PLANTED.keys() - FAULTS:
        monkeypatch.delitem(PLANTED, name)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "kernel_p_values", kernels.kernel_p_values)
    monkeypatch.setattr(command, "loop_p_values", kernels.loop_p_values)
    monkeypatch.setattr(kernels, "LOOPS", kernels.LOOPS[1:2])
    monkeypatch.setattr(kernels, "_STEPS", 60)
    monkeypatch.setattr(kernels, "_SEEDS", 300)


def verified(recipe: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = recipe.parent / "verdict" / "v.json"
    status = main(["verify", str(recipe), "--out", str(out), *arguments])
    return status, json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("with_kernels")
def test_a_verdict_of_four_parts(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = verified(recipe_file)
    assert status == 0 and found["passed"]
    exact, planted, p_values = found["exact"], found["planted"], found["kernels"]["p_values"]
    assert exact["cases"] == 3 and exact["branches"] > 50 and exact["wrong"] == {}
    assert exact["largest_distance"] < exact["tolerance"]
    assert planted["caught"] == planted["faults"] == 2 and planted["missed"] == []
    assert min(planted["distances"].values()) > 0.01 > max(planted["without_fault"].values())
    assert len(p_values) == 9 and found["kernels"]["smallest"] == min(p_values.values())
    greedy = found["greedy"]
    assert greedy["prompts"] == 4 and 4 < greedy["tokens"] <= 40, "two of each domain"
    assert greedy["drafter"] == {"family": "eagle3", "trained": False, "weights_sha256": None}
    ways = [(s["way"], s["rows"], s["verdict"]) for s in greedy["streams"]]
    assert ways == [(way, n, "equal") for way in ("plain", "chain", "tree") for n in (1, 4)]
    for stream in greedy["streams"]:
        assert (stream["drafted"] > 0) == (stream["way"] != "plain")
        assert 0 <= stream["accepted"] <= stream["drafted"]
    said = capsys.readouterr().out
    assert found["verdict"][-1] == "LOSSLESS as far as shown"
    for words in ("q from before truncation", "draws, even", "4 ragged rows", *found["verdict"]):
        assert words in said
    assert "3 ways of decoding, all pairs" in said and "Not shown: three and more" in said


def test_all_and_numbers_of_prompts(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "cross", lambda: iter(covering()[-1:]))
    status, found = verified(recipe_file, "--all", "--prompts-per-domain", "1")
    assert status == 0
    assert found["exact"]["covers"] == "all combinations" and found["exact"]["cases"] == 1
    assert found["greedy"]["prompts"] == 2
    assert not any("three and more" in line for line in found["verdict"])


@pytest.mark.parametrize("family", ["causal", "lookup", "skip"])
def test_other_families(family: str, recipe_file: Path) -> None:
    status, found = verified(recipe_file, f"drafter={{family: {family}}}")
    assert status == 0 and found["greedy"]["drafter"]["family"] == family
    if family != "lookup":
        assert any(s["accepted"] for s in found["greedy"]["streams"])


def test_a_trained_drafter(recipe_file: Path, tmp_path: Path) -> None:
    assert main(["train", str(recipe_file), "--runs", str(tmp_path / "runs")]) == 0
    (folder,) = tmp_path.glob("runs/tiny/train-*/drafter")
    status, found = verified(recipe_file, "--drafter", str(folder))
    assert status == 0 and found["greedy"]["drafter"]["trained"]
    assert len(found["greedy"]["drafter"]["weights_sha256"]) == 64


# ---- what must not pass


def failed(found: dict[str, Any]) -> list[str]:
    assert not found["passed"] and found["verdict"][-1].startswith("NOT LOSSLESS: ")
    return [part for part in ("exact", "planted", "kernels", "greedy") if not found[part]["passed"]]


def test_a_wrong_rule(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def halved(draft: Tensor, log_q: Tensor, *others: Any) -> Any:
        return verify.token(draft, log_q - 0.7, *others)  # q is half of what it was

    monkeypatch.setitem(RULES, "token", halved)
    status, found = verified(recipe_file)
    assert status == 1 and "exact" in failed(found)
    wrong = found["exact"]["wrong"]
    assert all(case.startswith("token") for case in wrong) and max(wrong.values()) > 0.01
    said = capsys.readouterr().out
    assert "wrong: token" in said and "NOT LOSSLESS: exact" in said


def test_unequal_streams(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0 only, so that enumeration of these cases sees nothing of it."""

    def lenient(draft: Tensor, target_argmax: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        return drafted, target_argmax.gather(1, drafted[:, None]).squeeze(1)

    monkeypatch.setattr(verify, "greedy", lenient)
    status, found = verified(recipe_file)
    assert status == 1 and failed(found) == ["greedy"]
    wrong = {s["way"] for s in found["greedy"]["streams"] if s["different"]}
    assert wrong == {"chain"}
    assert "different: chain, one at a time" in capsys.readouterr().out


def test_near_ties_are_listed_and_pass(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = load_target

    def other(*arguments: Any, **options: Any) -> Any:
        """As if rounding had turned some choices: the references are those of shifted logits."""
        target = real(*arguments, **options)
        generate = target.model.generate

        def shifted(ids: Tensor, **settings: Any) -> Any:
            out = generate(ids, **settings)
            out.sequences[0, -1] = (out.sequences[0, -1] + 1) % 100 + 3
            return out

        target.model.generate = shifted
        return target

    monkeypatch.setattr(command, "load_target", other)
    status, found = verified(recipe_file, "eval.near_tie_margin=1000")
    assert status == 0 and {s["verdict"] for s in found["greedy"]["streams"]} == {
        "equal except near-ties"
    }
    assert "near ties: plain" in capsys.readouterr().out
    status, found = verified(recipe_file, "eval.near_tie_margin=0")
    assert status == 1 and failed(found) == ["greedy"]


def test_a_fault_that_nothing_sees(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(PLANTED))
    monkeypatch.setitem(PLANTED, name, Fault(nullcontext, PLANTED[name].case))
    status, found = verified(recipe_file)
    assert status == 1 and failed(found) == ["planted"]
    assert found["planted"]["missed"] == [name] and found["planted"]["caught"] == 1


@pytest.mark.usefixtures("with_kernels")
def test_dependent_streams(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Streams._take

    def reused(self: Streams, where: Tensor) -> Tensor:
        uniforms = take(self, where)
        self.used = torch.zeros_like(self.used)
        return uniforms

    monkeypatch.setattr(Streams, "_take", reused)
    status, found = verified(recipe_file)
    assert status == 1 and failed(found) == ["kernels"]
    assert found["kernels"]["bonferroni"] < found["kernels"]["least"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts-per-domain", "0"], "--prompts-per-domain is 0"),
        (["--drafter", "no/such"], "there is no drafter's folder"),
        (["drafter={family: eagel3}"], "did you mean 'eagle3'"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    arguments: list[str], words: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(recipe_file), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_prompts_that_leave_no_room(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for domain in (0, 1):
        source = recipe_file.parent / "prompts" / f"{('chat', 'math')[domain]}.jsonl"
        source.write_text(json.dumps({"prompt": "stickers " * 300}) + "\n", encoding="utf-8")
    changes = ["domains.1.holdout=1", "domains.0.holdout=1"]
    assert main(["verify", str(recipe_file), *changes]) == 2
    assert "too long: 330 tokens and max_new_tokens 10, at most 256 fit" in capsys.readouterr().err
