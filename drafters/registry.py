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
from .vocab import captured_mass, choose_draft_ids, special_ids

FamilyConfig = Eagle3Config | CausalConfig

FAMILIES: dict[str, tuple[type[FamilyConfig], type[Eagle3Drafter] | type[CausalDrafter]]] = {
    "eagle3": (Eagle3Config, Eagle3Drafter),
    "causal": (CausalConfig, CausalDrafter),
}


def family_config(section: Mapping[str, Any], where: str) -> tuple[str, FamilyConfig]:
    """Read a recipe's `drafter:` section. Raises `UserError` for an unknown family or option."""
    options = dict(section)
    family = options.pop("family", None)
    if family not in FAMILIES:
        raise UserError(
            f"unknown drafter.family '{family}' in {where}{did_you_mean(str(family), FAMILIES)}"
        )
    return family, parse(FAMILIES[family][0], options, where, "drafter")


def resolved_taps(config: FamilyConfig, num_layers: int) -> tuple[int, ...]:
    """Target layers that records for this drafter must hold."""
    return config.resolved_taps(num_layers) if isinstance(config, Eagle3Config) else ()


def new_drafter(config: FamilyConfig, target: Target, records: Sequence[Record]) -> Drafter:
    """An untrained drafter for `target`, its draft vocabulary chosen on training `records`."""
    ids = _draft_ids(config, target, records)
    if isinstance(config, Eagle3Config):
        assert ids is not None
        return Eagle3Drafter.from_target(target, config, ids)
    return CausalDrafter.from_target(target, config, ids)


def _draft_ids(config: FamilyConfig, target: Target, records: Sequence[Record]) -> Tensor | None:
    if config.draft_vocab_size is None:
        return None
    mass = captured_mass(target, records)
    return choose_draft_ids(mass, config.draft_vocab_size, special_ids(target), config.domain_floor)
