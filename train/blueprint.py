"""Target and drafter of a recipe as shapes alone: no weight is read."""

import warnings
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.devices import pick_device, pick_dtype
from ..data.target import Target, target_info
from ..drafters.base import Drafter
from ..drafters.causal import CausalConfig, CausalDrafter
from ..drafters.eagle3 import Eagle3Config, Eagle3Drafter
from ..drafters.formats.config import read_config
from ..drafters.formats.eagle3_flat import layer_config
from ..drafters.registry import UntrainedConfig, family_config, new_drafter, resolved_taps
from ..drafters.start import Start, check_drafts, check_start

_META = torch.device("meta")


def target_shapes(recipe: Recipe) -> Target:
    """The recipe's target without weights; a quantised one as if it were not.

    Its tokenizer and provenance are those of the real one, but for what only weights tell. Raises
    `UserError` as `target_info` does, and as `Target`.
    """
    section = recipe.target
    info = target_info(section)
    config = AutoConfig.from_pretrained(info.place, revision=section.revision)
    dtype = pick_dtype(section.dtype, pick_device(section.device), config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with _META:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False)
    named = {"parameters": model.num_parameters(), "dtype": str(dtype).removeprefix("torch.")}
    return Target(model, info.tokenizer, info.provenance | named, info.eos_ids, len(info.tokenizer))


def drafter_shapes(recipe: Recipe, target: Target) -> Drafter:
    """The drafter that training would begin with, without weights.

    Raises `UserError` for a family that has nothing to train, for options that do not fit, and as
    `check_start`.
    """
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    if isinstance(config, UntrainedConfig):
        return new_drafter(config, target, [])  # which says so
    start = None if config.start is None else check_start(config, target)
    with _META, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about copying nothing
        if start is not None:
            return _continued(config, start, target)
        if isinstance(config, Eagle3Config):
            ids = torch.arange(_within(config.resolved_vocab_size, target))
            return Eagle3Drafter.from_target(target, replace(config, init="random"), ids)
        size = config.draft_vocab_size
        kept = None if size is None else torch.arange(_within(size, target))
        return CausalDrafter.from_target(target, config, kept)


def _within(size: int, target: Target) -> int:
    if size > target.vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size {size} exceeds the target's {target.vocab_size} tokens"
        )
    return size


def _continued(config: Eagle3Config | CausalConfig, start: Start, target: Target) -> Drafter:
    """The drafter that a folder holds, by its configuration."""
    if isinstance(config, Eagle3Config):
        path = start.folder / "config.json"
        shape = layer_config(read_config(start.folder), path)
        ids = torch.arange(start.draft_vocab_size)
        return Eagle3Drafter(shape, resolved_taps(config, target.num_layers), ids)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(start.folder), dtype=torch.float32
    )
    check_drafts(model, target, config)
    kept = None if start.draft_ids is None else torch.arange(len(start.draft_ids))
    drafter = CausalDrafter(model, kept)
    if config.lora is not None:
        drafter.adapt(config.lora, config.start or "")
    return drafter
