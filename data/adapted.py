"""Low-rank adapters of a target, merged into its weights when it is loaded (LoRA, by peft)."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..configs.errors import UserError
from .chat import tokenizer_hash
from .shelves import sha256

if TYPE_CHECKING:
    from peft import PeftModel

_PROBE = 16  # tokens that merged and adapted model are compared on
_TOLERANCE = 1e-4  # of the largest logit, in float32
_ROUNDINGS = 8  # in low precision: so many units of the dtype's own rounding
_FAULTS = (UserWarning, OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError)
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def with_adapter(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | None
) -> PreTrainedModel:
    """`model` with the adapter in `folder`, as peft saves it, folded in; as it is without one.

    Raises `UserError` for a folder without an adapter, one that does not fit the model, one that
    brings another tokenizer, and weights that it cannot be merged into.
    """
    if adapter_name(folder) is None or folder is None:
        return model
    _check_tokenizer(Path(folder), tokenizer)
    from peft import PeftModel  # slow to import, and only needed here

    try:
        with warnings.catch_warnings():
            # What is missing would stay as it was made, which changes nothing.
            warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
            found = PeftModel.from_pretrained(model, folder).eval()
        return merge(found)
    except _FAULTS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"cannot put the adapter {folder} on the target: {reason}; target.adapter takes a "
            "folder that peft wrote for this very model"
        ) from error


def adapter_name(folder: str | None) -> str | None:
    """What provenance says of a target's adapter: its folder's name and a hash of its weights.

    Raises `UserError` where there is none.
    """
    if folder is None:
        return None
    found = next((Path(folder) / w for w in _WEIGHTS if (Path(folder) / w).is_file()), None)
    if found is None:
        raise UserError(
            f"target.adapter: {folder} holds no adapter ({' or '.join(_WEIGHTS)}); give the folder "
            "that peft wrote"
        )
    return f"{Path(folder).resolve().name} ({sha256(found)[:16]})"


def _check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """An adapter may bring a tokenizer; then it was trained with that one."""
    if not (folder / "tokenizer.json").is_file():
        return
    theirs, ours = tokenizer_hash(AutoTokenizer.from_pretrained(folder)), tokenizer_hash(tokenizer)
    if theirs != ours:
        raise UserError(
            f"target.adapter: {folder} brings another tokenizer ({theirs}) than the target's "
            f"({ours}), so that its tokens are not the drafter's; merge it into a model folder of "
            "its own, and give that as target.name"
        )


@torch.no_grad()
def merge(model: "PeftModel") -> PreTrainedModel:
    """The model under an adapter with the adapter folded into its weights, in place.

    Raises `UserError` if its logits become others by that.
    """
    whole: Any = model
    rows = whole.get_input_embeddings().num_embeddings
    ids = torch.arange(_PROBE, device=whole.device)[None] * rows // _PROBE  # [1, n]
    before = whole(input_ids=ids, use_cache=False).logits.float()  # [1, n, V]
    try:
        plain: PreTrainedModel = whole.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise UserError(f"the adapter cannot be merged: {error}") from error
    merged: Any = plain
    after = merged(input_ids=ids, use_cache=False).logits.float()
    worst, scale = (before - after).abs().max().item(), before.abs().max().item()
    allowed = max(_TOLERANCE, _ROUNDINGS * torch.finfo(plain.dtype).eps)
    if not worst <= allowed * scale:
        raise UserError(
            f"the adapter cannot be merged: logits change by up to {worst:.3g} where the largest "
            f"is {scale:.3g}"
        )
    return plain
