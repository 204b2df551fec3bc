"""What a recipe may say of an EAGLE-3 head."""

from dataclasses import dataclass
from typing import ClassVar

from ..configs.errors import UserError
from .eagle3_layer import Norms
from .vocab import check_floor, check_init

HEAD_OF_FACTORS = "drafter.head_rank makes a head that is trained: train_head cannot be off"


@dataclass(frozen=True)
class Eagle3Config:
    """What a recipe's `drafter:` section may say for `family: eagle3`."""

    taps: tuple[int, ...] | None = None
    """Target layers read (0-based outputs), three of them; null takes 1, the middle, last but 1."""
    draft_vocab_size: int | None = None
    """Tokens the head can propose, chosen by captured target mass; special tokens always in. null
    takes 8192, or all of them with head_rank."""
    domain_floor: float = 0.5
    """Share of the draft vocabulary dealt out equally to the domains' own most likely tokens."""
    init: str | None = None
    """`target` starts the layer with the weights of the target's last one, as null does where they
    fit; `random` from noise."""
    start: str | None = None
    """Goes on from a published head, its folder or Hub id, which decides what is left unset here;
    null begins anew."""
    hidden_size: int | None = None
    """Width of the head; null takes the target's. Of another width it has an embedding of its own,
    which begins as the target's in fewer directions."""
    layers: int | None = None
    """Decoder layers; null takes 1. The later ones read the state alone."""
    intermediate_size: int | None = None
    """Width inside the MLPs; null takes the target's, in proportion to hidden_size."""
    head_rank: int | None = None
    """Proposes all tokens by a head of two factors with so many numbers between; null takes one
    matrix over the draft vocabulary."""
    train_head: bool = True
    """Trains the head's rows; false keeps those it begins with, the target's own or start's."""
    train_embedding: bool = False
    """Trains the embedding of a head that has its own."""
    norm_before_residual: bool | None = None
    """Adds the attention to the normed state, rather than to the state; null does not."""
    norm_before_fc: bool | None = None
    """Norms the tapped states as one vector before they are fused; null does not."""
    fc_norm: bool | None = None
    """Norms each tapped state by itself before they are fused; null does not."""
    norm_output: bool | None = None
    """Gives the next step the normed output as its state (EAGLE-3.1); null gives it as it is."""

    reads_target: ClassVar[bool] = True
    most: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.taps is not None and len(self.taps) != 3:
            raise UserError(f"drafter.taps takes three layers, got {list(self.taps)}")
        for name in ("draft_vocab_size", "hidden_size", "layers", "intermediate_size", "head_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"drafter.{name} is {value}, must be above 0")
        check_floor(self.domain_floor)
        check_init(self.init, self.start)
        if self.norm_before_fc and self.fc_norm:
            raise UserError("drafter.norm_before_fc and drafter.fc_norm exclude each other")
        self._check_head()

    def _check_head(self) -> None:
        if self.head_rank is not None and self.draft_vocab_size is not None:
            raise UserError(
                f"drafter.head_rank {self.head_rank} proposes all tokens and "
                f"drafter.draft_vocab_size {self.draft_vocab_size} some; leave one of them out"
            )
        if self.head_rank is not None and not self.train_head:
            raise UserError(HEAD_OF_FACTORS)

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the draft vocabulary of a head that begins anew, None for all."""
        if self.head_rank is not None:
            return None
        return 8192 if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def norms(self) -> Norms:
        """Where a head that begins anew norms."""
        return Norms(
            bool(self.norm_before_residual),
            bool(self.norm_before_fc),
            bool(self.fc_norm),
            bool(self.norm_output),
        )

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers to tap of a target with `num_layers` layers."""
        # Engines capture a layer's output when the next layer reads it, so the very last layer's
        # output is out of their reach.
        last = num_layers - 2
        taps = self.taps or (min(1, last), num_layers // 2 - 1, last)
        if not all(0 <= t <= last for t in taps):
            raise UserError(f"drafter.taps {list(taps)} must lie between 0 and {last}")
        return taps
