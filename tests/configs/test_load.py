"""Recipes: what is read, what is refused, and what the refusal says."""

import ast
import dataclasses
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from draftsmith.configs import collection, recipe, training
from draftsmith.configs.collection import DomainSection
from draftsmith.configs.errors import OptionError, UserError, did_you_mean
from draftsmith.configs.load import (
    load_recipe,
    parse,
    read_yaml,
    recipe_hash,
    shipped_recipes,
    to_dict,
)
from draftsmith.configs.recipe import LawSection, Recipe
from draftsmith.configs.training import TrainSection

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is shipped


def test_every_shipped_recipe_loads() -> None:
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert "demo" in names
    assert list(shipped_recipes()) == names
    for name in names:
        by_name = load_recipe(name)
        assert by_name.name == name
        assert load_recipe(ROOT / "configs" / f"{name}.yaml") == by_name


def test_the_demo_names_every_option() -> None:
    """So that it doubles as the reference: nothing is left to a default unseen."""
    written = read_yaml((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"), "demo")
    full = to_dict(Recipe(name="demo"))
    assert written.keys() == full.keys()
    for section, options in full.items():
        if section == "drafter":
            assert "family" in written[section]
        elif isinstance(options, dict):
            assert written[section].keys() == options.keys(), section
    first = written["domains"][0]
    assert first.keys() == {field.name for field in dataclasses.fields(DomainSection)}
    for law in written["serving"]["laws"]:
        assert law.keys() == {field.name for field in dataclasses.fields(LawSection)}


@pytest.mark.parametrize("module", [collection, recipe, training])
def test_every_option_has_a_docstring_under_it(module: ModuleType) -> None:
    bare = []
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        assert ast.get_docstring(node), node.name
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and not (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                bare.append(f"{node.name}.{ast.unparse(statement.target)}")
    assert bare == []


# ---- mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: r\ntrain: {stepz: 3}",
            "unknown key 'train.stepz' in {file} (did you mean 'train.steps'?)",
        ),
        ("nam: r", "unknown key 'nam' in {file} (did you mean 'name'?)"),
        (
            "name: r\ntrain: {on_policy: {draftd: 0.5}}",
            "unknown key 'train.on_policy.draftd' in {file} (did you mean "
            "'train.on_policy.drafted'?)",
        ),
        ("seed: 1", "missing key 'name' in {file}"),
        (
            "name: r\ndomains: [{name: a, source: chat}, {name: b, source: chat, hold: 1}]",
            "unknown key 'domains.1.hold' in {file} (did you mean 'domains.1.holdout'?)",
        ),
        (
            "name: r\nserving: {law: 3, zz: 1}",
            "unknown key 'serving.law' in {file} (did you mean 'serving.laws'?)",
        ),
        ("name: r\ntrain: {lr: fast}", "'train.lr' in {file} must be a number, not \"fast\""),
        (
            "name: r\ntrain: {steps: 2.5}",
            "'train.steps' in {file} must be a whole number or null, not 2.5",
        ),
        (
            "name: r\nserving: {num_draft_tokens: true}",
            "'serving.num_draft_tokens' in {file} must be a whole number, not true",
        ),
        (
            "name: r\ntrain: {betas: [0.9]}",
            "'train.betas' in {file} must be a list of 2, each a number, not [0.9]",
        ),
        (
            "name: r\ntrain: {schedule: cosin}",
            "'train.schedule' in {file} must be 'cosine' or 'linear' or 'constant', "
            "not \"cosin\" (did you mean 'cosine'?)",
        ),
        (
            "name: r\ntarget: {dtype: int7}",
            "'target.dtype' in {file} must be 'auto' or 'float32' or 'bfloat16' or 'float16', "
            'not "int7"',
        ),
        ("name: r\ntrain:", "'train' in {file} must be a mapping of options, not null"),
        ("- name: r", '{file} must be a mapping of options, not [{{"name": "r"}}]'),
        (
            "name: r\ndrafter: {taps: [1]}",
            "'drafter' in {file} must be a mapping that names its family, not {{\"taps\": [1]}}",
        ),
    ],
)
def test_a_mistake_is_named_by_its_dotted_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert refusal(path) == message.format(file=path)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("domains.0.holdout=1.5", "domains.0.holdout"),
        ("domains.0.max_rows=0", "domains.0.max_rows"),
        ("domains=[]", "domains"),
        ("serving.laws.1.temperature=-1", "serving.laws.1.temperature"),
        ("serving.laws.1.top_p=0", "serving.laws.1.top_p"),
        ("serving.laws.1.top_p=1.01", "serving.laws.1.top_p"),
        ("serving.laws.1.top_k=-1", "serving.laws.1.top_k"),
        ("serving.laws=[]", "serving.laws"),
        ("collect.temperatures=[0.5, -0.1]", "collect.temperatures"),
        ("objective.position_decay=0", "objective.position_decay"),
        ("objective.switch_at=2", "objective.switch_at"),
        ("train.steps=0", "train.steps"),
        ("train.lr=.nan", "train.lr"),
        ("train.lr=.inf", "train.lr"),
        ("train.betas=[0.9, 1]", "train.betas"),
        ("serving.num_draft_tokens=0", "serving.num_draft_tokens"),
        ("eval.sweep=[1, 0]", "eval.sweep"),
        ("name=runs/a", "name"),
        ("seed=-1", "seed"),
    ],
)
def test_ranges(override: str, key: str) -> None:
    assert refusal("demo", override).startswith(f"'{key}' in the command line must be ")


def test_a_section_made_in_python_is_checked_too() -> None:
    with pytest.raises(OptionError, match=r"'holdout' must be between 0 and 1, not 2"):
        DomainSection(name="a", source="chat", holdout=2)
    with pytest.raises(OptionError, match="'lr' must be above 0"):
        TrainSection(lr=float("nan"))


def test_parse_names_the_section_and_takes_any_dataclass() -> None:
    """As the drafter families do with their own options."""

    @dataclasses.dataclass(frozen=True)
    class Family:
        taps: tuple[int, ...]
        size: int = 3

        def __post_init__(self) -> None:
            if self.size > 9:
                raise ValueError("too large for these taps")

    assert parse(Family, {"taps": [1, 2]}, "r.yaml", "drafter") == Family((1, 2))
    for mapping, message in [
        ({"tap": []}, "unknown key 'drafter.tap' in r.yaml (did you mean 'drafter.taps'?)"),
        ({"taps": ["x"]}, "'drafter.taps.0' in r.yaml must be a whole number, not \"x\""),
        ({"taps": [], "size": 10}, "'drafter' in r.yaml: too large for these taps"),
    ]:
        with pytest.raises(UserError) as caught:
            parse(Family, mapping, "r.yaml", "drafter")
        assert str(caught.value) == message


def test_unions_are_named_by_their_key_alone() -> None:
    """pydantic puts the member that it tried behind the key."""

    @dataclasses.dataclass(frozen=True)
    class Family:
        one: Literal["auto"] | Literal["half", "full"] = "auto"
        maybe: Literal["auto"] | Literal["half", "full"] | None = None
        each: tuple[Literal["auto"] | Literal["half", "full"], ...] = ()
        free: float | str = 0.0

    assert parse(Family, {"maybe": "full", "each": ["half"]}, "r") == Family(
        "auto", "full", ("half",)
    )
    for mapping, message in [
        ({"one": "int7"}, "'one' in r must be 'auto' or 'half' or 'full', not \"int7\""),
        ({"one": "hal"}, "must be 'auto' or 'half' or 'full', not \"hal\" (did you mean 'half'?)"),
        ({"maybe": 3}, "'maybe' in r must be 'auto' or 'half' or 'full' or null, not 3"),
        ({"each": ["auto", 3]}, "'each.1' in r must be 'auto' or 'half' or 'full', not 3"),
        ({"free": None}, "'free' in r must be a number or text, not null"),
    ]:
        with pytest.raises(UserError) as caught:
            parse(Family, mapping, "r")
        assert str(caught.value).endswith(message)


def test_did_you_mean() -> None:
    assert did_you_mean("stepz", ["steps", "lr"]) == " (did you mean 'steps'?)"
    assert did_you_mean("train.qqq", ["train.steps", "train.lr"]) == (
        " (known: train.steps, train.lr)"
    )
    assert did_you_mean("x", []) == ""


def test_a_recipe_that_does_not_exist(tmp_path: Path) -> None:
    said = refusal("demmo")
    assert said.startswith("there is no recipe 'demmo'") and "did you mean 'demo'?" in said
    said = refusal(str(tmp_path / "qqqqqq.yaml"))
    assert str(tmp_path) in said and "demo" in said


# ---- YAML


def test_broken_yaml_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "name: r\ntrain:\n  lr: [1\nseed: 2\n")
    assert refusal(path).startswith(f"{path}:4: not valid YAML: ")
    path = write(tmp_path, "name: r\ntrain:\n  lr: 0.1\n  lr: 0.2\n")
    assert refusal(path) == f"{path}:4: not valid YAML: key 'lr' is given twice"
    path.write_bytes(b"name: \xff\xfe")
    assert refusal(path).startswith(f"cannot read {path} as UTF-8 text")


def test_words_stay_words_and_numbers_are_numbers() -> None:
    text = "[no, off, on, yes, true, 2024-01-02, 1.2.3, ~]"
    assert read_yaml(text, "here") == ["no", "off", "on", "yes", True, "2024-01-02", "1.2.3", None]
    text = "[1e-3, 1E5, 2., .5, -1.5e+3, 3]"
    assert read_yaml(text, "here") == [1e-3, 1e5, 2.0, 0.5, -1500.0, 3]


def test_the_same_key_in_merged_mappings_is_no_repetition() -> None:
    text = "a: &a {x: 1, y: 3}\nb: {<<: *a, x: 2}"
    assert read_yaml(text, "here")["b"] == {"x": 2, "y": 3}


def test_byte_order_mark(tmp_path: Path) -> None:
    """B020, for recipes."""
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: r\r\nseed: 4\r\n")
    assert load_recipe(path) == Recipe(name="r", seed=4)


# ---- overrides


def test_overrides() -> None:
    base = load_recipe("demo")
    changed = load_recipe(
        "demo",
        [
            "train.lr=1e-4",
            "train.wandb=offline",
            "train.mixed_precision=no",
            "domains.0.holdout=0.1",
            "serving.laws=[{temperature: 0.7}]",
            "eval.sweep=[2]",
            "drafter.taps=[1, 14, 28]",
            "target.revision=",
        ],
    )
    assert changed.train.lr == 1e-4
    assert (changed.train.wandb, changed.train.mixed_precision) == ("offline", "no")
    assert [d.holdout for d in changed.domains] == [0.1, *(d.holdout for d in base.domains[1:])]
    assert changed.serving.laws == (LawSection(temperature=0.7),)
    assert changed.eval.sweep == (2,)
    assert changed.drafter == {**base.drafter, "taps": [1, 14, 28]}
    assert changed.target.revision is None
    assert changed.collect == base.collect


def test_overrides_reach_the_defaults_of_a_short_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, "name: r")
    assert load_recipe(path) == Recipe(name="r")
    assert load_recipe(path, ["domains.3.max_rows=5"]).domains[3].max_rows == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.stepz=3",
            "unknown key 'train.stepz' in the command line (did you mean 'train.steps'?)",
        ),
        ("trian.lr=1", "unknown key 'trian' in the command line (did you mean 'train'?)"),
        ("train.lr", "'train.lr' on the command line must be written section.key=value"),
        (".lr=1", "'.lr=1' on the command line must be written section.key=value"),
        ("seed.x=1", "'seed' on the command line is one value and has no key 'x'"),
        (
            "domains.4.holdout=0",
            "'domains' on the command line is a list of 4: count it from 0 to 3, not '4'",
        ),
        ("train=3", "'train' in the command line must be a mapping of options, not 3"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(write(tmp_path, "name: r"), override) == message


def test_a_broken_value_on_the_command_line() -> None:
    assert "not valid YAML" in refusal("demo", "eval.sweep=[1")


# ---- identity


def test_to_dict_is_what_parse_reads() -> None:
    recipe = load_recipe("demo", ["drafter.taps=[1, 2]"])
    plain = to_dict(recipe)
    assert plain["train"]["betas"] == [0.9, 0.95]
    assert parse(Recipe, plain, "plain") == recipe


@pytest.mark.parametrize("override", ["seed=1", "train.lr=2e-3", "drafter.x=1", "eval.sweep=[1]"])
def test_recipe_hash_changes_with_any_option(override: str) -> None:
    base: Any = load_recipe("demo")
    assert recipe_hash(base) == recipe_hash(load_recipe("demo"))
    assert len(recipe_hash(base)) == 16
    assert recipe_hash(load_recipe("demo", [override])) != recipe_hash(base)
