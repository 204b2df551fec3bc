"""Records for tests of what is on disk: each with a length and values of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record, States
from draftsmith.data.store import RecordStore
from draftsmith.data.warp import Law

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


def is_finished(folder: Path) -> bool:
    try:
        return RecordStore.open(folder).complete
    except UserError as error:
        assert "is not finished" in str(error)
        return False


def assert_same(a: Record, b: Record) -> None:
    for name in ("states", "top"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert vars(one).keys() == vars(other).keys()
            for part, value in vars(one).items():
                same = torch.equal if isinstance(value, torch.Tensor) else float.__eq__
                assert same(value, getattr(other, part)), part
    assert torch.equal(a.ids, b.ids)
    plain = vars(a).keys() - {"states", "top", "ids"}
    assert {n: getattr(a, n) for n in plain} == {n: getattr(b, n) for n in plain}


# ---- stores of them

SETTINGS: dict[str, Any] = {
    "target": {"name": "tiny", "template": "abc"},
    "taps": [0, 2],
    "max_new_tokens": 8,
    "store_dtype": "float32",
}
NAMES = ("0f", "5a", "c3")  # of batches: in no order that means anything


def filled(folder: Path, shards: int = 3, size: int = 4) -> RecordStore:
    """An unfinished store of records 0 to 11, the first of each shard held out."""
    store = RecordStore.create(folder, SETTINGS)
    for n, name in enumerate(NAMES[:shards]):
        store.add(name, [record(size * n + i, "train" if i else "heldout") for i in range(size)])
    return store


def path_of(folder: Path, name: str) -> Path:
    return folder / f"shard-{name}.safetensors"


def write_for_ever(folder: Path, begun: Any) -> None:
    """Shards of 4 MB until the process is killed; the event `begun` is set after the first."""
    store, one = RecordStore.create(folder, SETTINGS), record(1)
    assert one.states is not None
    wide = replace(one.states, taps=torch.ones(len(one.states.taps), 1 << 18))
    for number in range(10**6):
        store.add(f"{number:06x}", [replace(one, states=wide)])
        begun.set()
