"""Reading and writing safetensors so that a wrong file is named, never half used."""

import json
import os
import zipfile
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...configs.errors import UserError
from ...data.files import write_json
from ...data.shards import Damaged, head_length

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"
PICKLE = "pytorch_model.bin"

M = TypeVar("M", bound=nn.Module)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(whole, folder / FILE, metadata={"format": "pt"})


def split_weights(folder: Path, max_shard_size: str) -> None:
    """Put the weights into several files of at most `max_shard_size`, such as "5GB", and an index.

    A tensor that is larger has a file of its own. Weights that need no second file stay as they
    are.
    """
    path = folder / FILE
    if not path.exists():  # whoever wrote them split them
        return
    tensors = load_file(path)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    if not split.is_sharded:
        return
    for file, names in split.filename_to_tensors.items():
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_json(folder / INDEX, index)
    path.unlink()


def weights_file(folder: Path) -> Path:
    """The folder's weight file, or the index of several. Raises `UserError` unless there is one."""
    found = _safe(folder)
    if not found:
        raise UserError(f"{folder} holds no {FILE}")
    if len(found) > 1:
        raise UserError(f"{folder} holds both {FILE} and {INDEX}; remove the one that is stale")
    return found[0]


def _safe(folder: Path) -> list[Path]:
    return [path for name in (FILE, INDEX) if (path := folder / name).exists()]


def whole_files(folder: Path) -> list[Path]:
    """The files of the folder's weights, after a look at their headers.

    Raises `UserError` for one that is absent or cut off, with the bytes that it should have, and
    for an index that tells of other tensors than they hold.
    """
    path = weights_file(folder)
    if path.name == FILE:
        header(path)
        return [path]
    told, total = _index(path)
    files = sorted(set(told.values()))
    there = {file: header(folder / file) for file in files if (folder / file).exists()}
    missing = [file for file in files if file not in there]
    if missing:
        held = sum(_ends(entries) for entries in there.values())
        of = "" if total is None else f" of {total}"
        raise UserError(
            f"{folder}: {', '.join(missing)} is missing; {held}{of} bytes of the tensors "
            f"in {INDEX} are there"
        )
    held_in = {name: file for file, entries in there.items() for name in entries}
    faults = [f"'{n}' is not in {file}" for n, file in told.items() if held_in.get(n) != file]
    faults += [f"'{n}' of {file} is not told of" for n, file in held_in.items() if n not in told]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise UserError(f"{path} is wrong: tensor {'; '.join(faults[:3])}{more}")
    return [folder / file for file in files]


def header(path: Path) -> dict[str, Any]:
    """What the header of a safetensors file tells of each tensor.

    Raises `UserError` if the file is not as long as that, naming both sizes.
    """
    try:
        with path.open("rb") as handle:
            size, start = os.fstat(handle.fileno()).st_size, handle.read(8)
            length = head_length(start, size)
            entries = dict(json.loads(handle.read(length - 8)))
        entries.pop("__metadata__", None)
        whole = length + _ends(entries)
    except Damaged as error:
        raise UserError(f"{path} is damaged: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is damaged: it has no header of tensors") from error
    if whole != size:
        raise UserError(f"{path} is damaged: it has {size} of {whole} bytes")
    return entries


def metadata(path: Path) -> str:
    """What a safetensors file says of itself, as JSON. Raises `UserError` as `header`."""
    header(path)
    with safe_open(path, "pt") as file:
        return json.dumps(file.metadata() or {})


def _ends(entries: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a header."""
    return max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)


def _index(path: Path) -> tuple[dict[str, str], int | None]:
    """The file of each tensor, and the bytes of all if they are told.

    Raises `UserError` for what is no index.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told = dict(content["weight_map"])
        total = dict(content["metadata"]).get("total_size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no index of weight files: {error!r}") from error
    outside = [file for file in told.values() if Path(file).name != file]
    if outside:
        raise UserError(f"{path} names '{outside[0]}', which is no file beside it")
    return told, total


def weight_files(folder: Path) -> list[Path]:
    """All files of a folder that hold weights, of whichever kind there is."""
    kinds = ("*.safetensors", "*.pt", "*.bin")
    found = next((files for kind in kinds if (files := sorted(folder.glob(kind)))), [])
    if not found:
        raise UserError(f"{folder} holds no weights ({', '.join(kinds)})")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weights. Raises `UserError` as `whole_files`."""
    tensors: dict[str, Tensor] = {}
    for path in whole_files(folder):
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} ({path.stat().st_size} bytes) is damaged: {error}") from error
    return tensors


def any_file(folder: Path) -> Path:
    """The folder's weight file, or a pickle of old. Raises `UserError` as `weights_file`."""
    pickle = folder / PICKLE
    return pickle if pickle.exists() and not _safe(folder) else weights_file(folder)


def tensor_names(folder: Path) -> set[str]:
    """What the folder's tensors are called; none is read. Raises `UserError` as `read_any`."""
    path = any_file(folder)
    if path.name == PICKLE:
        return set(read_pickle(path))
    return {name for file in whole_files(folder) for name in header(file)}


def read_any(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder. Raises `UserError` as `whole_files` and `read_pickle`."""
    path = any_file(folder)
    return dict(read_pickle(path)) if path.name == PICKLE else read_tensors(folder)


def read_pickle(path: Path) -> dict[str, Tensor]:
    """What a pickle holds, which may be tensors by name alone; they are read when looked at.

    Raises `UserError` for anything else.
    """
    try:
        found = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        size = path.stat().st_size
        raise UserError(f"{path} ({size} bytes) is damaged: {reason}") from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise UserError(f"{path} is no table of tensors by name")
    return found


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


def fill(module: M, tensors: Mapping[str, Tensor]) -> M:
    """`module`, its parameters (of device meta, say) replaced by the tensors of their names.

    In one precision, the widest that a tensor has.
    """
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        # A copy: products of unaligned weights, as they lie in a mapped file, round otherwise.
        value = tensors[name].to(dtype).clone()
        setattr(module.get_submodule(owner), own, nn.Parameter(value, parameter.requires_grad))
    return module
