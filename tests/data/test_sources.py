"""Where rows come from: files as people save them, data sets, and what is not there."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import DomainSection
from draftsmith.data.prompts import Prompt, load_prompts
from draftsmith.data.sources import read_rows

GOOD = [{"prompt": f"good prompt {number}"} for number in range(5)]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prompts_of(source: str) -> list[Prompt]:
    prompts, rejections = load_prompts(DomainSection(name="d", source=source))
    assert rejections == []
    return prompts


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    """B020: as Windows saves it, with a blank line and no end of line at the end."""
    plain = write(tmp_path / "plain.jsonl", GOOD)
    lines = [json.dumps(row).encode() for row in GOOD]
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([*lines[:2], b"", *lines[2:]]))
    expected, read = prompts_of(plain), prompts_of(str(windows))
    assert [(p.id, p.split) for p in read] == [(p.id, p.split) for p in expected]
    assert [p.line for p in read] == [1, 2, 4, 5, 6]


def test_other_line_ends_inside_a_text_do_not_split_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(read_rows(str(path))) == [(1, {"prompt": text})]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "unfinished', "not one JSON object a line"),
        (b"{'prompt': 'quotes'}", "not one JSON object a line"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_broken_line_is_named_with_its_first_characters(
    tmp_path: Path, line: bytes, said: str
) -> None:
    """B020: by number, and never blaming the schema."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        load_prompts(DomainSection(name="d", source=str(path)))
    assert str(caught.value).startswith(f"{path}:3: {said}")
    assert "prompt" in str(caught.value).partition(said)[2]


def test_a_source_that_does_not_exist() -> None:
    with pytest.raises(UserError) as caught:
        load_prompts(DomainSection(name="d", source="maths"))
    assert "'maths'" in str(caught.value) and "did you mean 'math'?" in str(caught.value)


def test_relative_paths_start_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "here.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    assert len(prompts_of("here.jsonl")) == 5


def test_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    # One column is null in each row, as columns of mixed layouts are.
    write(
        folder / "train.jsonl", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}]
    )
    write(folder / "test.jsonl", [{"prompt": "t"}])
    train = prompts_of(f"datasets:{folder}")
    assert [(p.line, p.messages[0]["content"]) for p in train] == [(1, "a"), (2, "b")]
    test = prompts_of(f"datasets:{folder}:default:test")
    assert [p.messages[0]["content"] for p in test] == ["t"]
    for wrong in (f"datasets:{folder}:nosuch", f"datasets:{folder}::nosuch"):
        with pytest.raises(UserError, match="nosuch"):
            load_prompts(DomainSection(name="d", source=wrong))


@pytest.mark.parametrize(
    "error", [ConnectionError("Couldn't reach 'x/y' on the Hub"), FileNotFoundError("no x/y")]
)
def test_datasets_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError) as caught:
        load_prompts(DomainSection(name="d", source="datasets:x/y"))
    assert str(caught.value).startswith("cannot load 'datasets:x/y'")
    assert str(error) in str(caught.value)
