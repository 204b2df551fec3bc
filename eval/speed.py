"""What rounds cost on this machine, and the speedup that follows.

Costs are calibrated on training prompts, never on those whose speed is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from ..data.cache import Branch
from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .draft import Clock, now
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


def measure_rows(
    target: Target, context: int, rows: Sequence[int], batch: int = 1
) -> dict[int, float]:
    """Seconds of one target pass (head included) over n rows of each of `batch` conversations,
    behind `context` tokens.

    Medians over interleaved repeats.
    """
    return _measure(target, context, dict.fromkeys(rows), batch)


def measure_tree(target: Target, context: int, nodes: int) -> float:
    """v(1+N): a target pass over a tree of N `nodes` and its root, in passes over one row.

    Medians over interleaved repeats. Nodes follow each other in pairs; the form matters little.
    """
    parents = torch.arange(-1, nodes, device=target.device).div(2, rounding_mode="floor")  # [1+N]
    seconds = _measure(target, context, {1: None, 1 + nodes: Branch([context], parents[None])})
    return seconds[1 + nodes] / seconds[1]


@torch.inference_mode()
def _measure(
    target: Target, context: int, passes: dict[int, Branch | None], batch: int = 1
) -> dict[int, float]:
    """Median seconds of passes over n new tokens, as nodes of the tree given with n if any."""
    cache = target.new_cache(batch, context + max(passes))
    ids = torch.arange(context, device=target.device) % target.vocab_size
    target.forward(ids.expand(batch, -1), cache)  # [B, context]
    cache.advance([context] * batch)
    times: dict[int, list[float]] = {n: [] for n in passes}
    for repeat in range(_REPEATS + 1):
        for n, branch in passes.items():
            block = torch.arange(n, device=target.device).expand(batch, -1)  # [B, n]
            start = now(target.device)
            target.logits(target.forward(block, cache, branch=branch).hidden)
            spent = now(target.device) - start
            if repeat:  # the first pass warms up
                times[n].append(spent)
    return {n: median(t) for n, t in times.items()}


def limit_of(drafter: Drafter, most: int) -> int:
    """The longest draft of up to `most` tokens that the drafter makes."""
    return most if drafter.max_draft_tokens is None else min(most, drafter.max_draft_tokens)


def long_enough(settings: DecodeSettings, drafter: Drafter) -> DecodeSettings:
    """With drafts that tell a first step from later ones, if the drafter makes such."""
    gamma = max(settings.num_draft_tokens, limit_of(drafter, 2))
    return replace(settings, num_draft_tokens=gamma)


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

    def run(self, *requests: Request, counted: bool = True) -> None:
        """Decode `requests` together under the law, both ways, while none of them has ended.

        The first time is best not `counted`. A calibration is of one number of requests.
        """
        clocks = (self.plain, self.fast) if counted else (Clock(), Clock())
        asked = [replace(request, law=self.law) for request in requests]
        how = replace(self.settings, together=True)
        decode(self.target, asked, replace(how, num_draft_tokens=0), clock=clocks[0])
        decode(self.target, asked, how, self.drafter, clocks[1])

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
    """`Calibration.cost` on `requests`, with drafts `long_enough`."""
    how = long_enough(settings, drafter)
    return _calibrated(Calibration(target, drafter, law, how), requests).cost(rows)


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
