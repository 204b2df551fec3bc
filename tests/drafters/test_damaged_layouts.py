"""Folders of every layout with one tensor missing, renamed, of another shape or cut off.

Each is refused with that tensor's name: none is filled with noise, and none is read by halves
(field report B121).
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laid_out import LAYOUTS
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]


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
