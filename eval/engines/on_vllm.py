"""vLLM, in its own environment.

It drafts whole rounds to the end of a reply, and counts what is accepted beyond that end, too.
Drawn drafts follow a request's temperature, never its truncation. Seen with 0.32 on CPUs.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ...data.served import Program
from ...drafters.card_commands import UNTRACKED
from .engine import Engine, Serving

METHODS = {
    "eagle3": "eagle3",
    "transformers": "draft_model",
    "dflash": "dflash",
    "medusa": "medusa",
}
_PLUGIN = Path(__file__).with_name("vllm_plugin.py")
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def program(serving: Serving) -> Program:
    words = [
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", serving.target, "--host", "127.0.0.1", "--port", "{port}"),
        *("--dtype", serving.dtype, "--max-model-len", str(serving.context)),
        *("--max-num-seqs", str(serving.rows), "--generation-config", "vllm"),
        "--no-enable-prefix-caching",  # a prompt asked again would cost nothing
    ]
    environment = dict(_ENVIRONMENT)
    if serving.cpu:
        words.append("--enforce-eager")
        environment["PYTHONPATH"] = _plugin(serving.work)
    if serving.drafter is not None:
        words += ["--speculative-config", json.dumps(speculation(serving))]
        if serving.layout == "medusa" and serving.reduced:
            words += ["--model-loader-extra-config", json.dumps(UNTRACKED)]
    return serving.program("vLLM", words, environment)


def _plugin(work: Path) -> str:
    """A PYTHONPATH on which every process of vLLM finds our plugin.

    It runs its engine in a process of its own, where nothing else of ours would be loaded.
    """
    folder = work / "plugin"
    about = folder / "draftsmith_vllm-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    shutil.copy(_PLUGIN, folder / "draftsmith_vllm.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: draftsmith-vllm\nVersion: 0\n")
    entry = "[vllm.general_plugins]\ndraftsmith = draftsmith_vllm:mend\n"
    (about / "entry_points.txt").write_text(entry)
    known = os.environ.get("PYTHONPATH")
    return str(folder) if not known else os.pathsep.join((str(folder), known))


def speculation(serving: Serving) -> dict[str, Any]:
    """Its `speculative_config`."""
    found = {
        "method": METHODS[serving.layout],
        "model": str(serving.drafter),
        "num_speculative_tokens": serving.num_draft_tokens,
        "draft_sample_method": "probabilistic" if serving.sampled else "greedy",
    }
    if serving.layout in VLLM.greedy:
        del found["draft_sample_method"]
    return found


VLLM = Engine(
    name="vLLM",
    methods=METHODS,
    program=program,
    counters="vllm",
    samples=True,
    greedy=frozenset({"medusa"}),
    overruns=True,
    version=("/version", "version"),
)
