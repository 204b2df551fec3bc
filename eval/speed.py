"""What rounds cost on this machine, the speedup that follows, and the speedup that is measured.

Costs are calibrated on training prompts, never on the timed ones. Timings are interleaved prompt by
prompt in one process after a warm-up, so that a slow moment of the machine hits every loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from ..data.cache import Branch
from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .draft import Clock, now
from .intervals import Interval, speedup_interval
from .tree import TreeShape

_REPEATS = 9


@dataclass(frozen=True)
class Cost:
    """Costs in units of one plain target pass, under one law.

    v[n]: a target pass over n rows, in a round; c_first, c: first and later draft steps; o: the
    rest of a speculative round; o_plain: the rest of a plain step; seconds: one target pass over
    one row. Passes behind a draft cost more than the same ones back to back, as the draft has
    pushed the target's weights out of the caches: v is what they cost in rounds.
    """

    seconds: float
    v: dict[int, float]
    c_first: float
    c: float
    o: float
    o_plain: float

    def speedup(self, survival: Sequence[float]) -> float:
        """Predicted speedup of drafting `len(survival)` tokens with these S_k.

        (1 + Σ S_k)(1 + o_plain) / (c_first + (γ-1)·c + v(γ+1) + o).
        """
        gamma = len(survival)
        cost = self.c_first + (gamma - 1) * self.c + self.v[gamma + 1] + self.o
        return (1 + sum(survival)) * (1 + self.o_plain) / cost

    def speedup_of(self, rounds: Sequence[tuple[int, int]]) -> float:
        """Predicted speedup of rounds (drafted, accepted) of any lengths."""
        tokens = sum(accepted + 1 for _, accepted in rounds)
        drafting = [drafted for drafted, _ in rounds if drafted > 0]
        passes = sum(self.v[drafted + 1] for drafted, _ in rounds) + self.o * len(rounds)
        steps = self.c_first * len(drafting) + self.c * sum(d - 1 for d in drafting)
        return tokens * (1 + self.o_plain) / (passes + steps)


@dataclass(frozen=True)
class TreeCost:
    """Costs of rounds that draft one shape of tree, in units of one plain target pass.

    draft: all draft steps of a round, Σ_d c(w_d); v: a target pass over the tree and its root; the
    others as in `Cost`.
    """

    seconds: float
    draft: float
    v: float
    o: float
    o_plain: float

    def speedup(self, reach: Sequence[float]) -> float:
        """Predicted speedup where `reach[d-1]` is P(accepted depth >= d).

        (1 + Σ reach)(1 + o_plain) / (draft + v + o).
        """
        return (1 + sum(reach)) * (1 + self.o_plain) / (self.draft + self.v + self.o)


def measure_rows(target: Target, context: int, rows: Sequence[int]) -> dict[int, float]:
    """Seconds of one target pass (head included) over n rows behind `context` tokens.

    Medians over interleaved repeats.
    """
    return _measure(target, context, dict.fromkeys(rows))


def measure_tree(target: Target, context: int, nodes: int) -> float:
    """v(1+N): a target pass over a tree of N `nodes` and its root, in passes over one row.

    Medians over interleaved repeats. Nodes follow each other in pairs; the form matters little.
    """
    parents = torch.arange(-1, nodes, device=target.device).div(2, rounding_mode="floor")  # [1+N]
    seconds = _measure(target, context, {1: None, 1 + nodes: Branch([context], parents[None])})
    return seconds[1 + nodes] / seconds[1]


@torch.inference_mode()
def _measure(target: Target, context: int, passes: dict[int, Branch | None]) -> dict[int, float]:
    """Median seconds of passes over n new tokens, as nodes of the tree given with n if any."""
    cache = target.new_cache(1, context + max(passes))
    ids = torch.arange(context, device=target.device)[None] % target.vocab_size
    target.forward(ids, cache)
    cache.advance([context])
    times: dict[int, list[float]] = {n: [] for n in passes}
    for repeat in range(_REPEATS + 1):
        for n, branch in passes.items():
            block = torch.arange(n, device=target.device)[None]
            start = now(target.device)
            target.logits(target.forward(block, cache, branch=branch).hidden)
            spent = now(target.device) - start
            if repeat:  # the first pass warms up
                times[n].append(spent)
    return {n: median(t) for n, t in times.items()}


@dataclass
class Calibration:
    """Clocks of plain and of speculative decoding of prompts other than the timed ones.

    Figures are means over all that was run. Run in turns with what is timed, it meets the same slow
    moments of the machine.
    """

    target: Target
    drafter: Drafter
    law: Law
    settings: DecodeSettings
    plain: Clock = field(default_factory=Clock)
    fast: Clock = field(default_factory=Clock)

    def run(self, request: Request, counted: bool = True) -> None:
        """Decode `request` under the law both ways; the first time is best not `counted`."""
        clocks = (self.plain, self.fast) if counted else (Clock(), Clock())
        asked = replace(request, law=self.law)
        plainly = replace(self.settings, num_draft_tokens=0)
        decode(self.target, [asked], plainly, clock=clocks[0])
        decode(self.target, [asked], self.settings, self.drafter, clocks[1])

    def cost(self, rows: dict[int, float]) -> Cost:
        """Costs of chains. `rows` are `measure_rows`, back to back: how passes compare with each
        other. How much dearer they are in rounds is measured in the rounds."""
        plain, fast = self.plain, self.fast
        unit = plain.target / max(1, plain.rounds)
        behind = [(n, spent) for n, spent in fast.passes if n > 1]  # a draft
        alone = sum(rows[n] / rows[1] for n, _ in behind) * unit
        dearer = sum(spent for _, spent in behind) / alone if alone else 1.0
        return Cost(
            seconds=unit,
            v={n: seconds / rows[1] * (dearer if n > 1 else 1.0) for n, seconds in rows.items()},
            c_first=fast.draft_first / max(1, fast.drafting_rounds) / unit,
            c=fast.draft_later / max(1, fast.later_steps) / unit,
            o=fast.outside / max(1, fast.rounds) / unit,
            o_plain=plain.outside / max(1, plain.rounds) / unit,
        )

    def tree_cost(self, v: float) -> TreeCost:
        """Costs of the settings' tree. Trees near the end of a reply are cut, so passes are those
        over whole trees (`v`, which is `measure_tree` of their size, where there was none), and the
        steps are those of a whole tree: one first step, and one more for each further depth at the
        mean cost of all later ones."""
        plain, fast, tree = self.plain, self.fast, self.settings.tree
        assert tree is not None
        unit = plain.target / max(1, plain.rounds)
        depth = tree.depth if isinstance(tree, TreeShape) else len(tree)
        first = fast.draft_first / max(1, fast.drafting_rounds)
        later = fast.draft_later / max(1, fast.later_steps)
        whole = [spent for n, spent in fast.passes if n == 1 + self.settings.nodes]
        return TreeCost(
            seconds=unit,
            draft=(first + (depth - 1) * later) / unit,
            v=sum(whole) / len(whole) / unit if whole else v,
            o=fast.outside / max(1, fast.rounds) / unit,
            o_plain=plain.outside / max(1, plain.rounds) / unit,
        )


def calibrate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    law: Law,
    rows: dict[int, float],
    settings: DecodeSettings,
) -> Cost:
    """`Calibration.cost` on `requests`, of drafts long enough to tell first from later steps."""
    gamma = max(2, settings.num_draft_tokens)
    return _calibrated(
        Calibration(target, drafter, law, replace(settings, num_draft_tokens=gamma)), requests
    ).cost(rows)


def calibrate_tree(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    law: Law,
    v: float,
    settings: DecodeSettings,
) -> TreeCost:
    """`Calibration.tree_cost` on `requests`."""
    return _calibrated(Calibration(target, drafter, law, settings), requests).tree_cost(v)


def _calibrated(calibration: Calibration, requests: Sequence[Request]) -> Calibration:
    calibration.run(requests[0], counted=False)
    for request in requests:
        calibration.run(request)
    return calibration


@dataclass(frozen=True)
class Timing:
    """Measured decode speed of one cell, prefill apart, for each draft length tried."""

    prompts: int
    plain_tokens_per_s: float
    fast_tokens_per_s: dict[int, float]
    speedup: dict[int, Interval]


def time_cell(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    settings: DecodeSettings,
    further: Sequence[int] = (),
) -> Timing:
    """Time plain and speculative decoding of `requests` one by one, loops interleaved.

    `further` draft lengths are timed beside that of `settings`.
    """
    lengths = (0, *dict.fromkeys((settings.num_draft_tokens, *further)))
    seconds: dict[int, list[float]] = {g: [] for g in lengths}
    produced: dict[int, list[float]] = {g: [] for g in lengths}
    for number, request in enumerate(requests):
        # Every other prompt runs the loops in the opposite order.
        for gamma in lengths if number % 2 == 0 else reversed(lengths):
            clock = Clock()
            used = drafter if gamma else None
            own = replace(settings, num_draft_tokens=gamma)
            out = decode(target, [request], own, used, clock)[0]
            seconds[gamma].append(clock.decode)
            produced[gamma].append(len(out.ids) - 1.0)  # the first token comes from prefill
    arrays = {g: (np.array(seconds[g]), np.array(produced[g])) for g in lengths}
    speeds = {g: float(n.sum() / s.sum()) for g, (s, n) in arrays.items()}
    return Timing(
        prompts=len(requests),
        plain_tokens_per_s=speeds[0],
        fast_tokens_per_s={g: speeds[g] for g in lengths[1:]},
        speedup={g: speedup_interval(*arrays[0], *arrays[g]) for g in lengths[1:]},
    )


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
