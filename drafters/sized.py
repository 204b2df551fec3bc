"""Draft LMs of sizes that a recipe gives: any decoder-only configuration of transformers.

Their layers begin as noise, their embedding and head as the target's. Where the widths differ these
are multiplied with the directions in which their rows differ most, so that no other rows of that
width have products with each other that are nearer to the target's (Eckart and Young, 1936).
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..configs.errors import UserError, did_you_mean
from ..data.dense import dense_weight, whole
from ..data.probe import check_family
from ..data.target import Target
from .borrowed import fill_rows

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""What says how large a model is; numbers that transformers has of its own are large ones'."""


def check_sizes(section: Mapping[str, Any]) -> None:
    """Whether a recipe's `drafter.config` is one of transformers, with all that makes up a size.

    Raises `UserError` naming what is unknown or missing.
    """
    kind = _kind(section)
    known = _names(kind)
    for name in section:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            raise UserError(
                f"unknown key 'drafter.config.{name}' for model type '{kind.model_type}'"
                + (did_you_mean(name, known) if near else "")
            )
    defaults = {field.name: field.default for field in fields(kind)}
    missing = [
        name
        for name in _SIZES
        if isinstance(defaults.get(kind.attribute_map.get(name, name)), int)
        and not _given(section, kind, name)
    ]
    if missing:
        raise UserError(
            f"drafter.config of model type '{kind.model_type}' lacks {', '.join(missing)}: without "
            "them it would have the sizes of a large model"
        )


def sized_model(section: Mapping[str, Any], target: Target) -> PreTrainedModel:
    """A model of `drafter.config` in float32, embedding and head begun as the target's.

    Raises `UserError` for sizes that make no model, too small a vocabulary, and as `check_drafts`.
    """
    kind = _kind(section)
    known = _names(kind)
    ours = {
        name: value
        for name, value in _of_target(target).items()
        if name in known and not _given(section, kind, name)
    }
    own = {name: value for name, value in section.items() if name != "model_type"}
    try:
        config = kind(**ours, **own)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever a model's code makes of numbers that do not go together
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(
            f"drafter.config of model type '{kind.model_type}' makes no model: {reason}"
        ) from error
    size = int(config.get_text_config(decoder=True).vocab_size)
    if size < target.vocab_size:
        raise UserError(
            f"drafter.config.vocab_size {size} is less than the target's {target.vocab_size} "
            "tokens; leave it out, and take drafter.draft_vocab_size for a smaller head"
        )
    check_drafts(model.eval(), target, "drafter.config")
    _take_rows(model, target)
    return cast(PreTrainedModel, model.train())


def check_drafts(model: PreTrainedModel, target: Target, named: str) -> None:
    """Refuse a language model that cannot draft, as what is `named`; one on meta is not run."""
    try:
        # Decoding asks of a draft what it asks of a target.
        draft = Target(model, target.tokenizer, {"name": named}, (), target.vocab_size)
        if draft.device.type != "meta":
            check_family(draft)
    except UserError as error:
        raise UserError(f"{named} cannot draft: {error}") from error


def _kind(section: Mapping[str, Any]) -> type[PreTrainedConfig]:
    """The configuration class of `model_type`."""
    name = section.get("model_type")
    if name is None:
        raise UserError("drafter.config lacks model_type, such as llama")
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(str(name), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UserError(
            f"drafter.config.model_type '{name}' is no language model of transformers"
            + (did_you_mean(str(name), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if near else "")
        )
    return CONFIG_MAPPING[name]


def _names(kind: type[PreTrainedConfig]) -> list[str]:
    """Keys that a configuration takes: its own, and the general names of some of them."""
    return ["model_type", *(field.name for field in fields(kind)), *kind.attribute_map]


def _given(section: Mapping[str, Any], kind: type[PreTrainedConfig], name: str) -> bool:
    """Whether the section has a value by its general name or by the model type's own."""
    return name in section or kind.attribute_map.get(name, name) in section


def _of_target(target: Target) -> dict[str, Any]:
    """What a draft has in common with its target, by general names."""
    text = target.text_config
    ends = getattr(text, "eos_token_id", None)
    found = {
        "vocab_size": target.head.out_features,
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": ends[0] if isinstance(ends, list | tuple) else ends,
        "pad_token_id": getattr(text, "pad_token_id", None),
        "max_position_embeddings": target.max_positions,
    }
    return {name: value for name, value in found.items() if value is not None}


@torch.no_grad()
def _take_rows(model: PreTrainedModel, target: Target) -> None:
    """Begin embedding and head as the target's, at the draft's width."""
    embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
    head: Any = model.get_output_embeddings()
    fill_rows(embedding, whole(target.embedding.detach()))
    if head.weight is not embedding:
        fill_rows(head.weight, dense_weight(target.head, target.dtype))
    bias = getattr(target.head, "bias", None)
    if bias is not None and getattr(head, "bias", None) is not None:
        rows = min(len(bias), len(head.bias))
        head.bias[:rows] = bias[:rows]
