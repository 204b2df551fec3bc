"""Domains split by the length of their prompts, as rows of a report.

Only what a row is called changes: records, their keys, and what was trained on stay as they are.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..data.records import Record

_LABEL = re.compile(r"(?P<name>.*) (?:<(?P<below>\d+)|≥?(?P<from>\d+)(?:–\d+)?)")


def by_length(records: Sequence[Record], splits: Sequence[int]) -> list[Record]:
    """The records with their domain's name and the span that their prompt's tokens fall into.

    With splits 256 and 1024: `math <256`, `math 256–1023`, `math ≥1024`. As they are without any.
    The later turns of a conversation have longer prompts, and count where those fall.
    """
    if not splits:
        return list(records)
    spans = [f"<{splits[0]}"]
    spans += [f"{a}–{b - 1}" for a, b in pairwise(splits)]
    spans += [f"≥{splits[-1]}"]
    return [
        replace(r, domain=f"{r.domain} {spans[bisect_right(splits, r.prompt_len)]}")
        for r in records
    ]


def in_order(domain: str) -> tuple[str, int]:
    """A key that sorts domains by name, and the spans of one by length."""
    found = _LABEL.fullmatch(domain)
    return (domain, 0) if found is None else (found["name"], int(found["from"] or 0))
