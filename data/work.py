"""What a collection needs besides its recipe, and the processes that share it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console

from ..configs.recipe import Recipe
from .prepare import Prepared, longest_conversation
from .target import Target, TargetInfo


@dataclass(frozen=True)
class Work:
    """What a collection needs besides its recipe."""

    recipe: Recipe
    target: Target | TargetInfo
    taps: tuple[int, ...]
    prepared: Prepared
    folder: Path
    console: Console
    ends: float | None = None
    """The time of `time.monotonic` after which no further batch is begun."""

    @property
    def limit(self) -> int:
        """Tokens of the longest conversation."""
        known = longest_conversation(self.target.max_positions, self.recipe.collect)
        return 1 << 30 if known is None else known


@dataclass(frozen=True)
class Processes:
    """The processes of `accelerate launch` that share the work; one where there is no launcher."""

    rank: int
    count: int
    _state: PartialState

    @classmethod
    def here(cls) -> "Processes":
        state = PartialState()
        return cls(state.process_index, state.num_processes, state)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        if self.count == 1:
            return flag
        found = torch.tensor([float(flag)], device=self._state.device)
        torch.distributed.all_reduce(found)
        return bool(found.item())
