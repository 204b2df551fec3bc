"""Rows of JSON from where a domain says they are: the package, a file, or a data set."""

import json
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..configs.errors import UserError, did_you_mean

DATASETS = "datasets:"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def packaged_domains() -> tuple[str, ...]:
    """Names of the domains that come with the package."""
    files = (resources.files(__package__) / "domains").iterdir()
    return tuple(sorted(f.name[: -len(".jsonl")] for f in files if f.name.endswith(".jsonl")))


def read_rows(source: str) -> Iterator[tuple[int, Any]]:
    """Each row with its line, counted from 1 (in a data set, its place).

    Args:
        source: a packaged domain, the path of a JSONL file relative to the working folder, or
            "datasets:NAME[:config[:split]]", whose split is train unless given.
    Raises:
        UserError: no such source, or a line that is not JSON.
    """
    if source.startswith(DATASETS):
        return _data_set(source)
    return _json_lines(_locate(source), source)


def _locate(source: str) -> Path | Traversable:
    if source in packaged_domains():
        return resources.files(__package__) / "domains" / f"{source}.jsonl"
    if Path(source).is_file():
        return Path(source)
    hint = did_you_mean(Path(source).stem, packaged_domains())
    raise UserError(
        f"there are no prompts at '{source}': give a packaged domain, the path of a JSONL file "
        f"or {DATASETS}NAME{hint}"
    )


def _json_lines(file: Path | Traversable, source: str) -> Iterator[tuple[int, Any]]:
    """Rows of a file, whatever its line ends; blank lines only count."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                # Bytes are split at line feeds only: text has other line ends, inside strings.
                line = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()
                if line:
                    yield number, _json(line, f"{source}:{number}")
    except OSError as error:
        raise UserError(f"cannot read the prompts in '{source}': {error}") from None


def _json(line: bytes, where: str) -> Any:
    start = line[:60].decode("utf-8", errors="replace")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text: {start!r}") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(f"{where}: not one JSON object a line ({reason}): {start!r}") from None


def _data_set(source: str) -> Iterator[tuple[int, Any]]:
    import datasets  # slow to import, and only needed here

    name, _, rest = source.removeprefix(DATASETS).partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # OSError is also what the library raises when it is offline or finds nothing there.
        reason = " ".join(str(error).split())
        raise UserError(
            f"cannot load '{source}', read as {DATASETS}NAME[:config[:split]]: {reason}"
        ) from None
    yield from enumerate(rows, start=1)
