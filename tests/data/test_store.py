"""A folder of shards: what is asked for is found, half-written or damaged files are never used."""

import json
import multiprocessing
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from stored import (
    NAMES,
    SETTINGS,
    assert_same,
    filled,
    is_finished,
    path_of,
    record,
    write_for_ever,
)
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data import shelves
from draftsmith.data import store as store_module
from draftsmith.data.store import MANIFEST, SELECTION, RecordStore, settings_hash
from draftsmith.data.warp import Law


def cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


# ---- round trip


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.held() == set(NAMES)
    for view in (store, store.finish({}), RecordStore.open(tmp_path)):
        found = list(view.records())
        assert len(found) == 12
        for number, one in enumerate(found):
            assert_same(one, record(number, "train" if number % 4 else "heldout"))


def test_the_order_is_that_of_names_whichever_came_first(tmp_path: Path) -> None:
    store = RecordStore.create(tmp_path, SETTINGS)
    for number, name in ((2, "c3"), (0, "0f"), (1, "5a")):
        store.add(name, [record(number)])
    assert [r.prompt_id for r in store.finish({}).records()] == ["p0", "p1", "p2"]


def test_splits(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert [r.prompt_id for r in store.records("heldout")] == ["p0", "p4", "p8"]
    for found in store.records("train"):  # rows before it were skipped, its states are its own
        assert_same(found, record(int(found.prompt_id[1:])))


def test_any_rows_are_read_in_any_order(tmp_path: Path) -> None:
    store = filled(tmp_path).finish({})
    rows = store.index()
    places = (11, 0, 6, 6, 3)
    for place, found in zip(places, store.read([rows[p] for p in places]), strict=True):
        assert_same(found, record(place, "train" if place % 4 else "heldout"))


def test_more_shards_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.data.store._OPEN", 1)
    store = filled(tmp_path).finish({})
    rows = store.index()
    places = [0, 11, 1, 10, 2]
    found = store.read([rows[p] for p in places])
    assert [r.prompt_id for r in found] == [f"p{p}" for p in places]
    assert len(store._files._open) == 1


def test_a_shard_written_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    assert [r.prompt_id for r in store.records()] == ["p0", "p1", "p2", "p3"]
    store.add(NAMES[0], [record(7)])
    assert [r.prompt_id for r in store.records()] == ["p7"]


def test_a_record_of_two_shards_is_told_of_once(tmp_path: Path) -> None:
    """Another plan has other batches; what both ask for is not trained on twice."""
    store = filled(tmp_path)
    store.add("77", [record(5), record(20)])
    ids = [r.prompt_id for r in store.finish({}).records()]
    assert ids.count("p5") == 1 and len(ids) == 13


def test_a_shard_is_as_readable_as_any_file(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    shard = path_of(tmp_path, NAMES[0])
    (tmp_path / "ordinary").touch()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (shard, tmp_path / "ordinary")]
    assert modes[0] == modes[1]


# ---- settings


def test_opened_again_with_the_same_settings(tmp_path: Path) -> None:
    filled(tmp_path)
    again = RecordStore.create(tmp_path, json.loads(json.dumps(SETTINGS)))
    assert len(again.index()) == 12
    assert not is_finished(tmp_path)
    finished = again.finish({"cells": [1]})
    assert finished.complete and is_finished(tmp_path)
    assert finished.summary() == {"cells": [1]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 9),
        ("taps", [0, 1]),
        ("target", {"name": "tiny", "template": "abd"}),
        ("seed", 1),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    filled(tmp_path, 1)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=rf"collected with {name} = "):
        RecordStore.create(tmp_path, {**SETTINGS, name: value})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert settings_hash({**SETTINGS, name: value}) != settings_hash(SETTINGS)


def test_a_shard_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    store = filled(tmp_path / "mine", 1)
    other = RecordStore.create(tmp_path / "other", {**SETTINGS, "seed": 1})
    foreign = other.add("aa", [record(9)])
    path_of(tmp_path / "mine", "aa").write_bytes(foreign.read_bytes())
    for read in (store.held, store.drop_damaged, store.index, lambda: store.finish({})):
        with pytest.raises(UserError, match=r"shard-aa\.safetensors .*other settings"):
            read()
    assert path_of(tmp_path / "mine", "aa").exists(), "it is somebody's work"


def test_no_store_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=MANIFEST):
        RecordStore.open(tmp_path / "nowhere")


def test_damaged_older_or_newer_manifest(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    text = (tmp_path / MANIFEST).read_text(encoding="utf-8")
    (tmp_path / MANIFEST).write_text(text[:40], encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        RecordStore.open(tmp_path)
    for number in (1, 99):
        (tmp_path / MANIFEST).write_text(json.dumps({"format": number}), encoding="utf-8")
        for read in (RecordStore.open, lambda folder: RecordStore.create(folder, SETTINGS)):
            with pytest.raises(UserError, match=f"format {number}, this version reads 2; .*again"):
                read(tmp_path)


# ---- which of them are asked for


def test_only_what_is_asked_for_is_read_and_where_it_now_belongs(tmp_path: Path) -> None:
    store = filled(tmp_path)
    rows = {row.prompt_id: row for row in store.index()}
    chosen = {rows["p9"].key: ("heldout", "maß"), rows["p2"].key: ("train", "chat")}
    for view in (store.finish({}, chosen), RecordStore.open(tmp_path)):
        found = {r.prompt_id: r for r in view.records()}
        assert {name: (r.split, r.domain) for name, r in found.items()} == {
            "p2": ("train", "chat"),
            "p9": ("heldout", "maß"),
        }
        assert torch.equal(found["p9"].ids, record(9).ids)
        assert [r.prompt_id for r in view.records("heldout")] == ["p9"]
        assert [row.prompt_id for row in view.index()] == ["p2", "p9"]
    assert len(RecordStore.create(tmp_path, SETTINGS).index()) == 12, "all are there to add to"
    assert len(list(store.finish({}).records())) == 12, "the next plan asks for all"


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    store = filled(tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 records, p77\|T=0"):
        store.finish({}, {record(77, law=Law(0.0)).key: ("train", "chat")})
    assert not is_finished(tmp_path)


def test_the_identity_is_that_of_records_and_places(tmp_path: Path) -> None:
    one = filled(tmp_path / "a").finish({})
    (row, *_) = one.index()
    moved = {r.key: (r.split, r.domain) for r in one.index()} | {row.key: ("train", row.domain)}
    same, fewer = filled(tmp_path / "b").finish({}), filled(tmp_path / "c", 2).finish({})
    assert one.identity == same.identity
    assert len({one.identity, fewer.identity, replace(one, selection=moved).identity}) == 3


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{}")])
def test_a_selection_that_is_lost_or_changed_is_refused(tmp_path: Path, change: Any) -> None:
    store = filled(tmp_path)
    store.finish({}, {store.index()[0].key: ("train", "chat")})
    change(tmp_path / SELECTION)
    with pytest.raises(UserError, match=SELECTION):
        RecordStore.open(tmp_path)
    RecordStore.create(tmp_path, SETTINGS).finish({})  # as a further collection does
    assert len(RecordStore.open(tmp_path).index()) == 12


def test_a_kill_between_selection_and_manifest_leaves_an_unfinished_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path)
    rows = store.index()
    store.finish({}, {rows[0].key: ("train", "chat")})

    def killed(text: str) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_hash", killed)
        with pytest.raises(KeyboardInterrupt):
            store.finish({}, {rows[1].key: ("train", "chat")})
    assert not is_finished(tmp_path)
    again = RecordStore.create(tmp_path, SETTINGS).finish({}, {rows[1].key: ("train", "chat")})
    assert [row.key for row in again.index()] == [rows[1].key]


def test_adding_to_a_finished_store_leaves_it_as_it_is_until_finished(tmp_path: Path) -> None:
    filled(tmp_path, 2).finish({"cells": 2})
    adding = RecordStore.create(tmp_path, SETTINGS)
    adding.add("00", [record(30)])
    before = RecordStore.open(tmp_path)  # what a reader sees after a kill here
    assert before.complete and len(before.index()) == 8
    assert "00" in adding.held() and len(adding.index()) == 9
    assert len(adding.finish({}).index()) == 9


# ---- whole or not at all


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    store = filled(tmp_path, 1)
    before = sorted(tmp_path.iterdir())

    def half(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        cut(path, 0.5)
        raise fault("no space left on device")

    monkeypatch.setattr(store_module, "save_file", half)
    expected = UserError if fault is OSError else fault
    with pytest.raises(expected, match="no space left"):
        store.add(NAMES[1], [record(7)])
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_b034_a_kill_in_the_middle_of_writing_leaves_whole_shards(
    tmp_path: Path, kind: signal.Signals
) -> None:
    # A fork of this process, whose torch threads it lacks, would crash in its first loop.
    context = multiprocessing.get_context("spawn")
    for name in (".shard-000000.safetensors.1.part", ".tmpAb12Cd"):  # of kills that hit for sure
        (tmp_path / name).touch()
    begun = context.Event()
    for attempt in range(3):
        begun.clear()
        worker = context.Process(target=write_for_ever, args=(tmp_path, begun))
        worker.start()
        assert worker.pid is not None and begun.wait(30)
        time.sleep(0.003 * attempt)
        os.kill(worker.pid, kind)
        worker.join()
    store = RecordStore.create(tmp_path, SETTINGS)
    names = {shelves.shard_name(path.name) for path in tmp_path.glob("shard-*")}
    assert names and store.held() == names, "no file of a shard's name is half of one"
    assert store.drop_damaged() == []
    assert not list(tmp_path.glob(".*")), "leftovers are gone"
    for found in store.read([store._files.rows(name)[0] for name in sorted(names)]):
        assert found.states is not None and bool((found.states.taps == 1).all())


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.999])
def test_b034_a_cut_off_shard_is_refused_and_redone(tmp_path: Path, keep: float) -> None:
    store = filled(tmp_path)
    middle = path_of(tmp_path, NAMES[1])
    whole = middle.read_bytes()
    cut(middle, keep)
    with pytest.raises(UserError, match=rf"{middle.name} is damaged"):
        list(RecordStore.create(tmp_path, SETTINGS).records())
    again = RecordStore.create(tmp_path, SETTINGS)
    assert again.held() == {NAMES[0], NAMES[2]}
    assert again.drop_damaged() == [middle] and again.drop_damaged() == []
    assert [r.prompt_id for r in again.records()] == [f"p{n}" for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    again.add(NAMES[1], [record(4 + i, "train" if i else "heldout") for i in range(4)])
    assert middle.read_bytes() == whole
    assert len(store.finish({}).index()) == 12


@pytest.mark.parametrize("keep", [None, 0.5])
def test_b137_a_finished_store_names_what_is_missing_or_short(
    tmp_path: Path, keep: float | None
) -> None:
    filled(tmp_path).finish({})
    middle = path_of(tmp_path, NAMES[1])
    size = middle.stat().st_size
    if keep is None:
        middle.unlink()
    else:
        cut(middle, keep)
    left = 0 if keep is None else size // 2
    with pytest.raises(UserError, match=rf"{middle.name} has {left} of {size} bytes"):
        RecordStore.open(tmp_path)
    assert RecordStore.create(tmp_path, SETTINGS).drop_damaged() == [middle]
    assert not is_finished(tmp_path)


def test_b034_bytes_that_changed_in_place_are_noticed_when_first_read(tmp_path: Path) -> None:
    filled(tmp_path).finish({})
    middle = path_of(tmp_path, NAMES[1])
    content = bytearray(middle.read_bytes())
    content[-3] ^= 1
    middle.write_bytes(content)
    store = RecordStore.open(tmp_path)  # sizes are right
    rows = store.index()
    assert [r.prompt_id for r in store.read(rows[:4])] == ["p0", "p1", "p2", "p3"]
    with pytest.raises(UserError, match=rf"{middle.name} is damaged \(its checksum"):
        store.read(rows[4:5])
    again = RecordStore.create(tmp_path, SETTINGS)
    assert again.drop_damaged() == [middle]
    assert again.held() == {NAMES[0], NAMES[2]}


def test_b137_a_file_that_is_cut_off_while_in_use_is_not_mapped(tmp_path: Path) -> None:
    """Beyond its end there would be zeros, or a signal that ends the process."""
    store = filled(tmp_path).finish({})
    rows, middle = store.index(), path_of(tmp_path, NAMES[1])
    size = middle.stat().st_size
    cut(middle, 0.5)
    with pytest.raises(UserError, match=rf"{middle.name} is damaged .*{size // 2} of {size} bytes"):
        store.read(rows[4:5])


def test_an_empty_or_foreign_file_is_no_shard(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    path_of(tmp_path, "01").write_bytes(b"")
    save_file({"x": torch.zeros(2)}, path_of(tmp_path, "02"))
    assert store.held() == {NAMES[0]}
    assert len(store.drop_damaged()) == 2
    assert len(store.index()) == 4
