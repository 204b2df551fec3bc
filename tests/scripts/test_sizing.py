"""`draftsmith size`: the table, its JSON, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.candidates import candidate
from draftsmith.scripts import sizing
from draftsmith.scripts.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = ["--turns", "1", "--most", "3"]


def sized(
    recipe: Path, *words: str, out: Path | None = None, code: int = 0
) -> list[dict[str, Any]]:
    command = ["size", str(recipe), *FAST, *words]
    command += ["--runs", str(recipe.parent / "runs")]
    assert main([*command, *(["--out", str(out)] if out else [])]) == code
    return json.loads(out.read_text(encoding="utf-8"))["candidates"] if out else []


def test_the_recipes_own_drafter_and_its_family(
    shared_recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sized(shared_recipe_file, out=tmp_path / "size.json")
    said = capsys.readouterr().out
    assert (
        found[0]["name"] == "eagle3 draft_vocab_size=120 taps=[0,1,2]"
        and found[0]["family"] == "eagle3"
    )
    assert "one plain target pass takes" in said and "S_k = α^k" in said
    for one in found:
        cost = one["cost"]
        assert set(cost["v"]) >= {"1", "2", "3", "4"} and cost["v"]["1"] == 1.0
        assert cost["c"] > cost["floor"] > 0 and cost["outside"] == cost["c"] - cost["floor"]
        assert one["limit"] > 0 and one["weights"]["parameters"] > 0
        for name, wanted in (("break_even", 1.0), ("twice", 2.0)):
            assert (one[name] is not None) == (one["limit"] >= wanted)
        if one["twice"] is not None:
            assert one["break_even"]["overlap"] <= one["twice"]["overlap"] <= 1
    assert not (shared_recipe_file.parent / "runs").exists(), "nothing of a run is left behind"


def test_what_is_asked_for(
    shared_recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--candidate", "family=causal,layers=[0]", "--candidate", "family=lookup"]
    found = sized(shared_recipe_file, *asked, out=tmp_path / "size.json")
    names = [one["name"] for one in found]
    assert names == ["eagle3 draft_vocab_size=120 taps=[0,1,2]", "causal layers=[0]", "lookup"]
    assert found[2]["weights"]["parameters"] == 0 == found[2]["cost"]["floor"]
    said = capsys.readouterr().out
    assert all(name in " ".join(said.split()) for name in names)


def test_nothing_is_measured_twice(shared_recipe_file: Path, tmp_path: Path) -> None:
    asked = ["--candidate", "family=lookup", "--candidate", "family=lookup,max_ngram=3"]
    found = sized(shared_recipe_file, "drafter={family: lookup}", *asked, out=tmp_path / "o.json")
    assert [one["name"] for one in found] == ["lookup"]


def test_families_that_do_not_fit_are_left_out(
    shared_recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default a head has more tokens than this target."""
    found = sized(
        shared_recipe_file, "drafter={family: lookup}", "--all", out=tmp_path / "size.json"
    )
    assert "left out: eagle3: drafter.draft_vocab_size 8192 exceeds" in capsys.readouterr().out
    assert {one["family"] for one in found} >= {"lookup", "causal", "skip"}


SHORT = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}


def test_one_that_has_no_room_to_draft_is_left_out(
    shared_recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = {"family": "causal", "config": SHORT}
    monkeypatch.setattr(sizing, "other_families", lambda _: [candidate(section)])
    found = sized(
        shared_recipe_file, "drafter={family: lookup}", "--all", out=tmp_path / "size.json"
    )
    assert [one["family"] for one in found] == ["lookup"]
    said = " ".join(capsys.readouterr().out.split())
    assert "left out: causal" in said and "for texts of 8 tokens drafts nothing behind" in said
    asked = "family=causal,config={" + ", ".join(f"{k}: {v}" for k, v in SHORT.items()) + "}"
    sized(shared_recipe_file, "--candidate", asked, code=2)
    assert "drafts nothing behind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--candidate", "family=nope"], "unknown drafter.family 'nope'"),
        (["--candidate", "eagle3"], "must be written family=NAME,option=value"),
        (["--candidate", "family=causal,layers=[7]"], "must name layers between 0 and 3"),
        (["drafter.draft_vocab_size=500"], "exceeds the target's 400 tokens"),
        (["--turns", "0"], "--turns is 0, must be 1 or more"),
        (["--most", "0"], "--most is 0, must be 1 or more"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str],
    sentence: str,
    shared_recipe_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sized(shared_recipe_file, *words, code=2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("draftsmith: ") and sentence in said
