"""Collecting against `model.generate`: tokens/s on real prompts, same machine, process and target.

    python scripts/bench_collect.py --prompts FILE.jsonl [FILE.jsonl ...] [--count 192]

Ours keeps the tapped states and the log-partition while it decodes and writes them to shards;
`generate` keeps nothing and runs on length-sorted batches, of each size given, on the model as
transformers loads it and with our linear layers. The second part feeds the replies back: the pass
that rebuilds all states, written to shards, against the bare forward over the same batches.
Results go to scripts/results/collect.json, with hashes of the prompts and none of their text.
"""

import argparse
import gc
import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.recipe import Recipe, ServingSection
from draftsmith.data.gather import GatherSettings, Request, answer, recompute_states
from draftsmith.data.plan import make_asks
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target
from draftsmith.data.turns import opening_requests
from draftsmith.data.warp import Law
from draftsmith.eval.provenance import processor
from draftsmith.scripts.pipeline import prepare_recipe
from draftsmith.scripts.results import save_result

TAPS = (1, 14, 28)
SETTINGS = {"store_dtype": "float32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL files")
    parser.add_argument("--count", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--sizes", type=int, nargs="+", default=(32, 64, 96))
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    domains = tuple(
        DomainSection(Path(p).stem, p, holdout=0.0, max_rows=args.count // len(args.prompts))
        for p in args.prompts
    )
    section = CollectSection(temperatures=(0.0,), max_new_tokens=args.tokens, turns="last")
    recipe = Recipe("bench", domains=domains, collect=section, serving=ServingSection())
    ours, stock = load_target(recipe.target), load_target(recipe.target, few_rows=False)
    prepared = prepare_recipe(recipe, ours, Console(stderr=True))
    asks = [a for a in make_asks(recipe, prepared) if a.law == Law(0.0)]
    requests = opening_requests(prepared, asks)
    loops: dict[str, Callable[[int], tuple[int, list[Record]]]] = {
        "ours": lambda size: _ours(ours, requests, args.tokens, size),
        "generate": lambda size: (_generate(stock, requests, args.tokens, size), []),
        "generate, our linear layers": lambda size: (
            _generate(ours, requests, args.tokens, size),
            [],
        ),
    }
    speeds: dict[str, dict[int, list[float]]] = {name: {} for name in loops}
    records: list[Record] = []
    for _ in range(args.repeats):
        for size in args.sizes:
            for name, loop in loops.items():
                gc.collect()
                start = time.perf_counter()
                made, kept = loop(size)
                seconds = time.perf_counter() - start
                records = kept or records
                speeds[name].setdefault(size, []).append(made / seconds)
                print(f"{name}, {size} rows: {made / seconds:.1f} tokens/s", flush=True)
    medians = {
        name: {size: round(median(values), 1) for size, values in by_size.items()}
        for name, by_size in speeds.items()
    }
    best = {name: max(by_size.values()) for name, by_size in medians.items()}
    replies = [len(r.reply) for r in records]
    result: dict[str, Any] = {
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "prompts": {
            "files": [Path(p).name for p in args.prompts],
            "count": len(requests),
            "ids_sha256": _hash(requests),
            "tokens": _spread([len(r.ids) for r in requests]),
        },
        "max_new_tokens": args.tokens,
        "replies": {
            "tokens": _spread(replies),
            "stopped": sum(r.finish == "stop" for r in records),
        },
        "tokens_per_s": medians,
        "ours_over_generate": round(best["ours"] / best["generate"], 2),
        "ours_over_generate_with_our_layers": round(
            best["ours"] / best["generate, our linear layers"], 2
        ),
        "extraction": _extraction(ours, records[:64]),
    }
    save_result("collect", result)


def _hash(requests: Sequence[Request]) -> str:
    return hashlib.sha256(" ".join(r.prompt_id for r in requests).encode()).hexdigest()[:16]


def _spread(lengths: Sequence[int]) -> dict[str, int]:
    ranked = sorted(lengths)
    return {"least": ranked[0], "median": ranked[len(ranked) // 2], "most": ranked[-1]}


def _ours(
    target: Target, requests: Sequence[Request], tokens: int, size: int
) -> tuple[int, list[Record]]:
    records = answer(target, requests, GatherSettings(tokens, size, TAPS, keep="hidden"))
    with tempfile.TemporaryDirectory() as folder:
        RecordStore.create(Path(folder), SETTINGS).add("bench", records)
    return sum(len(r.reply) for r in records), records


@torch.inference_mode()
def _generate(target: Target, requests: Sequence[Request], tokens: int, size: int) -> int:
    model: Any = target.model
    pad = target.eos_ids[0]
    made = 0
    for at in range(0, len(requests), size):  # they are sorted by length
        part = [list(r.ids) for r in requests[at : at + size]]
        longest = max(map(len, part))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False,
            eos_token_id=list(target.eos_ids), pad_token_id=pad,
        )  # fmt: skip
        for row in out[:, longest:].tolist():
            stop = next((i for i, t in enumerate(row) if t in target.eos_ids), len(row) - 1)
            made += stop + 1
    return made


@torch.inference_mode()
def _extraction(target: Target, records: Sequence[Record], size: int = 8) -> dict[str, Any]:
    """Tokens/s of rebuilding and writing states, and of the bare forward, in turns."""
    ranked = sorted(records, key=lambda r: len(r.ids))
    parts = [ranked[i : i + size] for i in range(0, len(ranked), size)]
    count = sum(len(r.ids) - 1 for r in ranked)
    seconds: dict[str, list[float]] = {"bare": [], "stored": []}
    for _ in range(3):
        start = time.perf_counter()
        for part in parts:
            _bare(target, part)
        seconds["bare"].append(time.perf_counter() - start)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            store = RecordStore.create(Path(folder), SETTINGS)
            for number, part in enumerate(parts):
                store.add(f"{number}", list(recompute_states(target, part, TAPS)))
        seconds["stored"].append(time.perf_counter() - start)
    speed = {name: count / median(own) for name, own in seconds.items()}
    return {
        "tokens": count,
        "tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "share_of_bare_forward": round(speed["stored"] / speed["bare"], 3),
    }


def _bare(target: Target, records: Sequence[Record]) -> None:
    """The model's own forward with its logits, which teacher forcing needs at every token."""
    longest = max(len(r.ids) for r in records) - 1
    ids = torch.zeros(len(records), longest, dtype=torch.long)
    mask = torch.zeros(len(records), longest, dtype=torch.long)
    for b, record in enumerate(records):
        ids[b, : len(record.ids) - 1] = record.ids[:-1]
        mask[b, : len(record.ids) - 1] = 1
    target.model(input_ids=ids, attention_mask=mask, use_cache=False)


if __name__ == "__main__":
    main()
