"""A folder of record shards: each written whole, found by its name, read in any order.

A collection writes one shard a batch. `finish` lists them in the manifest with their checksums, and
what of them the plan asked for; from then on nothing else is read.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..configs.errors import UserError
from .files import whole_file, write_json
from .records import Record
from .shards import FORMAT, Damaged, RowInfo, pack, read_record
from .shelves import Listed, Shelf, location, sha256, shard_file, shard_name, shelf_of

MANIFEST = "manifest.json"
SELECTION = "selection.json"
_OPEN = 64  # shards that are kept open

Selection = Mapping[str, tuple[str, str]]
"""Split and domain of the records that are asked for, by their keys."""


def settings_hash(settings: dict[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class RecordStore:
    """Shards of records that were all collected under the same settings.

    folder: a path, or the URL of a finished store. complete: whether it is one that was finished
    and is not added to; then only `listed` shards are read, else all that lie there. selection:
    which records of them, and where these belong; None for all, as they were collected.
    """

    folder: Path | str
    settings: dict[str, Any]
    complete: bool
    listed: Mapping[str, Listed] = field(default_factory=dict)
    selection: Selection | None = None

    @classmethod
    def create(cls, folder: Path, settings: dict[str, Any]) -> "RecordStore":
        """Open `folder` for adding, or begin it; all that lies there is seen, asked for or not.

        Raises `UserError` if it holds records of other settings.
        """
        if not (folder / MANIFEST).exists():
            store = cls(folder, settings, False)
            store._write_manifest({})
            return store
        manifest = _manifest(shelf_of(folder), folder)
        known = manifest["settings"]
        for name in sorted({*settings, *known}):
            was, now = known.get(name), settings.get(name)
            if was != now:
                raise UserError(
                    f"{folder} holds records collected with {name} = {was!r}, not {now!r}; "
                    "name another folder, or delete this one"
                )
        return cls(folder, known, False, manifest["shards"])

    @classmethod
    def open(cls, folder: Path | str) -> "RecordStore":
        """A store to read from, also one at a URL such as s3://bucket/records.

        Raises `UserError` if there is none, or shards of a finished one are missing or cut off.
        """
        folder = location(folder)
        shelf = shelf_of(folder)
        manifest = _manifest(shelf, folder)
        complete = bool(manifest["complete"])
        if not complete and isinstance(folder, str):
            raise UserError(f"{folder} is not finished; end `draftsmith collect` before moving it")
        selection = _selection(shelf, folder, manifest["selection"]) if complete else None
        store = cls(folder, manifest["settings"], complete, manifest["shards"], selection)
        lacking = store._lacking() if complete else []
        if lacking:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise UserError(
                f"{folder} is damaged: {', '.join(lacking[:3])}{more}; run `draftsmith collect` to "
                "redo them"
            )
        return store

    def _lacking(self) -> list[str]:
        sizes = self._files.shelf.sizes()
        return [
            f"{shard_file(name)} has {sizes.get(name, 0)} of {known['bytes']} bytes"
            for name, known in self.listed.items()
            if sizes.get(name) != known["bytes"]
        ]

    @cached_property
    def _files(self) -> "_Files":
        return _Files(self.folder, self.fingerprint, self.listed)

    @property
    def fingerprint(self) -> str:
        """What every shard carries: a hash of the settings."""
        return settings_hash(self.settings)

    @property
    def identity(self) -> str:
        """Hash of the settings and of which records there are, in which split and domain."""
        asked = sorted([row.key, row.split, row.domain] for row in self.index())
        return settings_hash({"settings": self.settings, "records": asked})

    def summary(self) -> dict[str, Any]:
        text = self._files.shelf.text(MANIFEST)
        return dict(json.loads(text or "{}").get("summary", {}))

    # ---- writing

    def add(self, name: str, records: Sequence[Record]) -> Path:
        """Write the shard `name`, in the place of one that is there. May be called from any thread.

        A full disk or a kill leaves no file of that name behind. Raises `UserError` naming a
        record whose values are not finite, or do not fit the settings' `store_dtype`.
        """
        dtype = getattr(torch, self.settings["store_dtype"])
        tensors, metadata = pack(records, self.fingerprint, dtype)
        path = self._path(name)
        try:
            with whole_file(path) as part:
                save_file(tensors, part, metadata)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"could not write {path}: {error}; the shards before it are whole, free some "
                "space and run the same command again"
            ) from error
        self._files.forget(name)
        sha256(path)  # now, while the file is in memory: `finish` asks for it
        return path

    def finish(self, summary: dict[str, Any], selection: Selection | None = None) -> "RecordStore":
        """List what lies there, with checksums, and the records that are asked for (None: all).

        Raises `UserError` if one of these is not held.
        """
        listed, keys = {}, set()
        for name in sorted(self.held()):
            path, rows = self._path(name), self._files.rows(name)
            size = path.stat().st_size
            listed[name] = Listed(bytes=size, sha256=sha256(path), records=len(rows))
            keys |= {row.key for row in rows}
        missing = (selection or {}).keys() - keys
        if missing:
            raise UserError(f"{self.folder} lacks {len(missing)} records, {min(missing)} for one")
        assert isinstance(self.folder, Path)
        self._write_manifest(listed)  # not complete until both files belong together
        digest = None
        if selection is None:
            (self.folder / SELECTION).unlink(missing_ok=True)
        else:
            write_json(self.folder / SELECTION, dict(sorted(selection.items())))
            digest = _hash((self.folder / SELECTION).read_text(encoding="utf-8"))
        self._write_manifest(listed, complete=True, summary=summary, selection=digest)
        return RecordStore.open(self.folder)

    def _write_manifest(self, listed: Mapping[str, Listed], **end: Any) -> None:
        assert isinstance(self.folder, Path)
        begin = {"format": FORMAT, "complete": False, "settings": self.settings}
        content = begin | {"selection": None, "summary": {}} | end | {"shards": dict(listed)}
        write_json(self.folder / MANIFEST, content)

    def held(self) -> set[str]:
        """Names of the shards that lie there whole, whether listed or not.

        Raises `UserError` for one that was collected under other settings.
        """
        return {name for name in self._files.shelf.sizes() if self._files.is_whole(name)}

    def drop_damaged(self) -> list[Path]:
        """Remove shards that are not whole, or not as listed; returns their paths and lost ones'.

        From then on the manifest calls the store incomplete, until `finish`. What killed writers
        left goes too, so no other process may be writing.
        """
        assert isinstance(self.folder, Path)
        for pattern in (".*.part", ".tmp*"):  # of `whole_file`, and of safetensors
            for part in self.folder.glob(pattern):
                part.unlink()
        names = sorted({*self._files.shelf.sizes(), *self.listed})
        with ThreadPoolExecutor() as pool:
            good = set(compress(names, pool.map(self._files.is_as_listed, names)))
        damaged = [self._path(name) for name in names if name not in good]
        if damaged:
            self._write_manifest({n: about for n, about in self.listed.items() if n in good})
        for path in damaged:
            path.unlink(missing_ok=True)
            self._files.forget(shard_name(path.name))
        return damaged

    def _path(self, name: str) -> Path:
        assert isinstance(self.folder, Path), "stores at a URL are only read"
        return self.folder / shard_file(name)

    # ---- reading

    def index(self) -> list[RowInfo]:
        """All records without their tensors, by shard name, then as they were added.

        One that lies in two shards, from plans with other batches, is told of once. Raises
        `UserError` naming a damaged shard.
        """
        names = self.listed if self.complete else self._files.shelf.sizes()
        found: dict[str, RowInfo] = {}
        for name in sorted(names):
            for row in self._files.rows(name):
                found.setdefault(row.key, row)
        if self.selection is None:
            return list(found.values())
        asked = ((row, self.selection[key]) for key, row in found.items() if key in self.selection)
        return [replace(row, split=split, domain=domain) for row, (split, domain) in asked]

    def read(self, rows: Sequence[RowInfo]) -> list[Record]:
        """These records, in this order; their tensors are mapped and not copied.

        A shard's checksum is verified when it is first read. Raises `UserError` naming a damaged
        shard, or a record whose values are not finite.
        """
        return [self._files.record(row) for row in rows]

    def records(self, split: str | None = None) -> Iterator[Record]:
        """All records of a split (or of both), one after the other, as `index` tells them."""
        for row in self.index():
            if split is None or row.split == split:
                yield self._files.record(row)


class _Files:
    """The shards of a store: rows are kept once read, and some of the files open."""

    def __init__(self, folder: Path | str, fingerprint: str, listed: Mapping[str, Listed]):
        self.folder, self.fingerprint, self.listed = folder, fingerprint, dict(listed)
        self.shelf = shelf_of(folder, fingerprint)
        self._rows: dict[str, list[RowInfo]] = {}
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def forget(self, name: str) -> None:
        """What was known of a shard that is written anew, or removed."""
        for known in (self._rows, self._open, self.listed):
            known.pop(name, None)

    def is_whole(self, name: str) -> bool:
        try:
            self._read_rows(name)
        except Damaged:
            return False
        return True

    def is_as_listed(self, name: str) -> bool:
        try:
            self.shelf.path(name, self.listed.get(name))
        except Damaged:
            return False
        return self.is_whole(name)

    def rows(self, name: str) -> list[RowInfo]:
        try:
            return self._read_rows(name)
        except Damaged as error:
            raise self._damage(name, error) from error

    def record(self, row: RowInfo) -> Record:
        return read_record(self._handle(row.shard), row, self._where(row.shard))

    def _read_rows(self, name: str) -> list[RowInfo]:
        if name not in self._rows:
            fingerprint, rows = self.shelf.head(name)
            if fingerprint != self.fingerprint:
                raise UserError(
                    f"{self._where(name)} was collected under other settings (fingerprint "
                    f"{fingerprint}, not {self.fingerprint}); move it to the records it is of"
                )
            self._rows[name] = rows
        return self._rows[name]

    def _handle(self, name: str) -> Any:
        with self._lock:
            if name not in self._open:
                self.rows(name)  # refuses one of other settings
                try:
                    path = self.shelf.path(name, self.listed.get(name))
                    self._open[name] = safe_open(path, "pt")
                except (Damaged, SafetensorError, OSError) as error:
                    raise self._damage(name, error) from error
                while len(self._open) > _OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            return self._open[name]

    def _where(self, name: str) -> str:
        return f"{self.folder}/{shard_file(name)}"

    def _damage(self, name: str, error: Exception) -> UserError:
        return UserError(
            f"{self._where(name)} is damaged ({error}); run `draftsmith collect` to redo it"
        )


def _manifest(shelf: Shelf, folder: Path | str) -> dict[str, Any]:
    text = shelf.text(MANIFEST)
    if text is None:
        raise UserError(f"{folder} holds no records (no {MANIFEST}); run `draftsmith collect`")
    try:
        manifest = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{folder}/{MANIFEST} is damaged ({error}); delete its folder to begin anew"
        ) from error
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder}/{MANIFEST} has format {manifest.get('format')}, this version reads "
            f"{FORMAT}; name another folder, or delete this one and collect again"
        )
    return manifest


def _selection(shelf: Shelf, folder: Path | str, digest: str | None) -> Selection | None:
    if digest is None:
        return None
    text = shelf.text(SELECTION) or ""
    if _hash(text) != digest:
        raise UserError(
            f"{folder}/{SELECTION} is missing or not the one that {MANIFEST} was written with; "
            "run `draftsmith collect` again"
        )
    return {key: (split, domain) for key, (split, domain) in json.loads(text).items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
