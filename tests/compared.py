"""Requests as evaluations list them, made up: with counts of known ratios."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.data.files import write_json
from draftsmith.eval.report import FORMAT
from draftsmith.eval.request_rows import Expected, Overlap, RequestRow, write_requests

_ROW = RequestRow(
    domain="chat",
    law="T=1",
    prompt_id="p0",
    turn=0,
    key="p0|T=1|0",
    seed=0,
    prompt_tokens=12,
    prompt_sha256="aa",
    tokens=5,
    finish="stop",
    output_sha256="bb",
    rounds=((2, 1), (2, 1)),
    overlap=Overlap(2.0, 4),
    expected=Expected(4.0, 2.0),
)


def row(prompt: str = "p0", **changes: Any) -> RequestRow:
    """A row of τ = 2, α = 0.5, half of all drafts accepted."""
    return replace(_ROW, prompt_id=prompt, key=f"{prompt}|T=1|0", **changes)


def report_of(**settings: Any) -> dict[str, Any]:
    """As little of a report as comparing takes."""
    return {
        "format": FORMAT,
        "created": "2026-01-01T00:00:00+00:00",
        "provenance": {
            "drafter": {"family": "eagle3", "parameters": 10, "weights_sha256": "cafe"},
            "target": {"name": "tiny", "weights": "w", "tokenizer": "t", "vocab_size": 400},
            "versions": {"torch": "2"},
            "machine": {"processor": "one"},
            "prompts_sha256": "r",
        },
        "settings": {"num_draft_tokens": 2, "verifier": "block", "max_new_tokens": 10, **settings},
        "cells": [{"domain": "chat", "law": "T=1"}],
    }


def saved(folder: Path, rows: Sequence[RequestRow], report: dict[str, Any]) -> Path:
    """An evaluation's folder with these."""
    write_requests(folder, rows)
    write_json(folder / "report.json", report)
    return folder
