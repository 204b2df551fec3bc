"""What the decoding benchmarks share: prompts, drafters, loops timed in turns, saved sections."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

from draftsmith.configs.load import load_recipe
from draftsmith.data.gather import Request
from draftsmith.data.linear import speed_up_few_rows
from draftsmith.data.plan import make_asks
from draftsmith.data.target import Target, load_target
from draftsmith.data.turns import opening_requests
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.draft import Clock
from draftsmith.eval.intervals import Interval, speedup_interval
from draftsmith.eval.provenance import processor
from draftsmith.eval.speed import Calibration
from draftsmith.scripts.pipeline import prepare_recipe
from draftsmith.scripts.results import FOLDER, save_result

NAME = "decode"
WARM_UP_TOKENS = 6
RESAMPLES = 4000


@dataclass(frozen=True)
class Setup:
    """One process's models and prompts. folders: where each drafter was loaded from."""

    target: Target
    drafters: dict[str, Drafter]
    folders: dict[str, Path]
    timed: list[Request]
    calibration: list[Request]
    tokens: int
    verifier: str
    laws: tuple[Law, ...]


@dataclass(frozen=True)
class Sample:
    """One timed call of a loop. rounds: as in `Output`.

    whole, forwards: seconds behind prefill in all, and of them inside models.
    """

    seconds: float
    tokens: float
    whole: float = 0.0
    forwards: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)


Loop = Callable[[Sequence[Request], int], Sample]
"""`loop(requests of one batch, most new tokens)`."""


def prepare(
    folders: dict[str, Path],
    prompts: int,
    tokens: int,
    verifier: str,
    laws: Sequence[Law],
) -> Setup:
    """Load everything; of each domain the held-out prompts with replies long enough come first.

    Otherwise the order is that of their ids, which are hashes. Domains take turns.
    """
    recipe = load_recipe("demo")
    target = load_target(recipe.target)
    prepared = prepare_recipe(recipe, target, Console(stderr=True))
    greedy = opening_requests(
        prepared, [a for a in make_asks(recipe, prepared) if a.law == Law(0.0)]
    )
    held_out = in_turns([r for r in greedy if r.split == "heldout"])[: 2 * prompts]
    plain = decode(target, held_out, DecodeSettings(tokens, 0))  # warms up, too
    lengths = {r.prompt_id: len(o.ids) for r, o in zip(held_out, plain, strict=True)}
    held_out.sort(key=lambda r: (-lengths[r.prompt_id], r.prompt_id))
    drafters = {name: load_drafter(folder, target) for name, folder in folders.items()}
    for drafter in drafters.values():
        assert isinstance(drafter, torch.nn.Module)
        speed_up_few_rows(drafter)
    training = in_turns([r for r in greedy if r.split == "train"])
    timed = in_turns(held_out[:prompts], sort=False)
    return Setup(target, drafters, folders, timed, training[:8], tokens, verifier, tuple(laws))


def in_turns(requests: Sequence[Request], sort: bool = True) -> list[Request]:
    """One of each domain after the other, within a domain by id or as they come."""
    ranked = sorted(requests, key=lambda r: r.prompt_id) if sort else list(requests)
    seen: dict[str, int] = {}
    place = []
    for request in ranked:
        place.append((seen.get(request.domain, 0), request.domain))
        seen[request.domain] = seen.get(request.domain, 0) + 1
    return [r for _, r in sorted(zip(place, ranked, strict=True), key=lambda pair: pair[0])]


def under(requests: Sequence[Request], law: Law) -> list[Request]:
    return [replace(r, law=law) for r in requests]


def batches(requests: Sequence[Request], size: int, most: int) -> list[list[Request]]:
    """Up to `most` whole batches of `size` requests."""
    starts = range(0, len(requests) - size + 1, size)
    return [list(requests[at : at + size]) for at in starts][:most]


# ---- loops


def our_loop(
    target: Target, settings: DecodeSettings, drafter: Drafter | None, prefill: bool
) -> Loop:
    """Our loop; without `prefill`, only what follows it is timed and counted."""

    def run(requests: Sequence[Request], tokens: int) -> Sample:
        clock = Clock()
        start = time.perf_counter()
        own = replace(settings, max_new_tokens=tokens)
        outputs = decode(target, requests, own, drafter, clock)
        whole = time.perf_counter() - start
        return Sample(
            seconds=whole if prefill else clock.decode,
            tokens=float(sum(len(o.ids) - (not prefill) for o in outputs)),
            whole=clock.decode,
            forwards=clock.decode - clock.outside,
            rounds=[r for o in outputs for r in o.rounds],
            ids=[o.ids for o in outputs],
        )

    return run


def steady_loop(target: Target, settings: DecodeSettings, drafter: Drafter | None) -> Loop:
    """Our loop on one prompt; only rounds that had room for a whole draft are timed and counted.

    Drafts are cut near the end of a reply, which the formulas of speed know nothing of. The last
    round is left out as well: an end token may cut what it emits.
    """

    def run(requests: Sequence[Request], tokens: int) -> Sample:
        (request,) = requests
        clock, marks = Clock(), list[tuple[float, int]]()

        def emitted(place: int, ids: list[int]) -> None:
            marks.append((time.perf_counter(), len(ids)))

        own = replace(settings, max_new_tokens=tokens)
        (output,) = decode(target, [request], own, drafter, clock, emitted)
        rounds = steady_rounds([n for _, n in marks], tokens, settings.num_draft_tokens)
        return Sample(
            seconds=marks[rounds][0] - marks[0][0],
            tokens=float(sum(n for _, n in marks[1 : rounds + 1])),
            whole=clock.decode,
            forwards=clock.decode - clock.outside,
            rounds=output.rounds[:rounds],
            ids=[output.ids],
        )

    return run


def calibration_loop(calibration: Calibration, requests: Sequence[Request]) -> Loop:
    """One of the calibration prompts after the other, whatever is timed beside it."""
    turns = cycle(requests)

    def run(asked: Sequence[Request], tokens: int) -> Sample:
        calibration.run(next(turns), counted=tokens != WARM_UP_TOKENS)
        return Sample(seconds=0.0, tokens=0.0)

    return run


def steady_rounds(emitted: Sequence[int], budget: int, depth: int) -> int:
    """How many rounds had room for a whole draft, the last round aside.

    `emitted` are the tokens of prefill (one) and of each round; a round may draft one token less
    than are left of the `budget`.
    """
    before = np.cumsum([0, *emitted])[1:-1]  # of each round
    return min(int((budget - before - 1 >= depth).sum()), max(0, len(emitted) - 2))


def interleaved(
    loops: Mapping[str, Loop], work: Sequence[Sequence[Request]], tokens: int, repeats: int = 1
) -> dict[str, list[Sample]]:
    """Every loop on every batch, in opposite order every other time, after a short warm-up."""
    for loop in loops.values():
        loop(work[0], WARM_UP_TOKENS)
    samples: dict[str, list[Sample]] = {name: [] for name in loops}
    for number, requests in enumerate(list(work) * repeats):
        for name in loops if number % 2 == 0 else reversed(list(loops)):
            samples[name].append(loops[name](requests, tokens))
    return samples


# ---- figures


def rate(samples: Sequence[Sample]) -> float:
    """Tokens/s, pooled."""
    return sum(s.tokens for s in samples) / sum(s.seconds for s in samples)


def ratio(slow: Sequence[Sample], fast: Sequence[Sample]) -> Interval:
    """Pooled tokens/s of `fast` over those of `slow`, paired by batch."""
    columns = [np.array([s.seconds for s in slow]), np.array([s.tokens for s in slow])]
    columns += [np.array([s.seconds for s in fast]), np.array([s.tokens for s in fast])]
    return speedup_interval(*columns)


def survival(rounds: Sequence[tuple[int, int]], most: int) -> list[float]:
    """S_k = P(A >= k) for k = 1..`most` in rounds that had room for it; of trees, by depth.

    A tree may have spent its nodes above its deepest depth, and still was a whole one.
    """
    count = max(1, len(rounds))
    return [sum(a >= k for _, a in rounds) / count for k in range(1, most + 1)]


def median_interval(values: Sequence[float]) -> Interval:
    """The median with its percentile bootstrap interval over the values."""
    array = np.array(values)
    if len(array) < 2:
        return Interval(float(array[0]), None, None)
    index = np.random.default_rng(0).integers(0, len(array), (RESAMPLES, len(array)))
    low, high = np.quantile(np.median(array[index], axis=1), [0.025, 0.975])
    return Interval(float(np.median(array)), float(low), float(high))


def per_round(samples: Sequence[Sample]) -> float:
    """Tokens of a round and row: the accepted ones and one more."""
    rounds = [r for s in samples for r in s.rounds]
    return 1 + sum(a for _, a in rounds) / max(1, len(rounds))


def rounded(value: Any, digits: int = 3) -> Any:
    """The same JSON with its floats rounded."""
    if isinstance(value, Interval):
        return rounded(value.to_dict(), digits)
    if isinstance(value, dict):
        return {k: rounded(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v, digits) for v in value]
    return round(value, digits) if isinstance(value, float) else value


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The least and the median of the rows' ratios."""
    values = [row["ratio"].value for row in rows]
    return {"cells": len(values), "lowest": min(values), "median": median(values)}


# ---- saved sections


def merged(saved: Mapping[str, Any], name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The saved result with one section put in or replaced, the others as they were."""
    sections = {**saved.get("sections", {}), name: dict(section)}
    return {"sections": {key: sections[key] for key in sorted(sections)}}


def save_section(setup: Setup, name: str, seconds: float, section: Mapping[str, Any]) -> None:
    """Write one section into `results/decode.json`, with where and with what it was measured."""
    path = FOLDER / f"{NAME}.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    drafters = {
        family: {"parameters": sum(p.numel() for p in drafter.trainable())}
        for family, drafter in setup.drafters.items()
    }
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": setup.target.provenance["name"],
        "dtype": str(setup.target.dtype).removeprefix("torch."),
        "drafters": drafters,
        "new_tokens": setup.tokens,
        "verifier": setup.verifier,
        "seconds": round(seconds),
    }
    save_result(NAME, merged(saved, name, rounded({**about, **section})), quiet=True)
