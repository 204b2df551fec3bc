"""Several processes share a collection: what they write together is what one would write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def collect(recipe: Path, runs: Path, *launcher: str) -> dict[str, bytes]:
    """Run the entry by its path; the shards it leaves."""
    entry = [str(ROOT / "data" / "collect.py"), str(recipe), "--runs", str(runs)]
    done = subprocess.run(
        [sys.executable, *launcher, *entry, "collect.shard_size=3"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (folder,) = runs.glob("tiny/records-*")
    names = ("shard-*.safetensors", "manifest.json", "selection.json")
    return {p.name: p.read_bytes() for name in names for p in sorted(folder.glob(name))}


@pytest.mark.parametrize(
    "launcher",
    [
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"),
    ],
)
def test_together_they_write_what_one_does(
    recipe_file: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    alone = collect(recipe_file, tmp_path / "alone")
    assert len(alone) > 4
    assert collect(recipe_file, tmp_path / "launched", *launcher) == alone
