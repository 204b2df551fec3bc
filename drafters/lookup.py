"""Prompt lookup: the text so far is the draft model (Saxena, 2023, "Prompt Lookup Decoding").

The last words are looked up in prompt and reply, and what followed them there is proposed. Of all
suffixes that came before the longest counts, up to `max_ngram` tokens. Of its occurrences the most
recent one does: replies go back to what they have just said, and change what they copy. (The
original, and transformers' `prompt_lookup_num_tokens`, take the earliest.)

Every proposal is looked up anew, drafted tokens being part of the text. So it is a function of the
text before it alone, wherever the round began, and a copy may run on over the end of the text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..configs.errors import UserError
from ..data.target import Target
from .base import Step, TrainBatch

NOTHING = -1
"""In place of the proposed token's id, where no suffix came before."""


@dataclass(frozen=True)
class LookupConfig:
    """What a recipe's `drafter:` section may say for `family: lookup`."""

    max_ngram: int = 3
    """Longest suffix that is looked up, in tokens; where it did not come before, shorter ones."""

    reads_target: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_ngram < 1:
            raise UserError(f"drafter.max_ngram is {self.max_ngram}, must be 1 or more")

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """It reads no states."""
        return ()


class _Text:
    """A text by what followed its n-grams: for each the token behind its last occurrence."""

    def __init__(self, longest: int):
        self.longest = longest
        self.recent: list[int] = []  # its last tokens, no more than the longest n-gram
        self.following: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        for n in range(1, len(self.recent) + 1):
            self.following[tuple(self.recent[-n:])] = token
        self.recent = [*self.recent, token][-self.longest :]

    def proposal(self, drafted: Sequence[int] = ()) -> int:
        """What follows the text and these tokens behind it, or `NOTHING`."""
        end = [*self.recent, *drafted]
        for n in range(min(self.longest, len(end)), 0, -1):
            suffix = tuple(end[-n:])
            for at in range(len(end) - 1, max(len(self.recent), n) - 1, -1):  # of drafted tokens
                if tuple(end[at - n : at]) == suffix:
                    return end[at]
            if suffix in self.following:
                return self.following[suffix]
        return NOTHING


@dataclass
class _State:
    """The committed texts, and of this round's drafted tokens the path to each, by row."""

    texts: list[_Text]
    paths: list[list[list[int]]] = field(default_factory=list)

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[r] for r in rows]
        self.paths = [self.paths[r] for r in rows]


class LookupDrafter(nn.Module):
    """Prompt lookup behind the drafter contract; it has no weights.

    Its logits are 0 at the proposed token and -inf elsewhere, so q is one-hot under every law. In a
    tree every node has one child at most.
    """

    family = "lookup"
    taps: tuple[int, ...] = ()
    one_pass = True
    may_abstain = True
    layout: str | None = None
    shared: tuple[str, ...] = ()
    unserved: str | None = None
    max_positions: int | None = None
    max_draft_tokens: int | None = None
    draft_ids: Tensor | None = None
    every: Tensor

    def __init__(self, config: LookupConfig, vocab_size: int):
        super().__init__()
        self.config = config
        self.register_buffer("every", torch.arange(vocab_size), persistent=False)

    @classmethod
    def from_target(
        cls, target: Target, config: LookupConfig, draft_ids: Tensor | None = None
    ) -> "LookupDrafter":
        return cls(config, target.vocab_size).to(target.device).eval()

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self.config)

    def trainable(self) -> list[nn.Parameter]:
        return []

    def checkpoint(self, on: bool) -> None:
        """There is no gradient."""

    # ---- scoring

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Head inputs are the proposed ids themselves, `[N, 1]`."""
        proposed, token = [], []
        rows = batch.ids.tolist()
        each = (batch.row, batch.begin, batch.lengths, batch.prompt_lens, batch.first)
        for row, begin, length, prompt, first in zip(*(t.tolist() for t in each), strict=True):
            text = _Text(self.config.max_ngram)
            for place, word in enumerate(rows[row][begin : begin + length]):
                if place > prompt:
                    proposed.append(text.proposal())
                    token.append(first + place - prompt)
                text.append(word)
        device = self.every.device
        hidden = torch.tensor(proposed, dtype=torch.float64, device=device)[:, None]  # [N, 1]
        return [Step(hidden, torch.tensor(token, dtype=torch.long, device=device))]

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.finish_logits(hidden - self.every)

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return hidden

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        """Rows whose product is how far the proposed id is from each id.

        Whole numbers in float64, which no device rounds and no autocast lowers.
        """
        ids = self.every.double()
        return torch.ones_like(ids)[:, None], -ids

    def finish_logits(self, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits).masked_fill(logits != 0, -torch.inf)

    # ---- decoding

    def start(self, rows: int, capacity: int) -> _State:
        return _State(
            [_Text(self.config.max_ngram) for _ in range(rows)], [[] for _ in range(rows)]
        )

    def prefill(self, state: _State, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        self._append(state, ids, lengths)

    def commit(
        self,
        state: _State,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        self._append(state, tokens, counts)
        state.paths = [[] for _ in state.texts]

    def first(self, state: _State) -> Tensor:
        return self._logits([[text.proposal()] for text in state.texts])[:, 0]

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        since = len(state.paths[0])
        if parents is None:  # each behind the one before
            parents = torch.arange(since - 1, since - 1 + tokens.shape[1]).expand_as(tokens)
        rows = zip(state.texts, state.paths, tokens.tolist(), parents.tolist(), strict=True)
        proposed = []
        for text, paths, own, above in rows:
            for token, parent in zip(own, above, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else ()), token])
            proposed.append([text.proposal(path) for path in paths[since:]])
        return self._logits(proposed)

    @staticmethod
    def _append(state: _State, tokens: Tensor, counts: Sequence[int]) -> None:
        for text, row, count in zip(state.texts, tokens.tolist(), counts, strict=True):
            for token in row[:count]:
                text.append(token)

    def _logits(self, proposed: list[list[int]]) -> Tensor:
        """Proposed ids `[B, w]` → logits `[B, w, V]`."""
        ids = torch.tensor(proposed, device=self.every.device)[..., None]  # [B, w, 1]
        return self.finish_logits((ids - self.every).float())
