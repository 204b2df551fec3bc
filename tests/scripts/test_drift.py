"""`draftsmith drift`: a drafter, the report of it, and targets that are no longer the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.scripts.cli import main


@pytest.fixture(scope="module")
def trained(shared_recipe_file: Path) -> list[str]:
    """The arguments of a drift, but for the changed target."""
    recipe, runs = str(shared_recipe_file), shared_recipe_file.parent / "runs"
    assert main(["eval", recipe, "--runs", str(runs)]) == 0
    (drafter,), (report,) = runs.glob("tiny/train-*/drafter"), runs.glob("tiny/eval-*")
    return [recipe, "--runs", str(runs), "--drafter", str(drafter), "--report", str(report)]


def drift(arguments: list[str], out: Path, *changes: str) -> dict[str, Any]:
    assert main(["drift", *arguments, "--out", str(out), *changes]) == 0
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def perturbed(
    saved_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[float], Path]:
    """The tiny target with noise on its decoder layers, in shares of each weight's size."""

    def make(noise: float) -> Path:
        folder = tmp_path_factory.mktemp("perturbed")
        model: Any = AutoModelForCausalLM.from_pretrained(saved_target)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for p in model.model.layers.parameters():
                p += noise * p.std() * torch.randn(p.shape, generator=generator)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(saved_target).save_pretrained(folder)
        return folder

    return make


def test_an_unchanged_target_asks_for_nothing(
    trained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = drift(trained, tmp_path / "out.json")
    said = capsys.readouterr().out
    assert "nothing has changed" in said and found["unpaired"] == 0
    assert found["target_before"] == found["target_after"]
    for line in found["rows"]:
        assert line["lost"] == pytest.approx(0, abs=1e-5)
        assert line["overlap"]["change"]["value"] == pytest.approx(0, abs=1e-5)
        assert line["speedup_predicted"] is not None
        # Three steps of training pay nowhere: nothing is lost all the same.
        assert line["advice"] == "reuse" or "does not pay" in line["why"]
    assert set(found["advice"]) == {"chat", "math"}


def test_the_more_a_target_changes_the_more_is_told(
    trained: list[str],
    perturbed: Callable[[float], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shifts = []
    for noise in (0.01, 0.5):
        capsys.readouterr()
        found = drift(trained, tmp_path / "out.json", f"target.name={perturbed(noise)}")
        said = capsys.readouterr().out
        assert "target moved: Σ |p − p′| / 2" in said
        assert "α was" in said and "advice" in said
        assert found["target_before"]["weights"] != found["target_after"]["weights"]
        rows = [r for r in found["rows"] if r["law"] == "T=1"]
        shifts.append(sum(r["target_moved"]["value"] for r in rows) / len(rows))
    assert 0 < shifts[0] < 0.1 < shifts[1] < 1


def test_an_adapter_is_a_change(trained: list[str], saved_target: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(saved_target)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(tmp_path / "tuned", save_embedding_layers=False)
    found = drift(trained, tmp_path / "out.json", f"target.adapter={tmp_path / 'tuned'}")
    assert found["target_before"]["adapter"] is None
    assert found["target_after"]["adapter"].startswith("tuned (")
    assert all(r["target_moved"]["value"] > 0 for r in found["rows"] if r["law"] == "T=1")


def test_a_recipe_of_the_new_target_cannot_tell_how_far_it_moved(
    trained: list[str],
    perturbed: Callable[[float], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "new.yaml"
    text = Path(trained[0]).read_text(encoding="utf-8")
    first, rest = text.split("\n", 1)
    rest = "\n".join(line for line in rest.splitlines() if not line.startswith("target:"))
    recipe.write_text(
        f"{first}\ntarget: {{name: {perturbed(0.1)}, device: cpu}}\n{rest}\n", encoding="utf-8"
    )
    found = drift([str(recipe), *trained[1:]], tmp_path / "out.json")
    assert all(r["target_moved"] is None for r in found["rows"])
    assert "how far the target itself has moved is not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["serving.num_draft_tokens=1"], "was measured with serving.num_draft_tokens=2, this"),
        (["collect.max_new_tokens=8"], "with collect.max_new_tokens=10"),
        (["--prompts", "other=code", "--max-rows", "3"], "prompts of eval-"),
        (["serving.tree={width: 2}"], "no serving.tree"),
    ],
)
def test_what_is_not_the_same_is_refused(
    trained: list[str],
    changes: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    assert main(["drift", *trained, "--out", str(out), *changes]) == 2
    assert told in capsys.readouterr().err and not out.exists()


def test_another_tokenizer_is_refused(
    trained: list[str], saved_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(saved_target)
    tokenizer = AutoTokenizer.from_pretrained(saved_target)
    tokenizer.add_tokens(["<new>"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "grown")
    tokenizer.save_pretrained(tmp_path / "grown")
    assert main(["drift", *trained, f"target.name={tmp_path / 'grown'}"]) == 2
    assert "train a drafter from scratch" in capsys.readouterr().err


def test_another_drafter_is_refused(
    trained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = trained.index("--drafter") + 1
    folder = Path(trained[place])
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    changed = [*trained[:place], str(other), *trained[place + 1 :]]
    assert main(["drift", *changed]) == 2
    assert "is of another drafter than" in capsys.readouterr().err
