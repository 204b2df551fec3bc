"""Known sets by name: their layouts, their own files, and what is not one of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from preparing import Load, prompts, reasons, write

from draftsmith.configs.collection import DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.data.known_sets import KNOWN_SETS, resolved
from draftsmith.data.sources import read_rows

QUESTIONS = ["What is {} and two?", "How many of {} sheep are left?", "Add {} to a dozen, please."]

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": q.format(n), "answer": f"#### {n}"} for n, q in enumerate(QUESTIONS)],
    "mbpp": [
        {"task_id": n, "text": f"Write function number {n} of {n * n}.", "code": f"def f{n}(): 0"}
        for n in range(1, 13)
    ],
    "humaneval": [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f'def f{n}():\n    """{q}"""\n',
            "canonical_solution": "    return 0\n" * 30,
        }
        for n, q in enumerate(QUESTIONS)
    ],
    "spec_bench": [
        {"question_id": 80 + n, "category": ("writing", "qa")[n % 2], "turns": [q, f"{n} again?"]}
        for n, q in enumerate(QUESTIONS)
    ],
}
ROWS["speed_bench"] = [
    {**r, "sub_category": None, "source": "s", "src_id": "1", "multiturn": True}
    for r in ROWS["spec_bench"]
]


def named(source: str, **options: Any) -> DomainSection:
    return DomainSection(**{"name": "d", "source": source, "holdout": 1.0, **options})


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_copy_of_ones_own_is_read_as_its_set(name: str, tmp_path: Path, ready: Load) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS[name])
    prepared = ready(named(f"{name}:{path}"))
    found = prompts(prepared)
    if name == "mbpp":  # of which eleven and up are to evaluate on
        assert [(p.line, p.own_id) for p in found] == [(11, "11"), (12, "12")]
        return
    assert len(found) == 3 and {p.source for p in found} == {path}
    by = {"writing", "qa"} if "bench" in name else {"d"}
    assert {p.domain for p in found} == by
    turns = {len(p.turns) for p in found}
    assert turns == ({2} if "bench" in name else {1})
    key = KNOWN_SETS[name].key
    first = ROWS[name][0][key]
    text = next(p for p in found if p.line == 1).messages[0]["content"]
    assert text == (first[0] if isinstance(first, list) else first)


def test_a_folder_holds_it_under_a_usual_name(tmp_path: Path, ready: Load) -> None:
    path = write(tmp_path / "gsm8k_test.jsonl", ROWS["gsm8k"])
    assert {p.source for p in prompts(ready(named(f"gsm8k:{tmp_path}")))} == {path}
    with pytest.raises(UserError, match=r"no file of spec_bench: looked for spec_bench\.jsonl"):
        resolved(named(f"spec_bench:{tmp_path}"))


def test_what_the_recipe_says_itself_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "mbpp.jsonl", ROWS["mbpp"])
    section = named(f"mbpp:{path}", first_line=3, by="task_id", kind="raw")
    assert resolved(section) == named(path, first_line=3, by="task_id", kind="raw")
    plain = named("other.jsonl", by="category", holdout=0.5)
    assert resolved(plain) is plain
    assert resolved(named("spec_bench")).by == "category"


def test_humaneval_is_a_chat_unless_it_is_asked_raw(tmp_path: Path, ready: Load) -> None:
    path = write(tmp_path / "humaneval.jsonl", ROWS["humaneval"])
    chat, raw = (ready(named(f"humaneval:{path}", kind=kind)).ids(0) for kind in ("chat", "raw"))
    assert len(chat) > len(raw), "the template's own tokens"


def test_published_sets_are_asked_of_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def load(name: str, config: str | None, split: str, **rest: Any) -> Iterator[dict[str, Any]]:
        asked.append((name, config, split))
        return iter([{"question": "q"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name, known in KNOWN_SETS.items():
        section = resolved(named(name))
        assert section.source == known.published
        if name != "spec_bench":
            assert len(list(read_rows(section))) == 1
    assert asked[:3] == [
        ("openai/gsm8k", "main", "test"),
        ("google-research-datasets/mbpp", "full", "test"),
        ("openai/openai_humaneval", None, "test"),
    ]
    assert ("nvidia/SPEED-Bench", "throughput_32k", "test") in asked
    assert KNOWN_SETS["spec_bench"].published.endswith("/spec_bench/question.jsonl")


def test_withheld_text_is_no_prompt(tmp_path: Path, ready: Load) -> None:
    """SPEED-Bench: texts that others own are to be put in by its own script."""
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [*ROWS["speed_bench"], {**ROWS["speed_bench"][0], "turns": [masked]}]
    prepared = ready(named(f"speed_bench:{write(tmp_path / 'rows.jsonl', rows)}"))
    assert len(prepared) == 3
    (reason,) = reasons(prepared)
    assert "prepare_data.py" in str(reason)


def test_what_is_evaluated_on_is_not_trained_on() -> None:
    with pytest.raises(UserError, match=r"holdout must be 1\.0, not 0\.25"):
        resolved(named("gsm8k", holdout=0.25))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("gsmk8:prompts.jsonl", "did you mean 'gsm8k'"),
        ("anything", "known: chat, code, extract, math, gsm8k, mbpp, humaneval, spec_bench"),
    ],
)
def test_an_unknown_name_is_told_what_there_is(source: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        list(read_rows(resolved(named(source))))
    assert told in str(caught.value)


def test_a_file_of_another_layout_is_refused(tmp_path: Path, ready: Load) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS["gsm8k"])
    with pytest.raises(UserError, match="have no 'turns', which those of spec_bench have"):
        ready(named(f"spec_bench:{path}"))
    short = write(tmp_path / "short.jsonl", ROWS["mbpp"][:5])
    with pytest.raises(UserError, match="holds no row of mbpp"):
        ready(named(f"mbpp:{short}"))
    with pytest.raises(UserError, match="names no file"):
        resolved(named("gsm8k:"))
