"""Rows from where a domain says they are: the package, files here or elsewhere, or a data set."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import glob
from importlib import resources
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from ..configs.collection import DomainSection
from ..configs.errors import UserError, did_you_mean
from .known_sets import KNOWN_SETS

DATASETS = "datasets:"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHUNK = 1 << 20  # characters of a JSON list read at a time
LONGEST_ITEM = 64 * CHUNK  # what is not closed by then is taken as broken
ROWS = 1000  # rows of a Parquet file decoded at a time


@dataclass(frozen=True)
class Place:
    """Where a row stands."""

    source: str
    """The packaged domain, file, URL or data set, as the recipe spells it; of a pattern, the file
    that it found."""
    line: int
    """The line it starts on, from 1; where rows are no lines (Parquet, a JSON list, a data set),
    which row it is."""


Row = tuple[int, Any]
"""A line and what stands there."""


def packaged_domains() -> tuple[str, ...]:
    """Names of the domains that come with the package."""
    files = (resources.files(__package__) / "domains").iterdir()
    return tuple(sorted(f.name[: -len(".jsonl")] for f in files if f.name.endswith(".jsonl")))


def read_rows(section: DomainSection) -> Iterator[tuple[Place, Any]]:
    """Each row of a source between its lines, with its place, while the source is read.

    Nothing behind `last_line` is read; of several files each has these lines.

    The source is a packaged domain; a path relative to the working folder or a URL that fsspec
    knows, perhaps a pattern such as data/*.jsonl, perhaps compressed (.gz, .bz2, .xz); or
    "datasets:NAME[:config[:split]]", whose split is train unless given. Files are read by their
    endings: .jsonl and .ndjson (blank lines only count), .json (a list or such lines), .csv (an
    empty cell is a missing value), .parquet, .txt (each line is a row's text, save blank ones).

    Raises:
        UserError: no such source, no such format, or a line that cannot be read.
    """
    source = section.source
    if source.startswith(DATASETS):
        for line, row in _between(_data_set(section), section):
            yield Place(source, line), row
        return
    for name, path in source_files(source):
        reader = _reader(name, path)
        with _faults(name):
            for line, row in _between(reader(partial(_open, path), name), section):
                yield Place(name, line), row


def _between(rows: Iterator[Row], section: DomainSection) -> Iterator[Row]:
    for line, row in rows:
        if section.last_line is not None and line > section.last_line:
            return
        if line >= section.first_line:
            yield line, row
        if line == section.last_line:  # what follows may be broken, or slow to come
            return


def source_files(source: str) -> list[tuple[str, str]]:
    """The files of a source that is no data set: each one's name for people, and its path or URL.

    Raises:
        UserError: there are none.
    """
    if source in packaged_domains():
        return [(source, str(resources.files(__package__) / "domains" / f"{source}.jsonl"))]
    names = [source] if Path(source).is_file() else _matching(source)
    if not names:
        of_set = ":" in source and "://" not in source
        word = source.partition(":")[0] if of_set else Path(source).stem
        hint = did_you_mean(word, (*packaged_domains(), *KNOWN_SETS))
        raise UserError(
            f"there are no prompts at '{source}': give a packaged domain, a known set, the path or "
            f"URL of a file ({', '.join(READERS)}) or {DATASETS}NAME{hint}"
        )
    return [(name, name) for name in names]


def _matching(source: str) -> list[str]:
    """The files that a path or URL names, in the order of their names."""
    if "://" not in source:
        return sorted(path for path in glob(source, recursive=True) if Path(path).is_file())
    with _faults(source):
        files, path = fsspec.core.url_to_fs(source)
        if "*" not in path:
            return [source] if files.exists(path) else []
        return [files.unstrip_protocol(found) for found in sorted(files.glob(path))]


@contextmanager
def _faults(source: str) -> Iterator[None]:
    """Tell what goes wrong in reading as an error of that source."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Each kind of storage and of packing has errors of its own, with no common type.
        raise UserError(f"cannot read the prompts in '{source}': {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """An error of another library in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _open(path: str) -> IO[bytes]:
    handle: IO[bytes] = fsspec.open(path, "rb", compression="infer").open()
    return handle


def _reader(name: str, path: str) -> "Reader":
    """How files of that name are read."""
    bare = urlsplit(path).path if path.startswith(("http://", "https://")) else path
    ending = Path(bare.removesuffix(".gz").removesuffix(".bz2").removesuffix(".xz")).suffix
    if ending not in READERS:
        raise UserError(f"cannot tell the format of '{name}': it must end in {', '.join(READERS)}")
    return READERS[ending]


# ---- formats


Opener = Callable[[], IO[bytes]]
Reader = Callable[[Opener, str], Iterator[Row]]


def _lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, whatever ends them and without a byte-order mark."""
    for number, line in enumerate(lines, start=1):
        # Bytes are split at line feeds only: text has other line ends, inside strings.
        yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def _json_lines(opened: Opener, source: str) -> Iterator[Row]:
    with opened() as handle:
        for number, line in _lines(handle):
            if line.strip():
                yield number, _json(line.strip(), f"{source}:{number}")


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(_utf8(line, where))
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(f"{where}: not one JSON object a line ({reason}): {_start(line)}") from None


def _utf8(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text: {_start(line)}") from None


def _start(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", errors="replace"))


def _json_file(opened: Opener, source: str) -> Iterator[Row]:
    with opened() as handle:
        start = handle.read(CHUNK).removeprefix(BYTE_ORDER_MARK).lstrip()
    is_list = start.startswith(b"[")
    yield from (_json_list if is_list else _json_lines)(opened, source)


def _json_list(opened: Opener, source: str) -> Iterator[Row]:
    """Items of a list one by one: such a file may be far larger than memory."""
    number, rest = 0, ""
    with opened() as handle, TextIOWrapper(handle, encoding="utf-8-sig") as text:
        while len(rest) < LONGEST_ITEM:
            try:
                chunk = text.read(CHUNK)
            except UnicodeDecodeError:
                raise UserError(f"{source}: not UTF-8 text after row {number}") from None
            if not chunk:
                break
            rest, at = rest + chunk, 0
            while item := _item(rest, at, "," if number else "["):
                row, at = item
                number += 1
                yield number, row
            rest = rest[at:]
    closing = rest.strip() if number else rest.strip().removeprefix("[").strip()
    if closing != "]":
        start = closing.lstrip(", \r\n\t")[:60]
        raise UserError(f"{source}: row {number + 1} of the list is cut off or not JSON: {start!r}")


def _item(text: str, at: int, mark: str) -> tuple[Any, int] | None:
    """The item of a list that stands after a mark, and where it ends; None if it may go on."""
    start = _after_blanks(text, at)
    if not text.startswith(mark, start):
        return None
    try:
        item, end = json.JSONDecoder().raw_decode(text, _after_blanks(text, start + 1))
    except (ValueError, RecursionError):
        return None
    end = _after_blanks(text, end)
    return (item, end) if end < len(text) else None


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _csv(opened: Opener, source: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # prompts are longer than the 128 KiB it starts with
    header: list[str] | None = None
    after = 1
    with opened() as handle:
        lines = (_utf8(line, f"{source}:{number}") for number, line in _lines(handle))
        reader = csv.reader(lines, strict=True)
        try:
            for cells in reader:
                # A cell may span lines.
                line, after = after, reader.line_num + 1
                if len(cells) < 2 and not "".join(cells).strip():
                    continue
                if header is None:
                    header = cells
                    if len(set(header)) < len(header):
                        raise UserError(f"{source}:{line}: two columns have one name")
                elif len(cells) != len(header):
                    counts = f"{len(cells)} cells where the header has {len(header)}"
                    raise UserError(f"{source}:{line}: {counts}: {','.join(cells)[:60]!r}")
                else:
                    yield line, {key: cell or None for key, cell in zip(header, cells, strict=True)}
        except csv.Error as error:
            raise UserError(f"{source}:{after}: not CSV: {error}") from None


def _parquet(opened: Opener, source: str) -> Iterator[Row]:
    import pyarrow  # slow to import, and only needed here
    from pyarrow.parquet import ParquetFile

    number = 0
    with opened() as handle:
        try:
            for batch in ParquetFile(handle).iter_batches(ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_padding(row)
        except pyarrow.ArrowException as error:
            reason = " ".join(str(error).split())
            raise UserError(f"cannot read '{source}' as Parquet: {reason}") from None


def _text_lines(opened: Opener, source: str) -> Iterator[Row]:
    with opened() as handle:
        for number, line in _lines(handle):
            if line.strip():
                yield number, {"text": _utf8(line, f"{source}:{number}").rstrip("\r\n")}


READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_file,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _text_lines,
}


# ---- data sets


def _data_set(section: DomainSection) -> Iterator[Row]:
    import datasets  # slow to import, and only needed here

    name, _, rest = section.source.removeprefix(DATASETS).partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(
            name,
            config or None,
            split=split or "train",
            revision=section.revision,
            streaming=section.streaming,
        )
        for number, row in enumerate(rows, start=1):
            yield number, _without_padding(row)
    except Exception as error:  # the library's own, or those of the storage behind it
        raise UserError(
            f"cannot load '{section.source}', read as {DATASETS}NAME[:config[:split]]: "
            f"{reason_of(error)}"
        ) from error


def _without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table without the nulls inside its values.

    All structs of a column have the same fields there: those of one message, tool or call are
    null in all others.
    """
    return {key: _dense(value) for key, value in row.items()}


def _dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dense(item) for key, item in value.items() if item is not None}
    return [_dense(item) for item in value] if isinstance(value, list) else value
