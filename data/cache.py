"""The only file that touches the transformers cache API.

A `SlabCache` keeps keys and values of a batch in slabs allocated once. *Slot = position*: token i
of a row always lies in slot i, so rows may have any lengths, rolling back is setting a length, and
slots at or past a row's length are simply never visible. Nothing is concatenated while decoding.

Only the nodes of a draft tree lie in slots that are not their positions, for one round: `Branch`
says whose child each is, and `keep` moves the accepted path to where it belongs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..configs.errors import UserError

_ATTENTION = {"full_attention", "sliding_attention"}
_SPARE_SLOTS = 64  # growth step, so that a long generation does not copy its slab every round


@dataclass(frozen=True)
class Sight:
    """How far back a model's layers see.

    window: tokens that its sliding layers see, a token itself being one; None if there are no such
    layers. kinds: the kinds of its layers, if it tells them apart.
    """

    window: int | None
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Sight":
        """A model's. Raises `UserError` for layers of other kinds than full and sliding ones."""
        text = config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None) or ()
        if not set(kinds) <= _ATTENTION:
            raise UserError(
                f"model type '{text.model_type}' has layers of kind "
                f"{sorted(set(kinds) - _ATTENTION)}, whose state cannot be cut back; "
                "only full and sliding attention layers can be decoded speculatively"
            )
        used = getattr(text, "use_sliding_window", True)
        window: int | None = getattr(text, "sliding_window", None) if used else None
        return cls(window, tuple(sorted(set(kinds))))

    def mask(
        self, visible: Tensor, at: Tensor, place: Tensor, dtype: torch.dtype | None
    ) -> Tensor | dict[str, Tensor]:
        """The model's mask of queries at positions `at` over keys at positions `place`.

        `visible [B, 1, n, S]` is what a token sees that sees all, `at [., 1, n, 1]` and `place`
        `[., 1, ., S]` broadcast to it. Bool for `dtype=None`, else additive in that dtype. Models
        with several kinds of layers get one mask a kind.
        """
        if self.window is None:
            return _finish(visible, dtype)
        near = visible & (place > at - self.window)
        if len(self.kinds) > 1:
            return {
                "full_attention": _finish(visible, dtype),
                "sliding_attention": _finish(near, dtype),
            }
        return _finish(visible if self.kinds == ("full_attention",) else near, dtype)


@dataclass(frozen=True)
class Branch:
    """Nodes of a tree behind each row's tokens.

    since: `[B]` tokens of each row when the tree began; parents: `[B, m]` of all nodes written
    since then, the new ones last: the index of a node's parent among them, below its own, or -1
    for a node directly behind the row's tokens.
    """

    since: list[int]
    parents: Tensor


def ancestors(parents: Tensor) -> Tensor:
    """`[B, m] -> [B, m, m]` bool: whether node j is node i or one of its ancestors."""
    m = parents.shape[1]
    own = torch.eye(m, device=parents.device)
    up = torch.nn.functional.one_hot(parents + 1, m + 1)[..., 1:].float() + own  # [B, m, m]
    for _ in range(max(0, m - 1).bit_length()):  # paths of 1, 2, 4... edges
        up = (up @ up).clamp_max(1.0)
    return up > 0


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


class _JoinedLayer(CacheLayerMixin):
    """One layer's keys and values of a pass, given out behind those of passes `before`."""

    is_sliding = False

    def __init__(self, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.before = before

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to allocate."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        pairs = [*self.before, (key_states, value_states)]
        return torch.cat([k for k, _ in pairs], 2), torch.cat([v for _, v in pairs], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return sum(keys.shape[2] for keys, _ in self.before)

    def get_max_length(self) -> int:
        return -1


class JoinedCache(Cache):
    """Keys and values of one pass of some `layers` behind known ones, for gradients: nothing is
    written over.

    known: of all passes before, each layer's keys `[B, KV, S, d]` and values in turns.
    """

    def __init__(self, layers: Sequence[int], known: Sequence[Tensor] = ()):
        pairs = list(zip(known[::2], known[1::2], strict=True))
        before = {layer: pairs[i :: len(layers)] for i, layer in enumerate(layers)}
        self._run = [_JoinedLayer(before.get(i, ())) for i in range(max(layers) + 1)]
        self._of = layers
        super().__init__(layers=list(self._run))

    @property
    def own(self) -> list[Tensor]:
        """This pass's, as `known` has them."""
        written = [(self._run[i].keys, self._run[i].values) for i in self._of]
        return [t for pair in written for t in pair if t is not None]


class SlabCache(Cache):
    """KV cache of `rows` sequences with per-row lengths.

    Protocol of one forward over n new tokens per row: `begin(n)` fixes where they are written, the
    model runs with `position_ids()` and `mask()`, then `advance(counts)` says how many of the n
    tokens of each row are kept. Tokens beyond the kept count are overwritten by later writes.

    A model of learned positions has no more than its table holds. Only padding ever lies beyond
    (callers see to that), and it is given the last position.
    """

    def __init__(self, config: PreTrainedConfig, rows: int, capacity: int, device: torch.device):
        text = config.get_text_config(decoder=True)
        self.sight = Sight.of(config)
        learned = getattr(text, "rope_parameters", None) is None
        known = getattr(text, "max_position_embeddings", None)
        self.positions: int | None = known if learned else None
        self.slabs = [_SlabLayer(self) for _ in range(text.num_hidden_layers)]
        super().__init__(layers=list(self.slabs))
        self.device = device
        self.capacity = capacity
        self.lengths: list[int] = [0] * rows
        self.common_start: int | None = 0
        self.write_index: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.end = 0
        self._n = 0
        self._branch: Branch | None = None
        # Of the branch: tokens before it [B, 1], who sees whom [B, m, m], positions [B, m].
        self._since = self._seen = self._nodes_at = torch.empty(0)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def begin(self, n: int, branch: Branch | None = None) -> None:
        """Place the next forward's n tokens of every row right behind the row's kept tokens.

        With a branch they are its last n nodes, and those before them count as kept.
        """
        self._n, self._branch = n, branch
        if branch is not None:
            self._since = torch.tensor(branch.since, device=self.device)[:, None]
            self._seen = ancestors(branch.parents)
            self._nodes_at = self._since + self._seen.sum(-1) - 1
        self.end = max(self.lengths) + n
        while self.capacity < self.end:
            self.capacity += max(_SPARE_SLOTS, self.end - self.capacity)
        first = self.lengths[0]
        self.common_start = first if all(x == first for x in self.lengths) else None
        if self.common_start is None:
            rows = torch.arange(self.rows, device=self.device)[:, None]  # [B, 1]
            self.write_index = (rows, self._slots())

    def _slots(self) -> Tensor:
        """Where the tokens of this forward are written, `[B, n]`."""
        start = torch.tensor(self.lengths, device=self.device)[:, None]  # [B, 1]
        return start + torch.arange(self._n, device=self.device)

    def position_ids(self) -> Tensor:
        """Positions of the tokens of this forward, `[B, n]`."""
        at = self._slots() if self._branch is None else self._nodes_at[:, -self._n :]
        return at if self.positions is None else at.clamp_max(self.positions - 1)

    def mask(self, dtype: torch.dtype | None) -> Tensor | dict[str, Tensor] | None:
        """Visibility `[B, 1, n, S]` of slots, see `Sight.mask`.

        None where one row decodes one token and sees everything.
        """
        if self.rows == 1 and self._n == 1 and self.sight.window is None and dtype is None:
            return None
        slot = torch.arange(self.end, device=self.device)
        if self._branch is None:
            at = self._slots()[:, None, :, None]  # [B, 1, n, 1]
            place = slot
            full = slot <= at  # [B, 1, n, S]
        else:
            full, place = self._branch_mask(slot)
            at = self._nodes_at[:, None, -self._n :, None]  # [B, 1, n, 1]
        return self.sight.mask(full, at, place, dtype)

    def _branch_mask(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """What the branch's new nodes see `[B, 1, n, S]`; every slot's position `[B, 1, 1, S]`."""
        node = slot - self._since  # [B, S], negative in the row's own tokens
        m = self._seen.shape[1]
        index = node.clamp(0, m - 1)  # [B, S]
        inside = (node >= 0) & (node < m)
        new = self._seen[:, -self._n :]  # [B, n, m]
        seen = new.gather(2, index[:, None].expand(-1, self._n, -1)) & inside[:, None]  # [B, n, S]
        place = torch.where(inside, self._nodes_at.gather(1, index), slot)  # [B, S]
        return (seen | (node < 0)[:, None])[:, None], place[:, None, None]

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[b]` tokens of the last forward in row b."""
        self.lengths = [x + c for x, c in zip(self.lengths, counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set every row's length; slots past it are forgotten."""
        if any(new > old for new, old in zip(lengths, self.lengths, strict=True)):
            raise ValueError(f"cannot lengthen a cache from {self.lengths} to {list(lengths)}")
        self.lengths = list(lengths)

    def keep(self, since: Sequence[int], nodes: Tensor, counts: Sequence[int]) -> None:
        """Of what lies behind each row's first `since[b]` tokens, keep `counts[b]` nodes in order.

        `nodes [B, k]` are slots counted from `since`; those past a row's count may be anything
        below the slots in use.
        """
        first = torch.tensor(list(since), device=self.device)[:, None]  # [B, 1]
        places = torch.arange(nodes.shape[1], device=self.device)
        if not bool((nodes == places).all()):
            rows = torch.arange(self.rows, device=self.device)[:, None]  # [B, 1]
            for layer in self.slabs:
                for slab in (layer.keys, layer.values):
                    if slab is not None:
                        flat = slab.transpose(1, 2)  # [B, S, KV, d]
                        flat[rows, first + places] = flat[rows, first + nodes]
        self.lengths = [s + c for s, c in zip(since, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        for layer in self.slabs:
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys.index_select(0, index)
                layer.values = layer.values.index_select(0, index)
        self.lengths = [self.lengths[r] for r in rows]

    def put(self, places: Sequence[int], other: "SlabCache") -> None:
        """Let the first rows of another cache of the same model take these rows' places."""
        if not places:
            return
        count, slots = len(places), max(other.lengths[: len(places)])
        self.capacity = max(self.capacity, other.capacity)
        index = torch.tensor(list(places), device=self.device)
        for mine, theirs in zip(self.slabs, other.slabs, strict=True):
            mine.keys = _replaced(mine.keys, index, theirs.keys, slots, self.capacity)
            mine.values = _replaced(mine.values, index, theirs.values, slots, self.capacity)
        for place, length in zip(places, other.lengths[:count], strict=True):
            self.lengths[place] = length

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


def _replaced(
    slab: Tensor | None, rows: Tensor, other: Tensor | None, slots: int, capacity: int
) -> Tensor:
    """The slab with the first `slots` of `rows` taken from the first rows of `other`."""
    if slab is None or other is None:
        raise ValueError("only caches that have been written can take each other's rows")
    if slab.shape[2] < slots:
        slab = torch.nn.functional.pad(slab, (0, 0, 0, capacity - slab.shape[2]))
    slab[rows, :, :slots] = other[: len(rows), :, :slots]
    return slab


def _stack(parts: Sequence[Tensor | None], slots: int) -> Tensor:
    """Rows of filled slabs, one cache behind the other, all `slots` long."""
    if any(t is None for t in parts):
        raise ValueError("only caches that have been written can be joined")
    pad = torch.nn.functional.pad
    return torch.cat([pad(t, (0, 0, 0, slots - t.shape[2])) for t in parts if t is not None])
