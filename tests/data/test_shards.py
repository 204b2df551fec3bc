"""One file of records: what goes in comes out, and its header alone tells what is in it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from stored import WARM, assert_same, record

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record, Top
from draftsmith.data.shards import (
    HOLDS,
    Damaged,
    RowInfo,
    head_length,
    pack,
    read_head,
    read_record,
)
from draftsmith.data.warp import Law

FLOAT = torch.float32


def written(path: Path, records: list[Record], dtype: torch.dtype = FLOAT) -> list[RowInfo]:
    path.write_bytes(save(*pack(records, "print", dtype)))
    fingerprint, rows = head_of(path.read_bytes())
    assert fingerprint == "print"
    return rows


def head_of(content: bytes) -> tuple[str, list[RowInfo]]:
    return read_head(content[: head_length(content[:8], len(content))], len(content), "name")


def back(path: Path, rows: list[RowInfo]) -> list[Record]:
    handle = safe_open(path, "pt")
    return [read_record(handle, row, path.name) for row in rows]


def with_top(one: Record, count: int, temperature: float = 1.0) -> Record:
    """The record with its `count` most probable tokens, the last unknown at the first place."""
    generator = torch.Generator().manual_seed(count)
    reply = len(one.reply)
    log_probs = torch.randn(reply, 40, generator=generator).log_softmax(-1)
    found = log_probs.topk(count)
    ids, told = found.indices.int(), found.values
    ids[0, -1], told[0, -1] = -1, -torch.inf
    return replace(one, states=None, top=Top(ids, told, temperature))


# ---- round trip


def test_mixed_records_come_back_as_they_were(tmp_path: Path) -> None:
    """With states, with nothing, with tops of several widths, given ones, later turns."""
    records = [
        record(0),
        record(1, states=False),
        with_top(record(2), 5),
        record(3, law=Law(0.5, top_k=20, top_p=0.9, min_p=0.1)),
        with_top(replace(record(4), turn=2), 3, temperature=0.7),
        replace(record(5, states=False, law=Law(0.0)), origin="given"),
        record(6),
    ]
    rows = written(tmp_path / "a", records)
    for found, one in zip(back(tmp_path / "a", rows), records, strict=True):
        assert_same(found, one)
    later = back(tmp_path / "a", rows[::-1][:3])
    assert [r.prompt_id for r in later] == ["p6", "p5", "p4"]
    assert_same(later[0], records[6])


def test_rows_are_told_without_tensors(tmp_path: Path) -> None:
    one, other = record(3), with_top(replace(record(4), turn=1), 2)
    rows = written(tmp_path / "a", [one, other])
    assert [row.key for row in rows] == [one.key, other.key]
    assert [row.row for row in rows] == [0, 1]
    for row, whole in zip(rows, (one, other), strict=True):
        assert (row.tokens, row.prompt_len) == (len(whole.ids), whole.prompt_len)
        assert len(row.reply) == len(whole.reply)
        assert row.drawn_from(WARM) and not row.drawn_from(Law(0.0))
    assert (rows[0].states, rows[0].top, rows[1].states, rows[1].top) == (True, 0, False, 2)


def test_given_replies_are_samples_of_no_law(tmp_path: Path) -> None:
    given = replace(record(1, law=Law(0.0)), origin="given")
    (row,) = written(tmp_path / "a", [given])
    assert not row.drawn_from(Law(0.0)) and not given.drawn_from(Law(0.0))


def test_no_records_are_a_shard(tmp_path: Path) -> None:
    """A batch may leave nothing: that it was asked must be known all the same."""
    assert written(tmp_path / "a", []) == []


def test_the_same_records_are_the_same_bytes() -> None:
    one, again = (save(*pack([record(n) for n in range(5)], "print", FLOAT)) for _ in range(2))
    assert one == again


def test_b037_the_header_says_what_the_tensors_are(tmp_path: Path) -> None:
    written(tmp_path / "a", [record(0), with_top(record(1), 2)])
    handle = safe_open(tmp_path / "a", "pt")
    holds = json.loads(handle.metadata()["draftsmith"])["holds"]
    assert holds == HOLDS and set(holds) == set(handle.keys())
    assert "after the final norm" in holds["hidden"]


# ---- precision and values that are not finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_taps_are_stored_in_the_precision_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    one = record(1)
    (found,) = back(tmp_path / "a", written(tmp_path / "a", [one], dtype))
    assert found.states is not None and one.states is not None
    assert torch.equal(found.states.taps, one.states.taps.to(dtype))
    for name in ("hidden", "log_z"):  # p is rebuilt from these
        assert torch.equal(getattr(found.states, name), getattr(one.states, name))


def test_b035_a_value_beyond_float16_is_named() -> None:
    wrong = record(2)
    assert wrong.states is not None
    wrong.states.taps[1, 2] = -7e4
    with pytest.raises(UserError, match=r"record p2\|T=0.7\|102: value 7e\+04 of 'taps' .*float16"):
        pack([record(1), wrong], "print", torch.float16)
    assert pack([record(1), wrong], "print", torch.bfloat16)


@pytest.mark.parametrize("name", ["hidden", "log_z", "taps"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_b035_values_that_are_not_finite_are_not_written(name: str, value: float) -> None:
    wrong = record(2)
    getattr(wrong.states, name)[-1] = value
    with pytest.raises(UserError, match=rf"record p2\|T=0.7\|102: '{name}' .*not finite"):
        pack([record(1), wrong, record(3)], "print", FLOAT)


def test_b035_finite_values_of_an_infinite_sum_are_kept(tmp_path: Path) -> None:
    one = record(1)
    assert one.states is not None
    one.states.taps[:] = 3e38
    (found,) = back(tmp_path / "a", written(tmp_path / "a", [one]))
    assert_same(found, one)


@pytest.mark.parametrize(("place", "value"), [(0, 0.0), (1, torch.nan), (1, -torch.inf)])
def test_b035_top_values_are_finite_where_a_token_is_told(place: int, value: float) -> None:
    """Place 0 is the last of the first row, where no token is told."""
    wrong = with_top(record(3), 4)
    assert wrong.top is not None
    wrong.top.log_probs[place, -1] = value
    with pytest.raises(UserError, match=r"p3\|T=0.7\|103: 'top_log_probs'"):
        pack([wrong], "print", FLOAT)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_b035_values_that_went_bad_on_disk_are_named(tmp_path: Path, value: float) -> None:
    rows = written(tmp_path / "a", [record(1), record(2)])
    content = bytearray((tmp_path / "a").read_bytes())
    taps = json.loads(content[8 : head_length(content[:8], len(content))])["taps"]
    end = head_length(content[:8], len(content)) + taps["data_offsets"][1]
    content[end - 4 : end] = torch.tensor([value]).numpy().tobytes()
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=r"^a, record p2\|T=0.7\|102: 'taps'"):
        back(tmp_path / "a", rows)
    assert len(back(tmp_path / "a", rows[:1])) == 1


# ---- damage


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_cut_off_file_is_no_shard(keep: int) -> None:
    content = save(*pack([record(1)], "print", FLOAT))[:keep]
    with pytest.raises(Damaged, match="bytes"):
        head_of(content)


def test_b137_the_expected_size_is_told() -> None:
    content = save(*pack([record(1)], "print", FLOAT))
    with pytest.raises(Damaged, match=rf"{len(content) - 8} of {len(content)} bytes"):
        head_of(content[:-8])


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"__metadata__": {"draftsmith": "no JSON"}},
        {"__metadata__": {"draftsmith": json.dumps({"format": 2, "rows": [{}]})}},
        [],
    ],
)
def test_a_file_of_another_kind_is_no_shard(header: Any) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + b"\0" * 4
    with pytest.raises(Damaged, match="no header of records"):
        head_of(content)


def test_a_shard_of_another_format_is_refused() -> None:
    about = {"draftsmith": json.dumps({"format": 3})}
    text = json.dumps({"__metadata__": about}).encode()
    with pytest.raises(UserError, match="format 3; this version reads 2"):
        head_of(len(text).to_bytes(8, "little") + text)
