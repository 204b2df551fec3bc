"""A benchmark's specification: what is read, and one sentence for every mistake."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.configs import benchmark
from draftsmith.configs.benchmark import Benchmark, ContestantSection, WaySection
from draftsmith.configs.errors import OptionError, UserError
from draftsmith.configs.load import load_benchmark, parse, to_dict
from draftsmith.configs.recipe import LawSection, TreeSection

SPEC: dict[str, Any] = {
    "name": "side-by-side",
    "drafters": [
        {"name": "head", "folder": "drafters/head"},
        {"name": "lookup", "options": {"family": "lookup"}, "servings": ["block"]},
    ],
    "servings": [
        {"name": "block"},
        {"name": "tree", "num_draft_tokens": 4, "tree": {"width": 2, "budget": 6}},
    ],
    "laws": [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 8}],
    "seeds": [0, 7],
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **changes}), encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_benchmark(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_specification_is_read_whole(tmp_path: Path) -> None:
    found = load_benchmark(write(tmp_path))
    assert [d.name for d in found.drafters] == ["head", "lookup"]
    assert found.drafters[1].servings == ("block",)
    assert found.servings[0] == WaySection("block", num_draft_tokens=3, verifier="block")
    assert found.servings[1].tree == TreeSection(width=2, budget=6)
    assert found.laws == (LawSection(0.0), LawSection(0.7, top_k=8))
    assert found.seeds == (0, 7)
    assert [d.name for d in found.domains] == ["chat", "code", "math", "extract"]
    assert parse(Benchmark, to_dict(found), "again") == found


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    path = tmp_path / "least.yaml"
    path.write_text("name: least\ndrafters: [{name: a, options: {family: lookup}}]\n")
    found = load_benchmark(path)
    assert [way.name for way in found.servings] == ["block"]
    assert found.laws == (LawSection(0.0), LawSection(1.0)) and found.seeds == (0,)


def test_the_command_line_changes_it(tmp_path: Path) -> None:
    found = load_benchmark(
        write(tmp_path), ["servings.0.num_draft_tokens=5", "eval.bootstrap=50", "seeds=[3]"]
    )
    assert found.servings[0].num_draft_tokens == 5
    assert (found.eval.bootstrap, found.seeds) == (50, (3,))
    assert "unknown key 'eval.bootstrapp' in the command line" in refusal(
        write(tmp_path), "eval.bootstrapp=50"
    )


def drafter(**options: Any) -> dict[str, Any]:
    return {"drafters": [{"name": "a", **options}]}


MISTAKES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"name": "a/b"}, ("'name'", "without slashes", '"a/b"')),
    ({"drafters": []}, ("'drafters'", "a list of at least one")),
    ({"servings": []}, ("'servings'", "a list of at least one")),
    ({"laws": []}, ("'laws'", "a list of at least one")),
    ({"seeds": []}, ("'seeds'", "a list of at least one")),
    ({"domains": []}, ("'domains'", "a list of at least one")),
    ({"seeds": [1, 1]}, ("'seeds'", "none twice", "[1, 1]")),
    ({"seeds": [-1]}, ("'seeds'", "whole numbers of 0 or more")),
    ({"drafter": []}, ("unknown key 'drafter'", "did you mean 'drafters'")),
    (drafter(), ("'drafters.0.folder'", "or null beside options", "null")),
    (
        drafter(folder="x", options={"family": "lookup"}),
        ("'drafters.0.folder'", "or null beside options", '"x"'),
    ),
    (drafter(options={"max_ngram": 2}), ("'drafters.0.options'", "names its family")),
    (drafter(folder="x", serving=["block"]), ("'drafters.0.serving'", "drafters.0.servings")),
    (drafter(folder="x", name=" "), ("'drafters.0.name'", "a label that is not empty")),
    (drafter(folder="x", servings=["blok"]), ("'drafters'", "block, tree", '["blok"]')),
    (drafter(folder="x", servings=[]), ("'drafters'", "names of servings")),
    (
        {"drafters": [{"name": "a", "folder": "x"}, {"name": "a", "folder": "y"}]},
        ("'drafters'", "names of their own", '["a", "a"]'),
    ),
    (
        {"servings": [{"name": "block"}, {"name": "block", "num_draft_tokens": 5}]},
        ("'servings'", "names of their own"),
    ),
    (
        {"servings": [{"name": "block", "num_draft_tokens": 0}]},
        ("'servings.0.num_draft_tokens'", "1 or more"),
    ),
    (
        {"servings": [{"name": "block", "verifier": "blok"}]},
        ("'servings.0.verifier'", "'token' or 'block'", "did you mean 'block'"),
    ),
    (
        {"servings": [{"name": "block", "policy": {"name": "adaedl"}, "tree": {}}]},
        ("'servings.0.policy'", "null where there is a tree"),
    ),
    ({"laws": [{"temperature": -1.0}]}, ("'laws.0.temperature'", "0 (greedy) or more")),
    ({"eval": {"sweep": [0]}}, ("'eval.sweep'", "1 or more")),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=lambda x: str(x)[:50])
def test_a_mistake_is_one_sentence(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    said = refusal(path)
    for word in (*words, str(path)):
        assert word in said, said


def test_a_specification_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    said = refusal(tmp_path / "none.yaml")
    assert "there is no benchmark" in said and "none.yaml" in said
    (tmp_path / "broken.yaml").write_text("name: [")
    assert "not valid YAML" in refusal(tmp_path / "broken.yaml")


def test_sections_made_in_python_are_as_safe() -> None:
    with pytest.raises(OptionError, match="folder"):
        ContestantSection("a")
    with pytest.raises(OptionError, match="names of their own"):
        Benchmark("b", (ContestantSection("a", folder="x"), ContestantSection("a", folder="y")))


def test_every_option_has_a_docstring_under_it() -> None:
    for node in ast.parse(inspect.getsource(benchmark)).body:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(below, ast.Expr), f"{node.name}: {ast.unparse(field)}"
