"""Answers and kept states are those of each row alone, whatever the batch."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.gather import (
    GatherSettings,
    Request,
    answer,
    draw_tokens,
    recompute_states,
)
from draftsmith.data.records import Record, request_key, request_seed, row_uniforms
from draftsmith.data.target import Forward, Target
from draftsmith.data.warp import Law

GREEDY, HOT = Law(0.0), Law(1.0)
TAPS = (0, 2)
LENGTHS = (5, 30, 1, 12, 12, 21, 2, 8)


def settings(batch_size: int = 3, tokens: int = 10, keep: bool = True) -> GatherSettings:
    return GatherSettings(tokens, batch_size, TAPS, keep="hidden" if keep else "none")


def requests(law: Law, lengths: Sequence[int] = LENGTHS) -> list[Request]:
    """Prompts of these lengths; all longer ones begin alike."""
    rng = random.Random(7)
    common = [rng.randrange(3, 400) for _ in range(4)]
    made = []
    for n, length in enumerate(lengths):
        own = [rng.randrange(3, 400) for _ in range(length)]
        ids = tuple([*common, *own][:length]) if length > 4 else tuple(own)
        seed = request_seed(0, f"p{n}", law)
        made.append(Request(f"p{n}", "chat", "train", ids, law, seed))
    return made


def forced(target: Target, record: Record) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head inputs `[R, h]`, log_z `[R]`, taps `[T-1, L*h]` by the model itself, uncached."""
    with torch.no_grad():
        out = target.model(
            input_ids=record.ids[None, :-1], output_hidden_states=True, use_cache=False
        )
    states, first = out.hidden_states, record.prompt_len - 1
    log_z = out.logits[0, first:].float().logsumexp(-1)
    return states[-1][0, first:], log_z, torch.cat([states[i + 1][0] for i in TAPS], -1)


# ---- tokens


def generated(target: Target, prompt: Sequence[int]) -> list[int]:
    """Prompt and greedy reply of one row, by transformers' own loop."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = target.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10
        )
    return [int(token) for token in out[0]]


def test_greedy_equals_generate(any_target: Target) -> None:
    asked = requests(GREEDY, (5, 30, 1, 12, 12))
    expected = [generated(any_target, request.ids) for request in asked]
    for batch_size in (1, 2, 5):
        records = answer(any_target, asked, settings(batch_size))
        assert [r.ids.tolist() for r in records] == expected
        for request, record in zip(asked, records, strict=True):
            assert record.prompt_len == len(request.ids)
            assert record.key == request_key(request.prompt_id, GREEDY, request.seed)


def test_samples_do_not_depend_on_neighbours(any_target: Target) -> None:
    asked = requests(HOT)
    together = answer(any_target, asked, settings(8))
    assert len({tuple(r.reply.tolist()) for r in together}) == len(asked)  # seeds of their own
    in_threes = answer(any_target, asked, settings(3))
    backwards = answer(any_target, asked[::-1], settings(4))[::-1]
    alone = [answer(any_target, [request], settings(1))[0] for request in asked]
    for others in (in_threes, backwards, alone):
        assert [r.ids.tolist() for r in others] == [r.ids.tolist() for r in together]


def test_samples_follow_the_law(tiny_target: Target) -> None:
    """The first tokens of many seeds have the frequencies of the model's own distribution."""
    prompt = (5, 9, 200, 31)
    asked = [Request("p", "chat", "train", prompt, HOT, seed) for seed in range(3000)]
    records = answer(tiny_target, asked, settings(500, tokens=1, keep=False))
    with torch.no_grad():
        p = tiny_target.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    seen = torch.stack([r.reply[0] for r in records]).bincount(minlength=400) / 3000
    assert (seen - p).abs().sum() / 2 < 0.13  # about 0.09 is expected of 3000 true samples
    top = int(p.argmax())
    assert abs(float(seen[top] - p[top])) < 4 * float((p[top] * (1 - p[top]) / 3000).sqrt())


def test_laws_may_share_a_batch(tiny_target: Target) -> None:
    logits = torch.linspace(-3, 3, 200).sin().view(4, 50)
    uniforms = torch.tensor([0.9, 0.1, 0.5, 0.7], dtype=torch.float64)
    laws = [GREEDY, HOT, Law(0.5), HOT]
    mixed = draw_tokens(logits, laws, uniforms)
    single = [draw_tokens(logits[b : b + 1], [laws[b]], uniforms[b : b + 1])[0] for b in range(4)]
    assert mixed == single
    assert mixed[0] == int(logits[0].argmax())
    both = [*requests(GREEDY)[:4], *requests(HOT)[4:]]
    together = answer(tiny_target, both, settings(8, keep=False))
    alone = [answer(tiny_target, [r], settings(1, keep=False))[0] for r in both]
    assert [r.ids.tolist() for r in together] == [r.ids.tolist() for r in alone]


# ---- states


@pytest.mark.parametrize("batch_size", [1, 3])
def test_states_are_those_of_a_row_alone(any_target: Target, batch_size: int) -> None:
    asked = requests(HOT)
    for record in answer(any_target, asked, settings(batch_size)):
        assert record.states is not None
        hidden, log_z, taps = forced(any_target, record)
        for kept, expected in (
            (record.states.hidden, hidden),
            (record.states.log_z, log_z),
            (record.states.taps, taps),
        ):
            assert kept.shape == expected.shape
            assert kept.dtype == torch.float32
            assert (kept - expected).abs().max() < 1e-4


def test_replies_are_drawn_from_the_kept_states(tiny_target: Target) -> None:
    for record in answer(tiny_target, requests(GREEDY), settings()):
        assert record.states is not None
        logits = tiny_target.logits(record.states.hidden)
        assert logits.argmax(-1).tolist() == record.reply.tolist()
        assert torch.allclose(logits.logsumexp(-1), record.states.log_z, atol=1e-5)


def test_recomputed_states_equal_kept_ones(any_target: Target) -> None:
    kept = answer(any_target, requests(HOT), settings())
    bare = answer(any_target, requests(HOT), settings(keep=False))
    assert all(record.states is None for record in bare)
    for old, new in zip(kept, recompute_states(any_target, bare, TAPS), strict=True):
        assert old.states is not None and new.states is not None
        assert (old.key, old.ids.tolist()) == (new.key, new.ids.tolist())
        for name in ("hidden", "log_z", "taps"):
            mine, theirs = getattr(old.states, name), getattr(new.states, name)
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() < 1e-4


# ---- ends


def test_finish_reasons(load_tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_tiny()
    free = answer(target, requests(GREEDY), settings(keep=False))
    assert {r.finish for r in free} == {"length"}
    assert {len(r.reply) for r in free} == {10}
    ends = (int(free[0].reply[3]), int(free[1].reply[0]))
    monkeypatch.setattr(target, "eos_ids", ends)
    for batch_size in (1, 3, 8):
        cut = answer(target, requests(GREEDY), settings(batch_size))
        for whole, record in zip(free, cut, strict=True):
            words = whole.reply.tolist()
            stops = [i for i, token in enumerate(words) if token in ends]
            expected = words[: stops[0] + 1] if stops else words  # the end token is kept
            assert record.reply.tolist() == expected
            assert record.finish == ("stop" if stops else "length")
            assert record.states is not None
            assert len(record.states.hidden) == len(record.states.log_z) == len(expected)
            assert len(record.states.taps) == len(record.ids) - 1
        assert len(cut[1].reply) == 1  # ended by its very first token


def test_an_end_token_at_the_limit_is_a_stop(
    load_tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_tiny()
    (free,) = answer(target, requests(GREEDY)[:1], settings(tokens=3))
    words = free.reply.tolist()
    assert words[2] not in words[:2]
    monkeypatch.setattr(target, "eos_ids", (words[2],))
    (record,) = answer(target, requests(GREEDY)[:1], settings(tokens=3))
    assert (record.reply.tolist(), record.finish) == (words, "stop")


def test_one_token_replies(tiny_target: Target) -> None:
    for record in answer(tiny_target, requests(GREEDY), settings(tokens=1)):
        assert len(record.reply) == 1
        assert record.states is not None
        assert len(record.states.taps) == record.prompt_len


def test_progress_counts_every_new_token(tiny_target: Target) -> None:
    counted: list[int] = []
    records = answer(tiny_target, requests(HOT), settings(), counted.append)
    assert sum(counted) == sum(len(r.reply) for r in records)


def test_padding_ids_are_never_drawn(load_tiny: Callable[..., Target]) -> None:
    target = load_tiny("llama", vocab_size=448, tie_word_embeddings=False)
    target.model.lm_head.weight.data[400:] *= 20  # these would win often
    records = answer(target, requests(Law(1.5)), settings(keep=False))
    assert max(int(r.ids.max()) for r in records) < 400


# ---- values that are not finite


@pytest.mark.parametrize("keep", [True, False])
def test_states_that_are_not_finite_stop_by_name(
    load_tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    target = load_tiny()
    whole = target.forward
    calls = 0

    def broken(*args: object) -> Forward:
        nonlocal calls
        calls += 1
        out = whole(*args)  # type: ignore[arg-type]
        if calls == 3:
            out.hidden[1] = torch.nan
        return out

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(UserError, match=r"prompt p\d .*not finite"):
        answer(target, requests(HOT), settings(keep=keep))


def test_recomputed_states_that_are_not_finite_stop_by_name(
    load_tiny: Callable[..., Target],
) -> None:
    target = load_tiny()
    records = answer(target, requests(GREEDY)[:2], settings(keep=False))
    target.model.model.norm.weight.data[3] = torch.inf
    with pytest.raises(UserError, match=r"prompt p0 .*not finite"):
        list(recompute_states(target, records, TAPS))


# ---- identity


def test_seeds_and_uniforms_are_the_requests_own() -> None:
    seeds = {
        request_seed(seed, prompt, law)
        for seed in (0, 1)
        for prompt in ("a", "b")
        for law in (GREEDY, HOT, Law(1.0, top_k=5))
    }
    assert len(seeds) == 12
    assert request_seed(0, "a", HOT) == request_seed(0, "a", Law(1))
    stream = row_uniforms(5, 100)
    assert stream.dtype == torch.float64
    assert torch.equal(row_uniforms(5, 40), stream[:40])  # a longer limit draws the same words
    assert not torch.equal(row_uniforms(6, 40), stream[:40])
    assert float(stream.min()) >= 0 and float(stream.max()) < 1
