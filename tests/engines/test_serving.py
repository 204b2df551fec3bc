"""Real engines accept of our drafters what our own decoding does, and what our estimator says.

Drafters of the embedded target are trained here, each once for both engines.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_needs import VLLM_PYTHON, needs, needs_vllm
from engine_serving import Trained, check_greedy, serve

from draftsmith.data.warp import Law
from draftsmith.eval.engines.on_llama_cpp import LLAMA_CPP
from draftsmith.eval.engines.on_vllm import VLLM

GREEDY, DRAWN = Law(0.0), Law(1.0)
Make = Callable[[str], Trained]


@needs_vllm()
@pytest.mark.parametrize(
    ("family", "sampled"),
    [("eagle3", True), ("causal", False), ("dflash", True), ("medusa", False)],
)
def test_vllm_accepts_what_is_expected(
    family: str, sampled: bool, trained: Make, tmp_path: Path
) -> None:
    """At T = 0 round by round; at T = 1 in the mean, with drafts of either kind."""
    made = trained(family)
    rows = serve(VLLM, VLLM_PYTHON, made, [GREEDY, DRAWN], sampled, tmp_path)
    check_greedy(rows[GREEDY], made, overruns=True)
    assert rows[DRAWN]["deviations"] == [], rows[DRAWN]


@needs("xllamacpp", "convert_hf_to_gguf", "sentencepiece")
@pytest.mark.parametrize("family", ["eagle3", "causal", "dflash"])
def test_llama_cpp_accepts_what_is_expected(
    family: str, trained: Make, gguf: Path, tmp_path: Path
) -> None:
    """At T = 0; its own drafts are the most probable tokens, whatever the law."""
    made = trained(family)
    (tmp_path / gguf.name).symlink_to(gguf)  # converted once
    (row,) = serve(LLAMA_CPP, sys.executable, made, [GREEDY], False, tmp_path).values()
    check_greedy(row, made, overruns=False)
