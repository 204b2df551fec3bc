"""Collecting against `model.generate`: tokens/s on the demo's prompts, same process, interleaved.

    python scripts/bench_collect.py [--prompts 96] [--repeats 3]

Ours keeps the tapped states and the log-partition while it decodes; `generate` keeps nothing and
runs on length-sorted batches of each size given. Results go to scripts/results/collect.json.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from draftsmith.configs.load import load_recipe
from draftsmith.data.collect import plan_requests
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.prompts import load_domains
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result

SIZES = (16, 32, 48)
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    recipe = load_recipe("demo")
    target = load_target(recipe.target)
    requests, _ = plan_requests(recipe, target, load_domains(recipe.domains)[0])
    greedy = [r for r in requests if r.law == Law(0.0)]
    step = max(1, len(greedy) // args.prompts)
    chosen = greedy[::step][: args.prompts]
    speeds: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for size in SIZES:
            speeds.setdefault(f"ours {size}", []).append(_ours(target, chosen, size))
            speeds.setdefault(f"generate {size}", []).append(_generate(target, chosen, size))
    medians = {name: round(median(values), 1) for name, values in speeds.items()}
    best = {
        kind: max(v for name, v in medians.items() if name.startswith(kind))
        for kind in ("ours", "generate")
    }
    result: dict[str, Any] = {
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "prompts": len(chosen),
        "new_tokens": NEW_TOKENS,
        "tokens_per_s": medians,
        "best_ours_over_best_generate": round(best["ours"] / best["generate"], 2),
    }
    save_result("collect", result)


def _ours(target: Target, requests: Sequence[Request], size: int) -> float:
    settings = GatherSettings(NEW_TOKENS, size, (1, 14, 28), keep_states=True)
    start = time.perf_counter()
    records = answer(target, requests, settings)
    return sum(len(r.reply) for r in records) / (time.perf_counter() - start)


def _generate(target: Target, requests: Sequence[Request], size: int) -> float:
    model: Any = target.model
    pad = target.eos_ids[0]
    made = 0
    start = time.perf_counter()
    for at in range(0, len(requests), size):
        part = [list(r.ids) for r in requests[at : at + size]]
        longest = max(map(len, part))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=list(target.eos_ids), pad_token_id=pad,
        )  # fmt: skip
        for row in out[:, longest:].tolist():
            stop = next((i for i, t in enumerate(row) if t in target.eos_ids), len(row) - 1)
            made += stop + 1
    return made / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
