"""B144: every stage on a machine without an accelerator, whatever dtype is asked for."""

import os
import subprocess
import sys
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16")
SCRIPT = """
import sys
from draftsmith.scripts.cli import main

recipe, runs = sys.argv[1:]
for dtype in {dtypes}:
    print(f"== {{dtype}}")
    here = [f"target.dtype={{dtype}}", "target.device=auto", "eval.timing_prompts=0"]
    here += ["--runs", f"{{runs}}/{{dtype}}"]
    for command in ("collect", "train", "eval", "parity"):
        assert main([command, recipe, *here]) == 0, (dtype, command)
"""


def test_b144_every_stage_runs_on_a_cpu(recipe_file: Path, tmp_path: Path) -> None:
    """In a process of its own, which sees no device and has two threads."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(dtypes=DTYPES), str(recipe_file), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, *parts = " ".join(done.stdout.split()).split("== ")
    for dtype, said in zip(DTYPES, parts, strict=True):
        weights = "bfloat16" if dtype == "bfloat16" else "float32"
        assert f"{weights} on cpu, 2 threads" in said, said
        assert "training on cpu in float32" in said, said
    assert "nccl" not in (done.stdout + done.stderr).lower()
