"""Where kept files live, and writing them so that a half-written one is never taken for whole."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """The user's cache folder for draftsmith: `DRAFTSMITH_CACHE`, else the platform's usual one."""
    named = os.environ.get("DRAFTSMITH_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "draftsmith"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it becomes `path` only if the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        ordinary = part.stat().st_mode
        part.unlink()
        yield part
        _open_up(part, ordinary)
        with part.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; it becomes `path` only if the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for written in part.rglob("*"):
            if written.is_file():
                _open_up(written, part.stat().st_mode)
        put_in_place(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_in_place(part: Path, path: Path) -> None:
    """Let the finished folder `part` become `path`, instead of what was there."""
    if path.exists():
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.replace(path, old)
        os.replace(part, path)
        shutil.rmtree(old)
    else:
        os.replace(part, path)


def _open_up(path: Path, ordinary: int) -> None:
    """Let a file be read and written by whom the umask lets: `ordinary` is what it gave another.

    safetensors writes through temporary files, which are for their owner alone.
    """
    path.chmod(stat.S_IMODE(path.stat().st_mode) | (ordinary & 0o666))


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, readable and with a stable key order of its own making."""
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def size_text(size: float) -> str:
    """A number of bytes as people read it: 663 B, 1.2 kB, 39.3 MB, 1.2 GB."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"
