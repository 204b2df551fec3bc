"""Scripted laws and drafters for tests of draft trees, and the law of whatever draws by `Draws`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.data.warp import Law, log_probs
from draftsmith.eval.branches import branches
from draftsmith.eval.draws import Draws
from draftsmith.eval.tree import Tree

Tokens = tuple[int, ...]


def laws_of(
    run: Callable[[list[int], Draws], Sequence[Tokens]], cases: int
) -> list[dict[Tokens, float]]:
    """The law of each case's outcome; `run(case of each row, draws)` gives an outcome a row."""
    laws: list[dict[Tokens, float]] = [{} for _ in range(cases)]
    for outcomes, case, chance in branches(cases, lambda draws, case: run(case.tolist(), draws)):
        for x, c, mass in zip(outcomes, case.tolist(), chance.tolist(), strict=True):
            laws[c][x] = laws[c].get(x, 0.0) + mass
    return laws


class Table:
    """Log-probabilities [V] after each history, different for each, the same whenever asked."""

    def __init__(self, seed: int, size: int = 4, law: Law | None = None):
        self.seed, self.size, self.law = seed, size, law or Law()
        self.places: dict[Tokens, int] = {}
        self.laws: list[Tensor] = []

    def place(self, history: Tokens) -> int:
        if history not in self.places:
            digest = sum((t + 1) * 11**i for i, t in enumerate(history))
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + digest)
            logits = torch.randn(self.size, generator=g, dtype=torch.float64) * 1.5
            self.places[history] = len(self.laws)
            self.laws.append(log_probs(logits, self.law))
        return self.places[history]

    def __call__(self, history: Tokens) -> Tensor:
        return self.laws[self.place(history)]

    def all(self, histories: Sequence[Sequence[Tokens]]) -> Tensor:
        """Those of n histories a row, `[B, n, V]`."""
        places = torch.tensor([[self.place(h) for h in row] for row in histories])
        return torch.stack(self.laws)[places]


def reader(q: Table, roots: Sequence[Tokens]) -> Callable[[Tensor, Tensor], Tensor]:
    """A drafter whose logits after a node depend on the whole path to it."""
    read: list[list[Tokens]] = [[] for _ in roots]

    def extend(tokens: Tensor, parents: Tensor) -> Tensor:
        for paths, root, ids, above in zip(
            read, roots, tokens.tolist(), parents.tolist(), strict=True
        ):
            paths += [(*(root if i < 0 else paths[i]), t) for i, t in zip(above, ids, strict=True)]
        return q.all([paths[-tokens.shape[1] :] for paths in read])

    return extend


def node_paths(tree: Tree) -> list[list[Tokens]]:
    """The tokens on the way to each node of each row."""
    rows = []
    for ids, parents, size in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.size.tolist(), strict=True
    ):
        paths: list[Tokens] = []
        for token, parent in zip(ids[:size], parents[:size], strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows
