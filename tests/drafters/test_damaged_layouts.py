"""Folders of every layout with one tensor missing, renamed, of another shape or cut off.

Each is refused with that tensor's name: none is filled with noise, and none is read by halves
(field report B121).
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_folders import H, flat, speculators
from dflash_folders import weights as dflash_weights
from eagle_heads import Published, PublishedEagle
from published import medusa_for_vllm, medusa_native, mlp_speculator
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import OWN, load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]

SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])


def _eagle3(folder: Path, target: Target) -> None:
    config = Eagle3Config(taps=(0, 1, 2), draft_vocab_size=len(SOME))
    save_drafter(Eagle3Drafter.from_target(target, config, SOME), folder, target, {})
    (folder / OWN).unlink()


def _own_embedding(folder: Path, target: Target) -> None:
    """Only our own file tells that the embedding is not the target's."""
    place = Published(embedding=True, ids=SOME.tolist()).flat(folder.parent / "theirs")
    save_drafter(load_drafter(place, target), folder, target, {})


def _eagle(folder: Path, pickled: bool) -> None:
    told = {"bias": True, "architectures": ["LlamaForCausalLMEagle"]}
    PublishedEagle(fused_bias=True).write(folder, pickled, **told)


def _causal(folder: Path, target: Target) -> None:
    drafter = CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    save_drafter(drafter, folder, target, {})
    (folder / OWN).unlink()


def _own(folder: Path, target: Target) -> None:
    save_drafter(MLPDrafter.from_target(target, MLPConfig(), SOME), folder, target, {})


def _reduced_dflash(folder: Path, target: Target) -> None:
    own = {"lm_head.weight": torch.ones(len(SOME), H), "d2t": SOME - torch.arange(len(SOME))}
    speculators(folder, {**dflash_weights(), **own}, draft_vocab_size=len(SOME))


LAYOUTS: Mapping[str, Callable[[Path, Target], Any]] = {
    "eagle3": _eagle3,
    "eagle3, several layers": lambda folder, _: Published(layers=2, ids=SOME.tolist()).flat(folder),
    "eagle3 speculators": lambda folder, _: Published(
        h=16, embedding=True, norms=("fc_norm",), ids=SOME.tolist()
    ).speculators(folder),
    "eagle3, its own embedding": _own_embedding,
    "eagle": lambda folder, _: _eagle(folder, False),
    "eagle, pickled": lambda folder, _: _eagle(folder, True),
    "transformers": _causal,
    "draftsmith": _own,
    "medusa": lambda folder, _: medusa_for_vllm(folder, bias=True, layers=2),
    "medusa, truncated": lambda folder, _: medusa_for_vllm(folder, map=SOME),
    "medusa, one head's rows": lambda folder, _: medusa_for_vllm(folder, original=True),
    "medusa native": lambda folder, _: medusa_native(folder, layers=2),
    "medusa native, safetensors": lambda folder, _: medusa_native(folder, pickled=False),
    "dflash": lambda folder, _: flat(folder, dflash_weights()),
    "dflash speculators, reduced": _reduced_dflash,
    "mlp speculator": lambda folder, _: mlp_speculator(folder),
    "mlp speculator, tied": lambda folder, _: mlp_speculator(folder, tied=True),
}
"""What writes a folder for a target, without our own file where the layout does not need it."""


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(
    request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "drafter"
    LAYOUTS[request.param](folder, tiny_target)
    load_drafter(folder, tiny_target)
    return folder


@pytest.fixture
def damage(whole: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the folder whose tensors were changed."""

    def changed(change: Callable[[dict[str, Tensor]], Any]) -> Path:
        place = shutil.copytree(whole, tmp_path / "damaged", dirs_exist_ok=True)
        path = weights(place)
        tensors = read(path)
        change(tensors)
        if path.suffix == ".safetensors":
            save_file(tensors, path, metadata={"format": "pt"})
        else:
            torch.save(tensors, path)
        return place

    return changed


def weights(folder: Path) -> Path:
    (path,) = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".pt", ".bin")]
    return path


def read(path: Path) -> dict[str, Tensor]:
    safe = path.suffix == ".safetensors"
    return load_file(path) if safe else torch.load(path, weights_only=True)


def test_a_missing_tensor(whole: Path, damage: Callable[..., Path], tiny_target: Target) -> None:
    for name in read(weights(whole)):
        folder = damage(lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(UserError) as caught:
            load_drafter(folder, tiny_target)
        assert f"'{name}'" in str(caught.value) and "missing" in str(caught.value)
        assert str(folder) in str(caught.value)


def test_a_renamed_tensor(whole: Path, damage: Callable[..., Path], tiny_target: Target) -> None:
    for name in read(weights(whole)):
        folder = damage(lambda tensors, name=name: tensors.update({name + "s": tensors.pop(name)}))
        with pytest.raises(UserError) as caught:
            load_drafter(folder, tiny_target)
        assert f"'{name}'" in str(caught.value) and "missing" in str(caught.value)


def test_an_additional_tensor(damage: Callable[..., Path], tiny_target: Target) -> None:
    folder = damage(lambda tensors: tensors.update(extra=torch.ones(3)))
    with pytest.raises(UserError, match="'extra' is unexpected"):
        load_drafter(folder, tiny_target)


def test_a_tensor_of_another_shape(
    whole: Path, damage: Callable[..., Path], tiny_target: Target
) -> None:
    """One row less, which a loader that copies what fits would never notice."""
    for name, tensor in read(weights(whole)).items():
        folder = damage(
            lambda tensors, name=name: tensors.update({name: tensors[name][1:].clone()})
        )
        with pytest.raises(UserError) as caught:
            load_drafter(folder, tiny_target)
        shapes = [len(tensor) - 1, *tensor.shape[1:]], list(tensor.shape)
        assert f"'{name}'" in str(caught.value)
        assert all(str(shape) in str(caught.value) for shape in shapes)


@pytest.mark.parametrize("keep", [0.9, 0.001])
def test_a_cut_off_file(keep: float, whole: Path, tiny_target: Target, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "cut")
    path = weights(folder)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=str(folder)):
        load_drafter(folder, tiny_target)
