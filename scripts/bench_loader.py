"""Reading records while training: time waiting for batches, and shards against Arrow files.

    python scripts/bench_loader.py [--records 300] [--steps 300] [--rows 100000]

Synthetic records of SmolLM2-135M's width with three tapped layers are written to shards as
`collect` writes them, and to Arrow files as `datasets` does. Batches of the default recipe are then
loaded for steps that really compute: the first length is that of an optimiser step of an EAGLE-3
head on this machine, the others stand for faster ones. Results go to scripts/results/loader.json.
"""

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from draftsmith.configs.load import load_recipe
from draftsmith.configs.training import TrainSection
from draftsmith.data import shelves
from draftsmith.data.records import Record, States
from draftsmith.data.shards import finite
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result
from draftsmith.train.batches import Plan, ahead, endless, make_plan
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens

HIDDEN, TAPPED, SHARD = 576, 3 * 576, 64
SETTINGS: dict[str, Any] = {"store_dtype": "float32"}
DOMAINS = ("synthetic",)
SHORT_STEPS = (0.02, 0.1)  # seconds, as on an accelerator
LONGEST_RUN = 40.0  # seconds of steps of one length
STATES = ("hidden", "log_z", "taps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=300)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=100_000, help="of a store that is indexed")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the rest is for the loader
    records = [synthetic(n) for n in range(args.records)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards, arrow = Shards(folder / "records"), Arrow(folder / "states.arrow")
        formats = {"shards": measured(shards, records), "arrow": measured(arrow, records)}
        checking = first_read(folder / "records")
        plan = make_plan(records, TrainSection().tokens_per_batch, seed=0)
        waiting = waits(RecordStore.open(folder / "records"), plan, records, args.steps)
        indexing = index_seconds(folder / "many", args.rows)
    save_result(
        "loader",
        {
            "machine": processor(),
            "load_of_the_machine_before": round(load, 1),
            "threads_of_a_step": torch.get_num_threads(),
            "records": len(records),
            "tokens": sum(len(r.ids) for r in records),
            "formats": formats,
            "first_read_with_checksums": checking,
            "waiting": waiting,
            "index": indexing,
        },
    )


def synthetic(number: int) -> Record:
    """A conversation of about the demo's lengths, with states of noise."""
    rng = random.Random(number)
    prompt, reply = rng.randint(40, 160), rng.randint(32, 96)
    states = States(
        hidden=torch.randn(reply, HIDDEN),
        log_z=torch.randn(reply),
        taps=torch.randn(prompt + reply - 1, TAPPED),
    )
    ids = torch.randint(0, 49152, (prompt + reply,))
    return Record(f"p{number}", DOMAINS[0], "train", Law(1.0), number, "stop", ids, prompt, states)


# ---- two formats


class Shards:
    """Shards of safetensors, written and read by `RecordStore`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, records: Sequence[Record]) -> None:
        store = RecordStore.create(self.folder, SETTINGS)
        for begin in range(0, len(records), SHARD):
            store.add(f"{begin:016x}", records[begin : begin + SHARD])
        store.finish({})

    def reader(self) -> Callable[[int], Record]:
        store = RecordStore.open(self.folder)
        rows = {row.prompt_id: row for row in store.index()}
        return lambda number: store.read([rows[f"p{number}"]])[0]

    def files(self) -> list[Path]:
        return list(self.folder.glob("*"))


class Arrow:
    """One Arrow file as `datasets` writes it, memory-mapped; states as flat lists of float32.

    Read without a copy, and checked as shards are. Arrow has no bfloat16: such states would take
    twice the bytes, or be told as integers.
    """

    def __init__(self, path: Path):
        self.path = path

    def write(self, records: Sequence[Record]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        features = Features({n: List(Value("float32")) for n in STATES})
        features["ids"] = List(Value("int64"))
        with ArrowWriter(path=str(self.path), features=features, writer_batch_size=SHARD) as writer:
            for r in records:
                assert r.states is not None
                row = {n: getattr(r.states, n).flatten().numpy() for n in STATES}
                writer.write({**row, "ids": r.ids.numpy()})
            writer.finalize()
        with self.path.open("rb") as handle:
            os.fsync(handle.fileno())
        shelves.sha256(self.path)  # on disk and with a checksum, as shards are

    def reader(self) -> Callable[[int], Record]:
        rows = Dataset.from_file(str(self.path)).with_format("arrow")

        def read(number: int) -> Record:
            row = rows[number]
            part = {
                n: torch.from_numpy(row[n].chunk(0).flatten().to_numpy()) for n in row.schema.names
            }
            reply = len(part["log_z"])
            states = States(
                part["hidden"].view(reply, -1), part["log_z"], part["taps"].view(-1, TAPPED)
            )
            if not all(finite(getattr(states, n)) for n in STATES):
                raise ValueError(f"record {number} is not finite")
            prompt = len(part["ids"]) - reply
            return Record(
                f"p{number}", DOMAINS[0], "train", Law(1.0), number, "stop", part["ids"], prompt,
                states,
            )  # fmt: skip

        return read

    def files(self) -> list[Path]:
        return [self.path] if self.path.exists() else []


def measured(kind: Shards | Arrow, records: Sequence[Record]) -> dict[str, Any]:
    """Bytes on disk, MB/s of writing, and of reading at random from memory and from disk."""
    size = sum(values(r) for r in records)
    times = []
    for _ in range(3):
        for path in kind.files():
            path.unlink()
        begin = time.perf_counter()
        kind.write(records)
        times.append(time.perf_counter() - begin)
    writing = median(times)
    forget(kind.files())
    cold = read_all(kind.reader(), records, check=True)
    warm = median(read_all(kind.reader(), records) for _ in range(3))
    return {
        "bytes_per_token": round(sum(p.stat().st_size for p in kind.files()) / tokens(records)),
        "write_mb_per_s": round(size / 1e6 / writing),
        "random_read_mb_per_s": {
            "from disk, file opened": round(size / 1e6 / cold),
            "from memory, file opened": round(size / 1e6 / warm),
        },
    }


def read_all(
    read: Callable[[int], Record], records: Sequence[Record], check: bool = False
) -> float:
    """Seconds to read all records in a random order, each value touched."""
    order = random.Random(0).sample(range(len(records)), len(records))
    begin = time.perf_counter()
    for number in order:
        found = read(number)
        assert found.states is not None
        for name in STATES:
            getattr(found.states, name).sum()
        if check:
            same = records[number].states
            assert same is not None and torch.equal(found.states.taps, same.taps)
    return time.perf_counter() - begin


def forget(files: Sequence[Path]) -> None:
    """Let the system drop what it holds of these files in memory."""
    for path in files:
        with path.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def values(record: Record) -> int:
    assert record.states is not None
    parts = [getattr(record.states, n) for n in STATES]
    return sum(t.numel() * t.element_size() for t in (*parts, record.ids))


def tokens(records: Sequence[Record]) -> int:
    return sum(len(r.ids) for r in records)


def first_read(folder: Path) -> dict[str, Any]:
    """Reading in a process that has not verified the checksums yet, against one that has."""
    found = {}
    for name in ("first", "later"):
        if name == "first":
            shelves._digests.clear()
        store = RecordStore.open(folder)
        rows = store.index()
        begin = time.perf_counter()
        for row in rows:
            store.read([row])
        found[f"{name}_s"] = round(time.perf_counter() - begin, 3)
    size = sum(path.stat().st_size for path in folder.iterdir())
    rate = size / 1e6 / max(1e-9, found["first_s"] - found["later_s"])
    return {**found, "megabytes": round(size / 1e6), "verified_mb_per_s": round(rate)}


# ---- waiting


def waits(
    store: RecordStore, plan: Plan, records: Sequence[Record], steps: int
) -> list[dict[str, Any]]:
    """Share of the time in which a step waits for its batch, by the length of a step."""
    rows = store.index()
    from_disk = partial_loader(lambda i: store.read([rows[i]])[0])
    in_memory = partial_loader(lambda i: records[i])
    batch = from_disk(plan.epoch(0)[0])
    real = real_step(batch)
    found = []
    for length in (real, *SHORT_STEPS):
        work = busy(length)
        count = max(5, min(steps, math.floor(LONGEST_RUN / length)))
        share = {
            "loaded ahead": waited(ahead(endless(plan, 0, from_disk, 0, 1)), work, count),
            "loaded when needed": waited(endless(plan, 0, from_disk, 0, 1), work, count),
            "from memory, when needed": waited(endless(plan, 0, in_memory, 0, 1), work, count),
        }
        found.append({"step_s": round(length, 3), "steps": count, "share_waiting": share})
    return found


def partial_loader(read: Callable[[int], Record]) -> Callable[[Sequence[int]], TrainBatch]:
    return lambda indices: collate([read(i) for i in indices], DOMAINS)


def waited(batches: Iterator[TrainBatch], work: Callable[[], None], count: int) -> float:
    next(batches)
    waiting, begin = 0.0, time.perf_counter()
    for _ in range(count):
        work()
        asked = time.perf_counter()
        next(batches)
        waiting += time.perf_counter() - asked
    return round(waiting / (time.perf_counter() - begin), 4)


def busy(seconds: float) -> Callable[[], None]:
    """Matrix products that take about this long on this machine."""
    a = torch.randn(512, 512)

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            a @ a
        return time.perf_counter() - begin

    run(20)
    times = max(1, round(seconds / (median(run(20) for _ in range(5)) / 20)))
    return lambda: (run(times), None)[1]


def real_step(batch: TrainBatch) -> float:
    """Seconds of an optimiser step of the demo's head on a batch of the default size."""
    recipe = load_recipe("demo")
    target = load_target(recipe.target)
    _, config = family_config(recipe.drafter, "demo")
    drafter = new_drafter(config, target, counted(target))
    objective = bind_objective(recipe.objective, recipe.serving)
    p = DraftVocabularyP(target, drafter.draft_ids, objective.law)
    scorer = Scorer(drafter, recipe.objective, objective, p)
    optimizer = torch.optim.AdamW(drafter.trainable(), lr=1e-4, fused=True)
    totals = scored_tokens(batch, recipe.train.unroll).float()
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        scorer(batch, recipe.train.unroll, totals).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def counted(target: Target) -> list[Record]:
    """Records to choose a draft vocabulary on by their words, without states."""
    ids = torch.arange(target.vocab_size)
    return [Record("all", DOMAINS[0], "train", Law(1.0), 0, "stop", ids, 1, None)]


# ---- many rows


def index_seconds(folder: Path, rows: int) -> dict[str, Any]:
    """Telling what a store of many records holds, without reading a tensor."""
    store = RecordStore.create(folder, SETTINGS)
    ids = torch.from_numpy(np.arange(24))
    for begin in range(0, rows, SHARD):
        part = range(begin, min(rows, begin + SHARD))
        made = [
            Record(f"{n:016x}", DOMAINS[0], "train", Law(1.0), n, "stop", ids, 8, None)
            for n in part
        ]
        store.add(f"{begin:016x}", made)
    store = store.finish({})
    begin_s = time.perf_counter()
    found = RecordStore.open(folder).index()
    seconds = time.perf_counter() - begin_s
    assert len(found) == rows
    return {"rows": rows, "shards": len(store.listed), "seconds": round(seconds, 2)}


if __name__ == "__main__":
    main()
