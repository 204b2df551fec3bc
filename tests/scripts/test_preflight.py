"""`draftsmith preflight`: what it prints, its exit code, and what publishing refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from misserved import edit_config
from publishing import save, send
from safetensors.torch import load_file
from starting import edit_weights

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.formats import eagle3_flat
from draftsmith.eval.preflight.preflight import files_of, preflight
from draftsmith.scripts import publish as publishing
from draftsmith.scripts.cli import main

IDS = "eagle_aux_hidden_state_layer_ids"


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def trained(shared_recipe_file: Path) -> tuple[Path, Path]:
    """(recipe, run folder) with records and a drafter."""
    recipe, runs = shared_recipe_file, shared_recipe_file.parent / "runs"
    assert main(["train", str(recipe), "--runs", str(runs)]) == 0
    return recipe, runs / "tiny"


def command(trained: tuple[Path, Path], folder: Path, *more: str) -> list[str]:
    recipe, run = trained
    records = ["--records", str(only(run, "records-*")), "--rows", "4"]
    return ["preflight", str(folder), str(recipe), "--runs", str(run.parent), *records, *more]


def copied(trained: tuple[Path, Path], place: Path, target: Target) -> Path:
    drafter: Any = load_drafter(only(trained[1], "train-*/drafter"), target)
    return save_drafter(drafter, place, target, {})


def test_a_drafter_is_served_by_all_that_read_it(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "found.json", only(trained[1], "train-*/drafter")
    assert main(command(trained, folder, "--out", str(out))) == 0
    said = capsys.readouterr().out
    for name in ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"):
        assert f"{name} would serve what was trained" in said
    assert "told of layers by eagle3_layers_to_capture [0, 1, 2]" in said
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and len(found["engines"]) == 4
    for engine in found["engines"]:
        assert {c["domain"] for c in engine["acceptance"]} == {"chat", "math"}
        assert all(c["trained"] == c["served"] and c["replies"] for c in engine["acceptance"])


def test_what_would_not_serve_is_exit_code_1(
    trained: tuple[Path, Path],
    tmp_path: Path,
    tiny_target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The acceptance that would result stands beside the trained one."""
    source, out = only(trained[1], "train-*/drafter"), tmp_path / "found.json"
    folder = copied(trained, tmp_path / "it", tiny_target)
    edit_weights(folder, lambda t: t.pop("fc.weight"))
    options = ("--engine", "vllm", "--drafter", str(source), "--out", str(out))
    assert main(command(trained, folder, *options)) == 1
    said = capsys.readouterr().out
    assert "FAULT: 'fc.weight' is missing" in said and "would NOT serve" in said
    (engine,) = json.loads(out.read_text(encoding="utf-8"))["engines"]
    cells = engine["acceptance"]
    assert any(c["trained"]["overlap"]["value"] != c["served"]["overlap"]["value"] for c in cells)


def test_a_recipe_may_stand_behind_options(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = only(trained[1], "train-*/drafter")
    words = ["preflight", str(folder), "--engine", "sglang", str(trained[0]), "seed=1"]
    assert main([*words, "--runs", str(tmp_path)]) == 0
    assert "vLLM" not in capsys.readouterr().out
    assert main(["preflight", str(tmp_path), str(trained[0]), "--runs", str(tmp_path)]) == 2
    assert "is no drafter folder" in capsys.readouterr().err


# ---- publishing


def test_a_folder_that_an_engine_reads_otherwise_is_not_published(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that tells vLLM of layers by their outputs; our own reader trusts the nested ids."""
    kept = save("eagle3", tiny_target, tmp_path / "kept")
    honest, read = eagle3_flat.engine_config, eagle3_flat.read_taps

    def wrong(*args: Any) -> dict[str, Any]:
        found = honest(*args)
        return {**found, IDS: found["eagle_config"][IDS]}

    def trusting(raw: dict[str, Any], *more: Any) -> tuple[int, ...]:
        nested = raw["eagle_config"][IDS]
        return read({**raw, IDS: [i + 1 for i in nested]}, *more)

    monkeypatch.setattr(eagle3_flat, "engine_config", wrong)
    monkeypatch.setattr(eagle3_flat, "read_taps", trusting)
    with pytest.raises(
        UserError, match=r"would not be served as it was trained: vLLM reads the out"
    ):
        send(tiny_target, kept, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


@pytest.mark.parametrize("fault", ["rope_parameters", "norm_before_residual"])
def test_the_layout_of_speculators_is_looked_at_too(
    fault: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save("eagle3", tiny_target, tmp_path / "kept")
    honest = publishing._write_speculators

    def spoiled(drafter: Any, folder: Path, *more: Any) -> Any:
        found = honest(drafter, folder, *more)

        def change(config: dict[str, Any]) -> None:
            if fault == "norm_before_residual":
                config.pop(fault)
            else:
                layer = config["transformer_layer_config"]
                layer.pop("rope_theta")
                layer[fault]["rope_theta"] = 500.0

        edit_config(folder, change)
        return found

    monkeypatch.setattr(publishing, "_write_speculators", spoiled)
    with pytest.raises(UserError, match="would not be served as it was trained"):
        send(tiny_target, kept, tmp_path / "out", speculators=True, base_model="owner/target")
    assert not (tmp_path / "out").exists()


def test_what_is_published_passes(tiny_target: Target, tmp_path: Path) -> None:
    """Checksums included, in 16 bits and in several files."""
    kept = save("causal", tiny_target, tmp_path / "kept")
    out = send(tiny_target, kept, tmp_path / "out", "bfloat16", max_shard_size="30KB")
    for engine in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"):
        found = preflight(files_of(out), engine, tiny_target, load_drafter(kept, tiny_target))
        assert found.ok, found.faults


# ---- field reports of exporting


@pytest.mark.parametrize("speculators", [False, True])
def test_b123_b124_a_reduced_vocabulary_by_its_files_alone(
    speculators: bool, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """vocab_size is the target's, the maps are whole, offsets, and name the very tokens."""
    target = load_tiny()
    kept = save("eagle3", target, tmp_path / "kept")
    ids = load_drafter(kept, target).draft_ids
    assert ids is not None
    out = send(target, kept, tmp_path / "out", speculators=speculators, base_model="owner/target")
    for folder in (out, out / "speculators")[: 1 + speculators]:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layer = config.get("transformer_layer_config", config)
        assert layer["vocab_size"] == 400 and config["draft_vocab_size"] == len(ids)
        tensors = load_file(folder / "model.safetensors")
        assert len(tensors["lm_head.weight"]) == len(ids)
        d2t, t2d = tensors["d2t"], tensors["t2d"]
        assert (d2t.dtype, d2t.shape) == (torch.int64, ids.shape)
        assert (t2d.dtype, t2d.shape) == (torch.bool, (400,))
        decoded = [i + int(d2t[i]) for i in range(len(ids))]
        assert decoded == ids.tolist() == t2d.nonzero().flatten().tolist()


def test_b124_no_map_of_a_whole_vocabulary(tiny_target: Target, tmp_path: Path) -> None:
    config = Eagle3Config((0, 1, 2), 400, init="random")
    drafter = Eagle3Drafter.from_target(tiny_target, config, None)
    kept = save_drafter(drafter, tmp_path / "kept", tiny_target, {})
    out = send(tiny_target, kept, tmp_path / "out")
    assert not {"d2t", "t2d"} & load_file(out / "model.safetensors").keys()
    config_file = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config_file["vocab_size"] == config_file["draft_vocab_size"] == 400


def test_b122_a_head_of_another_width(tiny_target: Target, tmp_path: Path) -> None:
    """With an embedding of its own, which vLLM reads and SGLang does not: that is said."""
    ids = torch.arange(0, 400, 2)
    config = Eagle3Config((0, 1, 2), 200, hidden_size=48, init="random")
    drafter = Eagle3Drafter.from_target(tiny_target, config, ids)
    kept = save_drafter(drafter, tmp_path / "kept", tiny_target, {})
    out = send(tiny_target, kept, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == (400, 48)
    assert tensors["fc.weight"].shape == (48, 3 * 32)
    found = {e: preflight(files_of(out), e, tiny_target) for e in ("vllm", "sglang")}
    assert found["vllm"].ok
    assert "SGLang does not read an embedding of its own" in found["sglang"].faults[-1]
