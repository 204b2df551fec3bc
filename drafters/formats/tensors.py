"""Reading and writing safetensors so that a wrong file is named, never half used."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...configs.errors import UserError

FILE = "model.safetensors"


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})


def weights_file(folder: Path) -> Path:
    """The folder's weight file. Raises `UserError` if it is absent."""
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no {FILE}")
    return path


def weight_files(folder: Path) -> list[Path]:
    """All files of a folder that hold weights, of whichever kind there is."""
    kinds = ("*.safetensors", "*.pt", "*.bin")
    found = next((files for kind in kinds if (files := sorted(folder.glob(kind)))), [])
    if not found:
        raise UserError(f"{folder} holds no weights ({', '.join(kinds)})")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weight file. Raises `UserError` if it is absent or cut off."""
    path = weights_file(folder)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} ({path.stat().st_size} bytes) is damaged: {error}") from error


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor], folder: Path
) -> None:
    """Raise `UserError` naming every missing, unexpected or wrongly shaped tensor."""
    faults = [f"'{n}' is missing" for n in expected if n not in found]
    faults += [f"'{n}' is unexpected" for n in found if n not in expected]
    for name, shape in expected.items():
        if name in found and tuple(found[name].shape) != shape:
            faults.append(f"'{name}' is {list(found[name].shape)}, must be {list(shape)}")
    if faults:
        raise UserError(f"{folder}: tensor {'; '.join(faults)}")
