"""The slab cache: ragged rows, rollback, selection and joining never change what a row computes."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from draftsmith.configs.errors import UserError
from draftsmith.data.cache import SlabCache
from draftsmith.data.target import Target

TOLERANCE = 1e-4
CPU = torch.device("cpu")


def alone(target: Target, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Final states `[T, h]` and logits `[T, V]` of one row, by the model itself, uncached."""
    row = torch.tensor([ids])
    with torch.no_grad():
        out = target.model(input_ids=row, use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1][0], out.logits[0].float()


@dataclass
class Rows:
    """A batch under test: for every row the tokens that the cache is meant to hold."""

    target: Target
    cache: SlabCache
    held: list[list[int]]

    @classmethod
    def empty(cls, target: Target, rows: int, capacity: int = 128) -> "Rows":
        return cls(target, target.new_cache(rows, capacity), [[] for _ in range(rows)])

    def feed(self, new: list[list[int]]) -> None:
        """One forward over ragged new tokens, right-padded, each kept row checked on its own."""
        width = max(len(tokens) for tokens in new)
        ids = torch.full((len(new), width), 5)  # the padding is an ordinary token
        for row, tokens in enumerate(new):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        with torch.no_grad():
            hidden = self.target.forward(ids, self.cache).hidden
            logits = self.target.logits(hidden)
        self.cache.advance([len(tokens) for tokens in new])
        self.held = [[*old, *tokens] for old, tokens in zip(self.held, new, strict=True)]
        assert self.cache.lengths == [len(held) for held in self.held]
        for row, tokens in enumerate(new):
            if not tokens:
                continue
            states, expected = alone(self.target, self.held[row])
            n = len(tokens)
            assert (hidden[row, :n] - states[-n:]).abs().max() < TOLERANCE
            assert (logits[row, :n] - expected[-n:]).abs().max() < TOLERANCE

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(lengths)
        self.held = [held[:n] for held, n in zip(self.held, lengths, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.held = [self.held[row] for row in rows]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 400) for _ in range(count)]


def test_ragged_writes_rollback_and_selection(any_target: Target) -> None:
    rng = random.Random(0)
    rows = Rows.empty(any_target, 3)
    rows.feed([words(rng, n) for n in (5, 17, 1)])  # prefill, beyond the window of 8
    rows.feed([words(rng, 1) for _ in range(3)])
    rows.feed([words(rng, n) for n in (4, 0, 2)])
    rows.truncate([7, 11, 4])  # the middle row forgets what its window still saw
    rows.feed([words(rng, n) for n in (3, 3, 3)])
    rows.select([2, 0])
    rows.feed([words(rng, n) for n in (1, 5)])
    rows.truncate([0, 12])
    rows.feed([words(rng, n) for n in (12, 1)])


def test_one_row_token_by_token(any_target: Target) -> None:
    rng = random.Random(1)
    rows = Rows.empty(any_target, 1)
    rows.feed([words(rng, 6)])
    for _ in range(12):  # past the window of 8
        rows.feed([words(rng, 1)])
    rows.truncate([9])
    rows.feed([words(rng, 1)])
    rows.feed([words(rng, 4)])


def test_rows_join_a_running_batch(any_target: Target) -> None:
    rng = random.Random(2)
    rows = Rows.empty(any_target, 2, capacity=40)
    rows.feed([words(rng, n) for n in (14, 3)])
    late = Rows.empty(any_target, 2, capacity=12)
    late.feed([words(rng, n) for n in (2, 9)])
    rows.cache.join(late.cache)
    rows.held += late.held
    assert rows.cache.rows == 4
    rows.feed([words(rng, 2) for _ in range(4)])
    rows.select([3, 1])
    rows.feed([words(rng, n) for n in (1, 3)])


def test_growing_past_the_capacity(tiny_target: Target) -> None:
    rng = random.Random(3)
    rows = Rows.empty(tiny_target, 2, capacity=4)
    rows.feed([words(rng, n) for n in (3, 4)])
    rows.feed([words(rng, n) for n in (6, 1)])
    rows.feed([words(rng, 80) for _ in range(2)])
    assert rows.cache.capacity >= 89


def test_a_cache_is_joined_whatever_its_capacity(tiny_target: Target) -> None:
    """The joining cache may have the larger slab."""
    rng = random.Random(4)
    rows = Rows.empty(tiny_target, 1, capacity=6)
    rows.feed([words(rng, 5)])
    late = Rows.empty(tiny_target, 1, capacity=64)
    late.feed([words(rng, 30)])
    rows.cache.join(late.cache)
    rows.held += late.held
    rows.feed([words(rng, n) for n in (8, 8)])


def test_equal_prefixes_do_not_mix(tiny_target: Target) -> None:
    rng = random.Random(5)
    common = words(rng, 20)
    rows = Rows.empty(tiny_target, 3)
    rows.feed([[*common, *words(rng, n)] for n in (1, 4, 2)])
    rows.feed([words(rng, 2) for _ in range(3)])


def test_mask_shows_exactly_what_a_token_may_see() -> None:
    cache = SlabCache(LlamaConfig(num_hidden_layers=1), rows=2, capacity=8, device=CPU)
    cache.lengths = [3, 1]
    cache.begin(2)
    assert cache.position_ids().tolist() == [[3, 4], [1, 2]]
    mask = cache.mask(None)
    assert isinstance(mask, Tensor)
    assert mask.shape == (2, 1, 2, 5)
    assert mask.int().tolist() == [
        [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]],
        [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]],
    ]
    additive = cache.mask(torch.float32)
    assert isinstance(additive, Tensor)
    assert torch.equal(additive == 0, mask)


def test_a_cache_is_never_lengthened(tiny_target: Target) -> None:
    cache = tiny_target.new_cache(2, 8)
    cache.advance([3, 4])
    with pytest.raises(ValueError, match="lengthen"):
        cache.truncate([3, 5])
    assert cache.lengths == [3, 4]


def test_an_unused_window_is_no_window() -> None:
    config = Qwen3Config(sliding_window=4, use_sliding_window=False, num_hidden_layers=2)
    assert SlabCache(config, 1, 8, CPU).sight.window is None


def test_layers_without_rollback_are_refused() -> None:
    config = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UserError, match="linear_attention"):
        SlabCache(config, 1, 8, CPU)
