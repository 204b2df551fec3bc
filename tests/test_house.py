"""The rules of the house: style, types, import layers, names and packaging."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftsmith

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
MAX_LINES = 400

NOT_OURS = {"__pycache__", "build", "dist", "runs", "wandb"}


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def python_files() -> Iterator[Path]:
    """Every Python file of the repository; hidden folders and environments are not ours."""
    for here, folders, files in os.walk(ROOT):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in NOT_OURS
            and not Path(here, name, "pyvenv.cfg").exists()
        )
        yield from (Path(here, name) for name in sorted(files) if name.endswith(".py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "command",
    ["ruff format --check .", "ruff check .", "mypy", "lint-imports"],
)
def test_check_passes(command: str) -> None:
    name, *arguments = command.split()
    program = shutil.which(name, path=os.fspath(Path(sys.executable).parent))
    assert program, f"{name} is not installed beside {sys.executable}: install the dev extra"
    done = subprocess.run(
        [program, *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{command} failed:\n{done.stdout}", pytrace=False)


def test_no_file_is_too_long() -> None:
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_no_module_shadows_another() -> None:
    """A script run by its path puts its folder first on sys.path: siblings come before others."""
    distributions = importlib.metadata.packages_distributions()
    others = {name for name, owners in distributions.items() if set(owners) != {"draftsmith"}}
    taken = sys.stdlib_module_names | others
    ours = {path for package in PACKAGES for path in folder_of(package).glob("*.py")}
    ours |= {folder_of(package) for package in PACKAGES if "." in package}
    assert sorted(relative(path) for path in ours if path.stem in taken) == []


def test_no_conftest_at_the_root() -> None:
    assert not (ROOT / "conftest.py").exists(), "it would be packed into the wheel"


def test_every_listed_package_exists() -> None:
    missing = [name for name in PACKAGES if not (folder_of(name) / "__init__.py").is_file()]
    assert missing == []


def test_every_folder_of_python_files_is_listed() -> None:
    listed = {folder_of(name) for name in PACKAGES}
    code = {path.parent for path in python_files() if path.relative_to(ROOT).parts[0] != "tests"}
    assert sorted(relative(folder) for folder in code - listed) == []


def test_version_is_the_projects() -> None:
    assert draftsmith.__version__ == PROJECT["project"]["version"]
