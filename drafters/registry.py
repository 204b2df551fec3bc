"""The table of drafter families, and what a recipe's `drafter:` section means."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..configs.errors import UserError, did_you_mean
from ..configs.load import parse
from ..data.records import Record
from ..data.target import Target
from .base import Drafter
from .causal import CausalConfig, CausalDrafter
from .eagle3 import Eagle3Config, Eagle3Drafter
from .lookup import LookupConfig, LookupDrafter
from .skip import SkipConfig, SkipDrafter
from .start import start_taps, started
from .vocab import captured_mass, choose_draft_ids, special_ids

TrainedConfig = Eagle3Config | CausalConfig
UntrainedConfig = LookupConfig | SkipConfig
"""Families that have nothing to train: the target and their options are all there is to them."""
FamilyConfig = TrainedConfig | UntrainedConfig

FAMILIES: dict[str, type[FamilyConfig]] = {
    "eagle3": Eagle3Config,
    "causal": CausalConfig,
    "lookup": LookupConfig,
    "skip": SkipConfig,
}


def family_config(section: Mapping[str, Any], where: str) -> tuple[str, FamilyConfig]:
    """Read a recipe's `drafter:` section. Raises `UserError` for an unknown family or option."""
    options = dict(section)
    family = options.pop("family", None)
    if family not in FAMILIES:
        raise UserError(
            f"unknown drafter.family '{family}' in {where}{did_you_mean(str(family), FAMILIES)}"
        )
    return family, parse(FAMILIES[family], options, where, "drafter")


def resolved_taps(config: FamilyConfig, num_layers: int) -> tuple[int, ...]:
    """Target layers that records for this drafter must hold.

    Raises `UserError` for layers that the target lacks, or that `drafter.start` does not read.
    """
    if not isinstance(config, Eagle3Config):
        return ()
    if config.start is not None:
        return start_taps(config, num_layers)
    return config.resolved_taps(num_layers)


def reads_target(config: FamilyConfig) -> bool:
    """Whether drafters of this configuration take in what the target computes."""
    return isinstance(config, Eagle3Config)


def new_drafter(config: FamilyConfig, target: Target, records: Sequence[Record]) -> Drafter:
    """A drafter for `target` to be trained, its draft vocabulary chosen on training `records`.

    With `config.start` it is that drafter, draft vocabulary included. Raises `UserError` for a
    family that has nothing to train, and as `started`.
    """
    if isinstance(config, UntrainedConfig):
        name = next(name for name, kind in FAMILIES.items() if isinstance(config, kind))
        raise UserError(
            f"drafter.family '{name}' has nothing to train: measure it as it is, with eval; "
            "families that learn are eagle3 and causal"
        )
    if config.start is not None:
        return started(config, target)
    ids = _draft_ids(config, target, records)
    if isinstance(config, Eagle3Config):
        assert ids is not None
        return Eagle3Drafter.from_target(target, config, ids)
    return CausalDrafter.from_target(target, config, ids)


def untrained_drafter(config: UntrainedConfig, target: Target) -> LookupDrafter | SkipDrafter:
    """The drafter of a family that has nothing to train, ready to draft."""
    if isinstance(config, LookupConfig):
        return LookupDrafter.from_target(target, config)
    return SkipDrafter.from_target(target, config)


def _draft_ids(config: TrainedConfig, target: Target, records: Sequence[Record]) -> Tensor | None:
    size = config.draft_vocab_size
    if isinstance(config, Eagle3Config):
        size = config.resolved_vocab_size
    if size is None:
        return None
    mass = captured_mass(target, records)
    return choose_draft_ids(mass, size, special_ids(target), config.domain_floor)
