"""Self-speculation: the target drafts for itself with some of its layers left out.

Draft & Verify (Zhang et al., 2023), by whole layers that the recipe names; the paper searches which
attention and MLP blocks to leave out. Nothing is trained and no weight is held twice: the draft is
the target's own modules, in a body that lists fewer layers. Only its cache is its own.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.dense import dense_weight
from ..data.target import Target
from .base import Step, TrainBatch
from .cached import CachedText, unroll_text
from .span import shorter_body


@dataclass(frozen=True)
class SkipConfig:
    """What a recipe's `drafter:` section may say for `family: skip`."""

    layers: tuple[int, ...] | None = None
    """Target layers that are kept, ascending; null leaves out the middle fifth."""

    reads_target: ClassVar[bool] = False

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """It reads no states of the target, but runs it."""
        return ()

    def resolved_layers(self, num_layers: int) -> tuple[int, ...]:
        """The kept layers of a target with `num_layers` layers."""
        layers = self.layers
        if layers is None:
            out = min(num_layers - 1, max(1, num_layers // 5))
            first = (num_layers - out) // 2
            layers = tuple(i for i in range(num_layers) if not first <= i < first + out)
        if not layers or list(layers) != sorted({i for i in layers if 0 <= i < num_layers}):
            raise UserError(
                f"drafter.layers {list(layers)} must name layers between 0 and {num_layers - 1}, "
                "ascending, each once"
            )
        return layers


class SkipDrafter(nn.Module):
    """The target's own modules, some layers apart, behind the drafter contract.

    They belong to the target: they are no submodules of this one, which has no parameters, and
    nothing that is done to it (`train`, `double`, `to`) touches them.
    """

    family = "skip"
    taps: tuple[int, ...] = ()
    one_pass = True
    may_abstain = False
    layout: str | None = None
    shared: tuple[str, ...] = ()
    unserved: str | None = None
    max_draft_tokens: int | None = None
    draft_ids: Tensor | None = None

    def __init__(self, part: Target, config: SkipConfig):
        super().__init__()
        self.part, self.config = part, config

    @classmethod
    def from_target(
        cls, target: Target, config: SkipConfig, draft_ids: Tensor | None = None
    ) -> "SkipDrafter":
        """The target with another body: its passes, its head and its caches serve as they are.

        Caches have the whole target's layers, because attention writes where it stands among them.
        """
        layers = config.resolved_layers(target.num_layers)
        part = copy.copy(target)
        part.body = shorter_body(target, layers)
        return cls(part, replace(config, layers=layers)).eval()

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self.config)

    def trainable(self) -> list[nn.Parameter]:
        return []

    def checkpoint(self, on: bool) -> None:
        """There is no gradient."""

    @property
    def max_positions(self) -> int | None:
        return self.part.max_positions

    # ---- scoring

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        return unroll_text(self.part.body, batch)

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.part.logits(hidden)

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return hidden

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return dense_weight(self.part.head), getattr(self.part.head, "bias", None)

    def finish_logits(self, logits: Tensor) -> Tensor:
        return self.part.finish_logits(logits)

    # ---- decoding

    def start(self, rows: int, capacity: int) -> CachedText:
        return CachedText.empty(self._forward, self.part.new_cache(rows, capacity))

    def prefill(self, state: CachedText, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        state.prefill(ids, lengths)

    def commit(
        self,
        state: CachedText,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        state.commit(tokens, counts, path)

    def first(self, state: CachedText) -> Tensor:
        return self.head(state.first())

    def extend(self, state: CachedText, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.head(state.extend(tokens, parents))

    def _forward(self, ids: Tensor, cache: SlabCache, branch: Branch | None) -> Tensor:
        return self.part.forward(ids, cache, branch=branch).hidden
