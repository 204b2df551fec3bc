"""What the README tells people to type exists."""

import re
import shlex
from pathlib import Path

import pytest

from draftsmith.scripts.cli import _parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", README, re.S)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("draftsmith ")])
def test_commands_are_understood(line: str) -> None:
    args = _parser().parse_args(shlex.split(line)[1:])
    assert callable(args.run)


def test_the_commands_of_every_stage_are_shown() -> None:
    shown = {shlex.split(line)[1] for line in LINES if line.startswith("draftsmith ")}
    assert shown >= {"collect", "train", "eval", "publish", "doctor"}


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in shlex.split(line)[1:]:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in link:
            assert (ROOT / link).exists(), link
