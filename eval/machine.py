"""What a machine takes to serve: costs by batch size, and memory; measured, or of a user's own.

The unit of cost is one plain target pass of one conversation, so that a faster machine of the same
kind differs in `seconds` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..configs.errors import UserError, require
from .request_rows import RequestRow
from .speed import Cost


@dataclass(frozen=True)
class Steps:
    """What the parts of a round cost with a number of conversations in the batch.

    In plain target passes of one conversation, as `Cost` has them for the batch by itself.
    """

    v: dict[int, float]
    """A target pass over 1, 2, ... tokens of every conversation."""
    c_first: float
    """The first draft step of a round."""
    c: float
    """Each later draft step."""
    o: float
    """The rest of a speculative round."""
    o_plain: float
    """The rest of a plain step."""

    def __post_init__(self) -> None:
        ok = all(0 < x < float("inf") for x in self.v.values()) and {1, 2} <= set(self.v)
        require(ok, "v", self.v, "numbers above 0 of passes over 1, 2 and more tokens")
        for name in ("c_first", "c", "o", "o_plain"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), name, value, "a number from 0 up")

    @classmethod
    def of(cls, cost: Cost, seconds: float) -> "Steps":
        """A batch's own costs in units of `seconds`."""
        f = cost.seconds / seconds
        v = {n: x * f for n, x in cost.v.items()}
        return cls(v, cost.c_first * f, cost.c * f, cost.o * f, cost.o_plain * f)

    def cost(self, seconds: float) -> Cost:
        """The batch's own costs, in plain passes of the whole batch; `seconds` is the unit here."""
        f = 1 / self.v[1]
        return Cost(
            seconds=seconds * self.v[1],
            v={n: x * f for n, x in self.v.items()},
            c_first=self.c_first * f,
            c=self.c * f,
            o=self.o * f,
            o_plain=self.o_plain * f,
        )

    @property
    def plain(self) -> float:
        """One step of plain decoding: a token of every conversation."""
        return self.v[1] + self.o_plain

    def round(self, num_draft_tokens: int) -> float:
        """One round that drafts so many tokens of every conversation.

        Raises `UserError` where no pass over them was measured.
        """
        if num_draft_tokens + 1 not in self.v:
            known = max(self.v) - 1
            raise UserError(
                f"drafts of {num_draft_tokens} tokens were not measured, the longest are {known}"
            )
        steps = self.c_first + (num_draft_tokens - 1) * self.c
        return steps + self.v[num_draft_tokens + 1] + self.o


@dataclass(frozen=True)
class Memory:
    """Bytes: weights of target and drafter, keys and values of each token of a conversation."""

    target_weights: float
    drafter_weights: float
    """Beyond what is the target's."""
    target_kv: float
    """A token's, in the target."""
    drafter_kv: float
    """A token's, in the drafter."""

    def __post_init__(self) -> None:
        for name in ("target_weights", "drafter_weights", "target_kv", "drafter_kv"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), name, value, "a number of bytes from 0 up")


@dataclass(frozen=True)
class Machine:
    """All a simulation has to know. `to_dict` writes it as JSON, `parse` reads it."""

    seconds: float
    """One plain target pass of one conversation: the unit of all other costs."""
    batches: dict[int, Steps]
    """By number of conversations, 1 among them; between two, costs are interpolated."""
    prefill: float = 0.0
    """Each prompt token in the target, in units."""
    draft_prefill: float = 0.0
    """What each prompt token costs more where a drafter reads it, too."""
    memory: Memory | None = None
    """None where memory is no limit."""

    def __post_init__(self) -> None:
        require(0 < self.seconds < float("inf"), "seconds", self.seconds, "above 0")
        ok = bool(self.batches) and min(self.batches) == 1
        require(ok, "batches", sorted(self.batches), "by batch size, from 1 up")
        for name in ("prefill", "draft_prefill"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), name, value, "a number from 0 up")

    @property
    def largest(self) -> int:
        return max(self.batches)


def entries_of(report: dict[str, Any], law: str) -> list[dict[str, Any]]:
    """The report's costs by batch size under a law, the smallest first.

    Raises `UserError` where there are none.
    """
    every = report.get("batches") or []
    found = [entry for entry in every if entry["law"] == law]
    if not found:
        laws = list(dict.fromkeys(entry["law"] for entry in every))
        if laws:
            known = ", ".join(laws)
            raise UserError(f"the report has no costs under '{law}' (known: {known})")
        raise UserError(
            "the report has no costs: evaluate with eval.timing_prompts of 1 or more, and with the "
            "batch sizes to plan for, such as eval.batch_sizes='[1, 4, 8]'"
        )
    return sorted(found, key=lambda entry: entry["batch"])


def steps_of(entry: dict[str, Any]) -> Steps:
    """The costs of one of the report's entries."""
    cost = entry["cost"]
    v = {int(n): float(x) for n, x in cost["v"].items()}
    return Steps(v, **{k: float(x) for k, x in cost.items() if k != "v"})


def machine_of(report: dict[str, Any], rows: Sequence[RequestRow], law: str) -> Machine:
    """The machine that an evaluation was measured on, under one law.

    `rows` are the evaluation's requests: prefill is what the timed ones took, by prompt token.
    Raises as `entries_of`.
    """
    entries = entries_of(report, law)
    seconds = float(entries[0]["seconds"])
    plain, fast = _prefill(report, rows, law)
    memory = report.get("memory")
    return Machine(
        seconds=seconds,
        batches={int(entry["batch"]): steps_of(entry) for entry in entries},
        prefill=plain / seconds,
        draft_prefill=max(0.0, fast - plain) / seconds,
        memory=None if memory is None else Memory(**memory),
    )


def _prefill(report: dict[str, Any], rows: Sequence[RequestRow], law: str) -> tuple[float, float]:
    """Seconds a prompt token, pooled over the timed prompts of all domains: plain, speculative."""
    cells = [cell for cell in report["cells"] if cell["law"] == law and cell.get("speed")]
    tokens = sum(row.prompt_tokens for row in rows if row.law == law and row.timing is not None)
    if not tokens:
        return 0.0, 0.0
    plain, fast = (
        sum(cell["speed"][f"{way}_prefill_seconds"] * cell["speed"]["prompts"] for cell in cells)
        for way in ("plain", "speculative")
    )
    return plain / tokens, fast / tokens
