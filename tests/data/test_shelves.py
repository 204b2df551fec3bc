"""Where shards lie: checksums are computed once, and a URL is read as a folder is."""

from pathlib import Path

import fsspec
import pytest
from stored import NAMES, assert_same, filled, record

from draftsmith.configs.errors import UserError
from draftsmith.data import shelves
from draftsmith.data.store import MANIFEST, RecordStore


def test_a_checksum_is_computed_once_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).finish({})
    monkeypatch.setattr(shelves.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert len(list(RecordStore.open(tmp_path).records())) == 12, "known from writing"


# ---- at a URL


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A finished store, moved to a file system that is not this machine's."""
    filled(tmp_path / "records").finish({"cells": 3})
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.put(str(tmp_path / "records") + "/", "/bucket/records/", recursive=True)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return "memory://bucket/records"


def test_a_store_at_a_url_is_read_shard_by_shard(url: str, tmp_path: Path) -> None:
    store = RecordStore.open(url)
    assert store.complete and store.summary() == {"cells": 3}
    rows = store.index()
    cache = tmp_path / "cache" / "records" / store.fingerprint
    assert len(rows) == 12 and not cache.exists(), "rows are told by the headers"
    assert_same(store.read(rows[5:6])[0], record(5))
    assert [path.name for path in cache.iterdir()] == [f"shard-{NAMES[1]}.safetensors"]
    assert [r.prompt_id for r in store.records()] == [f"p{n}" for n in range(12)]
    assert len(list(cache.iterdir())) == 3


def test_rows_behind_a_long_header_are_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "_START", 40)
    assert len(RecordStore.open(url).index()) == 12


@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_a_damaged_copy_is_fetched_again(url: str, tmp_path: Path, keep: float) -> None:
    store = RecordStore.open(url)
    rows = store.index()
    store.read(rows[:1])
    (copy,) = (tmp_path / "cache").rglob("shard-*")
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content[: int(len(content) * keep)])
    assert_same(RecordStore.open(url).read(rows[1:2])[0], record(1))


def test_a_shard_that_is_damaged_there_is_refused(url: str) -> None:
    system = fsspec.filesystem("memory")
    name = f"/bucket/records/shard-{NAMES[1]}.safetensors"
    content = bytearray(system.cat_file(name))
    content[-1] ^= 1
    system.pipe_file(name, bytes(content))
    store = RecordStore.open(url)
    with pytest.raises(UserError, match=rf"{url}/shard-{NAMES[1]}.safetensors is damaged"):
        list(store.records())
    system.rm(name)
    with pytest.raises(UserError, match=rf"shard-{NAMES[1]}.safetensors has 0 of"):
        RecordStore.open(url)


def test_urls_that_cannot_be_read(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=MANIFEST):
        RecordStore.open("memory://bucket/nothing")
    with pytest.raises(UserError, match="Protocol not known"):
        RecordStore.open("nosuch://bucket/records")
    filled(tmp_path / "half")
    half = (tmp_path / "half" / MANIFEST).read_bytes()
    fsspec.filesystem("memory").pipe_file("/bucket/half/" + MANIFEST, half)
    with pytest.raises(UserError, match="not finished"):
        RecordStore.open("memory://bucket/half")
