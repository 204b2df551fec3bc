"""Sections of a recipe about prompts and the target's answers to them."""

import math
from dataclasses import dataclass
from typing import Literal

from .errors import require

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class DomainSection:
    """One source of prompts, reported by its own name."""

    name: str
    """The label of these prompts in every table."""
    source: str
    """A packaged domain, a file or URL (JSONL, JSON, CSV, Parquet, text),
    datasets:NAME[:config[:split]], or a known set to evaluate on: gsm8k, mbpp, humaneval,
    spec_bench or speed_bench from where it is published, gsm8k:PATH from a copy of your own."""
    kind: Literal["chat", "raw", "rendered"] = "chat"
    """chat goes through the chat template; raw is bare text for completion models; rendered is
    text that a chat template has already made, whose earlier replies stay whatever `turns` says."""
    by: str | None = None
    """A key of the rows whose value names the domain of each; null calls all of them name."""
    holdout: float = 0.25
    """Share of prompts kept for evaluation, chosen by hash; 0 trains on all, 1 on none."""
    first_line: int = 1
    """The first row that is read, by its line in the file or place in the data set."""
    last_line: int | None = None
    """The last row that is read; null reads to the end."""
    max_rows: int | None = None
    """Keeps at most this many prompts, chosen by hash; null keeps all."""
    weight: float | None = None
    """Share of the training prompts relative to other weights: those above it are left out, chosen
    by hash; null keeps all."""
    revision: str | None = None
    """Branch, tag or commit of a data set; null takes the default branch."""
    streaming: bool = False
    """Reads a data set as it comes, without a copy on this disk."""
    reasoning: Literal["template", "inline"] = "template"
    """What becomes of a reply's reasoning: left to the template, or put before the content."""

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "a label that is not empty")
        require(bool(self.source.strip()), "source", self.source, "a domain, path or data set")
        require(0 <= self.holdout <= 1, "holdout", self.holdout, "between 0 and 1")
        require(self.first_line > 0, "first_line", self.first_line, "1 or more")
        ok = self.last_line is None or self.last_line >= self.first_line
        require(ok, "last_line", self.last_line, "first_line or more, or null")
        ok = self.max_rows is None or self.max_rows > 0
        require(ok, "max_rows", self.max_rows, "a number above 0, or null")
        ok = self.weight is None or 0 < self.weight < math.inf
        require(ok, "weight", self.weight, "a number above 0, or null")
        is_data_set = self.source.startswith("datasets:")
        ok = is_data_set or self.revision is None
        require(ok, "revision", self.revision, "null where source is no data set (datasets:NAME)")
        ok = is_data_set or not self.streaming
        require(ok, "streaming", self.streaming, "false where source is no data set")


PACKAGED_DOMAINS = tuple(
    DomainSection(name=name, source=name) for name in ("chat", "code", "math", "extract")
)


@dataclass(frozen=True)
class ServerSection:
    """OpenAI-compatible servers of the target (vLLM, SGLang, llama.cpp) that answer instead."""

    addresses: tuple[str, ...] = ()
    """Base URLs such as http://host:8000/v1; the work is shared between them."""
    command: tuple[str, ...] = ()
    """Starts such a server for the run, on this machine and in its own environment; {model} and
    {port} are filled in."""
    model: str | None = None
    """The name it serves the target by; null asks it."""
    concurrency: int = 16
    """Requests in flight at each address."""
    retries: int = 6
    """Further tries of a request that failed for a passing reason."""
    timeout: float = 600.0
    """Seconds until a request, or the start of a server, is given up."""

    def __post_init__(self) -> None:
        ok = bool(self.addresses) != bool(self.command)
        require(ok, "addresses", list(self.addresses), "URLs, or a command that starts a server")
        require(self.concurrency > 0, "concurrency", self.concurrency, "above 0")
        require(self.retries >= 0, "retries", self.retries, "0 or more")
        require(0 < self.timeout < math.inf, "timeout", self.timeout, "above 0")


@dataclass(frozen=True)
class CollectSection:
    """Running the target over the training and held-out prompts."""

    replies: Literal["target", "given"] = "target"
    """What is trained on: the target's own replies, or those given in the data. Evaluation is
    always on the target's own."""
    turns: Literal["all", "last"] = "all"
    """Whether every reply of a conversation is made anew in turn, or only the last."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """The target answers each training prompt once at each of these, and under each served law
    that truncates."""
    max_new_tokens: int = 96
    """Longest reply of the target, in tokens; given ones are bound by max_length alone."""
    cut: Literal["keep", "drop"] = "keep"
    """What becomes of replies that reach max_new_tokens: kept as unfinished ones, or left out
    together with the turns after them."""
    max_length: int | None = None
    """Longest conversation, in tokens; null takes the target's limit."""
    near_duplicates: float | None = 0.8
    """Share of common word sequences from which on two prompts count as the same; null compares
    them whole."""
    workers: int | None = None
    """Processes that prepare the rows; null takes as many as pay."""
    batch_size: int = 32
    """Prompts answered at a time."""
    shard_size: int = 64
    """Records in one file, the unit of restart."""
    distributions: Literal["hidden", "top", "none"] = "hidden"
    """hidden keeps the head's inputs, from which the target's distributions are rebuilt; top keeps
    the most probable tokens' log-probabilities; none keeps tokens only, and training runs the
    target again."""
    top: int = 64
    """Tokens kept of each distribution, where distributions is top."""
    store_dtype: Dtype = "float32"
    """Precision of the stored layers; the head's inputs stay float32."""
    server: ServerSection | None = None
    """Servers that answer; null runs the target in this process."""

    def __post_init__(self) -> None:
        require(len(self.temperatures) > 0, "temperatures", [], "a list of at least one number")
        ok = all(t == 0 or 1e-30 <= t < math.inf for t in self.temperatures)
        require(ok, "temperatures", list(self.temperatures), "numbers of 0 (greedy) or more")
        for option in ("max_new_tokens", "batch_size", "shard_size", "top"):
            require(getattr(self, option) > 0, option, getattr(self, option), "above 0")
        for option in ("max_length", "workers"):
            value = getattr(self, option)
            require(value is None or value > 0, option, value, "a number above 0, or null")
        ok = self.near_duplicates is None or 0 < self.near_duplicates <= 1
        require(ok, "near_duplicates", self.near_duplicates, "above 0 and at most 1, or null")
        ok = self.server is None or self.distributions != "hidden"
        require(ok, "distributions", self.distributions, "top or none: servers tell no states")
        ok = self.server is None or self.replies == "target" or self.distributions == "none"
        require(ok, "distributions", self.distributions, "none: servers judge no given replies")
