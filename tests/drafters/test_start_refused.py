"""Recipes that go on from a drafter and are refused, by what it is or what it says otherwise."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from starting import KINDS, WEIGHTS, bare, begun, build, config_for, edit_weights
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.lookup import LookupConfig, LookupDrafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import resolved_taps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def head(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "drafter"
    return save_drafter(build(tiny_target, "eagle3"), folder, tiny_target, {})


@pytest.fixture(scope="module")
def lm(target_folder: Callable[..., Path]) -> Path:
    """A causal LM that others published: another family, padded, with the target's tokenizer."""
    return target_folder("gpt_neox", num_hidden_layers=2, vocab_size=448)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"taps": [0, 1, 1]},
            r"taps \[0, 1, 1\] is another than the \[0, 1, 2\] of drafter\.start",
        ),
        ({"draft_vocab_size": 90}, r"draft_vocab_size 90 is another than the 82 of drafter"),
        ({"init": "random"}, r"drafter\.init 'random' begins anew and drafter\.start '.*' goes on"),
        ({"init": "target"}, r"drafter\.init 'target' begins anew and drafter\.start '.*' goes on"),
        ({"train_embedding": True}, "an embedding of its own, .* this one reads the target's"),
    ],
)
def test_a_head_and_options_that_say_otherwise(
    options: dict[str, Any], said: str, head: Path, tiny_target: Target
) -> None:
    with pytest.raises(UserError, match=said):
        begun(head, "eagle3", tiny_target, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [0, 1, 3]}, r"layers \[0, 1, 3\] are 3, and drafter\.start '.*' has 2 layers"),
        (
            {"draft_vocab_size": 90},
            r"draft_vocab_size 90 is another than the 400 of drafter",
        ),
    ],
)
def test_a_language_model_and_options_that_say_otherwise(
    options: dict[str, Any], said: str, lm: Path, tiny_target: Target
) -> None:
    with pytest.raises(UserError, match=said):
        begun(lm, "causal", tiny_target, **options)


def test_a_head_of_two_factors_that_stays(tiny_target: Target, tmp_path: Path) -> None:
    config = Eagle3Config(head_rank=4)
    drafter = Eagle3Drafter.from_target(tiny_target, config, None)
    place = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    assert begun(place, "eagle3", tiny_target).head_down.weight.requires_grad
    with pytest.raises(
        UserError, match="head_rank makes a head that is trained: train_head cannot"
    ):
        begun(place, "eagle3", tiny_target, train_head=False)


def test_layers_that_the_target_lacks(head: Path) -> None:
    """Known before anything is collected."""
    with pytest.raises(UserError, match=r"reads the layers \[0, 1, 2\], those of the target are"):
        resolved_taps(config_for(head, "eagle3"), 2)


@pytest.mark.parametrize("own", [True, False])
def test_another_kind_of_drafter(
    own: bool, head: Path, lm: Path, tiny_target: Target, tmp_path: Path
) -> None:
    place = head if own else bare(head, tmp_path / "bare")
    with pytest.raises(UserError, match=r"family 'eagle3', and drafter\.family is 'causal'"):
        begun(place, "causal", tiny_target)
    with pytest.raises(UserError, match=r"family 'causal', and drafter\.family is 'eagle3'"):
        begun(lm, "eagle3", tiny_target)


def test_a_drafter_without_weights(tiny_target: Target, tmp_path: Path) -> None:
    drafter = LookupDrafter.from_target(tiny_target, LookupConfig())
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    with pytest.raises(UserError, match=r"holds no weights \(\*\.safetensors, "):
        begun(folder, "causal", tiny_target)
    for family in ("lookup", "skip"):
        with pytest.raises(UserError, match=r"unknown key 'drafter\.start' in r\.yaml"):
            family_config({"family": family, "start": str(folder)}, "r.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_do_not_fit_are_named(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    drafter = build(tiny_target, kind)
    place = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    names = [n for n in load_file(place / WEIGHTS) if n.endswith(".weight") and "embed" not in n]
    name = next((n for n in names if n.endswith("up_proj.weight")), names[0])
    edit_weights(place, lambda tensors: tensors.update(other=tensors.pop(name)))
    with pytest.raises(UserError, match=f"'{name}' is missing; 'other' is unexpected"):
        begun(place, drafter.family, tiny_target)


@pytest.mark.parametrize("kind", ["eagle3", "causal"])
def test_another_tokenizer(
    kind: str,
    head: Path,
    lm: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    place = bare(head if kind == "eagle3" else lm, tmp_path / "bare")
    state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    words = {i: word for word, i in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {words[60]: 200, words[200]: 60}
    kind_of = type(tiny_tokenizer.backend_tokenizer)
    PreTrainedTokenizerFast(tokenizer_object=kind_of.from_str(json.dumps(state))).save_pretrained(
        place
    )
    with pytest.raises(UserError, match="id 60 is"):
        begun(place, kind, tiny_target)


def test_a_language_model_without_a_tokenizer(
    lm: Path, tiny_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no tokenizer to compare with the target's"):
        begun(bare(lm, tmp_path / "bare"), "causal", tiny_target)


def test_a_language_model_that_cannot_draft(
    tiny_target: Target, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = MambaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"cannot draft: .*mamba.* keeps a recurrent state"):
        begun(tmp_path, "causal", tiny_target)


def test_a_quantised_language_model(lm: Path, tiny_target: Target, tmp_path: Path) -> None:
    place = shutil.copytree(lm, tmp_path / "d")
    said = json.loads((place / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "gptq"}
    (place / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="is quantised, and cannot be trained so"):
        begun(place, "causal", tiny_target)
