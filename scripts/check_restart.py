"""Is a collection that was killed over and over the same as one that was not?

    python scripts/check_restart.py --prompts FILE.jsonl --count 2000 --target tiny --processes 2

One run goes through; another is killed (SIGKILL to all its processes, also while they write) at
random moments, then goes through. Both must hold the same bytes, and no shard that was there when a
run was killed may be written again. `tiny` is a random model with the embedded target's tokenizer.
Results go to scripts/results/restart.json, one entry for each target.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.embedded import embedded_folder
from draftsmith.data.store import RecordStore
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import FOLDER, save_result

REAL = TargetSection().name
KILLS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--target", choices=("tiny", "real"), default="tiny")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--shard", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp:
        found = check(args, Path(temp))
    path = FOLDER / "restart.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    save_result("restart", {**known, args.target: found})
    if not found["identical"] or found["rewritten"]:
        sys.exit("the killed run differs")


def check(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    recipe = root / "restart.yaml"
    recipe.write_text(yaml.safe_dump(_recipe(args, root)), encoding="utf-8")
    start = time.monotonic()
    child = _start(recipe, root / "whole", args.processes)
    while child.poll() is None and not _shards(root / "whole"):
        time.sleep(0.2)
    first = time.monotonic() - start
    _wait(child)
    seconds = time.monotonic() - start
    whole_shards = len(_shards(root / "whole"))
    each = (seconds - first) / whole_shards
    rng = random.Random(args.seed)
    seen: dict[str, tuple[str, int]] = {}
    rewritten = killed = 0
    held = []
    while killed < KILLS:
        child = _start(recipe, root / "killed", args.processes)
        # So many more shards each time that all kills find something to interrupt.
        wanted = len(seen) + rng.randrange(max(2, 2 * whole_shards // (KILLS + 2)))
        while child.poll() is None and len(_shards(root / "killed")) < wanted:
            time.sleep(0.1)
        at = rng.uniform(0, first if wanted == len(seen) else each)
        try:
            child.wait(at)
            sys.exit(f"it finished before kill {killed + 1}: give it more prompts")
        except subprocess.TimeoutExpired:
            _kill(child)
        killed += 1
        now = _shards(root / "killed")
        rewritten += sum(now.get(name) != known for name, known in seen.items())
        seen = now
        held.append(len(now))
        print(f"kill {killed}: {len(now)} of {whole_shards} shards", flush=True)
    _wait(_start(recipe, root / "killed", args.processes))
    last = _shards(root / "killed")
    rewritten += sum(last.get(name) != known for name, known in seen.items())
    whole = {name: digest for name, (digest, _) in _shards(root / "whole").items()}
    stores = [RecordStore.open(_folder(root / name)) for name in ("whole", "killed")]
    return {
        "machine": processor(),
        "prompts": args.count,
        "tokens": args.tokens,
        "processes": args.processes,
        "kills": killed,
        "shards": len(whole),
        "shards_at_each_kill": held,
        "seconds_uninterrupted": round(seconds, 1),
        "rewritten": rewritten,
        "identical": whole == {name: digest for name, (digest, _) in last.items()}
        and stores[0].identity == stores[1].identity,
        "records": len(stores[1].index()),
    }


def _recipe(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    return {
        "name": "restart",
        "target": {"name": REAL if args.target == "real" else str(_tiny(root / "tiny"))},
        "serving": {"laws": [{"temperature": 1.0}]},
        "domains": [{"name": "prompts", "source": args.prompts, "max_rows": args.count}],
        "collect": {
            "temperatures": [1.0],
            "max_new_tokens": args.tokens,
            "shard_size": args.shard,
            "batch_size": args.shard,
        },
        "drafter": {"family": "eagle3"},
    }


def _tiny(folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _start(recipe: Path, runs: Path, processes: int) -> "subprocess.Popen[bytes]":
    entry = [str(Path(__file__).resolve().parent.parent / "data" / "collect.py")]
    command = [sys.executable, *entry, str(recipe), "--runs", str(runs)]
    if processes > 1:
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
        command = [sys.executable, *launch, *command[1:]]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to the launcher and its workers, which are in sessions of their own."""
    family = psutil.Process(child.pid)
    for process in [family, *family.children(recursive=True)]:
        process.kill()
    child.wait()


def _wait(child: "subprocess.Popen[bytes]") -> None:
    _, errors = child.communicate()
    if child.returncode:
        sys.exit(f"collecting failed:\n{errors.decode(errors='replace')[-2000:]}")


def _folder(runs: Path) -> Path:
    (folder,) = (runs / "restart").glob("records-*")
    return folder


def _shards(runs: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of writing of each shard."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(runs.glob("restart/records-*/shard-*.safetensors"))
    }


if __name__ == "__main__":
    main()
