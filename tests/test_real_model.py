"""The real embedded target: what it says of itself, and our plain loop against `generate`.

Needs the package index once, for the target's wheel.
"""

import pytest
import torch

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.chat import render_prompt
from draftsmith.data.gather import Request
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.eval.decode import DecodeSettings, decode


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(TargetSection())


def test_embedded_target_says_what_it_is(target: Target) -> None:
    assert target.provenance["source"] == "embedded"
    assert "Q4_1" in target.provenance["quantisation"]
    assert target.vocab_size == 49152
    assert target.eos_ids == (2,)
    assert target.model.config._name_or_path.endswith("q4_1")


def test_plain_loop_equals_generate(target: Target) -> None:
    texts = ["What is 2+2?", "Name three primary colours.", "Write a haiku about the sea."]
    prompts = [
        render_prompt(target.tokenizer, [{"role": "user", "content": text}]) for text in texts
    ]
    requests = [
        Request(text, "d", "heldout", tuple(ids), Law(0.0), 0)
        for text, ids in zip(texts, prompts, strict=True)
    ]
    ours = decode(target, requests, DecodeSettings(32, 0))
    for ids, out in zip(prompts, ours, strict=True):
        row = torch.tensor([ids])
        made = target.model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=32, do_sample=False
        )
        assert out.ids == made[0, len(ids) :].tolist()
