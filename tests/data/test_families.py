"""Every family's cached ragged forwards, rolled back, are its own uncached ones; or it is refused.

Field reports B042, B043, B092 and B093.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import (
    ALL_EXPERTS,
    FAMILIES,
    LAYERS,
    RECURRENT,
    UNSUITED,
    VOCAB,
    WINDOW,
    WINDOWED,
    save_tiny,
)
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import Target, load_target

ROWS, TOKENS = 3, 34
TAPS = (0, LAYERS - 2)
TOLERANCE = 1e-5  # of the largest value compared: sums of other lengths round otherwise
ROUNDINGS = 8  # in bfloat16: so many units of its rounding

# Tokens fed to every row, and how many of them each row keeps. The others are wrong guesses,
# or padding: they are overwritten.
PLAN: tuple[tuple[int, tuple[int, ...]], ...] = (
    (11, (1, 11, 6)),  # prompts, one of a single token and one beyond the window of 8
    (4, (4, 1, 2)),
    (1, (1, 1, 1)),
    (5, (0, 2, 5)),  # nothing of a row is kept
    (6, (6, 1, 3)),
    (1, (1, 0, 1)),
    (9, (9, 9, 9)),  # more tokens at once than the window holds
    (3, (3, 2, 1)),
)


@dataclass(frozen=True)
class Seen:
    """What was computed at every kept position: states `[N, h]`, taps `[N, L*h]`, logits."""

    hidden: Tensor
    taps: Tensor
    logits: Tensor


@pytest.fixture(scope="module")
def load(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Target]:
    """`load(name)`: a tiny target through `load_target`; shared, each is loaded once."""

    @functools.cache
    def build(name: str, dtype: str = "float32", **changes: int) -> Target:
        config = {**FAMILIES, **RECURRENT, **UNSUITED}[name](**changes)
        folder = save_tiny(config, tiny_tokenizer, tmp_path_factory.mktemp(name))
        section = TargetSection(name=str(folder), device="cpu", dtype=dtype)
        return load_target(section, few_rows=False)

    return build


def text() -> Tensor:
    return torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def rounds(ids: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...], list[tuple[int, int]]]]:
    """The plan on `ids`: tokens `[B, n]` to feed, counts to keep, (row, position) kept."""
    at = [0] * ROWS
    wrong = torch.Generator().manual_seed(2)
    for width, counts in PLAN:
        fed = torch.randint(3, VOCAB, (ROWS, width), generator=wrong)
        for row, count in enumerate(counts):
            fed[row, :count] = ids[row, at[row] : at[row] + count]
        kept = [(row, at[row] + i) for row, count in enumerate(counts) for i in range(count)]
        yield fed, counts, kept
        at = [a + c for a, c in zip(at, counts, strict=True)]


@torch.no_grad()
def cached(target: Target, ids: Tensor) -> tuple[Seen, list[tuple[int, int]]]:
    """The kept positions through the cache, in the order of the plan, and which they are."""
    cache = target.new_cache(ROWS, 16)  # smaller than the text: it has to grow
    parts, places = [], []
    for fed, counts, kept in rounds(ids):
        out = target.forward(fed, cache, TAPS)
        cache.advance(counts)
        mask = torch.arange(fed.shape[1]) < torch.tensor(counts)[:, None]  # [B, n]
        hidden = out.hidden[mask]
        parts.append((hidden, out.taps[mask], target.logits(hidden)))
        places += kept
    return Seen(*(torch.cat(part) for part in zip(*parts, strict=True))), places


@torch.no_grad()
def uncached(target: Target, ids: Tensor, places: list[tuple[int, int]]) -> Seen:
    """The same positions by the model itself, teacher forced over the whole text."""
    out: Any = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    rows, positions = torch.tensor(places).T
    taps = torch.cat([out.hidden_states[tap + 1] for tap in TAPS], -1)
    parts = (out.hidden_states[-1], taps, out.logits.float()[..., :VOCAB])
    return Seen(*(part[rows, positions] for part in parts))


def worst(a: Seen, b: Seen) -> float:
    """The largest difference, as a share of the largest value of its kind (or of 1)."""
    pairs = ((a.hidden, b.hidden), (a.taps, b.taps), (a.logits, b.logits))
    return max(
        float((x - y).float().abs().max() / y.float().abs().max().clamp_min(1)) for x, y in pairs
    )


def test_the_plan_covers_what_it_should() -> None:
    kept = {place for _, _, kept in rounds(text()) for place in kept}
    lengths = [sum(counts[row] for _, counts in PLAN) for row in range(ROWS)]
    assert kept == {(row, i) for row, n in enumerate(lengths) for i in range(n)}
    assert len(set(lengths)) > 1 and max(lengths) <= TOKENS and min(lengths) > 2 * WINDOW


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_is_uncached(name: str, load: Callable[..., Target]) -> None:
    """With the attention that the family takes by itself, and with eager attention."""
    target = load(name)
    own = target.model.config._attn_implementation
    for attention in dict.fromkeys((own, "eager")):
        target.model.set_attn_implementation(attention)
        found, places = cached(target, text())
        assert found.logits.shape == (len(places), VOCAB)
        assert worst(found, uncached(target, text(), places)) < TOLERANCE, attention
    target.model.set_attn_implementation(own)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_within_rounding(name: str, load: Callable[..., Target]) -> None:
    """Experts are all taken here: a near-tie in the choice of two is no small difference."""
    routed = hasattr(FAMILIES[name](), "num_experts_per_tok")
    target = load(name, "bfloat16", **(ALL_EXPERTS if routed else {}))
    assert target.dtype == torch.bfloat16
    found, places = cached(target, text())
    assert found.hidden.dtype == torch.bfloat16 and found.logits.dtype == torch.float32
    allowed = ROUNDINGS * torch.finfo(torch.bfloat16).eps
    assert worst(found, uncached(target, text(), places)) < allowed


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_are_crossed(name: str, load: Callable[..., Target]) -> None:
    """The text reaches where a window forgets: without one, those families say something else."""
    target = load(name)
    ids = text()
    other = torch.cat([(ids[:, :1] + 1).clamp(max=VOCAB - 1), ids[:, 1:]], 1)
    with torch.no_grad():
        a, b = (
            target.model(input_ids=i, use_cache=False, output_hidden_states=True).hidden_states[1]
            for i in (ids, other)
        )
    near, far = (a - b).abs().amax(-1)[:, WINDOW - 1], (a - b).abs().amax(-1)[:, WINDOW:]
    assert (near > 0).all()
    assert bool((far > 0).any()) == (name not in WINDOWED)


@pytest.mark.parametrize("name", {**RECURRENT, **UNSUITED})
def test_refused_by_name(name: str, load: Callable[..., Target]) -> None:
    with pytest.raises(UserError, match=f"'{name}'|\\({name}\\)") as caught:
        load(name)
    assert "\n" not in str(caught.value)
