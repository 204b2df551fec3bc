"""Prompts that say the same as another one, exactly or nearly.

Two kinds of harm, told apart. A training prompt that is held out as well would be an exam with its
answers: it is dropped when it shares a held-out one's split key or the text of its first user turn
(but for case and spaces), or nearly the text of all its user turns, whatever surrounds these. A
prompt that stands twice on one side only weighs double: the later one is dropped when the whole
conversation is the same, or when the user turns nearly are and all the rest is: another system
prompt, tool or reply makes another prompt. Prompts of one key are meant to be alike, as those
written from one template are, and are never near duplicates of each other.

The ids are compared too, for what a chat asks a rendered text may ask as well: on both sides of the
split what is asked, on one side all that is learnt from. What users say in a rendered text is not
told from what its template prints, so that its texts are never called nearly the same.

Nearly the same are texts that share, of all runs of three words in either, the share
`collect.near_duplicates`. MinHash proposes pairs, of which it misses few; each is then counted out.
"""

import functools
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from .prompts import Prompt, normalised

RUN = 3  # words
HASHES = 128
PIECE = 4096  # runs hashed at a time, so that a book takes no more memory than a page
MISSES_COUNT_MORE = (0.02, 0.98)  # wrongly proposed pairs cost time, those missed are lost
# So that a million prompts of one mould do not take the square of a million comparisons:
REMEMBERED = 64  # earlier prompts of one bucket
COMPARED = 32  # those that share most buckets with a prompt
# Scripts without spaces: each of their characters counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")

HELD_OUT, DUPLICATE, NEARLY_HELD_OUT, NEAR_DUPLICATE = range(4)
HOW = ("held out as", "duplicate of", "nearly held out as", "near duplicate of")

Numbers = NDArray[np.uint64]
Ids = Sequence[int]
Asked = tuple[Ids, Ids]
"""What the target is asked, and the reply that is given; empty where it is the target's to make."""
MARKS = pa.schema(
    [(f"mark_{name}", pa.uint64()) for name in ("key", "first", "whole", "frame", "ids")]
    + [(name, pa.list_(pa.uint64())) for name in ("asked", "bands")]
)


# ---- one prompt


@dataclass(frozen=True)
class Sketch:
    """How texts are summarised so that nearly equal ones are found without comparing all pairs.

    Of a text's `HASHES` minimal hashes each band takes `rows`; texts alike in a band are compared.
    """

    threshold: float
    bands: int
    rows: int
    first: MinHash = field(repr=False)

    @classmethod
    def of(cls, threshold: float) -> "Sketch":
        # At 1 the library has no room for two bands; what is proposed is compared anyway.
        proposed = MinHashLSH(min(threshold, 0.95), HASHES, MISSES_COUNT_MORE)
        return cls(threshold, proposed.b, proposed.r, MinHash(HASHES, hashfunc=int))

    def of_text(self, text: str) -> list[int]:
        """A 64-bit number of each band, or nothing where the text is too short for a run."""
        runs = word_runs(text)
        if not len(runs):
            return []
        sketch = self.first.copy()
        for start in range(0, len(runs), PIECE):
            sketch.update_batch(runs[start : start + PIECE].tolist())
        used = sketch.hashvalues[: self.bands * self.rows].reshape(self.bands, self.rows)
        return [_hash64(band.tobytes()) for band in used]


def marks(
    prompt: Prompt, turns: Sequence[Asked], opening: Ids | None, sketch: Sketch | None
) -> dict[str, Any]:
    """What a prompt is compared by, one value of each of `MARKS`.

    Args:
        turns: the given replies with their prompts; or, with an empty reply, the first prompt.
        opening: ids before the first reply to a user, where no prompt of `turns` needs to be that.
    """
    frame = [
        {**message, "content": None if message["role"] == "user" else _plain(message["content"])}
        for message in prompt.messages
    ]
    rest = json.dumps([prompt.kind, prompt.given, frame, prompt.tools], sort_keys=True)
    texts = [normalised(text) for text in _user_texts(prompt.messages)]
    whole = _hash64(json.dumps([texts, rest]).encode())
    # Of several replies to make, ids tell the first prompt only.
    told = prompt.given or len(prompt.turns) == 1
    asked = [ids for ids, _ in turns] + ([] if opening is None else [opening])
    bands = sketch is not None and prompt.kind != "rendered"
    return {
        "mark_key": _hash64(prompt.key.encode()),
        "mark_first": _hash64(texts[0].encode()),
        "mark_whole": whole,
        "mark_frame": _hash64(rest.encode()),
        "mark_ids": _hash64(json.dumps(turns).encode()) if told else whole,
        "asked": [_hash64(json.dumps(ids).encode()) for ids in asked],
        "bands": sketch.of_text(user_text(prompt.messages)) if sketch and bands else [],
    }


def user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What is compared for nearness: all that the user says."""
    return "\n".join(_user_texts(messages))


def word_runs(text: str) -> NDArray[np.uint32]:
    """Hashes of all runs of `RUN` words of a text, each once and ascending."""
    words = _WORD.findall(normalised(text))
    runs = [" ".join(words[i : i + RUN]).encode() for i in range(len(words) - RUN + 1)]
    return np.unique(np.array([zlib.crc32(run) for run in runs], dtype=np.uint32))


def _user_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(message["content"]) for message in messages if message["role"] == "user"]


def _plain(content: object) -> object:
    return normalised(content) if isinstance(content, str) else content


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# ---- all prompts


@dataclass(frozen=True)
class Marked:
    """The marks of N prompts in the order in which they were read, as arrays `[N]`.

    ids: what is asked and learnt; asked, bands: the columns of prompts asked and of sketches, in as
    many pieces as they were written in.
    """

    heldout: NDArray[np.bool_]
    key: Numbers
    first: Numbers
    whole: Numbers
    frame: Numbers
    ids: Numbers
    asked: pa.ChunkedArray
    bands: pa.ChunkedArray


@dataclass(frozen=True)
class Twins:
    """What became of N prompts: twin `[N]` is the place of the earlier prompt that each repeats,
    -1 where it stays; how `[N]` says in which way, an index of `HOW`."""

    twin: NDArray[np.int64]
    how: NDArray[np.int8]

    def mark(self, rows: NDArray[np.int64], twins: NDArray[np.int64], how: int) -> None:
        self.twin[rows], self.how[rows] = twins, how


def find_twins(marked: Marked, sketch: Sketch | None, text: Callable[[int], str]) -> Twins:
    """Which prompts repeat another one that stays. Held-out ones come first, wherever they stand.

    Args:
        sketch: what made the bands, or None to compare whole prompts only.
        text: the `user_text` of the prompt at a place.
    """
    count = len(marked.heldout)
    twins = Twins(np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int8))
    heldout, training = np.flatnonzero(marked.heldout), np.flatnonzero(~marked.heldout)
    for values in (marked.whole, marked.ids):
        _drop_equal(values, heldout[twins.twin[heldout] < 0], twins)
    kept = heldout[twins.twin[heldout] < 0]
    for values in (marked.key, marked.first):
        same = _first_equal(values[kept], values[training])
        found = (same >= 0) & (twins.twin[training] < 0)
        twins.mark(training[found], kept[same[found]], HELD_OUT)
    _drop_asked(marked, kept, twins)
    for values in (marked.whole, marked.ids):
        _drop_equal(values, training[twins.twin[training] < 0], twins)
    if sketch is not None:
        for row, twin in _near(marked, twins, sketch, text):
            near = NEARLY_HELD_OUT if marked.heldout[row] < marked.heldout[twin] else NEAR_DUPLICATE
            twins.twin[row], twins.how[row] = twin, near
    return twins


def _drop_equal(values: Numbers, rows: NDArray[np.int64], twins: Twins) -> None:
    """Of rows with one value, all but the first repeat it."""
    _, first, inverse = np.unique(values[rows], return_index=True, return_inverse=True)
    twin = rows[first[inverse]]
    again = twin != rows
    twins.mark(rows[again], twin[again], DUPLICATE)


def _drop_asked(marked: Marked, kept: NDArray[np.int64], twins: Twins) -> None:
    """Training prompts that are asked, with any of their replies, what a held-out one is."""
    lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in marked.asked.chunks])
    values = np.concatenate([chunk.flatten().to_numpy() for chunk in marked.asked.chunks])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    held = np.isin(rows, kept)
    asks = ~marked.heldout[rows] & (twins.twin[rows] < 0)
    same = _first_equal(values[held], values[asks])
    twins.mark(rows[asks][same >= 0], rows[held][same[same >= 0]], HELD_OUT)


def _first_equal(known: Numbers, asked: Numbers) -> NDArray[np.int64]:
    """Index of the first of `known [K]` that equals each of `asked [N]`, -1 where none does."""
    values, first = np.unique(known, return_index=True)
    if not len(values):
        return np.full(len(asked), -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(values, asked), len(values) - 1)
    return np.where(values[at] == asked, first[at], -1)


def _near(
    marked: Marked, twins: Twins, sketch: Sketch, text: Callable[[int], str]
) -> Iterator[tuple[int, int]]:
    """Pairs of a prompt and the earlier, or held-out, one that it nearly repeats."""

    @functools.lru_cache(maxsize=4096)
    def runs(row: int) -> NDArray[np.uint32]:
        return word_runs(text(row))

    buckets: dict[int, list[int]] = {}
    for row, mine in _meetings(marked, twins.twin < 0, sketch.bands):
        met = Counter(other for bucket in mine for other in buckets.get(bucket, ()))
        likely = (other for other, _ in met.most_common() if _comparable(marked, row, other))
        twin = next(
            (
                other
                for other in itertools.islice(likely, COMPARED)
                if _overlap(runs(row), runs(other)) >= sketch.threshold
            ),
            None,
        )
        if twin is not None:
            yield row, twin
            continue
        for bucket in mine:
            stay = buckets.setdefault(bucket, [])
            if len(stay) < REMEMBERED:
                stay.append(row)


def _comparable(marked: Marked, row: int, other: int) -> bool:
    if marked.key[row] == marked.key[other]:
        return False
    return bool(
        marked.heldout[row] != marked.heldout[other] or marked.frame[row] == marked.frame[other]
    )


def _overlap(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> float:
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def _meetings(
    marked: Marked, alive: NDArray[np.bool_], bands: int
) -> Iterator[tuple[int, list[int]]]:
    """Prompts that share a bucket with another one, and their buckets; held-out ones first."""
    lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in marked.bands.chunks])
    rows = np.flatnonzero(lengths)
    live = alive[rows]
    rows = rows[live]
    found_rows, found_buckets, used = [], [], 0
    for band in range(bands):
        # One band of all prompts at a time is in memory.
        parts = [chunk.flatten().to_numpy()[band::bands] for chunk in marked.bands.chunks]
        values = np.concatenate(parts)[live]
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        shared = counts[inverse] > 1
        found_rows.append(rows[shared])
        found_buckets.append(inverse[shared] + used)
        used += len(counts)
    if not used:
        return
    all_rows, all_buckets = np.concatenate(found_rows), np.concatenate(found_buckets)
    order = np.lexsort((all_rows, ~marked.heldout[all_rows]))
    all_rows, all_buckets = all_rows[order], all_buckets[order]
    starts = np.flatnonzero(np.diff(all_rows, prepend=-1, append=-1))
    for start, end in itertools.pairwise(starts.tolist()):
        yield int(all_rows[start]), all_buckets[start:end].tolist()
