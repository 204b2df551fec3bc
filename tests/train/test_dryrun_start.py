"""A dry run refuses a drafter to go on from as training does, and reads none of its weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starting import WEIGHTS, bare, begun, build
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import Recipe
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.train.blueprint import drafter_shapes, target_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

RecipeFactory = Callable[..., Recipe]


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    kept = {n: v for n, v in (said | changes).items() if v is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def another_tokenizer(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = {i: word for word, i in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {words[60]: 200, words[200]: 60}
    changed = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    (folder / "draftsmith.json").unlink(missing_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=changed).save_pretrained(folder)


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def recurrent(folder: Path) -> None:
    config = MambaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


NO_LAYERS: dict[str, Any] = dict.fromkeys(("eagle_config", "eagle_aux_hidden_state_layer_ids"))
HARMS: list[tuple[str, Callable[[Path], Any] | None, dict[str, Any], str]] = [
    ("eagle3", None, {"family": "causal"}, "is a drafter of family 'eagle3'"),
    ("lm", None, {"family": "eagle3"}, "is a drafter of family 'causal'"),
    ("eagle3", None, {"draft_vocab_size": 90}, "draft_vocab_size 90 is another than the 82"),
    ("lm", None, {"draft_vocab_size": 90}, "draft_vocab_size 90 is another than the 400"),
    ("lm", None, {"layers": [0, 1, 3]}, "has 2 layers"),
    ("eagle3", another_tokenizer, {}, "id 60 is"),
    ("lm", another_tokenizer, {}, "id 60 is"),
    ("lm", no_tokenizer, {}, "has no tokenizer to compare"),
    ("lm", lambda f: set_config(f, quantization_config={"quant_method": "gptq"}), {}, "quantised"),
    ("lm", lambda f: (f / WEIGHTS).unlink(), {}, r"holds no weights \(\*\.safetensors, "),
    ("eagle3", lambda f: (f / WEIGHTS).rename(f / "a.safetensors"), {}, "holds no model.safeten"),
    ("eagle3", lambda f: set_config(f, vocab_size=500), {}, "reads embeddings of 500 tokens"),
    ("eagle3", lambda f: set_config(f, hidden_size=64), {}, "reads states of width 64"),
    ("eagle3", lambda f: set_config(f, norm_before_fc=True, fc_norm=True), {}, "exclude each"),
    ("eagle3", lambda f: set_config(f, **NO_LAYERS), {}, "name in drafter.taps"),
    ("eagle3", None, {"taps": [0, 1, 1]}, r"is another than the \[0, 1, 2\] of"),
    ("lm", lambda f: set_config(f, model_type="unheard"), {}, "cannot load draft LM"),
    ("lm", recurrent, {}, "cannot draft: .* keeps a recurrent state"),
]


@pytest.fixture(scope="module")
def folders(
    tiny_target: Target, target_folder: Callable[..., Path], tmp_path_factory: Any
) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("starts") / "head"
    head = save_drafter(build(tiny_target, "eagle3"), place, tiny_target, {})
    lm = target_folder("gpt_neox", num_hidden_layers=2, vocab_size=448)
    return {"eagle3": head, "lm": lm}


@pytest.mark.parametrize(("kind", "harm", "options", "said"), HARMS)
def test_refused_in_the_same_words(
    kind: str, harm: Callable[[Path], Any] | None, options: dict[str, Any], said: str,
    folders: dict[str, Path], findable: RecipeFactory, tiny_target: Target, tmp_path: Path,
) -> None:  # fmt: skip
    place = shutil.copytree(folders[kind], tmp_path / "draft")
    if harm is not None:
        harm(place)
    if harm is not recurrent:  # which training sees when it has read them
        for path in place.glob("*.safetensors"):
            path.write_bytes(b"")
    section = {"family": "eagle3" if kind == "eagle3" else "causal", "start": str(place)} | options
    recipe = replace(findable(), drafter=section)
    with pytest.raises(UserError, match=said) as dry:
        drafter_shapes(recipe, target_shapes(recipe))
    family, given = section.pop("family"), {n: v for n, v in section.items() if n != "start"}
    with pytest.raises(UserError) as real:
        begun(place, family, tiny_target, **given)
    assert str(dry.value) == str(real.value)


def test_what_is_only_warned_of_is_heard(
    folders: dict[str, Path], findable: RecipeFactory, tmp_path: Path
) -> None:
    place = bare(folders["eagle3"], tmp_path / "bare")
    recipe = replace(findable(), drafter={"family": "eagle3", "start": str(place)})
    with pytest.warns(UserWarning, match="has no tokenizer: its ids are taken as the target's"):
        drafter_shapes(recipe, target_shapes(recipe))


def test_tokens_that_the_draft_lacks_are_left_out_of_the_plan(
    target_folder: Callable[..., Path], findable: RecipeFactory
) -> None:
    place = target_folder("llama", vocab_size=390)
    recipe = replace(findable(), drafter={"family": "causal", "start": str(place)})
    shapes = drafter_shapes(recipe, target_shapes(recipe))
    assert shapes.draft_ids is not None and len(shapes.draft_ids) == 390
