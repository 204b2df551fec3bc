"""SGLang, in its own environment. Written after its sources, never run here: it needs a GPU.

A chain: one child a step, and the verified token besides the drafted ones. Its drafts are the most
probable tokens; every reply tells the rounds that it took.
"""

from ...data.served import Program
from .engine import Engine, Serving

METHODS = {"transformers": "STANDALONE", "eagle3": "EAGLE3", "dflash": "DFLASH"}


def program(serving: Serving) -> Program:
    words = ["-m", "sglang.launch_server", "--model-path", serving.target]
    words += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", serving.dtype]
    words += ["--context-length", str(serving.context), "--disable-radix-cache"]
    words += ["--max-running-requests", str(serving.rows), "--sampling-defaults", "openai"]
    if serving.cpu:
        words += ["--device", "cpu"]
    if serving.drafter is not None:
        drafted = serving.num_draft_tokens
        words += ["--speculative-algorithm", METHODS[serving.layout]]
        words += ["--speculative-draft-model-path", str(serving.drafter)]
        if serving.layout != "dflash":  # which drafts its block in one step
            words += ["--speculative-num-steps", str(drafted), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(drafted + 1)]
    return serving.program("SGLang", words, {})


SGLANG = Engine(
    name="SGLang",
    methods=METHODS,
    program=program,
    counters=None,
    samples=False,
    greedy=frozenset(METHODS),
    overruns=True,
    version=("/get_server_info", "version"),
    unread=frozenset({"dflash"}),
)
