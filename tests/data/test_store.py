"""Record shards: what goes in comes out, half-written or damaged ones are never used."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data import store as store_module
from draftsmith.data.records import Record, States
from draftsmith.data.store import MANIFEST, RecordStore, settings_hash
from draftsmith.data.warp import Law

SETTINGS: dict[str, Any] = {
    "target": {"name": "tiny", "template": "abc"},
    "taps": [0, 2],
    "max_new_tokens": 8,
}


WARM = Law(0.7)


def record(number: int, split: str = "train", states: bool = True, law: Law = WARM) -> Record:
    """Record `number` has a length of its own, and values that no other has."""
    prompt, reply = 3 + number % 4, 1 + number % 5
    generator = torch.Generator().manual_seed(number)
    kept = States(
        hidden=torch.randn(reply, 6, generator=generator),
        log_z=torch.randn(reply, generator=generator),
        taps=torch.randn(prompt + reply - 1, 4, generator=generator),
    )
    return Record(
        prompt_id=f"p{number}",
        domain="chat",
        split=split,
        law=law,
        seed=100 + number,
        finish="stop" if number % 2 else "length",
        ids=torch.randint(0, 400, (prompt + reply,), generator=generator),
        prompt_len=prompt,
        states=kept if states else None,
    )


def filled(folder: Path, shards: int = 3, size: int = 4) -> RecordStore:
    store = RecordStore.create(folder, SETTINGS)
    for n in range(shards):
        store.add([record(size * n + i, "train" if i else "heldout") for i in range(size)])
    return store


def assert_same(a: Record, b: Record) -> None:
    for name in ("key", "prompt_id", "domain", "split", "law", "seed", "finish", "prompt_len"):
        assert getattr(a, name) == getattr(b, name)
    assert torch.equal(a.ids, b.ids)
    assert (a.states is None) == (b.states is None)
    if a.states is not None and b.states is not None:
        for name in ("hidden", "log_z", "taps"):
            assert torch.equal(getattr(a.states, name), getattr(b.states, name))


# ---- round trip


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    store = filled(tmp_path)
    back = list(store.records())
    assert len(back) == 12
    for number, found in enumerate(back):
        assert_same(found, record(number, "train" if number % 4 else "heldout"))
    assert store.keys() == {r.key for r in back}


def test_splits(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert [r.prompt_id for r in store.records("heldout")] == ["p0", "p4", "p8"]
    for found in store.records("train"):  # rows before it were skipped, its states are its own
        assert_same(found, record(int(found.prompt_id[1:])))


def test_records_without_states_and_laws(tmp_path: Path) -> None:
    store = RecordStore.create(tmp_path, SETTINGS)
    law = Law(0.5, top_k=20, top_p=0.9)
    store.add([record(0, states=False, law=law)])
    (back,) = store.records()
    assert back.states is None
    assert back.law == law


def test_low_precision_taps(tmp_path: Path) -> None:
    store = RecordStore.create(tmp_path, SETTINGS)
    one = record(1)
    assert one.states is not None
    half = States(one.states.hidden, one.states.log_z, one.states.taps.bfloat16())
    store.add([Record(**{**one.__dict__, "states": half})])
    (back,) = store.records()
    assert back.states is not None
    assert back.states.taps.dtype == torch.bfloat16
    assert torch.equal(back.states.taps, half.taps)


def test_a_shard_is_as_readable_as_any_file(tmp_path: Path) -> None:
    shard = filled(tmp_path, 1).shards()[0]
    (tmp_path / "ordinary").touch()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (shard, tmp_path / "ordinary")]
    assert modes[0] == modes[1]


# ---- settings


def test_opened_again_with_the_same_settings(tmp_path: Path) -> None:
    filled(tmp_path)
    again = RecordStore.create(tmp_path, json.loads(json.dumps(SETTINGS)))
    assert len(again.keys()) == 12
    assert not again.complete
    again.finish({"cells": [1]})
    assert RecordStore.open(tmp_path).complete
    assert again.summary() == {"cells": [1]}


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


def test_no_store_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=MANIFEST):
        RecordStore.open(tmp_path / "nowhere")


def test_damaged_or_newer_manifest(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    text = (tmp_path / MANIFEST).read_text(encoding="utf-8")
    (tmp_path / MANIFEST).write_text(text[:40], encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        RecordStore.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 99}), encoding="utf-8")
    with pytest.raises(UserError, match="format 99"):
        RecordStore.open(tmp_path)


# ---- whole or not at all


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    store = filled(tmp_path, 1)
    before = sorted(tmp_path.iterdir())

    def cut(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata=metadata)
        path.write_bytes(path.read_bytes()[:100])
        raise fault("no space left on device")

    monkeypatch.setattr(store_module, "save_file", cut)
    expected = UserError if fault is OSError else fault
    with pytest.raises(expected, match="no space left"):
        store.add([record(7)])
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("keep", [0.5, 0.02, 0.999])
def test_a_cut_off_shard_is_noticed(tmp_path: Path, keep: float) -> None:
    store = filled(tmp_path)
    middle = store.shards()[1]
    content = middle.read_bytes()
    middle.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=rf"{middle.name} is damaged"):
        list(store.records())
    store.finish({})
    assert store.drop_damaged() == [middle]
    assert not RecordStore.open(tmp_path).complete
    assert [r.prompt_id for r in store.records()] == [f"p{n}" for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert store.drop_damaged() == []


def test_an_empty_or_foreign_file_is_no_shard(tmp_path: Path) -> None:
    store = filled(tmp_path, 1)
    (tmp_path / "shard-00001.safetensors").write_bytes(b"")
    save_file({"x": torch.zeros(2)}, tmp_path / "shard-00002.safetensors")
    assert len(store.drop_damaged()) == 2
    assert len(store.keys()) == 4


def test_a_redone_shard_takes_the_place_of_the_damaged_one(tmp_path: Path) -> None:
    store = filled(tmp_path)
    middle = store.shards()[1]
    content = middle.read_bytes()
    middle.write_bytes(content[:-8])
    store.drop_damaged()
    again = store.add([record(4 + i, "train" if i else "heldout") for i in range(4)])
    assert again == middle
    assert again.read_bytes() == content
    assert store.add([record(12)]).name == "shard-00003.safetensors"


# ---- values that are not finite


@pytest.mark.parametrize("name", ["hidden", "log_z", "taps"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, name: str, value: float
) -> None:
    store = RecordStore.create(tmp_path, SETTINGS)
    wrong = record(2, split="heldout")
    getattr(wrong.states, name)[-1] = value
    store.add([record(1), wrong, record(3)])
    with pytest.raises(UserError, match=rf"shard-00000.*p2\|T=0.7\|102.*'{name}'"):
        list(store.records())
    assert len(list(store.records("train"))) == 2
