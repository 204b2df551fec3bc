"""A model card says what was measured, under which conditions, and nothing about the machine."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.configs.errors import UserError
from draftsmith.data.embedded import QUANTISATION
from draftsmith.drafters.card_commands import SERVING
from draftsmith.drafters.hub import model_card
from draftsmith.drafters.layouts import LAYOUTS as WRITTEN

SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "report.json"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
DRAFT = "someone/smollm2-135m-eagle3"


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


def card_of(report: dict[str, Any], layout: str = "eagle3", base: str = BASE) -> str:
    return model_card(report, layout, base, "apache-2.0", repo_id=DRAFT)


def front_matter(card: str) -> dict[str, Any]:
    opening, fields, _ = card.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(fields)


def test_front_matter(report: dict[str, Any]) -> None:
    assert front_matter(card_of(report)) == {
        "base_model": BASE,
        "library_name": "draftsmith",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["speculative-decoding", "draft", "eagle3"],
    }
    assert front_matter(card_of(report, "transformers"))["library_name"] == "transformers"


def test_a_row_for_every_domain_and_law(report: dict[str, Any]) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in card_of(report).splitlines()
        if line.startswith("|")
    ]
    header, rule, *body = rows
    assert {len(row) for row in rows} == {len(header)}
    assert set(rule) == {"---"}
    assert len(body) == len(report["cells"])
    for row, cell in zip(body, report["cells"], strict=True):
        shown = dict(zip(header, row, strict=True))
        alpha, speedup = cell["overlap"], cell["speed"]["speedup"]
        assert (shown["domain"], shown["law"]) == (cell["domain"], cell["law"])
        assert shown["α overlap"] == (
            f"{alpha['value']:.3f} [{alpha['low']:.3f}–{alpha['high']:.3f}]"
        )
        assert shown["S_4"] == f"{cell['acceptance_by_position'][3]['survival']:.2f}"
        assert shown["τ"].startswith(f"{cell['tokens_per_round']['value']:.2f} [")
        assert shown["accepted/drafted"] == f"{cell['draft_acceptance_rate']:.3f}"
        assert shown["speedup measured"].startswith(f"{speedup['value']:.2f} [")


def test_the_conditions_are_named(report: dict[str, Any]) -> None:
    card = card_of(report)
    for words in (
        "γ = 4",
        "verifier: token",
        "draft sampling: warped by the same law; greedy at T=0",
        "dtype: float32",
        "Example CPU with AVX2, 2 threads, device cpu",
        "at most 96 tokens",
        "draft vocabulary: 4,096 tokens",
        "greedy outputs equal except near-ties (96 prompts)",
        "torch 2.13.0, transformers 5.24.0",
    ):
        assert words in card, words


def test_dequantised_weights_are_not_passed_off_as_the_hubs(report: dict[str, Any]) -> None:
    card = card_of(report)
    assert "Measured against Q8_0 weights, dequantised to float32**, not against" in card
    assert "target weights: Q8_0, dequantised" in card
    report["provenance"]["target"]["quantisation"] = QUANTISATION
    card = card_of(report)
    assert "against Q4_1 GGUF weights, dequantised to float32**" in card
    assert "target weights: Q4_1 GGUF, dequantised\n" in card
    report["provenance"]["target"]["quantisation"] = None
    card = card_of(report)
    assert "dequantised" not in card
    assert "target weights: not quantised" in card


def test_greedy_drafts_of_engines_are_named(report: dict[str, Any]) -> None:
    card = card_of(report)
    assert "`draft_sample_method` is `greedy` unless set to `probabilistic`" in card
    assert "p(argmax q) instead of Σ min(p, q)" in card
    assert "SGLang's rejection sampling does not take one" in card
    for cell in report["cells"]:
        cell["captured_mass"] = None
    assert "SGLang's rejection sampling" not in card_of(report)


def commands(card: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", card, flags=re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def test_commands_for_eagle3(report: dict[str, Any]) -> None:
    vllm, sglang = commands(card_of(report))
    assert vllm[:4] == ["vllm", "serve", BASE, "--speculative-config"]
    assert json.loads(vllm[4]) == {
        "method": "eagle3",
        "model": DRAFT,
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options == {
        "--model-path": BASE,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": DRAFT,
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }


def test_commands_for_the_layout_of_speculators(report: dict[str, Any]) -> None:
    """A folder of its own, which engines do not fetch by themselves."""
    card = model_card(report, "eagle3", BASE, "mit", repo_id=DRAFT, speculators=True)
    *_, told = re.findall(r"```bash\n(.*?)```", card, flags=re.DOTALL)
    fetch, serve = told.splitlines()
    assert shlex.split(fetch)[:5] == ["hf", "download", DRAFT, "--include", "speculators/*"]
    assert serve == f"vllm serve {shlex.split(fetch)[-1]}/speculators"
    assert "vllm serve draft" not in card_of(report)


def test_commands_for_dflash(report: dict[str, Any]) -> None:
    """SGLang takes the length from the drafter; a head of some tokens it does not take."""
    (vllm,) = commands(card_of(report, "dflash"))
    told = json.loads(vllm[4])
    assert (told["method"], told["num_speculative_tokens"]) == ("dflash", 4)
    assert told["draft_sample_method"] == "probabilistic"
    assert "Not SGLang" in card_of(report, "dflash")
    for cell in report["cells"]:
        cell["captured_mass"] = None
    _, sglang = commands(card_of(report, "dflash"))
    assert dict(zip(sglang[3::2], sglang[4::2], strict=True)) == {
        "--model-path": BASE,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": DRAFT,
    }


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("medusa", "vLLM up to 0.32, which always takes the best token"),
        ("mlp_speculator", "vLLM's V0 engine alone, up to 0.9: speculative decoding was removed"),
    ],
)
def test_layouts_that_old_engines_read(layout: str, said: str, report: dict[str, Any]) -> None:
    """No engine that is told how to sample; none that reads it no longer."""
    card = card_of(report, layout)
    (vllm,) = commands(card)
    assert json.loads(vllm[4]) == {"method": layout, "model": DRAFT, "num_speculative_tokens": 4}
    assert said in card and "nor do SGLang, llama.cpp or transformers" in card
    assert "draft_sample_method" not in card and "rejection sampling" not in card


def test_vllm_is_kept_from_missing_the_map_of_medusa_heads(report: dict[str, Any]) -> None:
    (vllm,) = commands(card_of(report, "medusa"))
    assert vllm[5] == "--model-loader-extra-config"
    assert json.loads(vllm[6]) == {"enable_weights_track": False}
    for cell in report["cells"]:
        cell["captured_mass"] = None  # all tokens are drafted
    (vllm,) = commands(card_of(report, "medusa"))
    assert len(vllm) == 5


def test_what_engines_do_otherwise_is_told(report: dict[str, Any]) -> None:
    assert "\n\nIt leaves something out.\n\n" in model_card(
        report, "dflash", BASE, "mit", note="It leaves something out."
    )


def test_commands_for_a_draft_lm(report: dict[str, Any]) -> None:
    card = card_of(report, "transformers")
    (vllm,) = commands(card)
    assert json.loads(vllm[4])["method"] == "draft_model"
    (program,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    compile(program, "card", "exec")
    assert "assistant_model=draft" in program
    assert "num_assistant_tokens = 4" in program


@pytest.mark.parametrize("layout", sorted(SERVING))
def test_no_local_path(report: dict[str, Any], layout: str) -> None:
    stand = report["provenance"]
    stand["target"] |= {
        "name": "/srv/models/smol target",
        "source": "/srv/models/smollm2-135m-instruct-q8_0.gguf",
        "quantisation": "Q8_0 from /srv/models/q8.gguf",
    }
    stand["recipe"] = "../recipes/own.yaml"
    stand["machine"]["processor"] = "CPU (see file:///etc/machine)"
    report["settings"]["draft_sampling"] = "as in C:\\runs\\notes.txt, greedy"
    report["cells"][0]["domain"] = "~/prompts/chat.jsonl"
    report["alarms"] = ["the record in /home/me/run/shard.safetensors is short"]
    card = card_of(report, layout, base="/srv/models/SmolLM2")
    for piece in ("/srv", "/home", "/etc", "~/", "../", "C:\\", "file:", "models/"):
        assert piece not in card, piece
    for kept in (
        "smollm2-135m-instruct-q8_0.gguf",
        "Q8_0 from q8.gguf",
        "chat.jsonl",
        "own.yaml",
        "record in shard.safetensors is short",
        "smol target",
        DRAFT,
    ):
        assert kept in card, kept
    assert front_matter(card)["base_model"] == "SmolLM2"


def test_a_domain_cannot_break_the_table(report: dict[str, Any]) -> None:
    report["cells"][0]["domain"] = "a|b\n<script>"
    assert "| a\\|b &lt;script> | T=0 |" in card_of(report)


def test_bad_news_is_told(report: dict[str, Any]) -> None:
    report["lossless"]["verdict"] = "different"
    report["alarms"] = ["the plain loop is slow"]
    card = card_of(report)
    assert "check of losslessness FAILED" in card
    assert "- **Alarm:** the plain loop is slow" in card


def test_a_report_without_timing(report: dict[str, Any]) -> None:
    for cell in report["cells"]:
        cell["speed"] = None
    report["lossless"] = None
    card = card_of(report)
    assert "| – | – |" in card
    assert "greedy outputs not checked" in card


def test_a_card_exists_for_what_is_written_and_no_more() -> None:
    written = {name for name, layout in WRITTEN.items() if layout.write is not None}
    assert set(SERVING) == written - {"draftsmith"}, "which no engine reads"


def test_an_unknown_layout_is_refused(report: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"'eagle4' \(did you mean 'eagle3'\?\)"):
        card_of(report, "eagle4")


def test_without_a_name_the_card_keeps_a_placeholder(report: dict[str, Any]) -> None:
    card = model_card(report, "eagle3", BASE, "mit")
    assert f"# Draft for {BASE}" in card
    assert '"model": "OWNER/DRAFT"' in card
