"""One request while it is decoded: what it has, what it may still get, and where it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..data.gather import Request
from ..data.rules import Processor
from ..data.target import Target


@dataclass
class Output:
    """One reply. `finish` is "stop" (an end token or stop string) or "length" (cut by the limit).

    rounds: (drafted, accepted) of every round after prefill, in order; of a tree, its depth and the
    depth accepted.
    """

    ids: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[tuple[int, int]] = field(default_factory=list)


class Row:
    """A request's place in the batch, its limit, and its output so far."""

    def __init__(self, place: int, request: Request, budget: int, target: Target):
        self.place, self.request, self.budget = place, request, budget
        self.out = Output()
        self._eos, self._tokenizer = target.eos_ids, target.tokenizer
        self.processor: Processor | None = None
        if request.rules.any:
            self.processor = Processor(
                request.rules, len(request.ids), target.eos_ids, target.tokenizer, target.vocab_size
            )

    @property
    def room(self) -> int:
        """Tokens a round may draft: one less than are left, since a round always adds its own."""
        return self.budget - len(self.out.ids) - 1

    @property
    def length(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.request.ids) + len(self.out.ids)

    def emit(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens up to the first end token, stop string or the limit; returns those taken."""
        kept = list(tokens[: self.budget - len(self.out.ids)])
        stop = next((i for i, t in enumerate(kept) if t in self._eos), None)
        if stop is not None:
            kept = kept[: stop + 1]
        spelt = self._spelt(kept)
        if spelt is not None:
            kept = kept[:spelt]
        self.out.ids += kept
        if stop is not None or spelt is not None:
            self.out.finish = "stop"
        elif len(self.out.ids) == self.budget:
            self.out.finish = "length"
        return kept

    def _spelt(self, new: Sequence[int]) -> int | None:
        """How many of the new tokens complete a stop string; None if they complete none."""
        if not self.request.stop or not self._stops([*self.out.ids, *new]):
            return None
        counts = range(1, len(new) + 1)
        return next(n for n in counts if self._stops([*self.out.ids, *new[:n]]))

    def _stops(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return any(word in text for word in self.request.stop)


def ruled(rows: Sequence[Row]) -> bool:
    """Whether any row's request has rules of its own."""
    return any(row.processor is not None for row in rows)


def apply_rules(
    rows: Sequence[Row], logits: Tensor, path: Callable[[int, int], Sequence[int] | None]
) -> Tensor:
    """Every row's rules at each of n positions, `[B, n, V] -> [B, n, V]`.

    `path(b, i)` are the drafted tokens before position i of row b; None where nobody will look.
    """
    if not ruled(rows):
        return logits
    logits = logits.clone()
    for b, row in enumerate(rows):
        if row.processor is None:
            continue
        history = [*row.request.ids, *row.out.ids]
        for i in range(logits.shape[1]):
            drafted = path(b, i)
            if drafted is not None:
                logits[b, i] = row.processor([*history, *drafted], logits[b, i])
    return logits
