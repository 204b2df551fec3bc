"""Training an EAGLE-3 head on SmolLM2: our trainer against that of speculators 0.9.

    python scripts/bench_train.py --records DIR --peer PEER_PYTHON --work DIR

DIR is what `draftsmith collect demo` wrote, PEER_PYTHON the Python of an environment that holds
speculators 0.9 (`pip install torch==2.13.0`, its requirements without torchvision and torchaudio,
then `pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0`). Both sides get the same rows,
first weights, draft vocabulary, unrolled steps with the same weights, AdamW, learning rates,
clipping and threads, each in a process of its own. The peer runs twice: on our batches in our
order, laid out without padding, and on its own batches of about as many supervised tokens, packed
by its own sampler. Results go to scripts/results/train.json.

Not matched: the peer's head stays frozen, so ours is also trained with a frozen one; it
renormalises p on the draft vocabulary, where ours keeps the mass outside; it scores rounds that
begin in the prompt, too; its first step has learning rate 0; its validation and its checkpoints are
left out, ours are not.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.utils import set_seed
from rich.console import Console
from safetensors.torch import save_file

from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import Recipe
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target, target_info
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import records_with_states
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.eval.provenance import processor
from draftsmith.scripts import peer_speculators
from draftsmith.scripts.bench_train_peer import (
    DECAY,
    LR,
    PROFILED,
    UNROLL,
    WARMUP,
    WINDOW,
    Bench,
    child,
    peer_names,
    run_peer,
    width_for,
    write_job,
    write_peer_data,
)
from draftsmith.scripts.results import save_result
from draftsmith.train import loop
from draftsmith.train.corpus import Data, load_data
from draftsmith.train.objective import bind_objective
from draftsmith.train.optimizer import parameter_groups
from draftsmith.train.score import expected, score
from draftsmith.train.step import Scorer, scored_tokens

LAW = Law(1.0)
OBJECTIVES = {"kl_div": "fkl", "nla": "nla"}
SIDES = {
    "ours": "the trainer of draftsmith",
    "ours, head frozen": "as the peer's",
    "peer, our batches": "without padding",
    "peer": "its own batches",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", required=True)
    parser.add_argument("--peer", type=Path, required=True, help="its Python")
    parser.add_argument("--work", type=Path, required=True, help="a folder for what comes between")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rows", type=int, help="training rows; default: all")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tokens-per-batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the result")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        ours(json.loads(args.child.read_text(encoding="utf-8")))
        return
    load = os.getloadavg()[0]
    bench = prepared(args)
    rows = [one(bench, args, objective, side) for objective in args.objectives
            for side in args.sides]  # fmt: skip
    if args.save:
        save_result("train", about(bench, args, load) | {"rows": rows, "ratios": ratios(rows)})


def our_recipe(objective: str, epochs: int, tokens_per_batch: int, start: Path | None) -> Recipe:
    begin = [] if start is None else [f"drafter.start={start}"]
    return load_recipe(
        "demo",
        [
            *begin, f"objective.loss={OBJECTIVES[objective]}", f"objective.position_decay={DECAY}",
            f"train.epochs={epochs}", f"train.tokens_per_batch={tokens_per_batch}",
            f"train.unroll={UNROLL}", f"train.lr={LR}", f"train.warmup_steps={WARMUP}",
            "train.schedule=cosine", "train.final_lr_fraction=0.0", "train.betas=[0.9, 0.999]",
            "train.weight_decay=0.0", "train.clip=1.0", "train.mixed_precision=no",
            "train.eval_every=1000000", "train.save_every=1000000",
            f"train.log_every={WINDOW}", "train.eval_conversations=1",
        ],
    )  # fmt: skip


def prepared(args: argparse.Namespace) -> Bench:
    """Load all, and write the peer's data."""
    recipe = our_recipe("nla", args.epochs, args.tokens_per_batch, None)
    store = subset(RecordStore.open(args.records), args.rows)
    target = load_target(recipe.target, few_rows=False)
    objective = bind_objective(recipe.objective, recipe.serving)
    data = load_data(recipe, target, store, objective)
    drafter = first_weights(recipe, target, data, args.work / "initial")
    plan = data.plan()
    held_out = records_with_states(store, target, drafter.taps, "heldout")
    batches = [plan.epoch(number) for number in range(args.epochs)]
    bench = Bench(
        target, store, data, drafter, [r for r in held_out if r.drawn_from(LAW)], batches,
        width_for(plan.sizes, len(batches[0])), target_info(recipe.target).place,
    )  # fmt: skip
    if not (args.work / "peer-data").exists():
        write_peer_data(bench, args.work / "peer-data")
    save_file(peer_names(drafter), args.work / "initial.safetensors")
    return bench


def subset(store: RecordStore, rows: int | None) -> RecordStore:
    """The store with so many of its training rows, evenly spread, and all held-out ones."""
    index = store.index()
    training = [r for r in index if r.split == "train"]
    count = len(training) if rows is None else min(rows, len(training))
    kept = [training[n * len(training) // count] for n in range(count)]
    kept += [r for r in index if r.split == "heldout"]
    return replace(store, selection={r.key: (r.split, r.domain) for r in kept})


def first_weights(recipe: Recipe, target: Target, data: Data, folder: Path) -> Eagle3Drafter:
    """The drafter that both sides start from, kept in `folder`."""
    if not folder.exists():
        set_seed(recipe.seed)
        config = family_config(recipe.drafter, "demo")[1]
        save_drafter(new_drafter(config, target, data.training), folder, target, {})
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


# ---- runs


def one(bench: Bench, args: argparse.Namespace, objective: str, side: str) -> dict[str, Any]:
    """Train one side; its rate, its matmul share and what its drafter is worth.

    A run that is finished in the work folder is not repeated.
    """
    folder = args.work / f"{objective}-{side}".replace(",", "").replace(" ", "-")
    if (folder / "row.json").exists():
        return dict(json.loads((folder / "row.json").read_text(encoding="utf-8")))
    run = run_peer if side.startswith("peer") else run_ours
    drafter, found = run(bench, args, objective, side, folder)
    row = {"objective": objective, "side": side, **found, **worth(bench, drafter)}
    print(json.dumps(row), flush=True)
    (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
    return row


def run_ours(
    bench: Bench, args: argparse.Namespace, objective: str, side: str, folder: Path
) -> tuple[Any, dict[str, Any]]:
    job = {
        "objective": objective, "epochs": args.epochs, "tokens_per_batch": args.tokens_per_batch,
        "records": args.records, "rows": args.rows, "threads": args.threads,
        "frozen": side.endswith("frozen"), "out": str(folder),
        "initial": str(args.work.absolute() / "initial"),
    }  # fmt: skip
    path = write_job(folder, job)
    given = ["--records", args.records, "--peer", args.peer, "--work", args.work]
    child([sys.executable, __file__, *given, "--child", path], args.threads, folder)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return load_drafter(folder / "run" / "drafter", bench.target), found


def ours(job: dict[str, Any]) -> None:
    """One training run of ours, in a process of its own."""
    torch.set_num_threads(job["threads"])
    folder = Path(job["out"])
    start = Path(job["initial"])
    recipe = our_recipe(job["objective"], job["epochs"], job["tokens_per_batch"], start)
    store = subset(RecordStore.open(job["records"]), job["rows"])
    target = load_target(recipe.target, few_rows=False)
    if job["frozen"]:
        train_with: Any = loop  # which offers no way to freeze a head
        train_with.new_drafter = lambda *args: frozen_head(new_drafter(*args))
    loop.train(recipe, target, store, folder / "run", Console(stderr=True))
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    lines = [line for line in lines if line["kind"] == "train"][1:]
    share, tokens = profiled(recipe, target, store, job["frozen"])
    found = {
        "steps": lines[-1]["step"],
        "tokens_per_s": round(median(line["tokens_per_s"] for line in lines), 1),
        "mfu": round(median(line["mfu"] for line in lines), 3),
        "tokens_per_step": round(tokens, 1), "matmul_share": round(share, 3),
    }  # fmt: skip
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def frozen_head(drafter: Any) -> Any:
    drafter.lm_head.requires_grad_(False)
    return drafter


def profiled(
    recipe: Recipe, target: Target, store: RecordStore, frozen: bool
) -> tuple[float, float]:
    """Matmul share of our optimiser steps, and the mean of their supervised tokens."""
    objective = bind_objective(recipe.objective, recipe.serving)
    data = load_data(recipe, target, store, objective)
    drafter: Any = new_drafter(family_config(recipe.drafter, "demo")[1], target, data.training)
    drafter = frozen_head(drafter) if frozen else drafter
    p = DraftVocabularyP(target, drafter.draft_ids, objective.law)
    scorer = Scorer(drafter, recipe.objective, objective, p)
    optimizer = torch.optim.AdamW(parameter_groups(drafter, 0.0), lr=LR, fused=True)
    plan = data.plan().epoch(0)
    supervised = [sum(data.plan().supervised[i] for i in rows) for rows in plan]
    profile = torch.profiler.profile()
    for number, rows in enumerate(plan[: PROFILED + peer_speculators.FIRST_PROFILED]):
        if number == peer_speculators.FIRST_PROFILED:
            profile.start()
        batch = data.load(rows)
        scorer(batch, UNROLL, scored_tokens(batch, UNROLL).float()).loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.trainable(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    profile.stop()
    return peer_speculators.matmul_share(profile), sum(supervised) / len(supervised)


def worth(bench: Bench, drafter: Any) -> dict[str, Any]:
    """Held-out overlap by unrolled step, and expected tokens per round, at T = 1."""
    found = score(bench.target, drafter, bench.held_out, LAW, UNROLL, bench.data.limit)
    pooled = [
        sum(c.overlap[k][0] for c in found) / sum(c.overlap[k][1] for c in found)
        for k in range(UNROLL)
    ]
    return {
        "overlap": [round(value, 4) for value in pooled],
        "tokens_per_round": round(expected(found, UNROLL, "block").tokens_per_round, 4),
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Our rate over the peer's, and our overlap less the peer's, by objective."""
    found: dict[str, Any] = {}
    for objective in {row["objective"]: None for row in rows}:
        by_side = {r["side"]: r for r in rows if r["objective"] == objective}
        for mine, their in [
            (m, p) for m in by_side for p in by_side if m[0] == "o" and p[0] == "p"
        ]:
            a, b = by_side[mine], by_side[their]
            found[f"{objective}: {mine} against {their}"] = {
                "speed": round(a["tokens_per_s"] / b["tokens_per_s"], 3),
                "overlap": round(a["overlap"][0] - b["overlap"][0], 4),
            }
    return found


def about(bench: Bench, args: argparse.Namespace, load: float) -> dict[str, Any]:
    return {
        "machine": processor(),
        "load_of_the_machine_before": round(load, 1),
        "threads": args.threads,
        "versions": {"torch": torch.__version__, "transformers": version("transformers"),
                     "speculators": "0.9.0"},
        "target": bench.target.provenance["name"],
        "training_rows": len(bench.data.training),
        "held_out_rows": len(bench.held_out),
        "supervised_tokens_per_epoch": sum(bench.data.plan().supervised),
        "epochs": args.epochs,
        "batches_per_epoch": [len(epoch) for epoch in bench.batches],
        "draft_vocab_size": bench.initial.lm_head.out_features,
        "trained_parameters": sum(p.numel() for p in bench.initial.trainable()),
        "tokens_of_the_peers_own_batches": bench.width,
        "before_training": worth(bench, bench.initial),
        "sides": SIDES,
    }  # fmt: skip


if __name__ == "__main__":
    main()
