"""Folders that load and would not serve: each fault is told in the sentence that fits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from misserved import edit_config, lost_tensor
from preflighting import absolute, names, only_fault, seen, without, written
from safetensors.torch import load_file
from starting import edit_weights

from draftsmith.data.target import Target
from draftsmith.drafters.checksums import write_checksums
from draftsmith.eval.preflight.terms import Absent, Extra

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = "eagle_aux_hidden_state_layer_ids"
Config = dict[str, Any]


@pytest.fixture
def head(tiny_target: Target, tmp_path: Path) -> tuple[Any, Path]:
    return written("eagle3", tiny_target, tmp_path / "it")


# ---- layers


def both_shifted(config: Config) -> None:
    config[IDS] = [i + 1 for i in config[IDS]]
    config["eagle_config"][IDS] = [i + 1 for i in config["eagle_config"][IDS]]


def outer_as_outputs(config: Config) -> None:
    config[IDS] = list(config["eagle_config"][IDS])


def nested_alone(config: Config) -> None:
    del config[IDS]


def outer_alone(config: Config) -> None:
    del config["eagle_config"]


@pytest.mark.parametrize(
    ("change", "engine", "read", "by"),
    [
        (both_shifted, "vllm", [1, 2, 3], "+1"),
        (both_shifted, "sglang", [1, 2, 3], "+1"),
        (both_shifted, "llama.cpp", [1, 2, 3], "+1"),
        (nested_alone, "vllm", None, None),
        (outer_alone, "sglang", None, None),
    ],
)
def test_layer_ids_off_by_one(
    change: Callable[[Config], None],
    engine: str,
    read: list[int] | None,
    by: str | None,
    head: tuple[Any, Path],
    tiny_target: Target,
) -> None:
    trained, folder = head
    edit_config(folder, change)
    found = seen(folder, engine, tiny_target, trained)
    assert not found.ok
    if read is None:  # below the first layer, or the engine's own: too few of this target
        told = {"vllm": "[-1, 0, 1] of the target's layers", "sglang": "reads its own, [1, 1, 0]"}
        only_fault(found, told[engine])
        return
    told = f"layers {read}, the drafter was trained on those of [0, 1, 2], each off by {by}"
    only_fault(found, told)


def test_layer_ids_in_the_wrong_convention(head: tuple[Any, Path], load_tiny: Any) -> None:
    """vLLM counts inputs of layers; a folder that tells it outputs shifts it by one."""
    target = load_tiny(num_hidden_layers=8)
    trained, folder = head
    trained.taps = (1, 3, 6)

    def wrong(config: Config) -> None:
        config[IDS], config["eagle_config"][IDS] = [1, 3, 6], [1, 3, 6]

    edit_config(folder, wrong)
    only_fault(seen(folder, "vllm", target, trained), "layers [0, 2, 5]", "each off by -1")
    assert seen(folder, "sglang", target, trained).ok
    edit_config(folder, lambda config: config.pop(IDS))
    only_fault(seen(folder, "vllm", target, trained), "each off by -1")
    edit_config(folder, lambda config: config["eagle_config"].pop(IDS))
    for engine in ("vllm", "sglang"):
        found = seen(folder, engine, target, trained)
        only_fault(found, "names no layers where", "reads its own, [1, 3, 4]")
        only_fault(found, "layers [1, 3, 4], the drafter was trained on those of [1, 3, 6]")


def test_layers_of_blocks_off_by_one(tiny_target: Target, tmp_path: Path) -> None:
    trained, folder = written("dflash", tiny_target, tmp_path / "it")

    def wrong(config: Config) -> None:
        config[IDS] = config["dflash_config"]["target_layer_ids"]

    edit_config(folder, wrong)
    assert not seen(folder, "vllm", tiny_target, trained).ok
    assert seen(folder, "sglang", tiny_target, trained).ok


# ---- tensors


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.mlp.up_proj.weight"])
def test_b121_a_missing_tensor_is_left_at_random(
    name: str, head: tuple[Any, Path], tiny_target: Target
) -> None:
    trained, folder = head
    edit_weights(folder, without(name))
    for engine in ("vllm", "sglang"):
        found = seen(folder, engine, tiny_target, trained)
        only_fault(found, f"'{name}' is missing", "whatever lies in memory")
        only_fault(found, "on a fixed batch of ids its logits are off")
        assert names(found, Absent.RANDOM) == {name}
    for engine in ("llama.cpp", "tensorrt-llm"):
        found = seen(folder, engine, tiny_target, trained)
        only_fault(found, f"'{name}' is missing", "does not start")
        assert found.served is None
    assert "is missing" in seen(folder, "vllm", tiny_target).faults[0]


def test_b121_a_missing_head(head: tuple[Any, Path], tiny_target: Target) -> None:
    """vLLM takes the target's, which has other rows; SGLang leaves it random."""
    trained, folder = head
    edit_weights(folder, without("lm_head.weight"))
    found = seen(folder, "vllm", tiny_target, trained)
    only_fault(found, "'lm_head.weight' is missing, and the target's own", "first round fails")
    found = seen(folder, "sglang", tiny_target, trained)
    only_fault(found, "'lm_head.weight' is missing: SGLang says nothing", "lies in memory")
    only_fault(found, "logits are off")


def test_b121_a_missing_norm_scales_by_ones(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    edit_weights(folder, without("norm.weight"))
    found = seen(folder, "vllm", tiny_target, trained)
    only_fault(found, "'norm.weight' is missing: vLLM scales by ones")
    only_fault(found, "logits are off")


def test_b121_a_missing_tensor_of_a_language_model(tiny_target: Target, tmp_path: Path) -> None:
    trained, folder = written("transformers", tiny_target, tmp_path / "it")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, without(name))
    for engine in ("sglang", "transformers"):
        found = seen(folder, engine, tiny_target, trained)
        only_fault(found, f"'{name}' is missing", "whatever lies in memory")
        only_fault(found, "logits are off")
    for engine in ("vllm", "llama.cpp", "tensorrt-llm"):
        only_fault(seen(folder, engine, tiny_target, trained), f"'{name}' is missing, without")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_renamed_tensor(engine: str, head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    edit_weights(folder, lambda t: t.update({"fusion.weight": t.pop("fc.weight")}))
    found = seen(folder, engine, tiny_target, trained)
    only_fault(found, "'fc.weight' is missing")
    ends = {"vllm": "it does not start", "sglang": "it is not read"}[engine]
    only_fault(found, "has no place for 'fusion.weight'", ends)
    assert (found.served is None) == (engine == "vllm")


def test_another_name_of_the_first_layer(head: tuple[Any, Path], tiny_target: Target) -> None:
    """`layers.0.` is read by vLLM and TensorRT-LLM, and passed over by SGLang."""
    trained, folder = head

    def rename(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    edit_weights(folder, rename)
    for engine in ("vllm", "tensorrt-llm", "llama.cpp"):
        assert seen(folder, engine, tiny_target, trained).ok
    found = seen(folder, "sglang", tiny_target, trained)
    only_fault(found, "'midlayer.self_attn.q_proj.weight' is missing")
    assert "layers.0.mlp.up_proj.weight" in names(found, Extra.IGNORED)


def test_a_tensor_that_nobody_reads(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    edit_weights(folder, lambda t: t.update({"extra.weight": torch.ones(3)}))
    ends = {"vllm": "does not start", "llama.cpp": "does not start", "sglang": "is not read"}
    for engine, end in ends.items():
        only_fault(
            seen(folder, engine, tiny_target, trained), "no place for 'extra.weight' [3]", end
        )


def test_stale_weights(head: tuple[Any, Path], tiny_target: Target) -> None:
    """Of the right names and shapes, and not those that were trained."""
    trained, folder = head
    lost_tensor(folder)
    assert seen(folder, "vllm", tiny_target).ok  # nothing tells but the drafter that was trained
    only_fault(seen(folder, "vllm", tiny_target, trained), "logits are off by")


# ---- RoPE


def test_b127_rope_in_the_new_style_alone(load_tiny: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    target = load_tiny("llama", rope_parameters=rope)
    trained, folder = written("eagle3", target, tmp_path / "it")
    engines = ("vllm", "sglang", "llama.cpp", "tensorrt-llm")
    assert all(seen(folder, engine, target, trained).ok for engine in engines)
    edit_config(folder, lambda config: (config.pop("rope_theta"), config.pop("rope_scaling")))
    found = seen(folder, "tensorrt-llm", target, trained)
    only_fault(found, "names no base of RoPE where TensorRT-LLM looks", "takes 10,000")
    only_fault(found, "runs it with rope_parameters", "10000.0", "100000.0")
    only_fault(found, "logits are off")
    found = seen(folder, "vllm", target, trained)
    assert found.ok
    assert "before transformers 5 takes RoPE's base for 10,000" in found.of("note")[0].sentence
    edit_config(folder, lambda config: config.pop("rope_parameters"))
    for engine in engines:
        found = seen(folder, engine, target, trained)
        only_fault(found, "names no base of RoPE", "takes 10,000")
        only_fault(found, "logits are off")


def test_b127_a_language_model_with_new_rope_alone(load_tiny: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    target = load_tiny("llama", rope_parameters=rope)
    trained, folder = written("transformers", target, tmp_path / "it")
    edit_config(folder, lambda config: config.pop("rope_theta"))
    found = seen(folder, "transformers", target, trained)
    only_fault(found, "transformers before transformers 5 takes RoPE's base for 10,000")
    only_fault(seen(folder, "tensorrt-llm", target, trained), "looks for one", "takes 10,000")


def test_b127_a_class_of_tokenizers_that_is_new(
    head: tuple[Any, Path], tiny_target: Target
) -> None:
    trained, folder = head
    path = folder / "tokenizer_config.json"
    words = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**words, "tokenizer_class": "TokenizersBackend"}))
    found = seen(folder, "vllm", tiny_target, trained)
    only_fault(found, "the class TokenizersBackend", "PreTrainedTokenizerFast is read by all")


# ---- vocabulary, widths, options


def test_b124_absolute_ids_in_the_map(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    edit_weights(folder, absolute)
    for engine in ("vllm", "sglang", "llama.cpp"):
        found = seen(folder, engine, tiny_target, trained)
        only_fault(found, "draft tokens are none of the target's", "target id = draft id + d2t")
        only_fault(found, "draft tokens for others of the target's than were trained")


def test_b124_a_missing_map(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    edit_weights(folder, without("d2t"))
    for engine in ("vllm", "sglang"):
        found = seen(folder, engine, tiny_target, trained)
        only_fault(found, "'d2t' is missing", "the target's id of the same number")
        only_fault(found, "draft tokens for others of the target's")
    only_fault(seen(folder, "tensorrt-llm", tiny_target, trained), "'d2t' is missing, without")


def test_b123_the_draft_size_as_vocab_size(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    size = len(trained.draft_ids)
    edit_config(folder, lambda config: config.update(vocab_size=size))
    found = seen(folder, "vllm", tiny_target, trained)
    only_fault(found, f"'vocab_size' is {size}", "the target's 400", "into 'draft_vocab_size'")


def test_b123_no_draft_size(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    edit_config(folder, lambda config: config.pop("draft_vocab_size"))
    found = seen(folder, "vllm", tiny_target, trained)
    size = len(trained.draft_ids)
    only_fault(found, f"'lm_head.weight' is [{size}, 32]", "makes it [400, 32]")
    found = seen(folder, "sglang", tiny_target, trained)
    only_fault(found, "SGLang does not start without 'draft_vocab_size'")


def test_b122_another_width_without_an_embedding(
    head: tuple[Any, Path], load_tiny: Any, tmp_path: Path
) -> None:
    """The same head in front of a wider target, as its configuration says."""
    _, folder = head
    target = load_tiny(hidden_size=64)

    def wider(config: Config) -> None:
        config["target_hidden_size"] = 64

    edit_config(folder, wider)
    edit_weights(folder, lambda t: t.update({"fc.weight": torch.randn(32, 3 * 64)}))
    found = seen(folder, "vllm", target)
    only_fault(found, "'embed_tokens.weight' is missing", "[400, 64]", "[400, 32]", "in memory")
    found = seen(folder, "sglang", target)
    only_fault(found, "'embed_tokens.weight' is missing", "[400, 64]", "first round fails")
    edit_config(folder, lambda config: config.pop("target_hidden_size"))
    only_fault(seen(folder, "vllm", target), "states of width 32", "are 64 wide")


def test_defaults_that_differ_between_layouts(tiny_target: Target, tmp_path: Path) -> None:
    """`norm_before_residual` is taken for false in the flat layout, for true in speculators'."""
    trained, flat = written("eagle3", tiny_target, tmp_path / "flat")
    _, other = written("eagle3 speculators", tiny_target, tmp_path / "other")
    for folder in (flat, other):
        edit_config(folder, lambda config: config.pop("norm_before_residual"))
    assert seen(flat, "vllm", tiny_target, trained).ok
    found = seen(other, "vllm", tiny_target, trained)
    only_fault(found, "runs it with norm_before_residual True, it was trained with False")
    only_fault(found, "logits are off")
    (key,) = (k for k in found.keys if k.name.endswith("norm_before_residual"))
    assert (key.becomes, key.value) == ("absent", True)


def test_options_that_would_run_another_drafter(
    head: tuple[Any, Path], tiny_target: Target
) -> None:
    trained, folder = head
    edit_config(folder, lambda config: config.update(logit_scale=0.5, tie_word_embeddings=True))
    only_fault(seen(folder, "vllm", tiny_target, trained), "reads 'logit_scale' 0.5")
    only_fault(seen(folder, "sglang", tiny_target, trained), "reads 'tie_word_embeddings' True")


def test_b130_a_head_of_its_own_that_is_said_to_be_tied(
    tiny_target: Target, load_tiny: Any, tmp_path: Path
) -> None:
    """As after a merge that changed one of the two."""
    target = load_tiny(tie_word_embeddings=False)
    trained, folder = written("transformers", target, tmp_path / "it")
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    for engine in ("vllm", "transformers", "sglang"):
        found = seen(folder, engine, target, trained)
        only_fault(found, "says tie_word_embeddings", "takes the embedding in its place")
        only_fault(found, "logits are off")
    assert [f for f in seen(folder, "llama.cpp", target, trained).faults if "tie" not in f] == []


# ---- files


def test_b137_a_file_that_is_cut_off(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    found = seen(folder, "vllm", tiny_target, trained)
    whole = path.stat().st_size + 100
    only_fault(found, "model.safetensors is damaged", f"{whole - 100} of {whole} bytes")
    assert found.tensors == () and found.served is None


def test_a_file_that_is_not_the_published_one(head: tuple[Any, Path], tiny_target: Target) -> None:
    trained, folder = head
    write_checksums(folder)
    assert seen(folder, "vllm", tiny_target, trained).ok
    lost_tensor(folder)
    found = seen(folder, "vllm", tiny_target)
    only_fault(found, "is not as its SHA256SUMS says", "'model.safetensors' is another file")
