"""Low-rank adapters on a standalone draft LM, by peft: one small file for each domain.

LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353) on linear layers of the decoder layers.
Embeddings and head stay as they are, so tied ones stay tied.
"""

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig, PeftModel, PeftModelForCausalLM
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..configs.errors import UserError, did_you_mean, require
from ..data.adapted import merge
from ..data.parts import cpu_copy
from ..data.target import decoder_layers

ADAPTER = "adapter"
"""Where a drafter's folder keeps its adapter, beside the merged weights, if its base is saved
somewhere: fitting weights that nobody has it would be of no use."""


@dataclass(frozen=True)
class LoraSection:
    """An adapter to be trained while the draft LM's own weights stay as they are."""

    rank: int = 8
    """Rank of the update that each adapted layer learns."""
    alpha: int = 16
    """Updates are scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of an update's inputs dropped in training."""
    modules: tuple[str, ...] | None = None
    """Linear layers to adapt, by names such as q_proj or mlp.up_proj; null takes all those of the
    decoder layers."""
    dora: bool = False
    """Learns the sizes of the adapted layers' outputs apart from their directions."""

    def __post_init__(self) -> None:
        for option in ("rank", "alpha"):
            require(getattr(self, option) > 0, option, getattr(self, option), "above 0")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "from 0 to below 1")
        ok = self.modules is None or len(self.modules) > 0
        require(ok, "modules", [], "names of linear layers, or null for all of them")


def adapted(model: PreTrainedModel, section: LoraSection, base: str) -> PeftModel:
    """Freeze `model` and put a new adapter on it, in place.

    `base` tells readers of the adapter where the model's weights lie, "" if nowhere; then it is
    not written. Raises
    `UserError` for modules that no decoder layer has, or that peft cannot adapt.
    """
    place, linear = _linear_layers(model)
    names = _chosen(linear, section.modules)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        use_dora=section.dora,
        target_modules=rf"{re.escape(place)}\.\d+\.({'|'.join(map(re.escape, names))})",
        fan_in_fan_out=all(isinstance(linear[name], Conv1D) for name in names),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about peft's own use
            return PeftModelForCausalLM(model, config)
    except ValueError as error:
        raise UserError(
            f"drafter.lora cannot adapt {', '.join(names)} of a {model.config.model_type}: {error}"
        ) from error


def _linear_layers(model: PreTrainedModel) -> tuple[str, dict[str, nn.Module]]:
    """Where the decoder layers are, and their linear layers by name, counted from such a layer."""
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    layers = decoder_layers(model.get_decoder(), count)
    place = next(name for name, module in model.named_modules() if module is layers)
    found = [item for layer in layers for item in layer.named_modules()]
    return place, {name: m for name, m in found if isinstance(m, nn.Linear | Conv1D)}


def _chosen(linear: Iterable[str], modules: tuple[str, ...] | None) -> list[str]:
    """The names among `linear` that end in one of `modules`."""
    if modules is None:
        return sorted(linear)
    for wanted in modules:
        if not any(_ends(name, wanted) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise UserError(
                f"drafter.lora.modules: the draft's layers have no linear layer '{wanted}'"
                f"{did_you_mean(wanted, known)}"
            )
    return sorted(name for name in linear if any(_ends(name, wanted) for wanted in modules))


def _ends(name: str, wanted: str) -> bool:
    return f".{name}".endswith(f".{wanted}")


def write_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter alone, in peft's own format and in the precision it is trained in.

    Nothing is written where `adapted` was told of no base.
    """
    if not model.active_peft_config.base_model_name_or_path:
        return
    # "auto" would ask the Hub for the base's config; embeddings are never adapted.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form


def merged(model: PeftModel) -> PreTrainedModel:
    """A copy on the CPU with the adapter folded into the weights; `model` stays as it is.

    Raises `UserError` as `merge`.
    """
    return merge(cpu_copy(model).eval())
