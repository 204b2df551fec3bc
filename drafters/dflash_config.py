"""What a recipe says of a block-parallel drafter."""

from dataclasses import dataclass
from typing import ClassVar

from ..configs.errors import UserError
from .vocab import check_floor, check_init

_LEAST_TAPS = 3


@dataclass(frozen=True)
class DFlashConfig:
    """What a recipe's `drafter:` section may say for `family: dflash`."""

    layers: int | None = None
    """Draft layers; null takes 2."""
    block_size: int | None = None
    """Places of a block, which drafts one token less; null takes 4."""
    taps: tuple[int, ...] | None = None
    """Target layers read (0-based outputs); null spreads one for each draft layer, three at least,
    evenly from the second layer to the last but two."""
    mask_token_id: int | None = None
    """Token that stands where one is to be drafted; null takes a special one that text has not."""
    intermediate_size: int | None = None
    """Width of the draft layers' MLPs; null takes the target's."""
    draft_vocab_size: int | None = None
    """Gives the drafter a trained head of its own with that many tokens, which of the engines vLLM
    alone reads; null takes the target's whole head."""
    domain_floor: float = 0.5
    """Share of the draft vocabulary dealt out equally to the domains' own most likely tokens."""
    sequential: bool | None = None
    """Corrects each place by the token drafted before it, in our own loop only; null does not."""
    init: str | None = None
    """`target` starts the layers from the target's last ones, as null does; `random` from noise."""
    start: str | None = None
    """Goes on from a published drafter, its folder or Hub id, which decides what is left unset
    here; null begins anew."""

    reads_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        least = {"layers": 1, "block_size": 2, "intermediate_size": 1, "draft_vocab_size": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UserError(f"drafter.{name} is {value}, must be {low} or more")
        if self.taps is not None and (not self.taps or len(set(self.taps)) != len(self.taps)):
            raise UserError(f"drafter.taps takes different layers, got {list(self.taps)}")
        check_floor(self.domain_floor)
        check_init(self.init, self.start)

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the draft vocabulary."""
        return self.draft_vocab_size

    @property
    def most(self) -> int | None:
        """Tokens drafted in a round; None where `start` decides."""
        if self.block_size is None and self.start is not None:
            return None
        return self.resolved_block_size - 1

    @property
    def resolved_layers(self) -> int:
        """Draft layers of a drafter that begins anew."""
        return self.layers or 2

    @property
    def resolved_block_size(self) -> int:
        """Places of a block of a drafter that begins anew."""
        return self.block_size or 4

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers to tap of a target with `num_layers` layers."""
        # Engines capture a layer's output when the next layer reads it, so the very last layer's
        # output is out of their reach.
        last = num_layers - 2
        if last < 0:
            raise UserError(
                "drafter.family 'dflash' reads layers before the target's last one, and this one "
                f"has {num_layers}; take another family"
            )
        taps = self.taps
        if taps is None:
            count = max(_LEAST_TAPS, self.resolved_layers)
            first = min(1, last)
            step = max(0, num_layers - 3 - first) / (count - 1)
            taps = tuple(sorted({round(first + i * step) for i in range(count)}))
        if not all(0 <= t <= last for t in taps):
            raise UserError(f"drafter.taps {list(taps)} must lie between 0 and {last}")
        return taps
