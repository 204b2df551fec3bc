"""Every branch of chance, exactly: a script in the place of the streams, played to its end.

Whatever decides only through `Draws` can be enumerated: a run plays one script a row, takes the
first possible outcome where the script has ended, and notes what else could have happened; those
are the scripts of the next runs. The probabilities of all leaves add up to 1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ROWS = 4096  # scripts played at a time


class Script:
    """`Draws` that follows a script a row. `[R]` rows in all, of which a batch may lose some."""

    def __init__(self, scripts: Tensor, lengths: Tensor, chance: Tensor):
        self.taken, self.lengths = scripts, lengths  # [R, L] outcomes so far, [R]
        self.chance = chance  # [R] probability of what was taken
        self.used = torch.zeros_like(lengths)  # [R]
        self.open: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.batch = torch.arange(len(lengths))  # which rows the batch still has

    def _decide(self, weights: Tensor, where: Tensor) -> Tensor:
        """An outcome a row of the batch by normalised weights `[B, K]`: `[B]`."""
        rows = self.batch[where]  # [n] of R
        if not len(rows):
            return torch.zeros(len(where), dtype=torch.long)
        weights = weights[where]  # [n, K]
        at = self.used[rows]
        if int(at.max()) >= self.taken.shape[1]:
            self.taken = torch.nn.functional.pad(self.taken, (0, 16))
        known = at < self.lengths[rows]
        first = (weights > 0).long().argmax(1)
        chosen = torch.where(known, self.taken[rows, at], first)
        others = (weights > 0) & ~known[:, None]
        others[torch.arange(len(rows)), chosen] = False
        index, outcome = others.nonzero(as_tuple=True)
        if len(index):
            lost = self.chance[rows[index]] * weights[index, outcome]
            self.open.append((rows[index], at[index], outcome, lost))
        self.taken[rows, at] = chosen
        # What a script holds already counted when it was noted.
        self.chance[rows] *= torch.where(known, 1.0, weights[torch.arange(len(rows)), chosen])
        self.used[rows] += 1
        decided = torch.zeros(len(where), dtype=torch.long)
        decided[where] = chosen
        return decided

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        p = p.double().clamp(0.0, 1.0)
        columns = [
            self._decide(torch.stack([1 - p[:, i], p[:, i]], 1), where[:, i])
            for i in range(p.shape[1])
        ]
        return torch.stack(columns, 1).bool() if columns else where

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        weights = weights.double()
        return self._decide(weights / weights.sum(1, keepdim=True), where)

    def select(self, rows: Sequence[int]) -> None:
        self.batch = self.batch[list(rows)]

    def further(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scripts of what was not taken: `[M, L]`, their lengths, chances, and rows `[M]`."""
        if not self.open:
            none = torch.zeros(0, dtype=torch.long)
            return self.taken[:0], none, self.chance[:0], none
        row, at, outcome, chance = (torch.cat(parts) for parts in zip(*self.open, strict=True))
        scripts = self.taken[row].clone()  # [M, L]
        scripts[torch.arange(len(row)), at] = outcome
        return scripts, at + 1, chance, row


def branches(
    cases: int, run: Callable[[Script, Tensor], T], rows: int = _ROWS
) -> Iterator[tuple[T, Tensor, Tensor]]:
    """Play all branches of `cases` independent cases.

    `run(draws, case [R])` plays one row a script, `case` saying of which case each is. Yields what
    it returns, the cases, and each row's probability `[R]` float64, until nothing is open.
    """
    waiting = [
        (torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, dtype=torch.long),
         torch.ones(1, dtype=torch.float64), torch.tensor([case]))
        for case in range(cases)
    ]  # fmt: skip
    while waiting:
        part, size = [], 0
        while waiting and size < rows:
            part.append(waiting.pop())
            size += len(part[-1][1])
        width = max(p[0].shape[1] for p in part)
        scripts = torch.cat(
            [torch.nn.functional.pad(p[0], (0, width - p[0].shape[1])) for p in part]
        )
        lengths, chance, case = (torch.cat([p[i] for p in part]) for i in (1, 2, 3))
        for start in range(0, len(case), rows):
            end = start + rows
            script = Script(
                scripts[start:end].clone(), lengths[start:end], chance[start:end].clone()
            )
            found = run(script, case[start:end])
            more, ends, chances, row = script.further()
            if len(row):
                waiting.append((more, ends, chances, case[start:end][row]))
            yield found, case[start:end], script.chance
