"""A damaged configuration is refused in one sentence: no traceback, and no other drafter.

Of every layout, each key of its `config.json` in turn is taken away or says what it cannot mean.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from drafting import drafted
from laid_out import LAYOUTS
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.about import OWN, about
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.layouts import LAYOUTS as READ
from draftsmith.drafters.layouts import layout_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CONFIG = "config.json"
CASES = {
    "dflash": ("dflash", CONFIG),
    "dflash speculators": ("dflash speculators, reduced", CONFIG),
    "eagle3": ("eagle3", CONFIG),
    "eagle3 speculators": ("eagle3 speculators", CONFIG),
    "medusa": ("medusa, truncated", CONFIG),
    "medusa native": ("medusa native", CONFIG),
    "mlp_speculator": ("mlp speculator, tied", CONFIG),
    "eagle": ("eagle", CONFIG),
    "draftsmith": ("draftsmith", OWN),
    "transformers": ("transformers", CONFIG),
}
"""What writes a folder of each layout, and the file that tells of it."""

WRONG: dict[type, list[Any]] = {
    bool: ["no", 2, []],
    int: ["many", -3, 0, 1.5, True, [], {"a": 1}],
    float: ["many", -1.0, True, [1.0], {}],
    str: ["unheard", 5, [], {"a": 1}],
    list: ["x", 5, {"a": 1}, [[]], ["x", 3], [-1], [True]],
    dict: ["x", 5, [1], {"x": 1}],
    type(None): ["x", -3, [2], True],
}


class Whole(NamedTuple):
    """A folder that is whole: its layout, the file that tells of it, and what its drafter says."""

    layout: str
    folder: Path
    file: str
    says: Tensor

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / self.file).read_text(encoding="utf-8"))


def test_every_layout_is_tried() -> None:
    assert CASES.keys() == READ.keys()


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    writer, file = CASES[request.param]
    folder = tmp_path_factory.mktemp("whole") / "drafter"
    LAYOUTS[writer](folder, tiny_target)
    assert layout_of(folder, about(folder)) == request.param
    return Whole(request.param, folder, file, says(folder, tiny_target))


@pytest.fixture
def read(whole: Whole, tiny_target: Target, tmp_path: Path) -> Callable[[str | bytes], Any]:
    """What the folder's drafter says once its file holds these; None if it is refused for it."""
    place = shutil.copytree(whole.folder, tmp_path / "damaged")

    def found(content: str | bytes) -> Tensor | None:
        data = content.encode() if isinstance(content, str) else content
        (place / whole.file).write_bytes(data)
        try:
            return says(place, tiny_target)
        except UserError as error:
            assert str(place) in str(error) and "\n" not in str(error), error
            return None

    return found


def says(folder: Path, target: Target) -> Tensor:
    """What the folder's drafter says, read by all that reads its configuration: `[2, V_d]`."""
    known = about(folder)
    if known.own is None or known.layout is not None:
        READ[layout_of(folder, known)].taps(folder, known, target.num_layers)
    return drafted(load_drafter(folder, target))


def keys_of(table: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in keys_of(value))


def holder_of(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The table within `config` that has the last key of `path`."""
    for key in path[:-1]:
        config = config[key]
    return config


def test_a_key_of_another_kind(whole: Whole, read: Callable[[str], Any]) -> None:
    """It is refused, or does not matter: the drafter says what it said."""
    config = whole.config
    for path in keys_of(config):
        value = holder_of(config, path)[path[-1]]
        for wrong in WRONG[type(value)]:
            damaged = copy.deepcopy(config)
            holder_of(damaged, path)[path[-1]] = wrong
            if (path[-1], wrong) == ("mask_token_id", 0):
                continue  # a token like another
            found = read(json.dumps(damaged))
            if whole.layout != "transformers":  # whose own reading is not judged
                assert found is None or torch.equal(found, whole.says), (path, value, wrong)


def test_a_key_that_is_missing(whole: Whole, read: Callable[[str], Any]) -> None:
    """It is refused, or has a default."""
    config = whole.config
    for path in keys_of(config):
        damaged = copy.deepcopy(config)
        del holder_of(damaged, path)[path[-1]]
        read(json.dumps(damaged))


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "[" * 5000, '{"a": 1}{', b"\xff\xfe\x00{"],
    ids=["empty", "open", "list", "null", "deep", "two", "no text"],
)
def test_what_is_no_table(content: str | bytes, read: Callable[[str | bytes], Any]) -> None:
    assert read(content) is None


@pytest.mark.parametrize(
    ("rope", "known_to_all"),
    [
        ({"rope_type": "spiral", "rope_theta": 5000.0}, True),
        ({"rope_type": "yarn", "rope_theta": 5000.0}, True),  # and no factor
        ({"rope_theta": -3.0}, False),
        ({"rope_theta": 5000.0, "partial_rotary_factor": 0.5}, False),
    ],
    ids=["unknown", "incomplete", "negative", "in part"],
)
def test_positions_that_cannot_be_told(
    rope: dict[str, Any], known_to_all: bool, whole: Whole, read: Callable[[str], Any]
) -> None:
    config = whole.config
    layer = config.get("transformer_layer_config", config)
    if not {"rope_theta", "rope_parameters"} & layer.keys():
        pytest.skip(f"the layout '{whole.layout}' tells of no positions")
    layer.pop("rope_theta", None)
    layer.pop("rope_scaling", None)
    layer["rope_parameters"] = rope
    found = read(json.dumps(config))
    assert found is None or (whole.layout == "transformers" and not known_to_all)
