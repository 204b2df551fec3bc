"""Whether a real server says of the embedded target what the target of this process says."""

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.configs.collection import PACKAGED_DOMAINS, CollectSection, ServerSection
from draftsmith.data.chat import render_prompt
from draftsmith.data.gather import Backend, GatherSettings, Request, TargetBackend, last_turn
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.data.records import Record
from draftsmith.data.remote import ServerBackend
from draftsmith.data.target import Target
from draftsmith.data.warp import Law

TOKENS = 32
TOP = 8
EACH = 3
"""Prompts of each packaged domain."""
BRIEF = ("What is 2+2?", "What is the capital of France?")
"""Prompts whose replies end by themselves."""
NEAR_TIE = 1e-3
"""Two best log-probabilities this close may come out either way in another implementation."""


@dataclass(frozen=True)
class Comparison:
    """What two backends made of the same requests.

    near_ties: (prompt, place in the reply, margin of the two best) where a reply first differs.
    error: the largest difference of log-probabilities up to there.
    """

    records: list[Record]
    near_ties: list[tuple[str, int, float]]
    error: float
    rates: dict[str, float]
    """Tokens a second, by who answered."""


def requests(target: Target) -> list[Request]:
    """Greedy ones: some of each packaged domain, and the brief ones."""
    asked = []
    for section in PACKAGED_DOMAINS:
        rows = (row for row in read_prompts(section, CollectSection()) if isinstance(row, Prompt))
        for prompt, _ in zip(rows, range(EACH), strict=False):
            ids = tuple(render_prompt(target.tokenizer, prompt.messages))
            asked.append(Request(prompt.id, prompt.domain, prompt.split, ids, Law(0.0), 0))
    for text in BRIEF:
        ids = tuple(render_prompt(target.tokenizer, [{"role": "user", "content": text}]))
        asked.append(Request(text, "brief", "train", ids, Law(0.0), 0))
    return asked


def timed(backend: Backend, asked: Sequence[Request]) -> tuple[list[Record], float]:
    settings = GatherSettings(TOKENS, len(asked), (), keep="top", top=TOP)
    start = time.perf_counter()
    records = backend.answer(asked, settings, lambda tokens: None, last_turn)
    return records, sum(len(r.reply) for r in records) / (time.perf_counter() - start)


def compare(target: Target, addresses: tuple[str, ...]) -> Comparison:
    """Greedy replies of both, equal up to near-ties, which are warned of.

    Raises `AssertionError` for a difference that is none.
    """
    asked = requests(target)
    section = ServerSection(addresses=addresses, concurrency=4)
    remote = ServerBackend(section, target.tokenizer, target.eos_ids, target.vocab_size, 512)
    timed(remote, asked[:1])  # what is done once: meeting it, first allocations
    theirs, their_rate = timed(remote, asked)
    ours, our_rate = timed(TargetBackend(target), asked)
    assert all(record.exact for record in theirs)
    ties, error = [], 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.top is not None
        assert other.top is not None
        assert (mine.key, mine.prompt_len) == (other.key, other.prompt_len)
        same = _common(mine.reply.tolist(), other.reply.tolist())
        if mine.reply.tolist() == other.reply.tolist():
            assert mine.finish == other.finish
        else:
            best = mine.top.log_probs[same]
            ties.append((mine.prompt_id, same, float(best[0] - best[1])))
        apart = (mine.top.log_probs[:same] - other.top.log_probs[:same]).abs()
        error = max(error, float(apart.max())) if same else error
    found = Comparison(theirs, ties, error, {"server": their_rate, "in process": our_rate})
    print(json.dumps({"near_ties": ties, "error": error, "tokens_per_second": found.rates}))
    for tie in ties:
        warnings.warn(f"near-tie: {tie}", stacklevel=2)
        assert tie[2] < NEAR_TIE, f"the replies differ where the best is {tie[2]:.2e} ahead: {tie}"
    return found


def _common(mine: list[int], other: list[int]) -> int:
    """Tokens until the two differ."""
    for place, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            return place
    return min(len(mine), len(other))


def model_folder(target: Target) -> Path:
    """Where the embedded target lies."""
    return Path(target.model.config._name_or_path)
