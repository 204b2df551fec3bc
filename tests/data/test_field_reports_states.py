"""B027, B029: what is kept of a row is that row's own, whatever it was answered together with."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES as KNOWN
from families import LAYERS, save_tiny
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.gather import GatherSettings, Request, TargetBackend, last_turn
from draftsmith.data.records import Record, request_seed
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law

TAPS = (0, 2, LAYERS - 1)  # the last one's output is not yet normed
TOKENS = 12
NEAR = 1e-4
LENGTHS = (5, 17, 200, 40, 91, 6, 150, 64)
COMMON = 150  # tokens that rows begin with alike


def settings(batch_size: int) -> GatherSettings:
    return GatherSettings(TOKENS, batch_size, TAPS, keep="hidden")


def asked(prompts: Sequence[Sequence[int]], laws: Sequence[Law]) -> list[Request]:
    """These prompts, each under the next of the laws, with seeds of their own."""
    found = []
    for n, prompt in enumerate(prompts):
        law = laws[n % len(laws)]
        seed = request_seed(0, f"p{n}", law)
        found.append(Request(f"p{n}", "chat", "train", tuple(prompt), law, seed))
    return found


def drawn(lengths: Sequence[int], begin: Sequence[int] = ()) -> list[list[int]]:
    """Random prompts of these lengths that begin so, without start, end or padding tokens."""
    rng = random.Random(27)
    return [[*begin, *(rng.randrange(3, 400) for _ in range(n - len(begin)))] for n in lengths]


def answered(backend: TargetBackend, requests: Sequence[Request], batch_size: int) -> list[Record]:
    return backend.answer(requests, settings(batch_size), lambda tokens: None, last_turn)


def alone(target: Target, record: Record) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits `[R, V]`, head inputs `[R, h]`, log_z `[R]` and taps `[T-1, L*h]` of one row.

    By the model itself, in one uncached pass; the layers are read by hooks set here.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [target.layers[tap].register_forward_hook(keep(tap)) for tap in TAPS]
    with torch.no_grad():
        out = target.model(
            input_ids=record.ids[None, :-1], output_hidden_states=True, use_cache=False
        )
    for hook in hooks:
        hook.remove()
    first = record.prompt_len - 1
    logits = out.logits[0, first:].float()
    taps = torch.cat([seen[tap][0] for tap in TAPS], -1)
    return logits, out.hidden_states[-1][0, first:], logits.logsumexp(-1), taps


def assert_own(target: Target, requests: Sequence[Request], records: Sequence[Record]) -> None:
    """Every record answers its own request, and holds what that row alone computes."""
    assert len(records) == len(requests)
    for request, record in zip(requests, records, strict=True):
        assert (record.prompt_id, record.seed) == (request.prompt_id, request.seed)
        assert record.ids[: record.prompt_len].tolist() == list(request.ids)
        logits, *expected = alone(target, record)
        if request.law.temperature == 0:
            assert record.reply.tolist() == logits.argmax(-1).tolist()
        assert record.states is not None
        kept = (record.states.hidden, record.states.log_z, record.states.taps)
        for mine, theirs in zip(kept, expected, strict=True):
            assert mine.shape == theirs.shape
            assert float((mine - theirs).abs().max()) < NEAR, request.prompt_id


# ---- B027


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_b027_states_are_those_of_their_row(any_target: Target, batch_size: int) -> None:
    """Eight rows of 5 to 200 tokens in two orders, asked of one backend twice."""
    requests = asked(drawn(LENGTHS), (Law(0.0), Law(1.0)))
    backend = TargetBackend(any_target)
    first = answered(backend, requests, batch_size)
    assert_own(any_target, requests, first)
    words = [r.reply.tolist() for r in first]
    assert len({tuple(w) for w in words}) == len(words), "no two rows say the same"
    again = answered(backend, requests[::-1], batch_size)
    assert_own(any_target, requests[::-1], again)
    assert [r.reply.tolist() for r in again[::-1]] == words


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_b027_rows_that_begin_alike_are_told_apart(tiny_target: Target, batch_size: int) -> None:
    """150 tokens in common, or all but the last one; one backend answers both sets."""
    begin = drawn([COMMON])[0]
    by_length = asked(drawn([COMMON + 1 + 5 * n for n in range(8)], begin), (Law(1.0),))
    by_last = asked([[*begin, 3 + n] for n in range(8)], (Law(0.0),))
    backend = TargetBackend(tiny_target)
    for requests in (by_length, by_last, by_length):
        assert_own(tiny_target, requests, answered(backend, requests, batch_size))


def test_b027_states_are_those_of_their_row_through_shards(
    tiny_target: Target, tmp_path: Path
) -> None:
    """Three shards of rows out of order, read back in another order and one by one."""
    requests = asked(drawn(LENGTHS), (Law(0.0), Law(1.0)))
    records = answered(TargetBackend(tiny_target), requests, 3)
    store = RecordStore.create(tmp_path, {"store_dtype": "float32"})
    places = [5, 0, 7, 2, 6, 1, 4, 3]
    for n, part in enumerate((places[:3], places[3:6], places[6:])):
        store.add(f"{n}", [records[place] for place in part])
    store.finish({})
    read = RecordStore.open(tmp_path)
    rows = {row.prompt_id: row for row in read.index()}
    assert_own(tiny_target, requests, read.read([rows[r.prompt_id] for r in requests]))
    for request in requests[::-1]:
        assert_own(tiny_target, [request], read.read([rows[request.prompt_id]]))


# ---- B029

PADDED = (5, 20, 80, 200)
RIGHT: dict[str, Callable[[], Any]] = {
    "llama": KNOWN["llama"],
    "gpt2": KNOWN["gpt2"],  # learned positions
    "opt": KNOWN["opt"],  # positions that count from 2
}


@pytest.fixture(scope="module", params=sorted(RIGHT))
def padded(
    request: pytest.FixtureRequest,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Target:
    """A target whose tokenizer pads on the right with its end token, as SmolLM2's does."""
    assert tiny_tokenizer.padding_side == "right" and tiny_tokenizer.pad_token_id == 2
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(RIGHT[request.param](), tiny_tokenizer, folder)
    return load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)


def greedy(target: Target, prompt: Sequence[int]) -> list[int]:
    """The reply of one row by uncached forwards of all the text so far."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) - len(prompt) < TOKENS:
            out = target.model(input_ids=torch.tensor([ids]), use_cache=False)
            ids.append(int(out.logits[0, -1].argmax()))
            if ids[-1] in target.eos_ids:
                break
    return ids[len(prompt) :]


def test_b029_short_prompts_beside_long_ones(padded: Target) -> None:
    """Prompts of 5, 20, 80 and 200 tokens at T=0: one batch, one by one, and without a cache."""
    requests = asked(drawn(PADDED), (Law(0.0),))
    backend = TargetBackend(padded)
    together = answered(backend, requests, 4)
    single = [answered(backend, [request], 1)[0] for request in requests]
    expected = [[*r.ids, *greedy(padded, r.ids)] for r in requests]
    assert [r.ids.tolist() for r in together] == expected
    assert [r.ids.tolist() for r in single] == expected
    assert_own(padded, requests, together)
    for record in together:
        inside = record.ids[:-1].tolist()  # the last token may be the end token, which pads too
        assert padded.tokenizer.pad_token_id not in inside
        assert len(record.ids) == record.prompt_len + len(record.reply)


def test_b029_positions_begin_at_0_in_every_row(padded: Target) -> None:
    seen: list[Tensor] = []
    hook = padded.body.register_forward_pre_hook(
        lambda module, args, named: seen.append(named["position_ids"].clone()), with_kwargs=True
    )
    answered(TargetBackend(padded), asked(drawn(PADDED), (Law(0.0),)), len(PADDED))
    hook.remove()
    begin, first, second, *_ = seen
    # As wide as the longest prompt: nothing looks at what lies behind a row's own tokens.
    assert begin.tolist() == [list(range(max(PADDED)))] * len(PADDED)
    assert first.tolist() == [[length] for length in PADDED]
    assert second.tolist() == [[length + 1] for length in PADDED]
