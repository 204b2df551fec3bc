"""The only file that touches the transformers cache API.

A `SlabCache` keeps keys and values of a batch in slabs allocated once. *Slot = position*: token i
of a row always lies in slot i, so rows may have any lengths, rolling back is setting a length, and
slots at or past a row's length are simply never visible. Nothing is concatenated while decoding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..configs.errors import UserError

_ATTENTION = {"full_attention", "sliding_attention"}
_SPARE_SLOTS = 64  # growth step, so that a long generation does not copy its slab every round


class _SlabLayer(CacheLayerMixin):
    """One layer's keys and values, `[B, KV, S, d]`, written where the owning cache says."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: "SlabCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, _ = key_states.shape
        slots = self.owner.capacity
        self.keys = key_states.new_zeros(batch, heads, slots, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, slots, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.keys.shape[2] < self.owner.end:
            extra = self.owner.capacity - self.keys.shape[2]
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))
        start = self.owner.common_start
        n = key_states.shape[2]
        if start is not None:
            self.keys[:, :, start : start + n] = key_states
            self.values[:, :, start : start + n] = value_states
        else:
            rows, slots = self.owner.write_index
            self.keys.transpose(1, 2)[rows, slots] = key_states.transpose(1, 2)
            self.values.transpose(1, 2)[rows, slots] = value_states.transpose(1, 2)
        end = self.owner.end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.end, 0

    def get_seq_length(self) -> int:
        return max(self.owner.lengths, default=0)

    def get_max_length(self) -> int:
        return -1


class SlabCache(Cache):
    """KV cache of `rows` sequences with per-row lengths.

    Protocol of one forward over n new tokens per row: `begin(n)` fixes where they are written, the
    model runs with `position_ids()` and `mask()`, then `advance(counts)` says how many of the n
    tokens of each row are kept. Tokens beyond the kept count are overwritten by later writes.
    """

    def __init__(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device):
        text = config.get_text_config(decoder=True)
        self.window: int | None = getattr(text, "sliding_window", None)
        if not getattr(text, "use_sliding_window", True):
            self.window = None
        kinds = getattr(text, "layer_types", None)
        if kinds is not None and not set(kinds) <= _ATTENTION:
            raise UserError(
                f"model type '{text.model_type}' has layers of kind "
                f"{sorted(set(kinds) - _ATTENTION)}, whose state cannot be cut back; "
                "only full and sliding attention layers can be decoded speculatively"
            )
        self.kinds: tuple[str, ...] = tuple(sorted(set(kinds))) if kinds else ()
        self.slabs = [_SlabLayer(self) for _ in range(text.num_hidden_layers)]
        super().__init__(layers=list(self.slabs))
        self.device = device
        self.capacity = capacity
        self.lengths: list[int] = [0] * rows
        self.common_start: int | None = 0
        self.write_index: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.end = 0
        self._n = 0

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def begin(self, n: int) -> None:
        """Place the next forward's n tokens of every row right behind the row's kept tokens."""
        self._n = n
        self.end = max(self.lengths) + n
        while self.capacity < self.end:
            self.capacity += max(_SPARE_SLOTS, self.end - self.capacity)
        first = self.lengths[0]
        self.common_start = first if all(x == first for x in self.lengths) else None
        if self.common_start is None:
            rows = torch.arange(self.rows, device=self.device)[:, None]  # [B, 1]
            self.write_index = (rows, self.position_ids())

    def position_ids(self) -> Tensor:
        """Positions (= slots) of the tokens of this forward, `[B, n]`."""
        start = torch.tensor(self.lengths, device=self.device)[:, None]  # [B, 1]
        return start + torch.arange(self._n, device=self.device)

    def mask(self, dtype: torch.dtype | None) -> Tensor | dict[str, Tensor] | None:
        """Visibility `[B, 1, n, S]` of slots: bool for `dtype=None`, else additive in that dtype.

        None where one row decodes one token and sees everything. Models with several layer kinds
        get one mask a kind.
        """
        if self.rows == 1 and self._n == 1 and self.window is None and dtype is None:
            return None
        at = self.position_ids()[:, None, :, None]  # [B, 1, n, 1]
        slot = torch.arange(self.end, device=self.device)
        full = slot <= at  # [B, 1, n, S]
        if self.window is None:
            return _finish(full, dtype)
        near = full & (slot > at - self.window)
        if len(self.kinds) > 1:
            return {
                "full_attention": _finish(full, dtype),
                "sliding_attention": _finish(near, dtype),
            }
        return _finish(full if self.kinds == ("full_attention",) else near, dtype)

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[b]` tokens of the last forward in row b."""
        self.lengths = [x + c for x, c in zip(self.lengths, counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set every row's length; slots past it are forgotten."""
        if any(new > old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot lengthen a cache from {self.lengths} to {list(lengths)}")
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        for layer in self.slabs:
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys.index_select(0, index)
                layer.values = layer.values.index_select(0, index)
        self.lengths = [self.lengths[r] for r in rows]

    def join(self, other: "SlabCache") -> None:
        """Append the rows of another cache of the same model behind this one's rows."""
        self.capacity = other.capacity = max(self.capacity, other.capacity)
        for mine, theirs in zip(self.slabs, other.slabs, strict=True):
            mine.keys = _stack((mine.keys, theirs.keys), self.capacity)
            mine.values = _stack((mine.values, theirs.values), self.capacity)
        self.lengths = self.lengths + other.lengths


def _finish(visible: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, torch.finfo(dtype).min
    )


def _stack(parts: Sequence[Tensor | None], slots: int) -> Tensor:
    """Rows of filled slabs, one cache behind the other, all `slots` long."""
    if any(t is None for t in parts):
        raise ValueError("only caches that have been written can be joined")
    pad = torch.nn.functional.pad
    return torch.cat([pad(t, (0, 0, 0, slots - t.shape[2])) for t in parts if t is not None])
