"""What engines tell of their rounds: counters of the whole server, or figures of one reply.

vLLM and llama.cpp count under the same names behind their own prefix, in the text that Prometheus
reads; SGLang tells a histogram with every reply.
"""

import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...configs.errors import UserError

POLL = 0.02
"""Seconds between two looks at counters that may still move."""
SETTLE = 5.0
"""Seconds that counters are given to take in a reply that has come."""

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'\bposition="(\d+)"')


@dataclass(frozen=True)
class Counts:
    """Rounds that verified a draft, tokens drafted and accepted in them, and by draft position,
    from the first, the rounds that accepted that many tokens or more."""

    rounds: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...]

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._with(other, -1)

    def _with(self, other: "Counts", sign: int) -> "Counts":
        longest = max(len(self.by_position), len(other.by_position))
        mine, theirs = (
            c.by_position + (0,) * (longest - len(c.by_position)) for c in (self, other)
        )
        return Counts(
            self.rounds + sign * other.rounds,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
        )


NOTHING = Counts(0, 0, 0, ())


def parse(text: str, prefix: str) -> Counts | None:
    """The counters of a Prometheus text, over all of a server's engines; None if it has none.

    Names with and without the suffix `_total` are the same.
    """
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None or not found["name"].startswith(f"{prefix}:spec_decode_num_"):
            continue
        name = found["name"].removeprefix(f"{prefix}:spec_decode_num_").removesuffix("_total")
        place = _POSITION.search(found["labels"] or "")
        if name == "accepted_tokens_per_pos" and place is not None:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + float(found["value"])
        else:
            totals[name] = totals.get(name, 0.0) + float(found["value"])
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= totals.keys():
        return None
    return Counts(
        int(totals["drafts"]),
        int(totals["draft_tokens"]),
        int(totals["accepted_tokens"]),
        tuple(int(positions.get(k, 0.0)) for k in range(max(positions, default=-1) + 1)),
    )


def scraped(root: str, prefix: str) -> Counts:
    """The counters of the server at `root` once they stand still.

    Raises `UserError` if it cannot be read or has none.
    """
    deadline = time.monotonic() + SETTLE
    before = None
    while True:
        found = parse(_metrics(root), prefix)
        if found is None:
            raise UserError(
                f"{root}/metrics has no counters {prefix}:spec_decode_num_drafts and _draft_tokens "
                "and _accepted_tokens: this version of the engine cannot be measured"
            )
        if found == before or time.monotonic() > deadline:
            return found
        before = found
        time.sleep(POLL)


def _metrics(root: str) -> str:
    try:
        with urllib.request.urlopen(f"{root}/metrics", timeout=SETTLE) as reply:
            return str(reply.read().decode("utf-8"))
    except OSError as error:
        raise UserError(f"{root}/metrics cannot be read: {error}") from error


def of_reply(reply: Mapping[str, Any], num_draft_tokens: int) -> Counts:
    """The rounds that SGLang tells of one reply. Raises `UserError` if it tells none.

    Its histogram says how many rounds accepted 0, 1, 2, ... tokens; it has had two names.
    """
    about = reply.get("meta_info") or {}
    names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
    histogram = next((about[name] for name in names if about.get(name)), None)
    if histogram is None or "spec_verify_ct" not in about:
        raise UserError(
            "a reply of the SGLang server has no spec_verify_ct or no histogram of its rounds: "
            "this version of the engine cannot be measured"
        )
    rounds = int(about["spec_verify_ct"])
    reached = tuple(sum(histogram[k:]) for k in range(1, num_draft_tokens + 1))
    return Counts(rounds, rounds * num_draft_tokens, sum(reached), reached)
