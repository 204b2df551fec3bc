"""The kernels of chance on their real streams: chi-square tests, each with its p-value.

Enumeration puts a script in the place of the streams; this is what it leaves open. Seeds are fixed,
so every run finds the same p-values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..data.gather import Request
from ..data.rules import Rules
from ..data.warp import Law, log_probs
from .conformance import TOKENS, Bench, Case
from .decode import decode
from .draws import Draws, Streams
from .lossless import chi_square, plain_law

LEAST = 1e-3
"""Of the smallest p-value times their number; below it something is wrong."""

_ROWS = 256  # streams drawn from side by side, of seeds 0, 1, ...
_STEPS = 400  # draws from each of them
_WIDE_STEPS = 50  # of laws over many tokens
_SEEDS = 4096  # replies of the whole loop

LOOPS = (
    Case(("token", "static"), "sampled", Law(1.0), Rules(), (0,), "eagle3", _SEEDS),
    Case(("block", "confidence"), "sampled", Law(0.7, top_k=2), Rules(), (), "causal", _SEEDS),
    Case(("tree", "static"), "sampled", Law(1.0), Rules(), (), "eagle3 reduced", _SEEDS),
    Case(("sampled tree", "static"), "sampled", Law(1.2, top_p=0.7), Rules(), (), "eagle3", _SEEDS),
)
"""Ways of decoding whose replies are drawn on real streams."""

Make = Callable[[Sequence[int]], Draws]
"""Streams of these seeds."""


def _tail() -> Tensor:
    """A float32 softmax of many tokens, most of them very unlikely."""
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3
    return log_probs(logits, Law(1.0)).exp()


LAWS: dict[str, Callable[[], Tensor]] = {
    "even": lambda: torch.ones(8),
    "tiny and zero weights": lambda: torch.tensor([0.0, 1e-30, 0.3, 0.0, 1e-4, 0.6, 0.1, 0.0]),
    "huge weights": lambda: torch.tensor([1e300, 3e300, 0.0, 1e-300, 2e297], dtype=torch.float64),
    "float32 tail": _tail,
}
"""Unnormalised weights `[V]` to draw by."""
COINS = (0.0, 1e-3, 0.3, 0.5, 0.999, 1.0)


def real_streams(seeds: Sequence[int]) -> Draws:
    return Streams(seeds, torch.device("cpu"))


def bonferroni(p_values: Mapping[str, float]) -> float:
    """The smallest p-value corrected for how many there are; at most 1, and 0 if one is NaN."""
    return min(1.0, min(p if p > 0 else 0.0 for p in p_values.values()) * len(p_values))


def kernel_p_values(make: Make = real_streams) -> dict[str, float]:
    """p-values of the laws of draws and coins, and of their telling nothing of each other."""
    seeds = range(_ROWS)
    found = {}
    for name, weights in LAWS.items():
        law = weights()
        steps = _STEPS if len(law) < 100 else _WIDE_STEPS
        found[f"draws, {name}"] = _fit(_drawn(make(seeds), law, steps), law)
    found["coins of every chance, side by side"] = _coins(make(seeds))
    die = torch.ones(6)
    ids = _drawn(make(seeds), die, _STEPS)  # [ROWS, STEPS]
    pair = torch.ones(36)
    found["a draw and the next of its row"] = _fit(6 * ids[:, 0::2] + ids[:, 1::2], pair)
    found["a draw and its neighbour's"] = _fit(6 * ids[0::2] + ids[1::2], pair)
    found["a draw and the coin behind it"] = _draw_and_coin(make(seeds))
    return found


def loop_p_values(bench: Bench) -> dict[str, float]:
    """p-values of replies decoded on real streams, those of `LOOPS`, against the target's law."""
    found = {}
    for case in LOOPS:
        target = replace(bench.target, eos_ids=case.ends)
        request = Request("p", "", "", (2, 0, 1), case.law, 0, rules=case.rules)
        law = plain_law(target, request, TOKENS)
        requests = [replace(request, seed=seed) for seed in range(_SEEDS)]
        outputs = decode(target, requests, case.settings, bench.drafters[case.drafter])
        place = {ids: i for i, ids in enumerate(law)}
        impossible = len(law)
        seen = torch.tensor([place.get(tuple(o.ids), impossible) for o in outputs])
        found[f"replies, {case}"] = _fit(seen, torch.tensor([*law.values(), 0.0]))
    return found


def _fit(ids: Tensor, law: Tensor) -> float:
    return chi_square(ids.flatten().bincount(minlength=len(law)), law)


def _everywhere(draws: Draws, weights: Tensor) -> Tensor:
    """One draw a row, `[V] -> [ROWS]`."""
    return draws.categorical(weights.expand(_ROWS, -1), torch.ones(_ROWS, dtype=torch.bool))


def _drawn(draws: Draws, weights: Tensor, steps: int) -> Tensor:
    """Draws one after the other, `[V] -> [ROWS, steps]`."""
    return torch.stack([_everywhere(draws, weights) for _ in range(steps)], 1)


def _coins(draws: Draws) -> float:
    """Which of a round's coins came up, against the product of their chances."""
    p = torch.tensor(COINS, dtype=torch.float64)  # [n]
    bits = 2 ** torch.arange(len(COINS))
    sides = (torch.arange(2 ** len(COINS))[:, None] & bits) > 0  # [2^n, n]
    law = torch.where(sides, p, 1 - p).prod(1)  # [2^n]
    where = torch.ones(_ROWS, len(COINS), dtype=torch.bool)
    thrown = [draws.bernoulli(p.expand(_ROWS, -1), where) for _ in range(_STEPS)]
    return _fit((torch.stack(thrown).long() * bits).sum(-1), law)


def _draw_and_coin(draws: Draws) -> float:
    """Pairs of a draw and a coin that only some rows throw, as after a refused draft."""
    die, p = torch.ones(4), torch.full((_ROWS, 1), 0.3)
    pairs = []
    for step in range(_STEPS):
        ids = _everywhere(draws, die)
        where = (torch.arange(_ROWS) + step) % 3 > 0
        coin = draws.bernoulli(p, where[:, None])[:, 0]
        pairs.append((2 * ids + coin)[where])
    return _fit(torch.cat(pairs), torch.tensor([0.7, 0.3] * 4))
