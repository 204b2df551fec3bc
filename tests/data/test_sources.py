"""Where rows come from: files as people save them, data sets, and what is not there."""

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.data import sources
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.data.sources import read_rows

GOOD = [{"prompt": f"good prompt {number}"} for number in range(5)]
LINES = [json.dumps(row).encode() for row in GOOD]
NUMBERED = list(enumerate(GOOD, start=1))


def rows_of(source: object, **options: Any) -> list[tuple[int, Any]]:
    section = DomainSection(name="d", source=str(source), **options)
    found = list(read_rows(section))
    assert {place.source for place, _ in found} <= {str(source)}
    return [(place.line, row) for place, row in found]


def refused(source: object, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(source, **options)
    return str(caught.value)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def write_rows(path: Path, rows: list[Any]) -> Path:
    return write(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))


# ---- lines


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    """B020: as Windows saves it, with a blank line and no end of line at the end."""
    plain = write_rows(tmp_path / "plain.jsonl", GOOD)
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([*LINES[:2], b"", *LINES[2:]]))
    assert rows_of(plain) == NUMBERED
    assert rows_of(windows) == list(zip([1, 2, 4, 5, 6], GOOD, strict=True))
    ids = [
        [
            (p.id, p.split)
            for p in read_prompts(DomainSection(name="d", source=str(path)), CollectSection())
            if isinstance(p, Prompt)
        ]
        for path in (plain, windows)
    ]
    assert ids[0] == ids[1] and len(ids[0]) == 5


def test_other_line_ends_inside_a_text_do_not_split_it(tmp_path: Path) -> None:
    row = {"prompt": "one\u2028two\x85three"}
    line = json.dumps(row, ensure_ascii=False).encode()
    assert rows_of(write(tmp_path / "rows.jsonl", line + b"\n")) == [(1, row)]
    text = write(tmp_path / "rows.txt", row["prompt"].encode() + b"\r\n")
    assert rows_of(text) == [(1, {"text": row["prompt"]})]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "unfinished', "not one JSON object a line"),
        (b"{'prompt': 'quotes'}", "not one JSON object a line"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
    ],
)
def test_a_broken_line_is_named_with_its_first_characters(
    tmp_path: Path, name: str, line: bytes, said: str
) -> None:
    """B020: by number, and never blaming the schema."""
    path = write(tmp_path / name, b'{"prompt": "a"}\n\n' + line + b"\n")
    message = refused(path)
    assert message.startswith(f"{path}:3: {said}")
    assert "prompt" in message.partition(said)[2]


def test_lines_of_text_are_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.txt", b"\xef\xbb\xbf one\r\n\r\n  \ntwo words \nthree")
    texts = [(1, " one"), (4, "two words "), (5, "three")]
    assert rows_of(path) == [(line, {"text": text}) for line, text in texts]
    broken = write(tmp_path / "broken.txt", b"a\n\xff\n")
    assert refused(broken).startswith(f"{broken}:2: not UTF-8 text")


# ---- lists, tables


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    """Read piece by piece, wherever the pieces end."""
    monkeypatch.setattr(sources, "CHUNK", chunk)
    path = tmp_path / "rows.json"
    rows = [*GOOD, 12, [], {"prompt": 'a ] , [ "é" \\'}, "x"]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\n")
    if chunk > 1:  # the mark that tells a list is looked for in the first piece
        assert rows_of(path) == list(enumerate(rows, start=1))
    path.write_text(text)
    assert rows_of(path) == list(enumerate(rows, start=1))
    path.write_text("[ ]")
    assert rows_of(path) == []


@pytest.mark.parametrize(
    ("text", "number", "start"),
    [
        ('[{"a": 1}, {"a": b}, {"a": 3}]', 2, '{"a": b}'),
        ('[{"a": 1}, {"a": 2}', 2, '{"a": 2}'),
        ('[{"a": 1} {"a": 2}]', 2, '{"a": 2}]'),
        ('[{"a": 1}, ]', 2, "]"),
        ('[{"a": 1}] x', 2, "] x"),
        ("[", 1, ""),
    ],
)
def test_a_broken_list_is_named_at_its_row(
    tmp_path: Path, text: str, number: int, start: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    message = refused(path)
    assert message.startswith(f"{path}: row {number} of the list is cut off or not JSON: '{start}")
    path.write_bytes(b'[{"a": 1},\n{"a": "\xff"}]')
    assert "not UTF-8 text" in refused(path)


def test_a_broken_list_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK", 10)
    monkeypatch.setattr(sources, "LONGEST_ITEM", 50)
    path = write(tmp_path / "rows.json", b'[{"a": b}, ' + b" " * 100_000 + b"\xff]")
    assert 'row 1 of the list is cut off or not JSON: \'{"a": b}' in refused(path)


def test_a_list_in_lines(tmp_path: Path) -> None:
    """.json is also what people call lines of JSON."""
    assert rows_of(write_rows(tmp_path / "rows.json", GOOD)) == NUMBERED


def test_csv(tmp_path: Path) -> None:
    """B020: byte-order mark, line ends, blank lines, and cells that span lines or are empty."""
    lines = ["prompt,response,n", 'a,"b, ""c""",1', "", '"two', 'lines",,2', '" ",d,']
    rows = [
        (2, {"prompt": "a", "response": 'b, "c"', "n": "1"}),
        (4, {"prompt": "two\nlines", "response": None, "n": "2"}),
        (6, {"prompt": " ", "response": "d", "n": None}),
    ]
    path = write(tmp_path / "rows.csv", "\n".join(lines).encode())
    assert rows_of(path) == rows
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, ""]).encode())
    rows[1][1]["prompt"] = "two\r\nlines"
    assert rows_of(path) == rows
    long = "x" * 200_000
    assert rows_of(write(path, f"prompt\n{long}\n \n".encode())) == [(2, {"prompt": long})]
    assert rows_of(write(path, b"prompt,n\n")) == []
    assert rows_of(write(path, b"a,b\n,\n")) == [(2, {"a": None, "b": None})]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n3\n", ":3: 1 cells where the header has 2: '3'"),
        (b"a,b\n1,2,3\n", ":2: 3 cells where the header has 2: '1,2,3'"),
        (b"a,b\n1,2\n\xff,3\n", ":3: not UTF-8 text"),
        (b'a,b\n1,2\n"3,4\n5,6\n', ":3: not CSV: "),
        (b"a,a\n1,2\n", ":1: two columns have one name"),
    ],
)
def test_a_broken_csv_is_named_at_its_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path / "rows.csv", content)
    assert refused(path).startswith(f"{path}{said}")


def parquet(path: Path, rows: list[Any]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, row_group_size=3)
    return path


CALLED = [
    {"messages": [{"role": "user", "content": "a"}], "arguments": {"city": "Oslo"}, "n": 1},
    {"messages": [{"role": "tool", "content": "b", "name": "f"}], "arguments": {"day": "x"}},
]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS", 2)
    rows = [{"prompt": f"p{n}"} for n in range(8)]
    assert rows_of(parquet(tmp_path / "rows.parquet", rows)) == list(enumerate(rows, start=1))
    broken = write(tmp_path / "broken.parquet", b"PAR1 but no more")
    assert refused(broken).startswith(f"cannot read '{broken}' as Parquet: ")


def test_tables_have_no_nulls_inside_their_values(tmp_path: Path) -> None:
    """B001, B006: what one row's message or call has, all others have as null."""
    path = parquet(tmp_path / "rows.parquet", CALLED)
    assert pyarrow.parquet.read_table(path).to_pylist()[0]["messages"][0]["name"] is None
    assert [row for _, row in rows_of(path)] == [CALLED[0], {**CALLED[1], "n": None}]


# ---- files here and elsewhere


@pytest.mark.parametrize(("ending", "packed"), [("gz", gzip), ("bz2", bz2), ("xz", lzma)])
def test_compressed_files(tmp_path: Path, ending: str, packed: Any) -> None:
    content = packed.compress(b"\n".join(LINES))
    path = write(tmp_path / f"rows.jsonl.{ending}", content)
    assert rows_of(path) == NUMBERED
    listed = packed.compress(json.dumps(GOOD).encode())
    assert rows_of(write(tmp_path / f"rows.json.{ending}", listed)) == NUMBERED
    write(path, content[: len(content) // 2])
    assert refused(path).startswith(f"cannot read the prompts in '{path}': ")
    write(path, content[:12] + b"\xff" * 40)
    assert refused(path).startswith(f"cannot read the prompts in '{path}': ")


def test_patterns_name_the_file_of_each_row(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": name}, {"id": name}])
    (tmp_path / "folder.jsonl").mkdir()
    section = DomainSection(name="d", source=str(tmp_path / "*.jsonl"))
    items = [str(i) for i in read_prompts(section, CollectSection()) if not isinstance(i, Prompt)]
    assert [item.partition(": ")[0] for item in items] == [
        f"{tmp_path / name}.jsonl:2" for name in ("a", "b")
    ]
    write(tmp_path / "c.jsonl", b"{")
    assert f"{tmp_path / 'c.jsonl'}:1: not one JSON object" in refused_pattern(section)
    literal = write_rows(tmp_path / "[x]*.jsonl", GOOD)
    assert rows_of(literal) == NUMBERED


def refused_pattern(section: DomainSection) -> str:
    with pytest.raises(UserError) as caught:
        list(read_rows(section))
    return str(caught.value)


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/draftsmith-test", recursive=True)


def test_urls(memory: Any, tmp_path: Path) -> None:
    base = "memory://draftsmith-test"
    memory.pipe("/draftsmith-test/a.jsonl", b"\n".join(LINES))
    memory.pipe("/draftsmith-test/b.jsonl.gz", gzip.compress(LINES[0]))
    memory.pipe("/draftsmith-test/c.csv", b"prompt\r\ngood prompt 0\r\n")
    table = parquet(tmp_path / "rows.parquet", GOOD)
    memory.pipe("/draftsmith-test/d.parquet", table.read_bytes())
    assert rows_of(f"{base}/a.jsonl") == NUMBERED
    assert rows_of(f"{base}/b.jsonl.gz") == NUMBERED[:1]
    assert rows_of(f"{base}/c.csv") == [(2, GOOD[0])]
    assert rows_of(f"{base}/d.parquet") == NUMBERED
    found = list(read_rows(DomainSection(name="d", source=f"{base}/*.jsonl*")))
    assert [place.source.rpartition("/")[2] for place, _ in found] == [
        *["a.jsonl"] * 5,
        "b.jsonl.gz",
    ]
    assert found[-1][0].source.startswith("memory://")
    assert f"there are no prompts at '{base}/e.jsonl'" in refused(f"{base}/e.jsonl")
    assert f"there are no prompts at '{base}/*.txt'" in refused(f"{base}/*.txt")


def test_urls_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("nosuch://bucket/a.jsonl").startswith(
        "cannot read the prompts in 'nosuch://bucket/a.jsonl': Protocol not known: nosuch"
    )

    class Denied(Exception):
        """Of no type that the others have."""

    def denied(_: str) -> None:
        raise Denied("no credentials")

    monkeypatch.setattr(fsspec.core, "url_to_fs", denied)
    assert refused("s3://bucket/a.jsonl").endswith("'s3://bucket/a.jsonl': no credentials")


def test_a_source_that_does_not_exist(tmp_path: Path) -> None:
    message = refused("maths")
    assert "'maths'" in message and "did you mean 'math'?" in message
    assert "there are no prompts at" in refused(tmp_path)


def test_a_format_that_is_not_known(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.xlsx", b"")
    assert refused(path) == (
        f"cannot tell the format of '{path}': it must end in "
        ".jsonl, .ndjson, .json, .csv, .parquet, .txt"
    )


def test_relative_paths_start_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "here.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    assert rows_of("here.jsonl") == NUMBERED
    assert [place.source for place, _ in read_rows(DomainSection(name="d", source="h*.jsonl"))] == [
        "here.jsonl"
    ] * 5


# ---- data sets


def test_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    # One column is null in each row, as columns of mixed layouts are.
    message = {"role": "user", "content": "b"}
    write_rows(folder / "train.jsonl", [{"prompt": "a"}, {"messages": [message]}])
    write_rows(folder / "test.jsonl", [{"prompt": "t"}])
    train = [(1, {"prompt": "a", "messages": None}), (2, {"prompt": None, "messages": [message]})]
    for streaming in (False, True):
        assert rows_of(f"datasets:{folder}", streaming=streaming) == train
    assert rows_of(f"datasets:{folder}:default:test") == [(1, {"prompt": "t", "messages": None})]
    assert rows_of(f"datasets:{folder}::train[1:]") == [(1, train[1][1])]
    for wrong in (f"datasets:{folder}:nosuch", f"datasets:{folder}::nosuch"):
        assert "nosuch" in refused(wrong)


def test_datasets_without_nulls_inside_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B001, B006."""
    rows = datasets.Dataset.from_list(CALLED)
    assert rows[0]["arguments"] == {"city": "Oslo", "day": None}
    told: dict[str, Any] = {}

    def load(name: str, config: str | None, **options: Any) -> Any:
        told.update(options, name=name, config=config)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = "datasets:x/y:c:validation"
    read = [row for _, row in rows_of(source, revision="v1", streaming=True)]
    assert read == [CALLED[0], {**CALLED[1], "n": None}]
    assert told == {
        **{"name": "x/y", "config": "c", "split": "validation"},
        **{"revision": "v1", "streaming": True},
    }


@pytest.mark.parametrize(
    "error", [ConnectionError("Couldn't reach 'x/y' on the Hub"), FileNotFoundError("no x/y")]
)
def test_datasets_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise error

    def breaks_off(*_: Any, **__: Any) -> Iterator[Any]:
        yield {"prompt": "a"}
        raise error

    for load in (offline, breaks_off):
        monkeypatch.setattr(datasets, "load_dataset", load)
        message = refused("datasets:x/y")
        assert message.startswith("cannot load 'datasets:x/y'")
        assert str(error) in message
