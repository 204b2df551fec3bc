"""Decoding speed: our loops alone, and against transformers and economize. One process, in turns.

    python scripts/bench_decode.py --drafter HEAD --causal LM [--lookup FOLDER] [--sections ...]

HEAD is a trained EAGLE-3 folder, LM a trained standalone draft LM, both as `train` saves them.
Prompts are held-out ones of the packaged domains. Costs are calibrated on training ones, in turns
with what is timed. Each section is merged into scripts/results/decode.json as soon as it is done.
What is compared, and what could not be matched, is said in `bench_rivals`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from draftsmith.data.warp import Law
from draftsmith.eval.decode import DecodeSettings
from draftsmith.eval.speed import Calibration, Cost, TreeCost, measure_rows, measure_tree
from draftsmith.eval.tree import TreeShape
from draftsmith.scripts import bench_rivals
from draftsmith.scripts.bench_timing import (
    Loop,
    Sample,
    Setup,
    batches,
    calibration_loop,
    interleaved,
    median_interval,
    our_loop,
    per_round,
    prepare,
    rate,
    ratio,
    rounded,
    save_section,
    steady_loop,
    survival,
    under,
)

TREES = {"eagle3": TreeShape(3, 3, 7), "causal": TreeShape(2, 3, 7)}
CHAIN = 3
BATCHES = (1, 2, 4, 8, 16)
BATCHED_LENGTHS = (1, 2, 3)
ENOUGH_TOKENS = 8  # a shorter reply tells nothing of speed


def prediction(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Measured ÷ predicted speedup of chains and trees, and round time ÷ model time, at batch 1."""
    work = batches(setup.timed, 1, args.prompts)
    context = len(setup.calibration[0].ids) + setup.tokens // 2
    rows = measure_rows(setup.target, context, range(1, CHAIN + 2))
    cells = []
    for family, drafter in setup.drafters.items():
        if family not in TREES:
            continue
        tree = TREES[family]
        ways = {
            f"chain of {CHAIN}": DecodeSettings(setup.tokens, CHAIN, setup.verifier),
            f"tree of {tree.budget}": DecodeSettings(setup.tokens, tree.depth, tree=tree),
        }
        v = measure_tree(setup.target, context, tree.budget)
        for law in setup.laws:
            loops = {"plain": steady_loop(setup.target, DecodeSettings(1, 0), None)}
            calibrations = {}
            for name, how in ways.items():
                own = Calibration(
                    setup.target, drafter, law, replace(how, max_new_tokens=setup.tokens)
                )
                loops[name] = steady_loop(setup.target, how, drafter)
                loops[f"calibrating {name}"] = calibration_loop(own, setup.calibration)
                calibrations[name] = own
            asked = [under(part, law) for part in work]
            samples = interleaved(loops, asked, setup.tokens, args.repeats)
            for name, how in ways.items():
                found = calibrations[name]
                cost = found.cost(rows) if how.tree is None else found.tree_cost(v)
                cell = _compared(cost, how.num_draft_tokens, samples["plain"], samples[name])
                cells.append({"drafter": family, "law": law.label, "draft": name, **cell})
                print(f"prediction {family} {law.label} {name}: {_brief(cell)}", flush=True)
    return {"prompts": len(work), "repeats": args.repeats, "context": context, "cells": cells}


def _compared(
    cost: Cost | TreeCost, depth: int, plain: Sequence[Sample], fast: Sequence[Sample]
) -> dict[str, Any]:
    """One prompt of one repeat is one comparison; its prediction knows its own acceptance."""
    quotients = []
    for slow, quick in zip(plain, fast, strict=True):
        if min(slow.tokens, quick.tokens) >= ENOUGH_TOKENS:
            predicted = cost.speedup(survival(quick.rounds, depth))
            quotients.append(rate([quick]) / rate([slow]) / predicted)
    rounds = [r for s in fast for r in s.rounds]
    return {
        "measured": ratio(plain, fast),
        "predicted": cost.speedup(survival(rounds, depth)),
        "measured_over_predicted": median_interval(quotients),
        "tokens_per_round": per_round(fast),
        "survival": survival(rounds, depth),
        "round_over_forwards": _over_forwards(fast),
        "plain_round_over_forwards": _over_forwards(plain),
        "cost": asdict(cost),
    }


def _over_forwards(samples: Sequence[Sample]) -> float:
    return sum(s.whole for s in samples) / sum(s.forwards for s in samples)


def _brief(cell: dict[str, Any]) -> str:
    names = ("measured", "predicted", "measured_over_predicted", "round_over_forwards")
    return f"{rounded({name: cell[name] for name in names})}"


def batch(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Batches of 1 to 16 with the head: where does speculation stop paying?"""
    drafter = setup.drafters["eagle3"]
    cells: list[dict[str, Any]] = []
    for law in setup.laws:
        for size in BATCHES:
            work = batches(under(setup.timed, law), size, max(1, 4 // size))
            if not work:
                continue
            loops: dict[str, Loop] = {
                str(n): our_loop(setup.target, DecodeSettings(1, n, setup.verifier), drafter, False)
                for n in (0, *BATCHED_LENGTHS)
            }
            samples = interleaved(loops, work, setup.tokens, args.repeats)
            speedups = {n: ratio(samples["0"], found) for n, found in samples.items() if n != "0"}
            cell: dict[str, Any] = {
                "law": law.label,
                "batch": size,
                "batches": len(work),
                "tokens_per_s": {n: rate(found) for n, found in samples.items()},
                "speedup_by_num_draft_tokens": speedups,
                "best": max(i.value for i in speedups.values()),
            }
            cells.append(cell)
            print(f"batch {law.label} {size}: {rounded(cell['tokens_per_s'])}", flush=True)
    pays = {
        law.label: [c["batch"] for c in cells if c["law"] == law.label and c["best"] > 1]
        for law in setup.laws
    }
    return {"drafter": "eagle3", "repeats": args.repeats, "pays_at": pays, "cells": cells}


Section = Callable[[Setup, argparse.Namespace], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    "prediction": prediction,
    "plain": bench_rivals.plain,
    "batch": batch,
    "assisted": bench_rivals.assisted,
    "lookup": bench_rivals.lookup,
    "economize": bench_rivals.economize,
}
NEEDS = {
    "prediction": ("eagle3", "causal"),
    "batch": ("eagle3",),
    "assisted": ("causal",),
    "lookup": ("lookup",),
    "economize": ("eagle3", "causal"),
}
"""Sections that need a drafter, of one of these kinds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drafter", type=Path, help="folder of a trained EAGLE-3 head")
    parser.add_argument("--causal", type=Path, help="folder of a trained standalone draft LM")
    parser.add_argument("--lookup", type=Path, help="folder of a prompt-lookup drafter")
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--tokens", type=int, default=48, help="most new tokens of a reply")
    parser.add_argument("--prompts", type=int, default=6, help="timed one at a time in a section")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--verifier", default="token", help="token as rivals have, or block")
    parser.add_argument("--stock", action="store_true", help=bench_rivals.STOCK)
    parser.add_argument("--lean", action="store_true", help=bench_rivals.LEAN)
    args = parser.parse_args()
    logging.set_verbosity_error()
    given = {"eagle3": args.drafter, "causal": args.causal, "lookup": args.lookup}
    folders = {family: folder for family, folder in given.items() if folder is not None}
    wide = {"batch", "economize"} & set(args.sections)
    prompts = max(args.prompts, max(BATCHES) if wide else 0)
    laws = [Law(t) for t in args.temperatures]
    setup = prepare(folders, prompts, args.tokens, args.verifier, laws)
    for name in args.sections:
        if name in NEEDS and not set(NEEDS[name]) & set(folders):
            print(f"{name} is left out: no folder for it was given")
            continue
        start = time.perf_counter()
        section = SECTIONS[name](setup, args)
        seconds = time.perf_counter() - start
        save_section(setup, bench_rivals.saved_name(name, args), seconds, section)
        print(f"{name}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
