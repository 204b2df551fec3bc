"""Record shards on disk: written atomically, resumed by content, damaged ones named."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..configs.errors import UserError
from .files import whole_file, write_json
from .records import Record, States
from .warp import Law

FORMAT = 1
MANIFEST = "manifest.json"


def settings_hash(settings: dict[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class RecordStore:
    """A folder of shards with a manifest saying under which settings all of them were collected."""

    folder: Path
    settings: dict[str, Any]
    complete: bool

    @classmethod
    def create(cls, folder: Path, settings: dict[str, Any]) -> "RecordStore":
        """Open `folder` for adding, or begin it.

        Raises `UserError` if it holds records of other settings.
        """
        if (folder / MANIFEST).exists():
            store = cls.open(folder)
            for name in sorted({*settings, *store.settings}):
                was, now = store.settings.get(name), settings.get(name)
                if was != now:
                    raise UserError(
                        f"{folder} holds records collected with {name} = {was!r}, not {now!r}; "
                        "name another folder, or delete this one"
                    )
            return store
        store = cls(folder, settings, False)
        store._write_manifest(complete=False)
        return store

    @classmethod
    def open(cls, folder: Path) -> "RecordStore":
        path = folder / MANIFEST
        if not path.exists():
            raise UserError(f"{folder} holds no records (no {MANIFEST}); run `draftsmith collect`")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}); delete its folder to begin anew"
            ) from error
        if manifest.get("format") != FORMAT:
            raise UserError(f"{path} has format {manifest.get('format')}; this version reads 1")
        return cls(folder, manifest["settings"], manifest["complete"])

    def finish(self, summary: dict[str, Any]) -> "RecordStore":
        self._write_manifest(complete=True, summary=summary)
        return RecordStore(self.folder, self.settings, True)

    def summary(self) -> dict[str, Any]:
        manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        return dict(manifest.get("summary", {}))

    def _write_manifest(self, complete: bool, summary: dict[str, Any] | None = None) -> None:
        content = {"format": FORMAT, "complete": complete, "settings": self.settings}
        write_json(self.folder / MANIFEST, content | {"summary": summary or {}})

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def drop_damaged(self) -> list[Path]:
        """Remove shards that cannot be read whole, and return their paths.

        From then on the manifest calls the store incomplete, until `finish`.
        """
        damaged = [path for path in self.shards() if _damage(path)]
        if damaged:
            self._write_manifest(complete=False)
        for path in damaged:
            path.unlink()
        return damaged

    def keys(self) -> set[str]:
        return {row["key"] for path in self.shards() for row in _rows(path)}

    def add(self, records: Sequence[Record]) -> Path:
        """Write one shard, in the place of a dropped one if there is any.

        A full disk or a kill leaves no file of that name behind.
        """
        taken = {path.name for path in self.shards()}
        names = (f"shard-{number:05d}.safetensors" for number in itertools.count())
        path = self.folder / next(name for name in names if name not in taken)
        tensors, rows = _flatten(records)
        try:
            with whole_file(path) as part:
                save_file(tensors, part, metadata={"rows": json.dumps(rows, ensure_ascii=False)})
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"could not write {path}: {error}; the shards before it are whole, free some "
                "space and run the same command again"
            ) from error
        return path

    def records(self, split: str | None = None) -> Iterator[Record]:
        """All records of a split (or of both), shard by shard.

        Raises `UserError` naming a damaged shard or a record with states that are not finite.
        """
        for path in self.shards():
            if _damage(path):
                raise UserError(f"{path} is damaged; run `draftsmith collect` to redo it")
            yield from _read(path, split)


def _flatten(records: Sequence[Record]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    rows = []
    for r in records:
        rows.append(
            {
                "key": r.key,
                "prompt_id": r.prompt_id,
                "domain": r.domain,
                "split": r.split,
                "law": list(astuple(r.law)),
                "seed": r.seed,
                "finish": r.finish,
                "tokens": len(r.ids),
                "prompt_len": r.prompt_len,
            }
        )
    tensors = {"ids": torch.cat([r.ids for r in records])}
    if records[0].states is not None:
        states = [r.states for r in records if r.states is not None]
        tensors["hidden"] = torch.cat([s.hidden for s in states])
        tensors["log_z"] = torch.cat([s.log_z for s in states])
        tensors["taps"] = torch.cat([s.taps for s in states])
    return {name: t.contiguous() for name, t in tensors.items()}, rows


def _damage(path: Path) -> bool:
    try:
        _rows(path)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return True
    return False


def _rows(path: Path) -> list[dict[str, Any]]:
    with safe_open(path, "pt") as handle:
        return list(json.loads(handle.metadata()["rows"]))


def _read(path: Path, split: str | None) -> Iterator[Record]:
    with safe_open(path, "pt") as handle:
        rows = json.loads(handle.metadata()["rows"])
        names = set(handle.keys())
        at = reply_at = tap_at = 0
        for row in rows:
            tokens, prompt_len = row["tokens"], row["prompt_len"]
            reply = tokens - prompt_len
            if split is None or row["split"] == split:
                states = None
                if "hidden" in names:
                    end = reply_at + reply
                    states = States(
                        hidden=handle.get_slice("hidden")[reply_at:end],
                        log_z=handle.get_slice("log_z")[reply_at:end],
                        taps=handle.get_slice("taps")[tap_at : tap_at + tokens - 1],
                    )
                    _check_finite(states, path, row["key"])
                yield Record(
                    prompt_id=row["prompt_id"],
                    domain=row["domain"],
                    split=row["split"],
                    law=Law(*row["law"]),
                    seed=row["seed"],
                    finish=row["finish"],
                    ids=handle.get_slice("ids")[at : at + tokens],
                    prompt_len=prompt_len,
                    states=states,
                )
            at, reply_at, tap_at = at + tokens, reply_at + reply, tap_at + tokens - 1


def _check_finite(states: States, path: Path, key: str) -> None:
    for name in ("hidden", "log_z", "taps"):
        if not torch.isfinite(getattr(states, name)).all():
            raise UserError(f"{path}, record {key}: '{name}' holds values that are not finite")
