"""Rows in files for preparation, and what came of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.configs.collection import DomainSection
from draftsmith.data.prepare import Prepared
from draftsmith.data.prompts import Prompt

Load = Callable[..., Prepared]

GOOD = [{"prompt": f"good prompt {number}"} for number in range(5)]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def section(folder: Path, rows: list[Any], name: str = "d", **options: Any) -> DomainSection:
    return DomainSection(name=name, source=write(folder / f"{name}.jsonl", rows), **options)


def rejected(prepared: Prepared) -> list[dict[str, Any]]:
    lines = (prepared.folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def reasons(prepared: Prepared) -> list[tuple[int, str]]:
    return [(row["line"], row["reason"]) for row in rejected(prepared)]


def prompts(prepared: Prepared) -> list[Prompt]:
    return [prepared.prompt(row) for row in range(len(prepared))]
