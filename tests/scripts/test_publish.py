"""Publishing: a whole folder that loads back equal, or nothing."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import PublishSection
from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter, weights_hash
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.scripts import publish as module
from draftsmith.scripts.publish import publish

SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "report.json"
FAMILIES = ["eagle3", "causal"]


def save(family: str, target: Target, folder: Path, reduced: bool = False) -> Path:
    torch.manual_seed(2)
    ids = torch.arange(0, target.vocab_size, 2)
    if family == "eagle3":
        config = Eagle3Config(draft_vocab_size=len(ids), init="random")
        drafter: Any = Eagle3Drafter.from_target(target, config, ids)
    else:
        drafter = CausalDrafter.from_target(target, CausalConfig(), ids if reduced else None)
    return save_drafter(drafter, folder, target, {"steps": 3})


def report_on(folder: Path) -> dict[str, Any]:
    report = json.loads(SAMPLE.read_text(encoding="utf-8"))
    report["provenance"]["drafter"]["weights_sha256"] = weights_hash(folder)
    return report


def send(target: Target, drafter: Path, out: Path, dtype: Any = "float32") -> Path:
    console = Console(file=io.StringIO())
    return publish(PublishSection(dtype=dtype), target, drafter, report_on(drafter), out, console)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_is_whole_and_loads_back(
    family: str, dtype: str, tiny_target: Target, tmp_path: Path
) -> None:
    trained = save(family, tiny_target, tmp_path / "trained")
    out = send(tiny_target, trained, tmp_path / "out" / "published", dtype)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        path.name for path in out.iterdir()
    }
    assert [path.name for path in out.parent.iterdir()] == ["published"]
    floats = [t for t in load_file(out / "model.safetensors").values() if t.is_floating_point()]
    assert {t.dtype for t in floats} == {getattr(torch, dtype)}
    one, other = (load_drafter(folder, tiny_target) for folder in (trained, out))
    for a, b in zip(one.trainable(), other.trainable(), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-2 if dtype == "bfloat16" else 0, atol=0)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "α overlap" in card


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_vocabulary_can_be_published(
    family: str, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    target = load_tiny(vocab_size=40)
    trained = save(family, target, tmp_path / "trained")
    assert send(target, trained, tmp_path / "out").is_dir()


def test_a_reduced_draft_lm_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("causal", tiny_target, tmp_path / "trained", reduced=True)
    with pytest.raises(UserError, match=r"200 tokens \(.*draft_vocab_size\), which no engine"):
        send(tiny_target, trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_report_of_another_drafter_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    report = report_on(save("causal", tiny_target, tmp_path / "other"))
    with pytest.raises(UserError, match="the report measured another drafter"):
        publish(PublishSection(), tiny_target, trained, report, tmp_path / "out", Console())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_loads_back_otherwise_is_not_published(
    family: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight a little off in the written file."""
    trained = save(family, tiny_target, tmp_path / "trained")

    def spoiled(drafter: Any, folder: Path, *args: Any) -> Path:
        save_drafter(drafter, folder, *args)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = next(n for n in tensors if n.endswith("down_proj.weight"))
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, path, metadata={"format": "pt"})
        return folder

    monkeypatch.setattr(module, "save_drafter", spoiled)
    with pytest.raises(UserError, match="loads back with other logits"):
        send(tiny_target, trained, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trained"]


def test_a_published_folder_is_replaced_whole(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    out = send(tiny_target, trained, tmp_path / "out")
    (out / "stale.txt").write_text("from before")
    assert send(tiny_target, trained, tmp_path / "out") == out
    assert not (out / "stale.txt").exists()
