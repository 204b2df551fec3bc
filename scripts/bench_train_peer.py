"""The peer's side of `bench_train`: its data, its arguments, its runs."""

import argparse
import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.data.gather import recompute_states
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.scripts import peer_speculators
from draftsmith.train.corpus import Data

DECAY, WARMUP, LR, UNROLL = 0.8, 20, 1e-3, 3
WINDOW = 10  # optimiser steps that one rate is of
PROFILED = 8  # optimiser steps


@dataclass(frozen=True)
class Bench:
    """What all runs share. batches: ours by epoch; width: tokens of the peer's own batches;
    folder: of the target."""

    target: Target
    store: RecordStore
    data: Data
    initial: Eagle3Drafter
    held_out: list[Record]
    batches: list[list[list[int]]]
    width: int
    folder: str


def width_for(sizes: Sequence[int], batches: int) -> int:
    """Tokens of the peer's own batches with which it makes about as many of them as we do.

    It fills them with shuffled rows in turn; whole blocks of 32 tokens.
    """
    order = random.Random(0).sample(list(sizes), len(sizes))

    def made(width: int) -> int:
        count, room = 0, 0
        for size in order:
            if size > room:
                count, room = count + 1, width
            room -= size
        return count

    widths = range(32 * -(-max(sizes) // 32), sum(sizes), 32)
    return min(widths, key=lambda width: abs(made(width) - batches))


# ---- the peer's files


def write_peer_data(bench: Bench, folder: Path) -> None:
    """Rows, states and draft vocabulary as speculators reads them.

    Its last state is the one before the target's final norm, which records do not hold: the target
    runs once more. Supervised are the positions whose distributions we train on. A last row stands
    for the validation set, which may not be empty.
    """
    records = [*bench.data.training]
    masks = [torch.arange(len(r.ids)) >= r.prompt_len for r in records]
    for record, mask in zip(records, masks, strict=True):
        mask[len(record.ids) - 1 :] = False
    rows = [*zip(records, masks, strict=True), (records[0], masks[0])]
    table = {
        "input_ids": [r.ids.tolist() for r, _ in rows],
        "loss_mask": [m.long().tolist() for _, m in rows],
        "seq_len": [len(r.ids) for r, _ in rows],
    }
    Dataset.from_dict(table).with_format("torch").save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    last = bench.target.num_layers - 1
    for number, (record, _) in enumerate(rows):
        (again,) = recompute_states(bench.target, [record], (last,))
        assert record.states is not None and again.states is not None
        taps = torch.cat([record.states.taps, again.states.taps], -1)  # [T-1, 4h]
        taps = torch.cat([taps, torch.zeros_like(taps[:1])])  # the last token was never fed
        states = taps.unflatten(-1, (4, -1)).contiguous()  # [T, 4, h]
        save_file({"hidden_states": states, "token_ids": record.ids},
                  folder / "hidden_states" / f"hs_{number}.safetensors")  # fmt: skip
    ids = bench.initial.draft_ids
    assert ids is not None
    there = torch.zeros(bench.target.head.out_features, dtype=torch.bool)
    there[ids] = True
    np.save(folder / "d2t.npy", (ids - torch.arange(len(ids))).numpy())
    np.save(folder / "t2d.npy", there.numpy())


def peer_names(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """Our trained tensors by the names that the peer gives them."""
    mine = {n: t.detach() for n, t in drafter.named_parameters() if not n.startswith("embed")}
    return {n.replace("midlayer.", "layers.0."): t.contiguous() for n, t in mine.items()}


def from_peer(bench: Bench, tensors: dict[str, Tensor]) -> Eagle3Drafter:
    """A copy of our drafter with the peer's weights."""
    drafter = Eagle3Drafter(bench.initial.config, bench.initial.taps, bench.initial.draft_ids)
    own = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    own = {n: t for n, t in own.items() if not n.startswith("verifier")}
    drafter.load_state_dict(own, strict=True)
    return drafter.eval()


# ---- runs


def run_peer(
    bench: Bench, args: argparse.Namespace, objective: str, side: str, folder: Path
) -> tuple[Any, dict[str, Any]]:
    packed = side == "peer"
    share = 0.0
    for profile in (PROFILED, 0):  # one short run to be profiled, one to be measured
        job = {
            "arguments": peer_arguments(bench, args, objective), "threads": args.threads,
            "initial": str(args.work / "initial.safetensors"), "profile": profile,
            "batches": None if packed else bench.batches, "out": str(folder),
        }  # fmt: skip
        if profile:
            job["arguments"] += [f"--max-steps={profile + peer_speculators.FIRST_PROFILED}"]
        path = write_job(folder, job)
        child([args.peer, peer_speculators.__file__, path], args.threads, folder)
        steps = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
        share = steps["matmul_share"] or share
    found = {
        "steps": len(steps["tokens"]),
        "tokens_per_s": round(median(rates(steps["tokens"], steps["times"])[1:]), 1),
        "tokens_per_step": round(sum(steps["tokens"]) / len(steps["tokens"]), 1),
        "matmul_share": round(share, 3),
    }
    return from_peer(bench, load_file(folder / "last.safetensors")), found


def peer_arguments(bench: Bench, args: argparse.Namespace, objective: str) -> list[str]:
    weight = 1 / sum(
        DECAY**k for k in range(UNROLL)
    )  # our weights of the unrolled steps add up to 1
    data, rows = args.work / "peer-data", len(bench.data.training)
    options = {
        "verifier-name-or-path": bench.folder, "speculator-type": "eagle3", "data-path": data,
        "d2t-path": data / "d2t.npy", "t2d-path": data / "t2d.npy",
        "draft-vocab-size": bench.initial.lm_head.out_features,
        "num-layers": 1, "draft-arch": "llama",
        "train-data-ratio": (rows + 0.5) / (rows + 1), "total-seq-len": bench.width,
        "loss-fn": json.dumps({objective: weight}), "loss-implementation": "eager",
        "ttt-steps": UNROLL, "ttt-step-loss-decay": DECAY, "optimizer": "adamw", "lr": LR,
        "weight-decay": 0.0, "scheduler-type": "cosine", "scheduler-warmup-steps": WARMUP,
        "epochs": args.epochs, "draft-attn-impl": "sdpa", "hidden-states-dtype": "float32",
        "num-workers": 0, "on-missing": "raise", "seed": 0,
    }  # fmt: skip
    said = [f"--{name}={value}" for name, value in options.items()]
    said += ["--target-layer-ids", *map(str, bench.initial.taps), "--full-attention-indices", "0"]
    return [*said, "--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output",
            "--no-resume-from-checkpoint"]  # fmt: skip


def rates(tokens: Sequence[int], times: Sequence[float]) -> list[float]:
    """Supervised tokens/s of whole windows of steps; `times` has one more, the beginning."""
    ends = range(0, len(times), WINDOW)
    return [sum(tokens[a:b]) / (times[b] - times[a]) for a, b in pairwise(ends)]


def write_job(folder: Path, job: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def child(command: Sequence[object], threads: int, folder: Path) -> None:
    """Run a process to its end, with its output in a log."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        words = [str(word) for word in command]
        done = subprocess.run(words, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{folder.name} failed, see its log.txt")
