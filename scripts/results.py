"""Saved benchmark results: one JSON file a benchmark, printed as it is written."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..data.files import write_json

FOLDER = Path(__file__).parent / "results"


def save_result(name: str, result: dict[str, Any], quiet: bool = False) -> Path:
    """Write `results/NAME.json` with today's date and, unless `quiet`, print it."""
    dated = {"date": datetime.now(UTC).date().isoformat(), **result}
    path = FOLDER / f"{name}.json"
    write_json(path, dated)
    if quiet:
        return path
    print(json.dumps(dated, indent=1, ensure_ascii=False))
    print(f"saved {path.name}")
    return path
