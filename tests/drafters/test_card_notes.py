"""A model card's words on data, on how the draft was made, and on licences."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.configs.load import load_recipe, parse, to_dict
from draftsmith.configs.recipe import Recipe
from draftsmith.drafters.hub import model_card

SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "report.json"


@pytest.fixture
def report() -> dict[str, Any]:
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


def card_of(report: dict[str, Any], recipe: Any = None) -> str:
    return model_card(report, "eagle3", "owner/llm", "mit", recipe=recipe)


def test_the_data_by_split_domain_and_law(report: dict[str, Any]) -> None:
    assert "## Data" not in card_of(report), "an older report tells of none"
    report["provenance"]["collected"] = [
        {"split": "train", "domain": "a|b", "law": "T=1", "records": 1200, "tokens": 34567},
        {"split": "heldout", "domain": "/data/c", "law": "T=0", "records": 3, "tokens": 45},
    ]
    card = card_of(report)
    assert "| train | a\\|b | T=1 | 1,200 | 34,567 |" in card
    assert "| heldout | c | T=0 | 3 | 45 |" in card


def test_the_recipe_is_one_that_runs(report: dict[str, Any]) -> None:
    recipe = load_recipe("demo", ["train.steps=7"])
    card = card_of(report, to_dict(recipe))
    written = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    again = parse(Recipe, written, "recipe.yaml")
    assert again == recipe


def test_the_recipe_tells_of_no_machine(report: dict[str, Any]) -> None:
    recipe = load_recipe(
        "demo",
        [
            "target.name=/home/someone/llm",
            "domains.0.source=~/prompts/mine.jsonl",
            "collect.distributions=none",
            "collect.server={command: [serve, --key, swordfish], model: /models/llm}",
        ],
    )
    card = card_of(report, to_dict(recipe))
    for piece in ("/home", "~/", "swordfish", "server", "/models"):
        assert piece not in card.split("## Make it again")[1].split("## Licence")[0], piece
    assert "name: llm" in card and "source: mine.jsonl" in card


def test_both_licences(report: dict[str, Any]) -> None:
    assert "These weights: mit." in card_of(report)
    report["provenance"]["target"]["license"] = "llama3"
    assert "the licence of owner/llm (llama3) holds for their use, too" in card_of(report)
