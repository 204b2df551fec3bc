"""The doctor: what is here, what would not work, and an exit status that says so."""

import io
import os
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.scripts import doctor
from draftsmith.scripts.cli import main

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with everything, whatever this one has."""
    monkeypatch.setattr(doctor, "_version", lambda name: "9.9")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(9 << 40, 0, 8 << 40))
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


def diagnosis() -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    return doctor.diagnose(console), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = diagnosis()
    assert status == 0
    for words in ("transformers", "9.9", "threads", "accelerators", str(tmp_path / "cache")):
        assert words in said
    assert "everything the demo needs is here" in said
    assert main(["doctor"]) == 0
    assert "embedded target" in capsys.readouterr().out


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("peft", "wandb") else "1")
    status, said = diagnosis()
    assert status == 1
    assert "would not work: peft is not installed" in said
    assert "wandb is not installed" not in said, "it is optional"


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(9 << 40, 0, 1 << 30))
    status, said = diagnosis()
    assert status == 1
    assert "only 1.0 GiB are free" in said


def test_an_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    status, said = diagnosis()
    assert status == 1
    assert "is not writable; set DRAFTSMITH_CACHE" in said


def test_versions_are_those_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert doctor._version("torch") and doctor._version("no-such-package") is None
