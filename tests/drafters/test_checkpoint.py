"""A saved drafter is the drafter, and a folder that is not whole is refused by what is wrong."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import drafted
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import Target, load_target
from draftsmith.drafters import checkpoint
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import OWN, load_drafter, read_own, save_drafter, weights_hash
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter

WEIGHTS = "model.safetensors"
SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])
KINDS = (
    *("eagle3", "causal", "causal reduced", "dflash", "dflash reduced"),
    *("medusa", "medusa reduced", "mlp"),
)


def build(target: Target, kind: str) -> Drafter:
    torch.manual_seed(2)
    if kind == "eagle3":
        config = Eagle3Config(taps=(0, 1, 2), draft_vocab_size=len(SOME))
        return Eagle3Drafter.from_target(target, config, SOME)
    ids = SOME if kind.endswith("reduced") else None
    if kind.startswith("medusa"):
        return MedusaDrafter.from_target(target, MedusaConfig(), ids)
    if kind == "mlp":
        return MLPDrafter.from_target(target, MLPConfig(inner_dim=24, scale_input=True), ids)
    if kind.startswith("dflash"):
        return DFlashDrafter.from_target(target, DFlashConfig(taps=(0, 1, 2)), ids)
    return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), ids)


@pytest.fixture(scope="module", params=KINDS)
def saved(
    request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Drafter, Path]:
    """A drafter of each kind with its folder; copy the folder before changing it."""
    drafter = build(tiny_target, request.param)
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    save_drafter(drafter, folder, tiny_target, {"steps": 7})
    return drafter, folder


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# ---- round trip


def test_a_loaded_drafter_drafts_the_same(saved: tuple[Drafter, Path], tiny_target: Target) -> None:
    drafter, folder = saved
    loaded = load_drafter(folder, tiny_target)
    assert isinstance(loaded, nn.Module) and not loaded.training
    assert (loaded.family, loaded.taps, loaded.one_pass) == (
        drafter.family,
        drafter.taps,
        drafter.one_pass,
    )
    if drafter.draft_ids is None:
        assert loaded.draft_ids is None
    else:
        assert torch.equal(loaded.draft_ids, drafter.draft_ids)
    assert torch.equal(drafted(loaded), drafted(drafter))
    assert len(loaded.trainable()) == len(drafter.trainable())  # it can be trained further


def test_saved_twice_is_the_same_file(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path
) -> None:
    _, folder = saved
    again = save_drafter(load_drafter(folder, tiny_target), tmp_path / "b", tiny_target, {})
    assert weights_hash(again) == weights_hash(folder)
    assert (again / "config.json").read_text() == (folder / "config.json").read_text()


def test_what_our_own_file_says(saved: tuple[Drafter, Path], tiny_target: Target) -> None:
    drafter, folder = saved
    own = read_own(folder)
    assert own["family"] == drafter.family
    assert own["target"] == tiny_target.provenance
    assert own["trained"] == {"steps": 7}
    reduced_lm = drafter.family == "causal" and drafter.draft_ids is not None
    assert own["draft_ids"] == (SOME.tolist() if reduced_lm else None)


@pytest.mark.parametrize("kind", ["eagle3", "causal", "dflash"])
def test_saving_in_low_precision_leaves_the_drafter_alone(
    tiny_target: Target, tmp_path: Path, kind: str
) -> None:
    drafter = build(tiny_target, kind)
    assert isinstance(drafter, nn.Module)
    before = copy.deepcopy(drafter.state_dict())
    save_drafter(drafter, tmp_path / "half", tiny_target, {}, torch.bfloat16)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    loaded = load_drafter(tmp_path / "half", tiny_target)
    assert isinstance(loaded, nn.Module)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    error = (drafted(loaded) - drafted(drafter)).abs().max()
    assert 0 < error < 0.1 * drafted(drafter).abs().max()


def test_a_failed_save_keeps_the_last_one(
    saved: tuple[Drafter, Path],
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, folder = saved
    last = shutil.copytree(folder, tmp_path / "last")

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "_save_tokenizer", full)
    with pytest.raises(OSError, match="no space"):
        save_drafter(drafter, last, tiny_target, {"steps": 99})
    assert read_own(last)["trained"] == {"steps": 7}
    assert torch.equal(drafted(load_drafter(last, tiny_target)), drafted(drafter))
    assert list(tmp_path.iterdir()) == [last]


def test_sampling_settings_of_the_target_do_not_break_saving(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    target = load_tiny()
    target.model.generation_config.temperature = 0.6
    target.model.generation_config.top_p = 0.9
    target.model.generation_config.do_sample = False
    drafter = build(target, "causal")
    assert isinstance(drafter, CausalDrafter)
    drafter.model.generation_config = target.model.generation_config
    folder = save_drafter(drafter, tmp_path / "d", target, {})
    assert (folder / WEIGHTS).exists()
    settings = json.loads((folder / "generation_config.json").read_text())
    assert "temperature" not in settings and "top_p" not in settings
    assert drafter.model.generation_config.temperature == 0.6  # the live one is left alone


def test_the_tokenizer_is_one_that_older_readers_know(
    saved: tuple[Drafter, Path], tiny_target: Target
) -> None:
    _, folder = saved
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == tiny_target.tokenizer.get_vocab()
    assert tokenizer.chat_template == tiny_target.tokenizer.chat_template
    assert tokenizer.eos_token_id == tiny_target.tokenizer.eos_token_id


# ---- what is refused


def test_any_missing_tensor_is_named(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path
) -> None:
    _, folder = saved
    for number, name in enumerate(load_file(folder / WEIGHTS)):
        part = shutil.copytree(folder, tmp_path / str(number))
        edit_weights(part, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(UserError, match=f"'{name}'.* is missing"):
            load_drafter(part, tiny_target)


NORMS = {
    "eagle3": "midlayer.hidden_norm.weight",
    "causal": "model.layers.0.input_layernorm.weight",
    "dflash": "layers.1.self_attn.k_norm.weight",
    "medusa": "blocks.2.layers.0.bias",
    "mlp": "speculator.ln.0.bias",
}
MATRICES = {
    "eagle3": "fc.weight",
    "causal": "model.layers.1.mlp.up_proj.weight",
    "dflash": "layers.0.self_attn.o_proj.weight",
    "medusa": "blocks.1.layers.0.weight",
    "mlp": "speculator.proj.1.weight",
}


def test_a_renamed_tensor_is_missing_and_unexpected(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path
) -> None:
    drafter, folder = saved
    part = shutil.copytree(folder, tmp_path / "renamed")
    name = NORMS[drafter.family]
    edit_weights(part, lambda tensors: tensors.update({"other": tensors.pop(name)}))
    with pytest.raises(UserError, match=f"'{name}' is missing; 'other' is unexpected"):
        load_drafter(part, tiny_target)


def test_a_wrong_shape_is_named(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path
) -> None:
    drafter, folder = saved
    part = shutil.copytree(folder, tmp_path / "shape")
    name = MATRICES[drafter.family]
    shape = list(load_file(folder / WEIGHTS)[name].shape)
    edit_weights(part, lambda tensors: tensors.update({name: tensors[name][:, 1:].contiguous()}))
    wrong = [shape[0], shape[1] - 1]
    with pytest.raises(UserError) as caught:
        load_drafter(part, tiny_target)
    assert f"'{name}' is {wrong}, must be {shape}" in str(caught.value)


@pytest.mark.parametrize("keep", [0.9, 0.001])
def test_a_cut_off_file_is_refused(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path, keep: float
) -> None:
    _, folder = saved
    part = shutil.copytree(folder, tmp_path / "cut")
    content = (part / WEIGHTS).read_bytes()
    (part / WEIGHTS).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=str(part)):
        load_drafter(part, tiny_target)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_missing_file_is_refused(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path, name: str
) -> None:
    _, folder = saved
    part = shutil.copytree(folder, tmp_path / "part")
    (part / name).unlink()
    with pytest.raises(UserError, match=str(part)):
        load_drafter(part, tiny_target)


def test_without_our_file_it_is_what_others_published(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path
) -> None:
    drafter, folder = saved
    part = shutil.copytree(folder, tmp_path / "part")
    (part / OWN).unlink()
    again = load_drafter(part, tiny_target)
    if drafter.draft_ids is not None and drafter.family == "causal":
        assert again.draft_ids is None, "no layout of a language model has place for them"
    else:
        assert torch.equal(drafted(again), drafted(drafter))
    with pytest.raises(UserError, match="no drafter folder of ours"):
        read_own(part)


def test_a_folder_of_another_version_or_family(
    saved: tuple[Drafter, Path], tiny_target: Target, tmp_path: Path
) -> None:
    _, folder = saved
    part = shutil.copytree(folder, tmp_path / "part")
    own = json.loads((part / OWN).read_text())
    (part / OWN).write_text(json.dumps({**own, "format": 9}))
    with pytest.raises(UserError, match="format 9"):
        load_drafter(part, tiny_target)
    (part / OWN).write_text(json.dumps({**own, "family": "eagle-3"}))
    with pytest.raises(UserError, match="did you mean 'eagle3'"):
        load_drafter(part, tiny_target)


# ---- another tokenizer


def swapped(tokenizer: PreTrainedTokenizerFast, a: int, b: int) -> PreTrainedTokenizerFast:
    """The same tokenizer with two ordinary tokens' ids exchanged: as large, other words."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = {i: word for word, i in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {words[a]: b, words[b]: a}
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.from_str(json.dumps(state))
    other._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return other


def test_another_tokenizer_is_refused_by_the_first_differing_token(
    saved: tuple[Drafter, Path], target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    _, folder = saved
    place = shutil.copytree(target_folder(), tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(place)
    first, second = (tokenizer.convert_ids_to_tokens(i) for i in (60, 200))
    swapped(tokenizer, 60, 200).save_pretrained(place)
    other = load_target(TargetSection(name=str(place), device="cpu"), few_rows=False)
    assert len(other.tokenizer) == len(tokenizer)
    with pytest.raises(UserError) as caught:
        load_drafter(folder, other)
    said = str(caught.value)
    assert "id 60" in said and repr(first) in said and repr(second) in said


def test_the_same_tokens_of_another_folder_are_accepted(
    saved: tuple[Drafter, Path], load_tiny: Callable[..., Target]
) -> None:
    """Another hash alone (how added tokens are matched, say) is no other token."""
    drafter, folder = saved
    again = load_tiny()
    again.provenance["tokenizer"] = "0" * 16
    assert torch.equal(drafted(load_drafter(folder, again)), drafted(drafter))


# ---- another shape of the target


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, r"reads the layers \[0, 1, 2\], those of '.*' are 0 to 1$"),
        ({"hidden_size": 24}, r"reads states of width 32, those of '.*' have 24$"),
        ({"vocab_size": 300}, r"reads embeddings of 400 tokens, '.*' has those of 300$"),
    ],
)
def test_a_head_whose_inputs_the_target_lacks_is_refused(
    changes: dict[str, int],
    said: str,
    tiny_target: Target,
    load_tiny: Callable[..., Target],
    tmp_path: Path,
) -> None:
    folder = save_drafter(build(tiny_target, "eagle3"), tmp_path / "d", tiny_target, {})
    with pytest.raises(UserError, match=said):
        load_drafter(folder, load_tiny(**changes))


@pytest.mark.parametrize("kind", ["eagle3", "causal reduced"])
def test_draft_ids_beyond_the_target_are_refused(
    kind: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_drafter(build(tiny_target, kind), tmp_path / "d", tiny_target, {})
    last = int(SOME.max())
    monkeypatch.setattr(tiny_target, "vocab_size", last + 1)
    load_drafter(folder, tiny_target)
    monkeypatch.setattr(tiny_target, "vocab_size", last)
    with pytest.raises(
        UserError, match=rf"tokens up to id {last}, those of '.*' end at {last - 1}$"
    ):
        load_drafter(folder, tiny_target)


def test_padded_rows_are_no_other_tokenizer(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """A target with rows past its tokenizer, and a drafter made from it."""
    padded = load_tiny("llama", vocab_size=448)
    for kind in KINDS:
        drafter = build(padded, kind)
        folder = save_drafter(drafter, tmp_path / kind.replace(" ", "-"), padded, {})
        assert torch.equal(drafted(load_drafter(folder, padded)), drafted(drafter))
