"""Target and drafter of a recipe as shapes alone: no weight is read."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.devices import pick_device, pick_dtype
from ..data.target import Target, target_info
from ..drafters.base import Drafter
from ..drafters.registry import FAMILIES, family_config, family_of
from ..drafters.start import check_start, learning

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
    config: Any = learning(family_config(recipe.drafter, f"recipe '{recipe.name}'")[1])
    if config.start is not None:
        return check_start(config, target).shape
    if hasattr(config, "init"):
        config = replace(config, init="random")  # there is nothing to copy
    ids = None if config.vocab_size is None else torch.arange(_within(config.vocab_size, target))
    with _META, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about copying nothing
        return FAMILIES[family_of(config)].build(target, config, ids)


def _within(size: int, target: Target) -> int:
    if size > target.vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size {size} exceeds the target's {target.vocab_size} tokens"
        )
    return size
