"""What a collection needs besides its recipe, and the processes that share it."""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import DistributedType, PartialState
from rich.console import Console

from ..configs.recipe import Recipe
from .prepare import Prepared, longest_conversation
from .target import Target, TargetInfo

# Processes wait for each other's batches, prompts and checksums, which take their time.
_WAIT = timedelta(days=30)


def start_processes(device: torch.device) -> PartialState:
    """The processes this one was launched among, or itself alone; to be called before all else.

    Each has a device of its own from then on. Called again, it gives what it gave before.
    """
    if PartialState._shared_state:
        return PartialState()
    on_cpu, launched = device.type == "cpu", "LOCAL_RANK" in os.environ
    wanted = {"FSDP": False, "DEEPSPEED": False}
    for name in wanted:
        wanted[name] = os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"
    if not (on_cpu and launched and any(wanted.values())):
        return PartialState(cpu=on_cpu, timeout=_WAIT)
    # Accelerate offers these two on accelerators alone, although both run on gloo: it must not be
    # told of the CPU, and takes FSDP to be meant only where it sees several devices.
    state = PartialState(backend="gloo", timeout=_WAIT)
    if wanted["FSDP"]:
        state.distributed_type = DistributedType.MULTI_GPU
    return state


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
