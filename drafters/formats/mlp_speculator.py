"""The MLP speculator as IBM publishes it. vLLM's V0 engine loads it, and no later engine does.

vLLM 0.10 removed speculative decoding from that engine; the one that followed knows the method by
name, and does not start with it.

Tensors `speculator.{emb,proj,ln,head}.{step}.*`. Where `tie_weights` is true, those of the first
step stand for all, of projections the first two; what others write of further ones must be the
same. All tokens are drafted: the layout has no place for a reduced vocabulary.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from ...configs.errors import UserError
from ...data.target import Target
from ..about import About
from ..mlp import MLPDrafter
from .config import architectures, config_of, flag, number, read_config
from .fits import check_head, check_width
from .tensors import check_tensors, fill, read_tensors, weights_file, write_tensors

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
_PREFIX = "speculator."


def claims(folder: Path) -> bool:
    """Whether the folder's configuration is that of such a drafter."""
    raw = config_of(folder)
    return raw.get("model_type") == "mlp_speculator" or ARCHITECTURE in architectures(raw)


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    return (num_layers,)


def shape(folder: Path, target: Target, about: About) -> MLPDrafter:
    weights_file(folder)
    raw, path = read_config(folder), folder / "config.json"
    check_width(folder, raw.get("emb_dim"), target)
    rows, steps = number(raw, "vocab_size", path), number(raw, "n_predict", path)
    check_head(folder, rows, target)
    tied = flag(raw, "tie_weights", path)
    if tied and steps == 1:
        raise UserError(f"{path}: tie_weights is true, and there is one step alone")
    width = target.hidden_size
    return MLPDrafter(
        width,
        rows,
        (target.num_layers,),
        steps,
        number(raw, "inner_dim", path, width),
        tied=tied,
        scaled=flag(raw, "scale_input", path),
    )


def read_for(folder: Path, target: Target, about: About) -> MLPDrafter:
    """Raises `UserError` naming any tensor that is missing, unexpected or of another shape."""
    with torch.device("meta"):
        drafter = shape(folder, target, about)
    tensors = read_tensors(folder)
    if drafter.tied:
        _drop_copies(folder, tensors, drafter)
    names = {_published(name): name for name, _ in drafter.named_parameters()}
    expected = {n: tuple(drafter.get_parameter(own).shape) for n, own in names.items()}
    check_tensors(expected, tensors, folder)
    return fill(drafter, {own: tensors[name] for name, own in names.items()})


def _published(name: str) -> str:
    """What others call a tensor of ours."""
    return _PREFIX + name.replace("heads.", "head.", 1)


def _drop_copies(folder: Path, tensors: dict[str, Tensor], drafter: MLPDrafter) -> None:
    """Take out what stands for further steps. Raises `UserError` for one that is not the same."""
    for own, _ in drafter.named_parameters():
        module, last, kind = own.split(".")
        if int(last) + 1 < len(drafter.get_submodule(module)):  # type: ignore[arg-type]
            continue
        name = _published(own)
        for step in range(int(last) + 1, drafter.n_predict):
            copy = _published(f"{module}.{step}.{kind}")
            tensor = tensors.pop(copy, None)
            if tensor is not None and name in tensors and not torch.equal(tensor, tensors[name]):
                raise UserError(
                    f"{folder}: tensor '{copy}' is another than '{name}', and tie_weights is true"
                )


def write(drafter: MLPDrafter, folder: Path, dtype: torch.dtype) -> None:
    """Write `config.json` and `model.safetensors` into an existing folder."""
    tensors = {_published(n): p.detach().to(dtype) for n, p in drafter.named_parameters()}
    write_tensors(tensors, folder)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "mlp_speculator",
        "vocab_size": drafter.rows,
        "emb_dim": drafter.width,
        "inner_dim": drafter.inner_dim,
        "n_predict": drafter.n_predict,
        "top_k_tokens_per_head": [1] * drafter.n_predict,
        "n_candidates": 1,
        "tie_weights": drafter.tied,
        "scale_input": drafter.scaled,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
