"""Where the shards of a store lie: a folder of this machine, or a URL that fsspec reads."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import fsspec

from ..configs.errors import UserError
from .files import cache_folder, whole_file
from .shards import Damaged, RowInfo, head_length, read_head

_START = 1 << 16  # bytes of each remote shard that are fetched at once; most headers are shorter


class Listed(TypedDict):
    """What a manifest says of a shard."""

    bytes: int
    sha256: str
    records: int


class Shelf(Protocol):
    """A place that holds files of a store."""

    def text(self, name: str) -> str | None:
        """The text of a file, None if there is none of that name."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each shard, by name."""

    def head(self, name: str) -> tuple[str, list[RowInfo]]:
        """Fingerprint and rows of a shard. Raises `Damaged` if it is not whole."""

    def path(self, name: str, known: Listed | None) -> Path:
        """The shard as a file of this machine. Raises `Damaged` if it is not what is `known`."""


def shard_file(name: str) -> str:
    return f"shard-{name}.safetensors"


def shard_name(file: str) -> str:
    return file.removeprefix("shard-").removesuffix(".safetensors")


def shelf_of(folder: Path | str, fingerprint: str = "") -> Shelf:
    return Folder(folder) if isinstance(folder, Path) else Bucket.at(folder, fingerprint)


def location(text: str | Path) -> Path | str:
    """A URL such as s3://bucket/records as it is, anything else as a path."""
    return text if isinstance(text, str) and "://" in text else Path(text)


_digests: dict[tuple[str, int, int], str] = {}


def sha256(path: Path) -> str:
    """The file's checksum, computed once a process for as long as its time and size stay."""
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns)
    if key not in _digests:
        with path.open("rb") as handle:
            _digests[key] = hashlib.file_digest(handle, "sha256").hexdigest()
    return _digests[key]


def check(path: Path, known: Listed) -> None:
    """Raises `Damaged` if the file is not the one that a manifest lists."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise Damaged("it is missing") from error
    if size != known["bytes"]:
        raise Damaged(f"it has {size} of {known['bytes']} bytes")
    if sha256(path) != known["sha256"]:
        raise Damaged("its checksum is not that of the manifest")


@dataclass(frozen=True)
class Folder:
    """A folder of this machine."""

    folder: Path

    def text(self, name: str) -> str | None:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else None

    def sizes(self) -> dict[str, int]:
        found = self.folder.glob(shard_file("*"))
        return {shard_name(path.name): path.stat().st_size for path in found}

    def head(self, name: str) -> tuple[str, list[RowInfo]]:
        path = self.folder / shard_file(name)
        try:
            with path.open("rb") as handle:
                size, start = os.fstat(handle.fileno()).st_size, handle.read(8)
                head = start + handle.read(head_length(start, size) - 8)
        except FileNotFoundError as error:
            raise Damaged("it is missing") from error
        return read_head(head, size, name)

    def path(self, name: str, known: Listed | None) -> Path:
        path = self.folder / shard_file(name)
        if known is not None:
            check(path, known)
        return path


@dataclass(frozen=True)
class Bucket:
    """A URL. Its shards are copied to the cache folder when they are first read."""

    url: str
    root: str
    system: Any
    cache: Path
    _starts: dict[str, tuple[Any, int]] = field(default_factory=dict)

    @classmethod
    def at(cls, url: str, fingerprint: str) -> "Bucket":
        """Raises `UserError` for a kind of URL that cannot be read here."""
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot read {url}: {error}") from error
        return cls(url, root.rstrip("/"), system, cache_folder() / "records" / fingerprint)

    def text(self, name: str) -> str | None:
        try:
            return bytes(self._asked(self.system.cat_file, self._at(name))).decode("utf-8")
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        listing = self._asked(self.system.ls, self.root, detail=True)
        files = {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in listing}
        return {shard_name(n): size for n, size in files.items() if shard_file(shard_name(n)) == n}

    def head(self, name: str) -> tuple[str, list[RowInfo]]:
        if not self._starts:  # of all at once: one request after the other would take minutes
            sizes = self.sizes()
            paths = [self._at(shard_file(n)) for n in sizes]
            ends = [min(size, _START) for size in sizes.values()]
            parts = self._asked(self.system.cat_ranges, paths, [0] * len(paths), ends)
            self._starts.update(zip(sizes, zip(parts, sizes.values(), strict=True), strict=True))
        start, size = self._starts[name]
        if isinstance(start, Exception):
            raise UserError(f"cannot read {self.url}/{shard_file(name)}: {start}") from start
        length = head_length(start, size)
        if length > len(start):
            start = self._asked(self.system.cat_file, self._at(shard_file(name)), 0, length)
        return read_head(bytes(start[:length]), size, name)

    def path(self, name: str, known: Listed | None) -> Path:
        assert known is not None, "stores that are not complete are not read from afar"
        path = self.cache / shard_file(name)
        try:
            check(path, known)
        except Damaged:  # or not fetched yet
            with whole_file(path) as part:
                self._asked(self.system.get_file, self._at(shard_file(name)), str(part))
            check(path, known)
        return path

    def _at(self, file: str) -> str:
        return f"{self.root}/{file}"

    def _asked(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise UserError(f"cannot read {self.url}: {error}") from error
