"""Preparation of many chat rows: seconds, memory, and the duplicates that were planted.

    python scripts/bench_prepare.py [TARGET] [--rows 10000 100000] [--workers N]

The rows are chats of one to three questions in words of the packaged domains, drawn so that each
word has followed the one before it there; every fiftieth repeats an earlier row exactly and every
fiftieth with one word exchanged. Each size is prepared in a process of its own, whose memory is
sampled. Results go to scripts/results/prepare.json.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.configs.collection import PACKAGED_DOMAINS, CollectSection, DomainSection
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.prepare import prepare
from draftsmith.data.sources import read_rows
from draftsmith.data.target import target_info
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result

EVERY = 50  # rows to one repeated exactly and one repeated nearly
QUIET = Console(quiet=True)
SYSTEMS = (None, "You are a helpful assistant.", "Answer briefly.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default=TargetSection().name)
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 100_000))
    parser.add_argument("--workers", type=int, default=None)
    args = parser.parse_args()
    # A process of its own for each size: what one has taken is no part of another's peak.
    context = multiprocessing.get_context("spawn")
    sizes = {}
    for count in args.rows:
        with ProcessPoolExecutor(1, context) as pool:
            sizes[str(count)] = pool.submit(measure, args.target, count, args.workers).result()
    result: dict[str, Any] = {
        "target": args.target,
        "machine": processor(),
        "workers": args.workers or "as many as pay",
        "near_duplicates": CollectSection().near_duplicates,
        "rows": sizes,
    }
    save_result("prepare", result)


def measure(target: str, count: int, workers: int | None) -> dict[str, Any]:
    """Prepare `count` rows and say how it went; memory in megabytes above that before it."""
    info = target_info(TargetSection(name=target))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DRAFTSMITH_CACHE"] = str(Path(folder) / "cache")
        file = Path(folder) / "rows.jsonl"
        planted = write_rows(file, count)
        sections = (DomainSection("synthetic", str(file), holdout=0.05),)
        collect = CollectSection(workers=workers)
        with Memory() as memory:
            start = time.perf_counter()
            prepared = prepare(
                sections, collect, info.tokenizer, info.eos_ids, info.max_positions, {}, QUIET
            )
            seconds = time.perf_counter() - start
        start = time.perf_counter()
        prepare(sections, collect, info.tokenizer, info.eos_ids, info.max_positions, {}, QUIET)
        again = time.perf_counter() - start
        reasons: Counter[str] = Counter()
        for row in prepared.counts["reasons"]:
            reasons[row["reason"]] += row["rows"]
        return {
            "seconds": round(seconds, 1),
            "rows_per_second": round(count / seconds),
            "seconds_when_found_again": round(again, 2),
            "tokens": sum(d["tokens"] for d in prepared.counts["domains"].values()),
            "file_megabytes": round(file.stat().st_size / 1e6, 1),
            "kept": prepared.counts["kept"],
            "rejected": dict(reasons),
            "planted": planted,
            "memory_growth_megabytes": memory.growth(),
        }


# ---- rows


def write_rows(file: Path, count: int) -> dict[str, int]:
    """Chats in JSON lines; returns how many repeat another one, by kind."""
    draw = random.Random(0)
    texts = sentences(draw)
    planted: Counter[str] = Counter()
    earlier: list[dict[str, Any]] = []
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            row = chat(draw, texts)
            kind = {1: "exact", 2: "near"}.get(number % EVERY)
            if kind and earlier:
                row = json.loads(json.dumps(draw.choice(earlier)))
                planted[kind] += 1
                if kind == "near":
                    exchange(row, draw, number)
            elif number % EVERY == 0:
                earlier.append(row)
            lines.write(json.dumps(row) + "\n")
    return dict(planted)


def sentences(draw: random.Random) -> Iterator[str]:
    """Endless texts of 30 to 120 words of the packaged domains."""
    follows: dict[str, list[str]] = defaultdict(list)
    for section in PACKAGED_DOMAINS:
        for _, row in read_rows(section):
            words = row["prompt"].split()
            for word, after in itertools.pairwise(words):
                follows[word].append(after)
    starts = list(follows)
    while True:
        words = [draw.choice(starts)]
        for _ in range(draw.randint(29, 119)):
            words.append(draw.choice(follows.get(words[-1]) or starts))
        yield " ".join(words)


def chat(draw: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    system = draw.choice(SYSTEMS)
    messages = [{"role": "system", "content": system}] if system else []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": next(texts)})
        messages.append({"role": "assistant", "content": next(texts)})
    return {"messages": messages}


def exchange(row: dict[str, Any], draw: random.Random, number: int) -> None:
    """Another word in the middle of the first question."""
    first = next(message for message in row["messages"] if message["role"] == "user")
    words = first["content"].split()
    words[draw.randrange(3, len(words) - 3)] = f"other{number}"
    first["content"] = " ".join(words)


# ---- memory


class Memory:
    """The peak of this process's memory in a `with` block, sampled; workers' are their own."""

    FIELDS = ("RssAnon", "VmRSS")

    def __init__(self) -> None:
        self.first = self._now()
        self.peak = dict(self.first)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def growth(self) -> dict[str, float]:
        """own: memory of the process itself; mapped too: with the pages of files it maps."""
        own, both = (round((self.peak[f] - self.first[f]) / 1e3, 1) for f in self.FIELDS)
        return {"own": own, "mapped_too": both}

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            now = self._now()
            self.peak = {field: max(self.peak[field], now[field]) for field in self.FIELDS}

    def _now(self) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        told = dict(line.split(":", 1) for line in lines)
        return {field: int(told[field].split()[0]) for field in self.FIELDS}


if __name__ == "__main__":
    main()
