"""What the README tells people to type exists."""

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from draftsmith.scripts import distill
from draftsmith.scripts.arguments import arguments, command_line
from draftsmith.scripts.cli import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", README, re.S)
LINES = [
    line.split("#")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
]
CELLS = [
    cell.strip()
    for line in README.splitlines()
    if line.startswith("|")
    for cell in line.strip("|").split("|")
]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("draftsmith ")])
def test_commands_are_understood(line: str) -> None:
    args = arguments(shlex.split(line)[1:])
    assert args.command in COMMANDS


def test_the_commands_of_every_stage_are_shown() -> None:
    shown = {shlex.split(line)[1] for line in LINES if line.startswith("draftsmith ")}
    assert shown >= {"collect", "train", "eval", "publish", "doctor"}


LAUNCHED = [line for line in LINES if line.startswith("accelerate launch ")]


@pytest.mark.parametrize("line", LAUNCHED)
def test_launched_commands_are_understood(line: str) -> None:
    words = shlex.split(line)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launcher, script, given = words[2:at], words[at], words[at + 1 :]
    if script == "train/distill.py":
        distill._parser().parse_args(given)
    else:
        assert script == "data/collect.py"
        assert command_line().parse_args(["collect", *given]).command in COMMANDS
    known = launch_command_parser().parse_args([*launcher, script])
    assert known.config_file is None or (ROOT / known.config_file).exists()


def test_both_launched_scripts_are_shown() -> None:
    assert {s for line in LAUNCHED for s in re.findall(r"\S+\.py", line)} == {
        "data/collect.py", "train/distill.py",
    }  # fmt: skip


def test_no_table_cell_waits_for_its_figure() -> None:
    assert len(CELLS) > 50
    assert not [cell for cell in CELLS if re.fullmatch(r"[A-Z][A-Z0-9_]+", cell)]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in shlex.split(line)[1:]:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in link:
            assert (ROOT / link).exists(), link
