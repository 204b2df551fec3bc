"""Files and folders appear whole or not at all."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.data.files import (
    cache_folder,
    size_text,
    whole_file,
    whole_folder,
    write_json,
)


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.bin"
    with whole_file(path) as part:
        part.write_bytes(b"12")
        assert part.parent == path.parent  # one file system, so that the move is atomic
        assert not path.exists()
    assert path.read_bytes() == b"12"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", [OSError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(tmp_path: Path, fault: type[BaseException]) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(fault), whole_file(path) as part:
        part.write_bytes(b"ne")
        raise fault
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for text in ("first", "second"):
        with whole_folder(path) as part:
            (part / text).write_text(text, encoding="utf-8")
            assert not (path / text).exists()
        assert [p.name for p in path.iterdir()] == [text]  # nothing of the old one stays
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_keeps_the_old_folder(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "model"
    if exists:
        path.mkdir()
        (path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt), whole_folder(path) as part:
        (part / "half").write_text("x", encoding="utf-8")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.rglob("*")] == (["model", "config.json"] if exists else [])


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def ordinary(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of a new file under some umask, which holds for the test."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def write_private(path: Path) -> None:
    path.touch(0o600)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_follow_the_umask(tmp_path: Path, ordinary: int) -> None:
    """Whatever the mode of the temporary files that a library writes through."""
    with whole_file(tmp_path / "a.bin") as part:
        write_private(part)
    with whole_folder(tmp_path / "model") as part:
        write_private(part / "weights")
        (part / "deep").mkdir()
        write_private(part / "deep" / "weights")
        (part / "run").touch(0o700)
    assert mode(tmp_path / "a.bin") == ordinary
    assert mode(tmp_path / "model" / "weights") == ordinary
    assert mode(tmp_path / "model" / "deep" / "weights") == ordinary
    assert mode(tmp_path / "model" / "run") == ordinary | 0o100


def test_json_is_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": "Maß", "a": [1]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "Maß" in text and text.endswith("\n")
    assert json.loads(text) == {"b": "Maß", "a": [1]}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"b": object()})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == text
    assert len(list(tmp_path.iterdir())) == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTSMITH_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "draftsmith"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "draftsmith"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.2 kB"),
        (39_348_648, "39.3 MB"),
        (5e9, "5.0 GB"),
        (7e12, "7000.0 GB"),
    ],
)
def test_sizes_as_people_read_them(size: float, text: str) -> None:
    assert size_text(size) == text
