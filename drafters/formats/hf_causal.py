"""A standalone draft LM as an ordinary Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ...configs.errors import UserError
from ...data.parts import cpu_copy
from ...data.target import Target
from ..about import About
from ..adapters import ADAPTER, merged, write_adapter
from ..causal import CausalDrafter
from .config import RAISED, built, config_of, number, old_rope, why
from .tensors import whole_files


def claims(folder: Path) -> bool:
    """Whether the folder has a model's configuration: what no head claims is a language model.

    But for what the speculators library writes, which says what it is.
    """
    raw = config_of(folder)
    return "model_type" in raw and "speculators_model_type" not in raw


def taps(folder: Path, about: About, num_layers: int) -> tuple[int, ...]:
    """It reads none."""
    return ()


def shape(folder: Path, target: Target, about: About) -> CausalDrafter:
    """With `about.draft_ids`, None for all tokens."""
    text_config(folder)

    def model() -> Any:
        config = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    ids = about.draft_ids
    return CausalDrafter(
        built(folder / "config.json", model), None if ids is None else torch.tensor(ids)
    )


def read_for(folder: Path, target: Target, about: About) -> CausalDrafter:
    drafter, ids = read(folder), about.draft_ids
    return drafter if ids is None else CausalDrafter(drafter.model, torch.tensor(ids))


def write(drafter: CausalDrafter, folder: Path, dtype: torch.dtype) -> None:
    """Write config, weights and a clean generation config into an existing folder.

    A model with an adapter is written merged, and the adapter by itself in a folder beside it if
    its base is saved somewhere. Nothing is copied on the model's device.
    """
    if isinstance(drafter.model, PeftModel):
        write_adapter(drafter.model, folder / ADAPTER)
        model: Any = merged(drafter.model)
    else:
        model = cpu_copy(drafter.model)
    model.to(dtype)  # of the copy: saving must not round the live weights
    # Sampling settings copied from a target can make save_pretrained raise before any weights
    # are written; a drafter needs none of them.
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(folder)
    _spell_old_names(folder / "config.json")


def _spell_old_names(path: Path) -> None:
    """Add the pre-5 names of RoPE and dtype, which older readers need (field report B127)."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config |= old_rope(rope)
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def text_config(folder: Path) -> Any:
    """The configuration of a folder's language model. Raises `UserError` for an unknown one."""
    try:
        found = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
        for name in ("vocab_size", "num_hidden_layers"):
            number({name: getattr(found, name, None)}, name, folder / "config.json")
    except (OSError, *RAISED) as error:
        raise UserError(f"cannot load draft LM {folder}: {why(error)}") from error
    return found


def read(folder: Path) -> CausalDrafter:
    """Load a causal LM folder, with all its tokens.

    Raises `UserError` naming any tensor that does not fit.
    """
    if any(folder.glob("model*.safetensors*")):
        whole_files(folder)  # transformers names no file that is cut off
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, SafetensorError, *RAISED) as error:
        raise UserError(f"cannot load draft LM {folder}: {why(error)}") from error
    model, info = loaded
    faults = [f"'{name}' is missing" for name in sorted(info["missing_keys"])]
    faults += [f"'{name}' is unexpected" for name in sorted(info["unexpected_keys"])]
    for name, found, expected in sorted(info["mismatched_keys"]):
        faults.append(f"'{name}' is {list(found)}, must be {list(expected)}")
    if faults:
        raise UserError(f"{folder}: tensor {'; '.join(faults)}")
    # They lie where the mapped file has them, and products of unaligned weights round otherwise
    # than those of the drafter that was saved.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return CausalDrafter(model, None)
