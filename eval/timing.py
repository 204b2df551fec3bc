"""How fast decoding is, measured: loops in turns, prompt by prompt, in one process.

A slow moment of the machine hits every loop, and what calibrates costs in between, too. Prefill is
timed apart from what follows, and the first token, which comes from it, is not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .draft import Clock, now
from .intervals import Interval, speedup_interval


@dataclass(frozen=True)
class Lap:
    """One prompt decoded one way: seconds of prefill and of all behind it, tokens produced there.

    The drafter's own prefill is part of the first.
    """

    prefill: float
    decode: float
    tokens: int


@dataclass(frozen=True)
class Timing:
    """Measured decode speed of one cell: by draft length a lap of every prompt, 0 is plain."""

    laps: dict[int, tuple[Lap, ...]]

    @property
    def prompts(self) -> int:
        return len(self.laps[0])

    @property
    def lengths(self) -> list[int]:
        """The draft lengths that were timed."""
        return [gamma for gamma in self.laps if gamma > 0]

    def tokens_per_s(self, num_draft_tokens: int) -> float:
        """Pooled over prompts, prefill apart; of plain decoding for 0."""
        seconds, tokens = self._arrays(num_draft_tokens)
        return float(tokens.sum() / seconds.sum())

    def speedup(self, num_draft_tokens: int) -> Interval:
        """Over plain decoding, paired by prompt."""
        return speedup_interval(*self._arrays(0), *self._arrays(num_draft_tokens))

    def prefill(self, num_draft_tokens: int) -> float:
        """Mean seconds of a prompt's prefill; of plain decoding for 0."""
        laps = self.laps[num_draft_tokens]
        return sum(lap.prefill for lap in laps) / len(laps)

    def _arrays(self, gamma: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        laps = self.laps[gamma]
        return np.array([lap.decode for lap in laps]), np.array([float(x.tokens) for x in laps])


def time_cell(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    settings: DecodeSettings,
    further: Sequence[int] = (),
    between: Callable[[], None] = lambda: None,
) -> Timing:
    """Time plain and speculative decoding of `requests` one by one, loops interleaved.

    `further` draft lengths are timed beside that of `settings`; `between` is called behind every
    prompt.
    """
    return time_groups(target, drafter, [[r] for r in requests], settings, further, between)


def time_groups(
    target: Target,
    drafter: Drafter,
    groups: Sequence[Sequence[Request]],
    settings: DecodeSettings,
    further: Sequence[int] = (),
    between: Callable[[], None] = lambda: None,
) -> Timing:
    """As `time_cell`, of requests that are decoded together: a lap of every group.

    A lap ends with the first of its replies, so that all of it is at the size of the group.
    """
    lengths = (0, *dict.fromkeys((settings.num_draft_tokens, *further)))
    laps: dict[int, list[Lap]] = {g: [] for g in lengths}
    for number, group in enumerate(groups):
        # Every other group runs the loops in the opposite order.
        for gamma in lengths if number % 2 == 0 else reversed(lengths):
            clock = Clock()
            used = drafter if gamma else None
            own = replace(settings, num_draft_tokens=gamma, together=True)
            outputs = decode(target, group, own, used, clock)
            tokens = sum(len(out.ids) - 1 for out in outputs)
            laps[gamma].append(Lap(clock.prefill, clock.decode, tokens))
        between()
    return Timing({g: tuple(own) for g, own in laps.items()})


def generate_ratio(target: Target, requests: Sequence[Request], tokens: int) -> Interval:
    """Our plain loop's tokens/s over those of transformers' `generate`, prefill included in both.

    Greedy, interleaved prompt by prompt, the first prompt untimed.
    """
    ours: list[float] = []
    theirs: list[float] = []
    counts: list[tuple[float, float]] = []
    for number, request in enumerate([requests[0], *requests]):
        greedy = Request(**{**request.__dict__, "law": Law(0.0)})
        start = now(target.device)
        mine = decode(target, [greedy], DecodeSettings(tokens, 0))[0]
        middle = now(target.device)
        ids = torch.tensor([request.ids], device=target.device)
        model: Any = target.model
        other = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=list(target.eos_ids) or None,
            pad_token_id=next(iter(target.eos_ids), 0),
        )
        end = now(target.device)
        if number:
            ours.append(middle - start)
            theirs.append(end - middle)
            counts.append((float(len(mine.ids)), float(other.shape[1] - ids.shape[1])))
    made = np.array(counts)
    return speedup_interval(np.array(theirs), made[:, 1], np.array(ours), made[:, 0])
