"""What each family's drafter is, as an engine reads it."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...drafters.base import Drafter
from ...drafters.card_commands import UNTRACKED
from ...drafters.causal import CausalDrafter
from ...drafters.dflash import DFlashDrafter
from ...drafters.eagle3 import Eagle3Drafter
from ...drafters.eagle3_layer import Norms
from ...drafters.formats.eagle3_parts import file_names
from ...drafters.medusa import MedusaDrafter
from .lookup import ROPE, Missing
from .replay import Replay, Stops
from .rules import LLAMA, QWEN3
from .terms import Extra, TensorUse

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_BROKEN = (StrictDataclassError, ArithmeticError, KeyError, TypeError, ValueError)


def replayed(replay: Replay) -> None:
    """Read the folder; `replay.drafter` stays None if the engine would not start."""
    try:
        replay.drafter = _FAMILIES[replay.rules.family](replay)
    except Missing as error:
        replay.tell("fault", f"{replay.name} does not start without '{error}' in config.json")
    except Stops:
        pass
    except _BROKEN as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        replay.tell("fault", f"{replay.name} cannot build its layers: {reason}")


def _eagle3(replay: Replay) -> Eagle3Drafter:
    options, rows = replay.lookup.options(), len(replay.target.embedding)
    replay.check_neutral(options)
    config: Any = LlamaConfig(**{n: options[n] for n in LLAMA}, rope_parameters=replay.rope())
    width, size = int(options["target_hidden_size"]), int(options["draft_vocab_size"])
    _check_vocabulary(replay, int(config.vocab_size), rows, "draft_vocab_size")
    if width != replay.target.hidden_size:
        raise replay.stop(
            f"{replay.name} reads states of width {width} ('target_hidden_size', or else "
            f"'hidden_size'), and the target's are {replay.target.hidden_size} wide"
        )
    fc = replay.tensors.get("fc.weight")
    taps = replay.layers(3 if fc is None else fc.shape[-1] // width)
    norms = Norms(**{name: bool(options.get(name, False)) for name in _NORMS})
    ids, order = _usable(replay, replay.draft_ids(size, rows, replay.engine == "tensorrt-llm"))
    wider = width != config.hidden_size
    if wider and replay.engine == "tensorrt-llm":
        replay.shared = frozenset()
    own = wider or ("embed_tokens.weight" in replay.tensors and not replay.shared)
    with torch.device("meta"):
        drafter = Eagle3Drafter(config, taps, _rows(size, rows), width, None, norms, own)
    drafter.rotary = LlamaRotaryEmbedding(config)
    one, other = (file_names(drafter, numbered) for numbered in (False, True))
    allowed = {n: [f for f in (one[n], other[n]) if _readable(f, replay)] for n in one}
    replay.fill(drafter, {n: files or [one[n]] for n, files in allowed.items()})
    if ids is not None and order is not None:
        drafter.lm_head.weight.data = drafter.lm_head.weight.data[order]
        drafter.draft_ids = ids
    return drafter


def _check_vocabulary(replay: Replay, said: int, rows: int, other: str) -> None:
    if said != rows:
        raise replay.stop(
            f"'vocab_size' is {said}, where {replay.name} expects the target's {rows}; how many "
            f"tokens are drafted belongs into '{other}'"
        )


def _readable(name: str, replay: Replay) -> bool:
    """Whether the engine reads layers by that name: those behind the first are numbered, too."""
    if name.startswith("layers."):
        return "layers.0." in replay.rules.firsts
    return not name.startswith("midlayer.") or "midlayer." in replay.rules.firsts


def _rows(size: int, rows: int) -> Tensor | None:
    """Draft ids that stand for those to come: only how many there are matters yet."""
    return None if size == rows else torch.arange(size, device="cpu")


def _usable(replay: Replay, ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Draft ids as a drafter of ours has them, ascending, and which rows of the head are theirs.

    Rows of ids that the target does not have, or that another row has, too, are left out.
    """
    if ids is None:
        return None, None
    known = (ids >= 0) & (ids < replay.target.vocab_size)
    found, place = ids[known].unique(return_inverse=True)
    if len(found) < len(ids):
        replay.tell(
            "fault",
            f"{len(ids) - len(found)} of {len(ids)} draft tokens are none of the target's as "
            f"{replay.name} reads their map (d2t: target id = draft id + d2t[draft id]), or are "
            "there twice",
        )
    if not len(found):
        raise Stops
    order = torch.empty(len(found), dtype=torch.long)
    order[place] = known.nonzero().flatten()
    return found, order


def _dflash(replay: Replay) -> DFlashDrafter:
    options, target = replay.lookup.options(), replay.target
    replay.check_neutral(options)
    layers = options.get("layer_types") or []
    if set(layers) - {"full_attention"}:
        raise replay.stop(f"layer_types {layers} cannot be replayed, full_attention can")
    rows = target.head.out_features
    size = int(options.get("draft_vocab_size", options["vocab_size"]))
    _check_vocabulary(replay, int(options["vocab_size"]), rows, "draft_vocab_size")
    factors = {n: options.get(n) for n in ("output_multiplier", "final_logit_softcapping")}
    scale = options.get("logit_scale", 1.0 if replay.engine == "vllm" else None)
    scale = factors["output_multiplier"] or scale
    cap = factors["final_logit_softcapping"]
    after: dict[str, Any] = {
        "logit_scale": None if scale in (None, 1.0) else float(scale),
        "final_logit_softcapping": cap and float(cap) / float(scale or 1.0),
    }
    layer: dict[str, Any] = {name: options[name] for name in QWEN3}
    config = Qwen3Config(**layer, rope_parameters=replay.rope(), **after)
    fc = replay.tensors.get("fc.weight")
    told = replay.lookup.at("dflash_config.target_layer_ids") or ()
    taps = replay.layers(len(told) if fc is None else fc.shape[-1] // target.hidden_size)
    ids, order = _usable(replay, replay.draft_ids(size, rows, False))
    block = int(options.get("block_size") or replay.raw.get("block_size") or 16)
    with torch.device("meta"):
        mask = int(options["mask_token_id"])
        drafter = DFlashDrafter(config, taps, block, mask, _rows(size, rows), target)
    drafter.rotary = Qwen3RotaryEmbedding(config)
    replay.fill(drafter, {})
    if ids is not None and order is not None:
        drafter.lm_head.weight.data = drafter.lm_head.weight.data[order]
        drafter.draft_ids = ids
    return drafter


def _medusa(replay: Replay) -> MedusaDrafter:
    options, target = replay.lookup.options(), replay.target
    width, rows = int(options["hidden_size"]), int(options["vocab_size"])
    size = int(options["truncated_vocab_size"])
    if width != target.hidden_size:
        raise replay.stop(
            f"'hidden_size' is {width}, and the target's states are {target.hidden_size} wide"
        )
    _check_vocabulary(replay, rows, target.head.out_features, "truncated_vocab_size")
    replay.tensors = {n.removeprefix("medusa_heads."): t for n, t in replay.tensors.items()}
    shared = bool(options["original_lm_head"])
    ids, order = _usable(replay, _map_of(replay, size, rows, shared))
    with torch.device("meta"):
        drafter = MedusaDrafter(
            width,
            rows,
            (target.num_layers,),
            int(options["num_heads"]),
            int(options["num_hidden_layers"]),
            _rows(size, rows),
            bias=bool(options["medusa_fc_bias"]),
            shared_head=shared,
        )
    first = "lm_heads.0.weight"
    replay.fill(drafter, {first: [first, "lm_head.weight"]} if shared else {})
    for parameter in drafter.lm_heads.parameters():
        kept = parameter.data if order is None else parameter.data[order]
        parameter.data = float(options["logit_scale"]) * kept
    drafter.draft_ids = ids
    return drafter


def _map_of(replay: Replay, size: int, rows: int, shared: bool) -> Tensor | None:
    """`token_map` of heads of some tokens, None for heads of all. Raises `Stops`."""
    ids = replay.tensors.pop("token_map", None)
    if ids is not None:
        use = "used" if size < rows else Extra.IGNORED
        replay.uses.append(TensorUse("token_map", "token_map", tuple(ids.shape), use))
    if size == rows:
        return None
    if ids is None or len(ids) != size:
        raise replay.stop(
            f"'truncated_vocab_size' is {size}, and 'token_map' is "
            + ("missing" if ids is None else f"{list(ids.shape)}")
        )
    if not shared:
        raise replay.stop(
            f"'truncated_vocab_size' is {size}, and vLLM stops at the shapes of heads of some "
            "tokens, unless all share one matrix (original_lm_head)"
        )
    replay.tell("note", f"vLLM starts with --model-loader-extra-config '{json.dumps(UNTRACKED)}'")
    return ids.long()


def _causal(replay: Replay) -> CausalDrafter:
    config = _model_config(replay)
    if not replay.rules.tied:
        config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    kept = {**dict(model.named_parameters()), **{n: model.get_buffer(n) for n in buffers}}
    files = revert_weight_conversion(model, kept)  # by the names that files have
    words = model.get_input_embeddings().weight
    replay.embedding = next((n for n, t in files.items() if t is words), "")
    head = "lm_head.weight"
    if head not in files and head in replay.tensors:
        _pass_over_head(replay, head)
    values = replay.take({name: tuple(t.shape) for name, t in files.items()}, {})
    loaded = type(model).from_pretrained(None, config=config, state_dict=values)
    return CausalDrafter(loaded.eval(), None)


def _model_config(replay: Replay) -> Any:
    """The configuration of a language model, with RoPE as the engine has it."""
    raw = dict(replay.raw)
    kind = raw.pop("model_type", None)
    if kind is None:
        raise Missing("model_type")
    own = AutoConfig.for_model(str(kind), **raw)
    rope = getattr(own, "rope_parameters", None)
    if rope is not None and not any(isinstance(value, dict) for value in rope.values()):
        for name in ROPE:
            raw.pop(name, None)
        own = AutoConfig.for_model(str(kind), **raw, rope_parameters=replay.rope())
    known = {f.name for f in fields(type(own))}
    replay.lookup.know({"model_type", "torch_dtype", *known, *(ROPE if rope is not None else ())})
    for name in sorted(known - {f.name for f in fields(PreTrainedConfig)} - raw.keys() - set(ROPE)):
        replay.lookup.absent[name] = getattr(own, name)
    return own


def _pass_over_head(replay: Replay, name: str) -> None:
    """A head in the folder of a model that is tied to its embedding: nobody reads it."""
    tensor = replay.tensors.pop(name)
    replay.uses.append(
        TensorUse(name, replay.called(name), tuple(tensor.shape), "passed over: tied to embedding")
    )
    embedding = replay.tensors.get(replay.embedding)
    if embedding is None or not torch.equal(embedding, tensor):
        replay.tell(
            "fault",
            f"config.json says tie_word_embeddings, and '{name}' is another than the embedding: "
            f"{replay.name} takes the embedding in its place",
        )


_FAMILIES: dict[str, Callable[[Replay], Drafter]] = {
    "eagle3": _eagle3,
    "dflash": _dflash,
    "medusa": _medusa,
    "causal": _causal,
}
