"""Duplicates: what counts as the same, and which of two prompts stays."""

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from draftsmith.data import duplicates
from draftsmith.data.duplicates import (
    DUPLICATE,
    HELD_OUT,
    NEAR_DUPLICATE,
    NEARLY_HELD_OUT,
    Marked,
    Sketch,
    Twins,
    find_twins,
    marks,
    user_text,
    word_runs,
)
from draftsmith.data.prompts import Prompt

SKETCH = Sketch.of(0.8)
WORDS = [f"word{n}" for n in range(500)]
LONG = " ".join(WORDS[:40])


def prompt(*texts: str | None, train: bool = True, **fields: Any) -> Prompt:
    """A chat of the user's texts; a None between them is a reply to be made."""
    roles = ["assistant" if text is None else "user" for text in texts]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    if "system" in fields:
        messages.insert(0, {"role": "system", "content": fields.pop("system")})
    split = "train" if train else "heldout"
    options = {"key": texts[0], "split": split, **fields}
    return Prompt(id="0", domain="d", messages=tuple(messages), source="s", line=1, **options)


def twins(prompts: list[Prompt], sketch: Sketch | None = SKETCH) -> Twins:
    rows = [marks(p, [(list(text_of(p).encode()), ())], None, sketch) for p in prompts]
    numbers = {
        name: np.array([row[f"mark_{name}"] for row in rows], dtype=np.uint64)
        for name in ("key", "first", "whole", "frame", "ids")
    }
    middle = len(rows) // 2  # as a table keeps them: in pieces
    columns = {
        name: pa.chunked_array(
            [[row[name] for row in part] for part in (rows[:middle], rows[middle:])],
            type=pa.list_(pa.uint64()),
        )
        for name in ("asked", "bands")
    }
    heldout = np.array([p.split == "heldout" for p in prompts])
    marked = Marked(heldout, **columns, **numbers)
    return find_twins(marked, sketch, lambda n: user_text(prompts[n].messages))


def text_of(prompt: Prompt) -> str:
    """In place of its ids."""
    return json.dumps([prompt.kind, prompt.messages, prompt.tools])


def found(*prompts: Prompt, sketch: Sketch | None = SKETCH) -> list[tuple[int, int] | None]:
    """For each prompt None if it stays, else how it is a twin and of which."""
    told = twins(list(prompts), sketch)
    return [
        None if twin < 0 else (int(how), int(twin))
        for twin, how in zip(told.twin, told.how, strict=True)
    ]


def changed(text: str, places: int, seed: int = 0) -> str:
    """The text with other words in as many places."""
    words = text.split()
    for place in random.Random(seed).sample(range(len(words)), places):
        words[place] = f"other{seed}x{place}"
    return " ".join(words)


def jaccard(a: str, b: str) -> float:
    runs = [set(word_runs(text).tolist()) for text in (a, b)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


# ---- exact


def test_case_and_spaces_make_no_other_prompt() -> None:
    assert found(prompt("Tell me  more\n"), prompt("tell ME more")) == [None, (DUPLICATE, 0)]


def test_of_equal_prompts_the_first_stays() -> None:
    assert found(*[prompt("a")] * 3, prompt("b")) == [None, (DUPLICATE, 0), (DUPLICATE, 0), None]


@pytest.mark.parametrize(
    "other",
    [
        {"system": "Be brief."},
        {"kind": "raw"},
        {"tools": ({"type": "function", "function": {"name": "f"}},)},
    ],
)
def test_what_surrounds_a_question_makes_another_prompt(other: dict[str, Any]) -> None:
    """Exactly and nearly: but not where the one is held out."""
    assert found(prompt(LONG), prompt(LONG, **other)) == [None, None]
    assert found(prompt(LONG), prompt(LONG + " too", **other)) == [None, None]
    assert found(prompt(LONG, train=False), prompt(LONG, **other)) == [None, (HELD_OUT, 0)]
    near = prompt(LONG + " too", **other)
    assert found(prompt(LONG, train=False), near) == [None, (NEARLY_HELD_OUT, 0)]


def test_every_turn_counts() -> None:
    assert found(prompt("a", None, "b"), prompt("a", None, "c"), prompt("a")) == [None] * 3
    assert found(prompt("a", None, "and b?"), prompt("c", None, "and b?")) == [None, None]
    assert found(prompt("a", None, "and b?"), prompt("a", None, "and B? ")) == [
        None,
        (DUPLICATE, 0),
    ]


def test_other_given_replies_are_other_conversations() -> None:
    """One question with two replies is twice to learn from."""
    rows = [
        Prompt(
            *("0", "d", ({"role": "user", "content": LONG}, {"role": "assistant", "content": r})),
            *("s", 1, "train", LONG),
            given=True,
        )
        for r in ("yes", "no", "yes")
    ]
    assert found(*rows) == [None, None, (DUPLICATE, 0)]


@pytest.mark.parametrize("heldout_first", [True, False])
def test_the_held_out_one_stays_wherever_it_stands(heldout_first: bool) -> None:
    """Also where the training one shares nothing but the key, or the first turn."""
    held, same = prompt("a", train=False), prompt("A", None, "b")
    keyed = prompt("something else", key="a")
    if heldout_first:
        assert found(held, same, keyed) == [None, (HELD_OUT, 0), (HELD_OUT, 0)]
    else:
        assert found(same, keyed, held) == [(HELD_OUT, 2), (HELD_OUT, 2), None]


def test_nothing_held_out_and_nothing_to_train_on() -> None:
    assert found(prompt("a"), prompt("b")) == [None, None]
    assert found(prompt("a", train=False), prompt("a", train=False)) == [None, (DUPLICATE, 0)]


# ---- near


def test_nearly_equal_texts() -> None:
    """38 runs of three words: an exchanged word in the middle costs three of them."""
    near, far = changed(LONG, 1), changed(LONG, 4)
    assert jaccard(LONG, near) >= 0.8 > jaccard(LONG, far)
    assert found(prompt(LONG), prompt(near), prompt(far)) == [None, (NEAR_DUPLICATE, 0), None]
    assert found(prompt(LONG), prompt(near), sketch=None) == [None, None]


def test_the_threshold_is_met_by_counting() -> None:
    """Whatever MinHash proposes: two texts of just below 0.8 stay, of just above do not."""
    base = " ".join(WORDS[:102])  # 100 runs
    below, above = " ".join(WORDS[:127]), " ".join(WORDS[:126])  # of 125 and of 124
    assert jaccard(base, below) == 0.8 and jaccard(base, above) > 0.8
    exact = Sketch.of(0.801)
    assert found(prompt(base), prompt(below), sketch=exact) == [None, None]
    assert found(prompt(base), prompt(above), sketch=exact) == [None, (NEAR_DUPLICATE, 0)]


def test_all_user_turns_count() -> None:
    a = prompt("Hello there", None, LONG)
    b = prompt("Good morning", None, LONG)
    assert found(a, b) == [None, (NEAR_DUPLICATE, 0)]
    assert found(a, prompt("Good morning", None, changed(LONG, 5))) == [None, None]


@pytest.mark.parametrize("heldout_first", [True, False])
def test_nearly_held_out(heldout_first: bool) -> None:
    held, near = prompt(LONG, train=False), prompt(changed(LONG, 1))
    if heldout_first:
        assert found(held, near) == [None, (NEARLY_HELD_OUT, 0)]
    else:
        assert found(near, held) == [(NEARLY_HELD_OUT, 1), None]


def test_prompts_of_one_template_are_meant_to_be_alike() -> None:
    alike = [prompt(changed(LONG, 1, seed), key="template") for seed in range(5)]
    assert found(*alike) == [None] * 5
    own = [prompt(changed(LONG, 1, seed)) for seed in range(5)]
    assert found(*own)[1:] != [None] * 4


def test_short_texts_are_compared_whole() -> None:
    assert word_runs("two words").tolist() == []
    assert found(prompt("two words"), prompt("two words?!")) == [None, None]


def test_scripts_without_spaces() -> None:
    """Characters count as words: no sentence is one long word that differs or does not."""
    text = "東京の天気はどうですか、そして明日は雨が降りますか、傘を持って行くべきですか"
    assert len(word_runs(text)) > 30
    assert found(prompt(text), prompt(text + "ね")) == [None, (NEAR_DUPLICATE, 0)]


def test_a_dropped_prompt_drops_no_other() -> None:
    """b is near a, c near b but not near a: c stays."""
    a, b, c = (" ".join(WORDS[start : start + 62]) for start in (0, 6, 12))
    assert jaccard(a, b) > 0.8 > jaccard(a, c)
    assert found(prompt(a), prompt(b), prompt(c)) == [None, (NEAR_DUPLICATE, 0), None]


def test_planted_near_duplicates_among_many() -> None:
    """All but a few of the nearly equal pairs are found, and no other pair is."""
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=60)) for _ in range(300)]
    copies = [changed(text, 1, seed) for seed, text in enumerate(texts)]
    told = found(*map(prompt, texts + copies))
    assert told[:300] == [None] * 300
    assert all(twin in (None, (NEAR_DUPLICATE, n)) for n, twin in enumerate(told[300:]))
    assert sum(twin is not None for twin in told[300:]) >= 297


def test_many_of_one_mould_take_no_square_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all pairs meet in some bucket and none is near: only some are counted out."""
    compared = []

    def counted(a: Any, b: Any) -> float:
        compared.append(1)
        return 0.0

    monkeypatch.setattr(duplicates, "_overlap", counted)
    mould = " ".join(WORDS[:60])
    prompts = [prompt(f"{mould} {' '.join(f'own{n}x{k}' for k in range(9))}") for n in range(300)]
    assert jaccard(user_text(prompts[0].messages), user_text(prompts[1].messages)) > 0.7
    assert found(*prompts) == [None] * 300
    assert 300 * 20 < len(compared) <= 300 * duplicates.COMPARED  # of 44,850 pairs


def test_buckets_remember_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    near = [prompt(changed(LONG, 1, seed)) for seed in range(2)]
    monkeypatch.setattr(duplicates, "REMEMBERED", 1)
    assert found(prompt(LONG), *near)[1:] == [(NEAR_DUPLICATE, 0)] * 2
    monkeypatch.setattr(duplicates, "REMEMBERED", 0)
    assert found(prompt(LONG), *near) == [None] * 3


@pytest.mark.parametrize("threshold", [0.05, 0.5, 1.0])
def test_any_threshold_has_bands(threshold: float) -> None:
    sketch = Sketch.of(threshold)
    assert len(sketch.of_text(LONG)) == sketch.bands
    assert found(prompt(LONG), prompt(LONG.upper() + "!", key="k"), sketch=sketch)[0] is None


def test_long_texts_are_summarised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    text = " ".join(str(draw.random()) for _ in range(9000))
    assert len(word_runs(text)) > 2 * duplicates.PIECE
    in_pieces = SKETCH.of_text(text)
    monkeypatch.setattr(duplicates, "PIECE", 1 << 20)
    assert SKETCH.of_text(text) == in_pieces
