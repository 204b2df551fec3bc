"""A line for each held-out reply of an evaluation, without text: what evaluations are compared by.

The file `requests.jsonl` lies beside the report. It holds prompt ids, hashes and counts, so that it
may be committed and sent on.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..configs.errors import UserError
from ..data.files import whole_file

NAME = "requests.jsonl"


@dataclass(frozen=True)
class Overlap:
    """Σ min(p, q) summed over drafted positions, and how many those are."""

    sum: float
    count: int


@dataclass(frozen=True)
class Expected:
    """Tokens behind the first, and the rounds that the estimator expects them to take."""

    tokens: float
    rounds: float


@dataclass(frozen=True)
class Timed:
    """One prompt decoded plainly and speculatively, in turns: seconds behind prefill, tokens."""

    plain_seconds: float
    plain_tokens: float
    fast_seconds: float
    fast_tokens: float


@dataclass(frozen=True)
class RequestRow:
    """One reply to one prompt under one law.

    key: of the record it belongs to; tokens: ids produced, the first, which comes from prefill,
    among them; rounds: (drafted, accepted) of every round; expected: None where policies or trees
    leave nothing to expect; timing: None where the prompt was not timed.
    """

    domain: str
    law: str
    prompt_id: str
    turn: int
    key: str
    seed: int
    prompt_tokens: int
    prompt_sha256: str
    tokens: int
    finish: str
    output_sha256: str
    rounds: tuple[tuple[int, int], ...]
    overlap: Overlap
    expected: Expected | None
    timing: Timed | None = None

    @property
    def pair(self) -> tuple[str, str, str, int, int]:
        """What it shares with the same request of another evaluation."""
        return self.domain, self.law, self.prompt_id, self.turn, self.seed


_ROW = TypeAdapter(RequestRow)


def write_requests(folder: Path, rows: Sequence[RequestRow]) -> Path:
    """Write the file into `folder`, whole or not at all; returns its path."""
    path = folder / NAME
    lines = [json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    with whole_file(path) as part:
        part.write_text("".join(lines), encoding="utf-8")
    return path


def read_requests(folder: Path) -> list[RequestRow]:
    """The rows of the evaluation in `folder`.

    Raises `UserError` if there are none, or a line is damaged or says of a request what another
    line has said.
    """
    path = Path(folder) / NAME
    try:
        lines = path.read_bytes().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no {NAME} in {folder}: give the folder of an evaluation, as `draftsmith "
            "eval` writes it; one of an older version has to be evaluated again"
        ) from None
    rows: dict[tuple[str, str, str, int, int], RequestRow] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = _ROW.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(
                f"{path}:{number} is damaged: {where + ': ' if where else ''}{first['msg']}; "
                "evaluate again"
            ) from None
        if row.pair in rows:
            raise UserError(
                f"{path}:{number} is damaged: {row.key} stands there twice; evaluate again"
            )
        rows[row.pair] = row
    if not rows:
        raise UserError(f"{path} is empty; evaluate again")
    return list(rows.values())
