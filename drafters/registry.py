"""The table of drafter families, and what a recipe's `drafter:` section means."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from ..configs.errors import UserError, did_you_mean
from ..configs.load import parse
from ..data.target import Target
from .base import Drafter
from .causal import CausalConfig, CausalDrafter
from .dflash import DFlashDrafter
from .dflash_config import DFlashConfig
from .eagle3 import Eagle3Drafter
from .eagle3_config import Eagle3Config
from .jump import JumpConfig, JumpDrafter
from .lookup import LookupConfig, LookupDrafter
from .medusa import MedusaConfig, MedusaDrafter
from .mlp import MLPConfig, MLPDrafter
from .skip import SkipConfig, SkipDrafter

UntrainedConfig = LookupConfig | SkipConfig
"""Families that have nothing to train: the target and their options are all there is to them."""
TrainedConfig = Eagle3Config | CausalConfig | DFlashConfig | JumpConfig | MedusaConfig | MLPConfig
FamilyConfig = TrainedConfig | UntrainedConfig


class Family(NamedTuple):
    """What a recipe may say of a family, and what is built from it.

    Configurations of those that are trained have `start`, a drafter to go on from; `vocab_size`,
    tokens of the draft vocabulary or None for all; `domain_floor`, as `vocab.choose_draft_ids`
    takes it; and `most`, as `Drafter.max_draft_tokens` where it is known without weights. All have
    `reads_target`, whether they take in what the target computes, and `resolved_taps(num_layers)`.
    """

    config: type[FamilyConfig]
    build: Callable[[Target, Any, Any], Drafter]
    """A new drafter for a target by a configuration, with these draft ids `[V_d]` or None."""


FAMILIES: dict[str, Family] = {
    "eagle3": Family(Eagle3Config, Eagle3Drafter.from_target),
    "causal": Family(CausalConfig, CausalDrafter.from_target),
    "dflash": Family(DFlashConfig, DFlashDrafter.from_target),
    "medusa": Family(MedusaConfig, MedusaDrafter.from_target),
    "mlp": Family(MLPConfig, MLPDrafter.from_target),
    "jump": Family(JumpConfig, JumpDrafter.from_target),
    "lookup": Family(LookupConfig, LookupDrafter.from_target),
    "skip": Family(SkipConfig, SkipDrafter.from_target),
}

MEASURED = {"eagle": "heads of EAGLE-1 and EAGLE-2"}
"""Families of drafters that others made, which no recipe builds."""


def family_config(section: Mapping[str, Any], where: str) -> tuple[str, FamilyConfig]:
    """Read a recipe's `drafter:` section. Raises `UserError` for an unknown family or option."""
    options = dict(section)
    family = options.pop("family", None)
    if family in MEASURED:
        raise UserError(
            f"drafter.family '{family}' in {where} cannot be trained: {MEASURED[family]} are only "
            "measured, with `draftsmith eval --drafter FOLDER`"
        )
    if family not in FAMILIES:
        raise UserError(
            f"unknown drafter.family '{family}' in {where}{did_you_mean(str(family), FAMILIES)}"
        )
    own = _names(FAMILIES[family])
    for name in options.keys() - own:
        if others := [n for n, other in FAMILIES.items() if name in _names(other)]:
            raise UserError(
                f"unknown key 'drafter.{name}' in {where}: it is an option of "
                f"{', '.join(others)}, and drafter.family is '{family}'"
            )
    return family, parse(FAMILIES[family].config, options, where, "drafter")


def _names(family: Family) -> set[str]:
    """The options of a family."""
    return {field.name for field in fields(family.config)}


def family_of(config: FamilyConfig) -> str:
    """The name of a configuration's family."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config)


def runs_target(config: FamilyConfig) -> bool:
    """Whether drafters of that configuration run layers of the target itself."""
    return isinstance(config, JumpConfig | SkipConfig)


def trained_families() -> list[str]:
    """Names of the families that learn."""
    return [n for n, family in FAMILIES.items() if not issubclass(family.config, UntrainedConfig)]


def untrained_drafter(config: UntrainedConfig, target: Target) -> Drafter:
    """The drafter of a family that has nothing to train, ready to draft."""
    return FAMILIES[family_of(config)].build(target, config, None)
