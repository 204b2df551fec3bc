"""Drafters that a recipe might have had instead, with weights that have learnt nothing."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.errors import UserError
from ..configs.load import read_yaml
from ..data.linear import speed_up_few_rows
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.causal import CausalConfig
from ..drafters.registry import (
    FAMILIES,
    FamilyConfig,
    UntrainedConfig,
    family_config,
    family_of,
    untrained_drafter,
)
from ..drafters.start import started
from ..drafters.vocab import choose_draft_ids, special_ids


@dataclass(frozen=True)
class Candidate:
    """A `drafter:` section under a name; asked: whether somebody named it."""

    name: str
    section: Mapping[str, Any]
    asked: bool = False

    @property
    def config(self) -> FamilyConfig:
        """Raises `UserError` for an unknown family or option."""
        return family_config(self.section, f"'{self.name}'")[1]


def candidate(section: Mapping[str, Any], asked: bool = False) -> Candidate:
    """A candidate named by what its section says."""
    options = {name: value for name, value in section.items() if name != "family"}
    words = [f"{name}={_word(value)}" for name, value in options.items() if value is not None]
    return Candidate(" ".join([str(section.get("family")), *words]), section, asked)


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}: {_word(v)}' for k, v in value.items())}}}"
    return str(value)


def asked_for(text: str) -> Candidate:
    """What `--candidate "family=eagle3,draft_vocab_size=4096"` names. Raises `UserError`."""
    said = re.sub(r"(^|,)\s*(\w+)\s*=", r"\1 \2: ", text)
    section = read_yaml(f"{{{said}}}", f"--candidate '{text}'")
    named = re.findall(r"(\w+)\s*=", text)
    if not isinstance(section, dict) or "family" not in section or set(section) - set(named):
        raise UserError(
            f"--candidate '{text}' must be written family=NAME,option=value, with the options of "
            "a recipe's drafter section"
        )
    return candidate(section, asked=True)


# ---- which


def own_grid(section: Mapping[str, Any], target: Target) -> list[Candidate]:
    """The recipe's drafter, and others of its family that differ in one thing."""
    family, config = family_config(section, "drafter")
    new = {name: value for name, value in section.items() if name != "start"}
    found = [candidate(section, asked=True)]
    for change in _GRID.get(family, _no_grid)(config, target):
        excluded = {other for name in change for other in _EXCLUDED.get(name, ())}
        kept = {name: value for name, value in new.items() if name not in excluded}
        found.append(candidate({**kept, **change}))
    return different(found)


def other_families(section: Mapping[str, Any]) -> list[Candidate]:
    """Every family as it is by default but the recipe's own."""
    return [candidate({"family": name}) for name in FAMILIES if name != section.get("family")]


def different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Without those that say the same as an earlier one, or what does not go together."""
    found: list[tuple[Candidate, FamilyConfig]] = []
    for one in candidates:
        try:
            config = one.config
        except UserError:
            continue
        if all(config != other for _, other in found):
            found.append((one, config))
    return [one for one, _ in found]


def _no_grid(config: Any, target: Target) -> list[dict[str, Any]]:
    return []


def _vocabularies(config: Any, target: Target, *sizes: int) -> list[dict[str, Any]]:
    """Those of the sizes that are smaller than the target's, and not the one at hand."""
    own = config.vocab_size
    return [{"draft_vocab_size": n} for n in sizes if n < target.vocab_size and n != own]


def _of_eagle3(config: Any, target: Target) -> list[dict[str, Any]]:
    h = target.hidden_size
    return [
        *_vocabularies(config, target, 2048, 8192, 32768),
        {"head_rank": h // 4},
        {"hidden_size": h // 2},
        {"layers": 2},
    ]


def _of_causal(config: Any, target: Target) -> list[dict[str, Any]]:
    found = _vocabularies(config, target, 8192)
    if config.config is not None:
        return found
    last = target.num_layers - 1
    kept = ([last], [0, last], [*range(target.num_layers // 3), last])
    return [*found, *({"layers": sorted(set(layers))} for layers in kept)]


def _of_dflash(config: Any, target: Target) -> list[dict[str, Any]]:
    return [*_vocabularies(config, target, 8192), {"layers": 1}, {"layers": 3}]


def _of_heads(config: Any, target: Target) -> list[dict[str, Any]]:
    return _vocabularies(config, target, 2048, 8192)


def _of_mlp(config: Any, target: Target) -> list[dict[str, Any]]:
    return [*_of_heads(config, target), {"inner_dim": target.hidden_size // 2}]


def _of_jump(config: Any, target: Target) -> list[dict[str, Any]]:
    begins = [b for b in (target.num_layers - 4, target.num_layers - 12) if b >= 0]
    return [*_of_heads(config, target), *({"begin": b} for b in begins)]


_GRID: dict[str, Callable[[Any, Target], list[dict[str, Any]]]] = {
    "eagle3": _of_eagle3,
    "causal": _of_causal,
    "dflash": _of_dflash,
    "medusa": _of_heads,
    "mlp": _of_mlp,
    "jump": _of_jump,
}
"""By family, options that are changed one at a time; those that say what is said already go."""
_EXCLUDED = {"head_rank": ("draft_vocab_size", "train_head"), "draft_vocab_size": ("head_rank",)}
"""By option, those that do not go with it."""


# ---- made


def built(config: FamilyConfig, target: Target) -> Drafter:
    """The drafter as it would be served, whatever its weights say.

    A reduced vocabulary has special tokens and any others: its size matters, not which they are.
    Raises `UserError` for options that do not fit the target.
    """
    drafter: Any
    if isinstance(config, UntrainedConfig):
        drafter = untrained_drafter(config, target)
    elif config.start is not None:
        drafter = started(_without_adapter(config), target)
    else:
        ids = None if config.vocab_size is None else _some_ids(target, config.vocab_size)
        drafter = FAMILIES[family_of(config)].build(target, _without_adapter(config), ids)
    assert isinstance(drafter, nn.Module)
    drafter = drafter.to(target.device).eval()
    speed_up_few_rows(drafter)
    return drafter


def _without_adapter(config: Any) -> Any:
    """An adapter is served merged."""
    return replace(config, lora=None) if isinstance(config, CausalConfig) else config


def _some_ids(target: Target, size: int) -> Tensor:
    """A draft vocabulary of that size, special tokens among it: `[size]`."""
    nothing = torch.zeros(1, target.vocab_size, dtype=torch.float64)
    return choose_draft_ids(nothing, size, special_ids(target), floor=0.0)


@dataclass(frozen=True)
class Weights:
    """What a drafter holds beside the target's own parameters: numbers, and bytes as it runs."""

    parameters: int
    bytes: int


def weights(drafter: Drafter) -> Weights:
    """Of a drafter as it is."""
    assert isinstance(drafter, nn.Module)
    theirs = {id(drafter.get_parameter(name)) for name in drafter.shared}
    own = [p for p in drafter.parameters() if id(p) not in theirs]
    return Weights(
        parameters=sum(p.numel() for p in own),
        bytes=sum(p.numel() * p.element_size() for p in own),
    )
