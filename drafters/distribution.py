"""The target's distribution on the draft vocabulary, from its states or most probable tokens."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.target import Target
from ..data.top import rows_of, warped
from ..data.warp import Law, log_probs
from .base import TrainBatch, reply_index


@dataclass(frozen=True)
class DraftVocabularyP:
    """log p over the draft vocabulary under a law, from what records tell of the target.

    Of final hidden states, at temperature 1 without truncation, the stored log-partition makes the
    rows of the draft vocabulary enough; any other law is a function of all logits and costs the
    full head. Of the most probable tokens no head is needed; see `data.top` for what is known.
    """

    target: Target
    draft_ids: Tensor | None
    law: Law

    @property
    def width(self) -> int:
        """Width of the widest rows that are ever formed."""
        return len(self.draft_ids) if self._narrow else self.target.vocab_size  # type: ignore[arg-type]

    @property
    def _narrow(self) -> bool:
        """Whether single rows of the target's head are enough, and can be read."""
        dense = self.target.head.weight.is_floating_point()
        return self.draft_ids is not None and self.law == Law(1.0) and dense

    @torch.no_grad()
    def __call__(self, hidden: Tensor, log_z: Tensor) -> Tensor:
        """`[R, h]`, `[R]` → log p `[R, V_d]`, gathered and never renormalised."""
        with torch.autocast(hidden.device.type, enabled=False):  # p is what was sampled, exactly
            if self._narrow:
                return self._rows(hidden) - log_z[:, None]
            log_p = log_probs(self.target.logits(hidden), self.law)  # [R, V]
            return log_p if self.draft_ids is None else log_p[:, self.draft_ids]

    def rows(self, batch: TrainBatch, at: Tensor) -> Tensor:
        """log p `[n, V_d]` of a batch's reply tokens at indices `[n]`.

        Raises `UserError` if the law is not known from the most probable tokens.
        """
        if batch.top is None:
            assert batch.hidden is not None and batch.log_z is not None
            return self(batch.hidden[at], batch.log_z[at])
        top = rows_of(batch.top, at)
        width = self.target.vocab_size if self.draft_ids is None else len(self.draft_ids)
        place = _columns(top.ids.long(), self.draft_ids, width)  # [n, K]
        known = warped(top, self.law).masked_fill(place < 0, -torch.inf)
        none = known.new_full((len(at), width), -torch.inf)  # [n, V_d]
        # The largest of each column, as all tokens without one were put into the first.
        return none.scatter_reduce_(1, place.clamp_min(0), known, "amax")

    def _rows(self, hidden: Tensor) -> Tensor:
        weight, bias = self._own
        return self.target.finish_logits(F.linear(hidden.to(weight.dtype), weight, bias).float())

    @cached_property
    def _own(self) -> tuple[Tensor, Tensor | None]:
        """The frozen head's rows of the draft vocabulary `[V_d, h]`, gathered once, and biases."""
        head = self.target.head
        bias = getattr(head, "bias", None)
        return head.weight[self.draft_ids], None if bias is None else bias[self.draft_ids]


def reply_columns(batch: TrainBatch, draft_ids: Tensor | None, width: int) -> Tensor:
    """Where reply tokens stand in the draft vocabulary of `width` ids: `[R]`, -1 if they do not."""
    every = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    said = reply_index(batch, every) >= 0  # [B, T]
    return _columns(batch.ids[said], draft_ids, width)


def _columns(tokens: Tensor, draft_ids: Tensor | None, width: int) -> Tensor:
    """Where tokens `[...]` stand in the draft vocabulary of `width` ids, -1 if they do not."""
    if draft_ids is None:
        return tokens.masked_fill(tokens >= width, -1)
    place = torch.searchsorted(draft_ids, tokens).clamp_max(len(draft_ids) - 1)
    return place.masked_fill(draft_ids[place] != tokens, -1)
