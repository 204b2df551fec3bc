"""A real vLLM server on a CPU says what the target of this process says."""

from collections.abc import Iterator

import pytest
from engine_equality import BRIEF, EACH, TOP, compare, model_folder
from engine_needs import VLLM_PYTHON, needs_vllm

from draftsmith.configs.collection import PACKAGED_DOMAINS, ServerSection
from draftsmith.data.served import serving
from draftsmith.data.target import Target

pytestmark = needs_vllm()
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="module")
def addresses(target: Target) -> Iterator[tuple[str, ...]]:
    options = f"--max-model-len 512 --max-num-seqs 8 --max-logprobs {TOP} --dtype float32"
    program = (VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")
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
