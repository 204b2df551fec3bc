"""Folders that are as they should be: every engine serves them, and every tensor is told of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import TAPS, Published, said
from preflighting import GOOD, laid_out, names, only_fault, seen, written
from safetensors.torch import load_file
from starting import SOME, bare, build, edit_weights
from starting import TAPS as READ

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.about import about
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.layouts import LAYOUTS
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.eval.preflight.rules import RULES
from draftsmith.eval.preflight.terms import Absent, Extra

pytestmark = pytest.mark.usefixtures("one_thread")

READERS = [pair for pair in RULES if pair[1] in GOOD]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("engine", "layout"), READERS)
def test_a_good_folder_is_served_as_it_was_trained(
    engine: str, layout: str, dtype: torch.dtype, tiny_target: Target, tmp_path: Path
) -> None:
    trained, folder = written(layout, tiny_target, tmp_path / "it", dtype)
    for source in (trained, None):
        found = seen(folder, engine, tiny_target, source)
        assert found.faults == [] and found.ok
    told = [t.name for t in found.tensors if t.becomes not in set(Absent)]
    assert sorted(told) == sorted(load_file(folder / "model.safetensors"))
    told = [t.name for t in found.tensors if t.becomes in set(Absent)]
    assert set(told) <= {"embed_tokens.weight", "lm_head.weight"}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    told = {k.name.split(".")[0] for k in found.keys if k.becomes != "absent"}
    assert told == {name for name, value in config.items() if value != {}}


@pytest.mark.parametrize(("engine", "layout"), [p for p in READERS if p[0] == "vllm"])
def test_what_is_read_is_what_the_layouts_reader_needs(
    engine: str, layout: str, tiny_target: Target, tmp_path: Path
) -> None:
    """Tensor by tensor: what the one uses, the other does not do without."""
    _, folder = written(layout, tiny_target, tmp_path / "it")
    used = names(seen(folder, engine, tiny_target), "used")
    needed = set()
    for name in load_file(folder / "model.safetensors"):
        with_all = load_file(folder / "model.safetensors")
        edit_weights(folder, lambda t, n=name: t.pop(n))  # type: ignore[misc]
        try:
            LAYOUTS[layout].read(folder, tiny_target, about(folder))
        except UserError as error:
            assert f"'{name}'" in str(error)
            needed.add(name)
        edit_weights(folder, lambda t, all=with_all: (t.clear(), t.update(all)))  # type: ignore[misc]
    assert needed - {"t2d"} == used


@pytest.mark.parametrize("norms", [(), ("norm_before_residual",), ("fc_norm", "norm_output")])
@pytest.mark.parametrize("speculators", [False, True])
def test_others_heads_say_what_their_publisher_computes(
    speculators: bool, norms: tuple[str, ...], tiny_target: Target, tmp_path: Path
) -> None:
    """Nothing of ours wrote the folder, or computes what its reading is held against."""
    head = Published(ids=SOME.tolist(), norms=norms)
    folder = (head.speculators if speculators else head.flat)(tmp_path / "it")
    found = seen(folder, "vllm", tiny_target)
    drafter: Any = found.served
    assert drafter.taps == TAPS and drafter.draft_ids.tolist() == SOME.tolist()
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(4, 3 * tiny_target.hidden_size, generator=generator)
    tokens, drafted = torch.tensor([5, 17, 3, 250]), torch.tensor([7, 12])
    with torch.no_grad():
        theirs = head.says(tiny_target.embedding, taps, tokens, drafted)
    torch.testing.assert_close(said(drafter, taps, tokens, drafted), theirs, rtol=1e-4, atol=1e-4)


def test_a_folder_that_tells_nothing_of_us_does_as_well(
    tiny_target: Target, tmp_path: Path
) -> None:
    trained, folder = written("eagle3", tiny_target, tmp_path / "it")
    found = seen(bare(folder, tmp_path / "bare"), "vllm", tiny_target, trained)
    assert found.ok and found.layout == "eagle3"


def test_every_option_of_a_head_is_told(tiny_target: Target, tmp_path: Path) -> None:
    _, folder = written("eagle3", tiny_target, tmp_path / "it")
    found = {k.name: k for k in seen(folder, "vllm", tiny_target).keys}
    ids = "eagle_aux_hidden_state_layer_ids"
    assert found[ids].becomes == "read" and found[ids].value == [t + 1 for t in READ]
    assert found["eos_token_id"].becomes == "not read"
    assert (found["fc_norm"].becomes, found["fc_norm"].value) == ("absent", False)
    assert found["rope_theta"].becomes == "read"
    found = {k.name: k for k in seen(folder, "sglang", tiny_target).keys}
    assert (found[ids].becomes, found[f"eagle_config.{ids}"].becomes) == ("not read", "read")


def test_what_stands_for_what_is_left_out_is_told(tiny_target: Target, tmp_path: Path) -> None:
    _, folder = written("dflash", tiny_target, tmp_path / "it")
    found = seen(folder, "sglang", tiny_target)
    assert names(found, Absent.TARGET) == {"embed_tokens.weight", "lm_head.weight"}
    _, folder = written("eagle3", tiny_target, tmp_path / "head")
    found = seen(folder, "vllm", tiny_target)
    assert names(found, Absent.TARGET) == {"embed_tokens.weight"}
    assert names(found, Extra.IGNORED) == {"t2d"}
    by = {t.name: t.called for t in found.tensors}
    assert by["midlayer.self_attn.q_proj.weight"] == "model.layers.0.self_attn.qkv_proj.weight"
    assert by["d2t"] == "draft_id_to_target_id" and by["lm_head.weight"] == "lm_head.weight"


# ---- limits: what an engine does not read, however it is written


@pytest.mark.parametrize(
    ("options", "reads", "what"),
    [
        ({"layers": 2}, {"vllm"}, "more layers than one"),
        ({"norm_before_residual": True}, {"vllm", "llama.cpp"}, "a norm elsewhere"),
        ({"norm_before_fc": True}, {"vllm", "llama.cpp"}, "a norm elsewhere"),
        ({"norm_output": True}, {"vllm", "tensorrt-llm"}, "a norm elsewhere"),
        ({"fc_norm": True}, {"vllm", "tensorrt-llm"}, "a norm elsewhere"),
        ({"hidden_size": 48}, {"vllm", "tensorrt-llm", "llama.cpp"}, "an embedding of its own"),
    ],
)
def test_heads_that_some_engines_do_not_read(
    options: dict[str, Any], reads: set[str], what: str, tiny_target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = Eagle3Config(READ, len(SOME), **options)
    drafter = Eagle3Drafter.from_target(tiny_target, config, SOME)
    with torch.no_grad():
        for parameter in drafter.trainable():
            parameter += 0.05 * torch.randn_like(parameter)
    folder = laid_out(drafter, "eagle3", tiny_target, tmp_path / "it")
    for engine in ("vllm", "sglang", "tensorrt-llm", "llama.cpp"):
        found = seen(folder, engine, tiny_target, drafter)
        assert found.ok == (engine in reads), (engine, found.faults)
        if engine not in reads:
            assert any(what in f.sentence for f in found.of("limit")), engine


def test_blocks_of_a_reduced_vocabulary(tiny_target: Target, tmp_path: Path) -> None:
    trained, folder = written("dflash", tiny_target, tmp_path / "it", kind="dflash reduced")
    assert seen(folder, "vllm", tiny_target, trained).ok
    found = seen(folder, "sglang", tiny_target, trained)
    only_fault(found, "SGLang does not read a reduced draft vocabulary")


def test_a_soft_cap_that_is_left_out_is_a_note(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    target = load_tiny("gemma2")
    drafter = DFlashDrafter.from_target(target, DFlashConfig())
    folder = laid_out(drafter, "dflash", target, tmp_path / "it")
    found = seen(folder, "vllm", target, drafter)
    assert found.ok and "leaves out the soft cap" in found.of("note")[0].sentence
    found = seen(folder, "sglang", target, drafter)
    assert found.ok and not found.of("note")


def test_a_layout_that_an_engine_does_not_read(tiny_target: Target, tmp_path: Path) -> None:
    folder = laid_out(build(tiny_target, "mlp"), "mlp_speculator", tiny_target, tmp_path / "it")
    found = seen(folder, "vllm", tiny_target)
    only_fault(found, "vLLM is not known to read the layout 'mlp_speculator'", "no engine reads it")
    with pytest.raises(UserError, match=r"unknown engine 'vlm' \(did you mean 'vllm'\?\)"):
        seen(folder, "vlm", tiny_target)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "gemma2", "mistral"])
def test_language_models_of_other_families(
    family: str, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    target = load_tiny(family)
    trained, folder = written("transformers", target, tmp_path / "it")
    for engine in ("vllm", "tensorrt-llm", "transformers", "llama.cpp", "sglang"):
        assert seen(folder, engine, target, trained).faults == []


def test_heads_of_some_tokens(tiny_target: Target, tmp_path: Path) -> None:
    """As seen with vLLM 0.32: those with a matrix of their own stop at its shape."""
    trained, folder = written("medusa", tiny_target, tmp_path / "it", kind="medusa reduced")
    found = seen(folder, "vllm", tiny_target, trained)
    only_fault(found, "'truncated_vocab_size' is", "vLLM stops at the shapes of heads")
    assert found.of("limit") and found.served is None
    one = MedusaDrafter.from_target(tiny_target, MedusaConfig(shared_head=True), SOME)
    found = seen(laid_out(one, "medusa", tiny_target, tmp_path / "one"), "vllm", tiny_target, one)
    assert found.ok and "--model-loader-extra-config" in found.of("note")[0].sentence
    assert "token_map" in names(found, "used")
    edit_weights(tmp_path / "one", lambda t: t.pop("token_map"))
    found = seen(tmp_path / "one", "vllm", tiny_target, one)
    only_fault(found, "'token_map' is missing")
