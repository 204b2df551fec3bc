"""A recipe's policies and trees, through the whole evaluation."""

from pathlib import Path
from typing import Any

import pytest
from worlds import GAMMA, World

from draftsmith.configs.errors import OptionError, UserError
from draftsmith.configs.recipe import Recipe, ServingSection, TreeSection
from draftsmith.eval.serving import check_serving, settings
from draftsmith.eval.tree import TreeShape


@pytest.mark.parametrize(
    "policy",
    [{"name": "confidence", "threshold": 0.15}, {"name": "adaedl", "threshold": 0.3},
     {"name": "cost_model"}],
    ids=lambda policy: policy["name"],
)  # fmt: skip
def test_a_policy_ends_drafts_and_changes_no_output(
    policy: dict[str, Any], world: World, tmp_path: Path
) -> None:
    report = world.evaluate(tmp_path, {"policy": policy}, timing_prompts=1)
    assert report["lossless"]["verdict"] == "equal"
    named = report["settings"]["policy"]
    assert {p["name"] for p in named.values()} == {policy["name"]}
    assert {p["limit"] for p in named.values()} == {GAMMA}
    attempts = [c["acceptance_by_position"] for c in report["cells"]]
    first, second = (sum(a[k]["attempts"] for a in attempts) for k in range(2))
    assert first > 0 and second < first, "some drafts were ended"
    for cell in report["cells"]:
        assert cell["tokens_per_round_estimated"] is None and cell["survival_estimated"] == []
        assert cell["speed"]["predicted"] > 0
    # What was calibrated is kept: a rerun decodes with the same policy.
    again = world.evaluate(tmp_path, {"policy": policy}, timing_prompts=1)
    assert again["settings"]["policy"] == named
    assert [c["rounds"] for c in again["cells"]] == [c["rounds"] for c in report["cells"]]


@pytest.mark.parametrize("tree", [TreeSection(2, 4), TreeSection(sampled=(2, 1))], ids=str)
def test_trees_are_drafted_timed_and_predicted(
    tree: TreeSection, world: World, tmp_path: Path
) -> None:
    report = world.evaluate(tmp_path, {"tree": tree}, timing_prompts=1)
    assert report["lossless"]["verdict"] == "equal"
    assert report["settings"]["tree"]["sampled"] == tree.sampled
    assert set(report["cost"]["tree_by_law"]) == {c["law"] for c in report["cells"]}
    for cell in report["cells"]:
        cost = report["cost"]["tree_by_law"][cell["law"]]
        reach = sum(p["survival"] for p in cell["acceptance_by_position"])
        predicted = (1 + reach) * (1 + cost["o_plain"]) / (cost["draft"] + cost["v"] + cost["o"])
        assert cell["speed"]["predicted"] == pytest.approx(predicted)


def recipe(**serving: Any) -> Recipe:
    return Recipe(name="r", serving=ServingSection(num_draft_tokens=2, **serving))


def test_what_cannot_be_served_is_refused() -> None:
    for policy, said in (
        ({"name": "confidenc"}, "did you mean 'confidence'"),
        ({"name": "confidence"}, "threshold"),
        ({"name": "adaedl", "threshold": 2.0}, "at most 1"),
        ({"name": "cost_model", "costs": 3}, "takes no options"),
    ):
        with pytest.raises(UserError, match=said):
            check_serving(recipe(policy=policy))
    with pytest.raises(OptionError, match="for chains"):
        recipe(policy={"name": "cost_model"}, tree=TreeSection())


def test_a_tree_is_no_deeper_than_the_draft_length() -> None:
    assert settings(recipe(tree=TreeSection(3, 5)).serving, 9).tree == TreeShape(3, 2, 5)
    assert settings(recipe(tree=TreeSection(sampled=(3, 2, 2))).serving, 9).tree == (3, 2)
    assert settings(recipe().serving, 9).tree is None
