"""Load a target model, run it over ragged batches, tap hidden states, turn states into logits."""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..configs.errors import UserError
from ..configs.recipe import TargetSection
from . import embedded
from .adapted import adapter_name, with_adapter
from .cache import Branch, SlabCache
from .chat import rules_hash, template_hash, tokenizer_hash
from .devices import pick_device, pick_dtype
from .linear import speed_up_few_rows
from .parts import with_replaced
from .probe import check_family
from .warp import float32_or_better


@dataclass(frozen=True)
class Forward:
    """What one pass over n new tokens a row gives.

    hidden: `[B, n, h]` the head's inputs (after the final norm); taps: `[B, n, L*h]` outputs of the
    tapped layers, concatenated in the order asked for (`[B, n, 0]` without taps).
    """

    hidden: Tensor
    taps: Tensor


@dataclass(eq=False)
class Target:
    """A frozen causal language model with its tokenizer, as the rest of draftsmith sees it.

    Layer ids of taps are 0-based *outputs* of decoder layers: tap i is what layer i returns. One
    more than there are layers, tap `num_layers`, is what the head reads, behind the final norm.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    provenance: dict[str, Any]
    eos_ids: tuple[int, ...]
    vocab_size: int
    """Ids that exist: those of the tokenizer, less any that the head has no row for."""
    body: nn.Module = field(init=False)
    head: nn.Linear = field(init=False)
    layers: nn.ModuleList = field(init=False)
    _captured: dict[int, Tensor] = field(default_factory=dict)
    _hooked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if getattr(self.model, "_is_stateful", False):
            raise UserError(
                f"target '{self.provenance['name']}' ({self.model.config.model_type}) keeps a "
                "recurrent state, which cannot be cut back; only attention models can be decoded "
                "speculatively"
            )
        self.body = self.model.get_decoder()
        head = self.model.get_output_embeddings()
        if head is None or self.body is self.model:
            raise UserError(
                f"target '{self.provenance['name']}' ({self.model.config.model_type}) has no "
                "separate language-model head; draftsmith needs a decoder-only causal LM"
            )
        self.head = cast(nn.Linear, head)  # or what has its weight and bias
        self.vocab_size = min(self.vocab_size, self.head.out_features)
        self.layers = decoder_layers(self.body, self.num_layers)

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def embedding(self) -> Tensor:
        """Weights of the input embedding, `[rows, h]`."""
        return cast(nn.Embedding, self.model.get_input_embeddings()).weight

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def max_positions(self) -> int | None:
        value = getattr(self.text_config, "max_position_embeddings", None)
        return int(value) if value else None

    def headonly(self) -> "Target":
        """The same target without its layers, which it shares the rest with."""
        nothing = nn.ModuleList(nn.Identity() for _ in self.layers)
        twin = copy.copy(self)
        twin.model = cast(PreTrainedModel, with_replaced(self.model, self.layers, nothing))
        twin.body, twin.layers = twin.model.get_decoder(), nothing
        twin._captured, twin._hooked = {}, set()
        return twin

    def new_cache(self, rows: int, capacity: int) -> SlabCache:
        return SlabCache(self.model.config, rows, capacity, self.device)

    def forward(
        self,
        ids: Tensor,
        cache: SlabCache,
        taps: tuple[int, ...] = (),
        branch: Branch | None = None,
    ) -> Forward:
        """Run ids `[B, n]` behind what `cache` keeps, or as nodes of a tree.

        The caller then tells the cache what stays: `advance`, or `keep` for a tree.
        """
        self._hook(taps)
        cache.begin(ids.shape[1], branch)
        out = self.body(
            input_ids=ids,
            attention_mask=cache.mask(self._mask_dtype()),
            position_ids=cache.position_ids(),
            cache=cache,
            use_cache=True,
        )
        hidden = out.last_hidden_state
        states = [hidden if i == self.num_layers else self._captured[i] for i in taps]
        return Forward(hidden, torch.cat(states, -1) if states else hidden[..., :0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Full-vocabulary logits of head inputs: `[..., h] -> [..., vocab_size]`.

        float32, or float64 where the head is.
        """
        hidden = hidden.to(self.dtype)  # stored states are float32 whatever the head is
        logits = float32_or_better(self.head(hidden))
        return self.finish_logits(logits)[..., : self.vocab_size]

    def finish_logits(self, logits: Tensor) -> Tensor:
        return finish_logits(self.text_config, logits)

    def _mask_dtype(self) -> torch.dtype | None:
        eager = self.model.config._attn_implementation == "eager"
        return self.dtype if eager else None

    def _hook(self, taps: tuple[int, ...]) -> None:
        for i in taps:
            if i in self._hooked or i == self.num_layers:
                continue
            self.layers[i].register_forward_hook(_store_output(self._captured, i))
            self._hooked.add(i)


def finish_logits(config: Any, logits: Tensor) -> Tensor:
    """What some families do to the head's output: soft-capping (Gemma), scaling (Cohere...)."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        logits = torch.tanh(logits / cap) * cap
    scale, divisor = _scaling(config)
    logits = logits if scale is None else logits * scale
    return logits if divisor is None else logits / divisor


def logit_factor(config: Any) -> float:
    """What `finish_logits` multiplies by; 1.0 for most families."""
    scale, divisor = _scaling(config)
    return (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)


def _scaling(config: Any) -> tuple[float | None, float | None]:
    return getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)


def _store_output(captured: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        captured[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def decoder_layers(body: nn.Module, count: int) -> nn.ModuleList:
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"found no list of {count} decoder layers in {type(body).__name__}")


@dataclass(frozen=True)
class TargetInfo:
    """What is known of a target without its weights: enough to prepare prompts and ask servers."""

    tokenizer: PreTrainedTokenizerBase
    provenance: dict[str, Any]
    """As a Target's; weights is None."""
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int | None
    place: str
    """The folder or Hub id that it is loaded from."""


def target_info(section: TargetSection) -> TargetInfo:
    """Tokenizer and configuration alone. Raises `UserError` as `load_target`."""
    place, provenance = _locate(section)
    config, tokenizer, options = _read(place, section)
    try:
        generation: Any = GenerationConfig.from_pretrained(place, **options)
    except OSError:  # a target need not have one; its loader too falls back to the configuration
        named: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
        generation = GenerationConfig.from_pretrained(place, **named, **options)
    text = config.get_text_config(decoder=True)
    rows = int(getattr(text, "vocab_size", None) or len(tokenizer))
    positions = getattr(text, "max_position_embeddings", None)
    return TargetInfo(
        tokenizer=tokenizer,
        provenance=provenance
        | {
            "model_type": config.model_type,
            "quantisation": provenance["quantisation"] or _quantisation(config),
            "dtype": None,
            "weights": None,
            **_words(tokenizer, section, min(len(tokenizer), rows)),
        },
        eos_ids=_eos_ids(generation, tokenizer),
        vocab_size=min(len(tokenizer), rows),
        max_positions=int(positions) if positions else None,
        place=place,
    )


def _words(
    tokenizer: PreTrainedTokenizerBase, section: TargetSection, vocab_size: int
) -> dict[str, Any]:
    """What a target's provenance says about text."""
    return {
        "template_options": dict(section.template_options),
        "adapter": adapter_name(section.adapter),
        "tokenizer": tokenizer_hash(tokenizer),
        "rules": rules_hash(tokenizer),
        "template": template_hash(tokenizer, section.template_options),
        "vocab_size": vocab_size,
    }


def load_target(
    section: TargetSection, few_rows: bool = True, on: torch.device | None = None
) -> Target:
    """Load the embedded default, a local folder or a Hub id; frozen, in evaluation mode.

    `on` puts it elsewhere than on the section's device, in the dtype it would have there.

    Raises `UserError` for a model that cannot be found, is no causal LM, or whose logits cannot be
    rebuilt from its final hidden states (checked on a short probe).
    """
    place, provenance = _locate(section)
    model, tokenizer = _load(place, section, on or pick_device(section.device))
    model.requires_grad_(False)
    model.eval()
    target = Target(
        model=model,
        tokenizer=tokenizer,
        provenance=provenance,
        eos_ids=_eos_ids(getattr(model, "generation_config", None), tokenizer),
        vocab_size=len(tokenizer),
    )
    _describe(target, section)
    check_family(target)
    if few_rows:
        speed_up_few_rows(model)
    return target


def _locate(section: TargetSection) -> tuple[str, dict[str, Any]]:
    if section.name == embedded.NAME:
        folder = embedded.embedded_folder()
        known = json.loads((folder / embedded._PROVENANCE).read_text(encoding="utf-8"))
        return str(folder), {**known, "source": "embedded"}
    folder = Path(section.name).expanduser()
    local = folder.is_dir()
    kept = folder / embedded._PROVENANCE
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    return str(folder) if local else section.name, {
        "name": Path(section.name).name if local else section.name,
        "base_model": known.get("base_model", "" if local else section.name),
        "revision": known.get("revision", section.revision),
        "quantisation": known.get("quantisation"),
        "license": known.get("license"),
        "source": "local folder" if local else "hub",
    }


_FAULTS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)


def _not_loaded(section: TargetSection, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0]
    return UserError(
        f"cannot load target '{section.name}': {reason}; target.name takes "
        f"'{embedded.NAME}' (needs no network), a local model folder, or a Hub id that is "
        "reachable or already in the Hub cache"
    )


def _read(
    place: str, section: TargetSection
) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
    """Configuration and tokenizer, and the options they were loaded with."""
    options = {} if Path(place).is_dir() else {"revision": section.revision}
    try:
        config = AutoConfig.from_pretrained(place, **options)
        return config, AutoTokenizer.from_pretrained(place, **options), options
    except _FAULTS as error:
        raise _not_loaded(section, error) from error


def _load(
    place: str, section: TargetSection, on: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config, tokenizer, options = _read(place, section)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=pick_dtype(section.dtype, pick_device(section.device), config),
            output_loading_info=True,
            **options,
        )
    except _FAULTS as error:
        raise _not_loaded(section, error) from error
    model, info = loaded
    if info["missing_keys"]:  # transformers would go on with random values
        raise UserError(
            f"target '{section.name}' lacks the weights {sorted(info['missing_keys'])[:3]} (of "
            f"{len(info['missing_keys'])}); take a complete model folder"
        )
    return with_adapter(model.to(on), tokenizer, section.adapter), tokenizer


def _eos_ids(generation: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    for found in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def _quantisation(config: Any) -> str | None:
    """How transformers says that it stores the weights."""
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else found
    return None if found is None else str(getattr(method, "quant_method", method))


def _describe(target: Target, section: TargetSection) -> None:
    config = target.model.config
    about = config.to_dict()  # rope scaling, for one, makes other states of the same weights
    for name in ("_name_or_path", "transformers_version", "architectures", "use_cache"):
        about.pop(name, None)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in sorted(target.model.state_dict().items()):
        if type(tensor) not in (Tensor, nn.Parameter):  # a quantised kind of its own
            tensor = tensor.dequantize()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().flatten()
        step = max(
            1, flat.numel() // 1024
        )  # a sample: full hashing of a large target takes minutes
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    target.provenance |= {
        "model_type": config.model_type,
        "parameters": target.model.num_parameters(),
        "quantisation": target.provenance["quantisation"] or _quantisation(config),
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": digest.hexdigest()[:16],
        **_words(target.tokenizer, section, target.vocab_size),
    }
