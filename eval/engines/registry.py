"""The engines there are, and where each is found."""

from typing import NamedTuple

from .engine import Engine
from .on_llama_cpp import LLAMA_CPP
from .on_sglang import SGLANG
from .on_vllm import VLLM


class Known(NamedTuple):
    """variable: what names the interpreter that has it; module: what it has there."""

    engine: Engine
    variable: str
    module: str


ENGINES = {
    "vllm": Known(VLLM, "DRAFTSMITH_VLLM_PYTHON", "vllm"),
    "sglang": Known(SGLANG, "DRAFTSMITH_SGLANG_PYTHON", "sglang"),
    "llama.cpp": Known(LLAMA_CPP, "DRAFTSMITH_LLAMA_CPP_PYTHON", "xllamacpp"),
}

WHOLE = frozenset({"dflash"})
"""Layouts whose drafters see, in engines, as many places as are drafted."""
