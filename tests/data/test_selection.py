"""What is kept of usable prompts: no leak, nothing twice, caps, weights; and who they are."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from preparing import GOOD, Load, prompts, reasons, rejected, section

from draftsmith.configs.collection import PACKAGED_DOMAINS, CollectSection
from draftsmith.data.prompts import Prompt, normalised
from draftsmith.data.sources import packaged_domains

# ---- split and duplicates


def test_duplicates_are_dropped_across_domains(tmp_path: Path, ready: Load) -> None:
    a = section(tmp_path, [*GOOD, GOOD[0]], "a")
    b = section(tmp_path, [{"prompt": "b"}, *GOOD], "b")
    prepared = ready((a, b))
    places = [(p.domain, p.line) for p in prompts(prepared)]
    assert places == [("a", n) for n in range(1, 6)] + [("b", 1)]
    told = [(r["domain"], r["line"], r["reason"]) for r in rejected(prepared)]
    assert told[0] == ("a", 6, f"duplicate of {a.source}:1")
    assert told[1:] == [("b", n + 1, f"duplicate of {a.source}:{n}") for n in range(1, 6)]


def no_leak(kept: list[Prompt]) -> bool:
    keys: dict[str, set[str]] = {"train": set(), "heldout": set()}
    texts: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for prompt in kept:
        keys[prompt.split].add(prompt.key)
        first = next(m["content"] for m in prompt.messages if m["role"] == "user")
        texts[prompt.split].add(normalised(first))
    return not keys["train"] & keys["heldout"] and not texts["train"] & texts["heldout"]


@pytest.mark.parametrize("order", [1, -1])
def test_what_one_domain_holds_out_no_other_trains_on(
    tmp_path: Path, ready: Load, order: int
) -> None:
    """With different shares one key falls on both sides, and the training side gives way."""
    rows = [{"prompt": f"p{n}"} for n in range(20)]
    train = section(tmp_path, rows, "a", holdout=0.0)
    test = section(tmp_path, rows[:5], "b", holdout=1.0)
    prepared = ready((train, test)[::order])
    kept = prompts(prepared)
    assert sum(p.split == "heldout" for p in kept) == 5
    assert no_leak(kept) and len(kept) == 20
    told = {reason for _, reason in reasons(prepared)}
    assert told == {f"held out as {test.source}:{n}" for n in range(1, 6)}


@pytest.mark.parametrize("order", [1, -1])
def test_near_duplicates_are_dropped_across_the_split(
    tmp_path: Path, ready: Load, order: int
) -> None:
    """One word of many makes no other exam question, nor another one to train on."""
    words = " ".join(f"w{n}" for n in range(40))
    held = section(tmp_path, [{"prompt": words}], "held", holdout=1.0)
    rows = [{"prompt": f"{words} indeed"}, {"prompt": words[::-1]}, {"prompt": f"{words[::-1]} z"}]
    train = section(tmp_path, rows, "train", holdout=0.0)
    prepared = ready((held, train)[::order])
    assert sorted(reasons(prepared)) == [
        (1, f"nearly held out as {held.source}:1"),
        (3, f"near duplicate of {train.source}:2"),
    ]
    whole = ready((held, train)[::order], CollectSection(near_duplicates=None))
    assert len(whole) == 4 and whole.folder != prepared.folder


def test_case_and_spaces_do_not_make_another_prompt(tmp_path: Path, ready: Load) -> None:
    rows = [{"prompt": text} for n in range(30) for text in (f"Tell me  {n}\n", f"tell me {n}")]
    prepared = ready(section(tmp_path, rows, holdout=0.5))
    kept = prompts(prepared)
    assert {p.split for p in kept} == {"train", "heldout"}
    assert no_leak(kept) and len(kept) == 30
    starts = Counter(reason.split(" of ")[0].split(" as ")[0] for _, reason in reasons(prepared))
    assert starts.keys() == {"held out", "duplicate"}


def test_the_packaged_domains_lose_nothing(ready: Load) -> None:
    """Prompts of one template are alike by design, below the threshold and of one key."""
    assert set(packaged_domains()) == {s.source for s in PACKAGED_DOMAINS}
    prepared = ready(PACKAGED_DOMAINS)
    assert len(prepared) == 256 and rejected(prepared) == []
    assert no_leak(prompts(prepared))
    for name, counts in prepared.counts["domains"].items():
        assert counts["heldout"] >= 8 and counts["train"] >= 32, name
    assert len(ready(PACKAGED_DOMAINS, CollectSection(near_duplicates=0.5))) == 256


# ---- caps and weights


def test_max_rows_are_the_first_by_hash(tmp_path: Path, ready: Load) -> None:
    rows = [{"prompt": f"p{n}"} for n in range(50)]
    all_prompts = prompts(ready(section(tmp_path, rows)))
    prepared = ready(section(tmp_path, rows, max_rows=20))
    some = prompts(prepared)
    assert {p.id for p in some} == set(sorted(p.id for p in all_prompts)[:20])
    assert [p.line for p in some] == sorted(p.line for p in some)
    assert {reason for _, reason in reasons(prepared)} == {"beyond max_rows 20"}
    assert len({p.split for p in some}) == 2
    shuffled = prompts(ready(section(tmp_path, rows[::-1], max_rows=20)))
    assert {p.id for p in shuffled} == {p.id for p in some}


def test_weights_are_shares_of_the_training_prompts(tmp_path: Path, ready: Load) -> None:
    """As many as there can be in these proportions; held-out ones and others stay."""
    sizes = {"a": (60, 1.0), "b": (30, 2.0), "c": (100, 1.5), "free": (7, None)}
    sections = tuple(
        section(tmp_path, [{"prompt": f"{n} {k}"} for k in range(size)], n, holdout=0, weight=w)
        for n, (size, w) in sizes.items()
    )
    held = section(tmp_path, [{"prompt": f"h{k}"} for k in range(9)], "h", holdout=1.0, weight=9.0)
    prepared = ready((*sections, held))
    kept = {name: c["train"] + c["heldout"] for name, c in prepared.counts["domains"].items()}
    assert kept == {"a": 15, "b": 30, "c": 22, "free": 7, "h": 9}  # 22.5, to the even one
    assert Counter(reason for _, reason in reasons(prepared)) == {
        "beyond its weight 1": 45,
        "beyond its weight 1.5": 78,
    }
    ids = sorted(p.id for p in prompts(ready(sections[0])))
    assert sorted(p.id for p in prompts(prepared) if p.domain == "a") == ids[:15]


def test_a_small_weight_leaves_one(tmp_path: Path, ready: Load) -> None:
    big = section(tmp_path, [{"prompt": "a"}], "a", holdout=0, weight=1000.0)
    small = section(tmp_path, [{"prompt": f"b{n}"} for n in range(9)], "b", holdout=0, weight=1.0)
    assert ready((big, small)).counts["domains"]["b"]["train"] == 1


# ---- domains and identity


def test_b116_labels_of_rows_are_domains(tmp_path: Path, ready: Load) -> None:
    """B116: spelling kept, unlabelled rows in the section's name, and nothing lost."""
    labels = ["code"] * 10 + ["chat"] * 3 + [None] * 2 + ["Code", "a/b"]
    rows = [{"prompt": f"p{n}", "category": label} for n, label in enumerate(labels)]
    prepared = ready(section(tmp_path, rows, "rest", by="category"))
    totals = {n: c["train"] + c["heldout"] for n, c in prepared.counts["domains"].items()}
    assert totals == {"code": 10, "chat": 3, "rest": 2, "Code": 1, "a/b": 1}
    assert [p.domain for p in prompts(prepared)] == [label or "rest" for label in labels]
    tokens = sum(c["tokens"] for c in prepared.counts["domains"].values())
    assert tokens == sum(prepared.rows["tokens"]) == sum(map(len, prepared.rows["ids"]))


def test_b030_identity_is_the_content(tmp_path: Path, ready: Load) -> None:
    """B030: rows put in front, shuffled and moved are the same prompts; of two that are equal
    one stays; a row's own id plays no part."""
    rows: list[dict[str, Any]] = [{"prompt": f"p{n}", "id": n} for n in range(18)]
    rows += [{"prompt": "same"}, {"prompt": "same", "id": "x"}]
    before = {p.id: p.messages for p in prompts(ready(section(tmp_path, rows)))}
    assert len(before) == 19
    random.Random(0).shuffle(rows)
    for row in rows[::3]:
        row.pop("id", None)
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    moved = [{"prompt": "new 1"}, {"prompt": "new 2"}, *rows]
    after = {p.id: p.messages for p in prompts(ready(section(elsewhere, moved, "e")))}
    assert before.items() <= after.items() and len(after) == 21
