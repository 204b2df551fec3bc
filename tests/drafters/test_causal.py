"""The draft LM: a part of the target, the same in training and in decoding."""

import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.train.batches import collate

TOLERANCE = 1e-4
STEPS = 3
IDS = torch.tensor([[3, 90, 14, 260, 41, 7, 77, 8, 19, 300, 5, 64]])
SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])


def conversations(
    prompts: Sequence[int] = (5, 9), replies: Sequence[int] = (14, 9)
) -> list[Record]:
    rng = random.Random(4)
    made = []
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        ids = torch.tensor([rng.randrange(3, 400) for _ in range(prompt + reply)])
        states = States(torch.zeros(reply, 1), torch.zeros(reply), torch.zeros(len(ids) - 1, 0))
        law = Law()
        made.append(Record(f"p{number}", "chat", "train", law, 0, "length", ids, prompt, states))
    return made


def no_taps(rows: int, width: int) -> Tensor:
    return torch.zeros(rows, width, 0)


def alone(drafter: CausalDrafter, ids: Tensor) -> Tensor:
    """Draft logits at every position of one row `[T, V_d]`, by the model itself."""
    with torch.no_grad():
        logits = drafter.model(input_ids=ids[None], use_cache=False).logits[0]
    return logits if drafter.draft_ids is None else logits[:, drafter.draft_ids]


# ---- construction


def test_all_layers_are_the_target(any_target: Target) -> None:
    drafter = CausalDrafter.from_target(any_target, CausalConfig(layers=(0, 1, 2, 3)), None).eval()
    with torch.no_grad():
        hidden = drafter.body(input_ids=IDS, use_cache=False).last_hidden_state
        logits = drafter.head(hidden)
        cache = any_target.new_cache(1, 12)
        expected = any_target.logits(any_target.forward(IDS, cache).hidden)
    assert (logits - expected).abs().max() < TOLERANCE
    drafter.model.get_output_embeddings().weight.data.zero_()  # a copy, not the target's own
    assert (any_target.head.weight != 0).any()


def test_kept_layers_run_in_their_order(any_target: Target) -> None:
    """Layers (1, 3) behind the embedding: what the target gives with the others taken out."""
    drafter = CausalDrafter.from_target(any_target, CausalConfig(layers=(1, 3)), None).eval()
    assert drafter.model.config.num_hidden_layers == 2
    whole = copy.deepcopy(any_target.model)
    layers = next(m for m in whole.modules() if getattr(m, "__len__", None) and len(m) == 4)
    for dropped in (0, 2):
        layers[dropped].forward = lambda hidden_states, *args, **kwargs: hidden_states
    with torch.no_grad():
        expected = whole(input_ids=IDS, use_cache=False).logits
        logits = drafter.model(input_ids=IDS, use_cache=False).logits
    assert (logits - expected).abs().max() < TOLERANCE


def test_which_layers() -> None:
    assert CausalConfig().resolved_layers(30) == (0, 1, 28, 29)
    assert CausalConfig().resolved_layers(3) == (0, 1, 2)
    assert CausalConfig().resolved_layers(1) == (0,)
    assert CausalConfig(layers=(5, 2)).resolved_layers(6) == (5, 2)
    with pytest.raises(UserError, match="between 0 and 5"):
        CausalConfig(layers=(0, 6)).resolved_layers(6)


def test_a_tied_head_stays_tied(load_tiny: Callable[..., Target]) -> None:
    for tied in (True, False):
        target = load_tiny("llama", tie_word_embeddings=tied)
        model = CausalDrafter.from_target(target, CausalConfig(), None).model
        same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert same == tied


def test_head_sizes_are_carried_over(load_tiny: Callable[..., Target]) -> None:
    drafter = CausalDrafter.from_target(load_tiny("qwen3"), CausalConfig(layers=(0,)), None)
    assert drafter.model.config.head_dim == 16  # 4 heads of 16 at hidden size 32


# ---- the draft vocabulary


def test_reduced_vocabulary(any_target: Target) -> None:
    config = CausalConfig(layers=(0, 3))
    full = CausalDrafter.from_target(any_target, config, None).eval()
    some = CausalDrafter.from_target(any_target, config, SOME).eval()
    hidden = torch.randn(5, 32)
    expected = full.head(hidden)[:, SOME]
    assert torch.allclose(some.head(hidden), expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(some.head(hidden), expected, atol=1e-5)


def test_a_bias_of_the_head_is_kept(tiny_target: Target) -> None:
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(), SOME).eval()
    head = torch.nn.Linear(32, 400)
    drafter.model.set_output_embeddings(head)
    hidden = torch.randn(5, 32)
    assert torch.allclose(drafter.head(hidden), head(hidden)[:, SOME], atol=1e-5)


def test_gathered_rows_follow_training(tiny_target: Target) -> None:
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(), SOME)
    hidden = torch.randn(5, 32)
    for switch in (lambda: drafter, drafter.eval, drafter.train, drafter.eval):
        switch()
        with torch.no_grad():
            before = drafter.head(hidden)
        drafter.train()
        drafter.head(hidden).sum().backward()
        weight = drafter.model.get_output_embeddings().weight
        weight.data -= weight.grad
        with torch.no_grad():
            after = drafter.head(hidden)
        assert (after - before).abs().max() > 0.1
        assert torch.allclose(after, drafter.model.get_output_embeddings()(hidden)[:, SOME])


# ---- training


def steps_by_token(drafter: CausalDrafter, batch: TrainBatch) -> dict[tuple[int, int], Tensor]:
    """Unrolled logits by (row, reply token)."""
    with torch.no_grad():
        (step,) = drafter.unroll(batch, STEPS)
        logits = drafter.head(step.hidden)
    ends = (batch.first + batch.reply_lens).tolist()
    found = {}
    for token, row_logits in zip(step.token.tolist(), logits, strict=True):
        row = next(b for b, end in enumerate(ends) if token < end)
        found[row, token - int(batch.first[row])] = row_logits
    return found


@pytest.mark.parametrize("ids", [None, SOME], ids=["full", "reduced"])
def test_unrolled_logits_are_those_of_each_row_alone(any_target: Target, ids: Tensor | None) -> None:
    drafter = CausalDrafter.from_target(any_target, CausalConfig(layers=(0, 1, 3)), ids).eval()
    records = conversations()
    found = steps_by_token(drafter, collate(records, ["chat"]))
    assert set(found) == {(b, r) for b, rec in enumerate(records) for r in range(1, len(rec.reply))}
    for row, record in enumerate(records):
        expected = alone(drafter, record.ids)
        for r in range(1, len(record.reply)):
            assert (found[row, r] - expected[record.prompt_len + r - 1]).abs().max() < TOLERANCE


def test_everything_is_trained(tiny_target: Target) -> None:
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(), SOME).train()
    (step,) = drafter.unroll(collate(conversations(), ["chat"]), 1)
    drafter.head(step.hidden).log_softmax(-1)[:, 3].sum().backward()
    assert len(drafter.trainable()) == len(list(drafter.parameters()))
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and (parameter.grad != 0).any(), name
        assert torch.isfinite(parameter.grad).all()


# ---- decoding


@pytest.mark.parametrize("ids", [None, SOME], ids=["full", "reduced"])
def test_decoding_equals_training(any_target: Target, ids: Tensor | None) -> None:
    """After rounds of full, partial and no acceptance, of rows with different counts: draft logits
    are those of the committed words with the drafted ones behind them, from scratch."""
    drafter = CausalDrafter.from_target(any_target, CausalConfig(layers=(0, 2)), ids).eval()
    records = conversations()
    unrolled = steps_by_token(drafter, collate(records, ["chat"]))
    lengths = [r.prompt_len for r in records]
    prompts = torch.full((2, max(lengths)), 7)
    for b, record in enumerate(records):
        prompts[b, : lengths[b]] = record.ids[: lengths[b]]
    state = drafter.start(2, 24)
    said, alive = [0, 0], [0, 1]
    with torch.no_grad():
        drafter.prefill(state, prompts, lengths, no_taps(2, max(lengths)))
    counts, kinds, number = [1, 1], set(), 0
    while alive:
        tokens = torch.full((len(alive), max(counts) + 1), 9)  # others stand behind the counted
        for b, (row, count) in enumerate(zip(alive, counts, strict=True)):
            at = records[row].prompt_len + said[row]
            tokens[b, :count] = records[row].ids[at : at + count]
            said[row] += count
        drafter.commit(state, tokens, counts, no_taps(*tokens.shape))
        keep = [b for b, row in enumerate(alive) if said[row] < len(records[row].reply)]
        if len(keep) < len(alive):
            alive = [alive[b] for b in keep]
            if not alive:
                break
            state.select(keep)
        right = [(number + 2 * row) % (STEPS + 1) for row in alive]
        right = [min(a, len(records[row].reply) - said[row]) for a, row in zip(right, alive, strict=True)]
        seen: list[Tensor] = []

        def draw(logits: Tensor, k: int) -> Tensor:
            seen.append(logits)
            words = []
            for row, a in zip(alive, right, strict=True):
                words.append(int(records[row].reply[said[row] + k]) if k < a else 11 + k)
            return torch.tensor(words)

        with torch.no_grad():
            drafted = drafter.propose(state, STEPS, draw)
        for b, row in enumerate(alive):
            known = records[row].ids[: records[row].prompt_len + said[row]]
            expected = alone(drafter, torch.cat([known, drafted[b]]))
            for k in range(STEPS):
                assert (seen[k][b] - expected[len(known) - 1 + k]).abs().max() < TOLERANCE
            for k in range(right[b]):
                assert (seen[k][b] - unrolled[row, said[row] + k]).abs().max() < TOLERANCE
        kinds |= set(right)
        counts = [
            min(a + 1, len(records[row].reply) - said[row])
            for a, row in zip(right, alive, strict=True)
        ]
        number += 1
    assert kinds == {0, 1, 2, 3}  # none, some, all


def test_a_draft_of_one_token(tiny_target: Target) -> None:
    """With one token drafted, full acceptance leaves two words that the draft has not seen."""
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 1)), None).eval()
    (record,) = conversations((4,), (9,))
    state = drafter.start(1, 4)
    ids = record.ids[None]
    with torch.no_grad():
        drafter.prefill(state, ids[:, :4], [4], no_taps(1, 4))
        drafter.commit(state, ids[:, 4:5], [1], no_taps(1, 1))
        for at in (5, 7, 9):
            seen: list[Tensor] = []
            word = ids[:, at]
            drafter.propose(state, 1, lambda logits, k, word=word, seen=seen: seen.append(logits) or word)
            assert (seen[0][0] - alone(drafter, record.ids[:at])[-1]).abs().max() < TOLERANCE
            drafter.commit(state, ids[:, at : at + 2], [2], no_taps(1, 2))
