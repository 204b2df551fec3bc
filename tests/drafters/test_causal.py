"""The draft LM: a part of the target, the same in training and in decoding."""

import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from drafting import propose
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter

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


def test_every_tensor_is_held_under_one_name(any_target: Target) -> None:
    drafter = CausalDrafter.from_target(any_target, CausalConfig(), SOME)
    assert list(drafter.state_dict()) == [f"model.{name}" for name in drafter.model.state_dict()]


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
        if not drafter.training:
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
def test_unrolled_logits_are_those_of_each_row_alone(
    any_target: Target, ids: Tensor | None
) -> None:
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


class Decoding:
    """Drives the decode protocol over known conversations; rows leave when they have said all."""

    def __init__(self, drafter: CausalDrafter, records: Sequence[Record]):
        self.drafter, self.records = drafter, list(records)
        self.said = [0 for _ in records]
        self.places = list(range(len(records)))
        lengths = [r.prompt_len for r in records]
        ids = torch.full((len(records), max(lengths)), 7)
        for b, record in enumerate(records):
            ids[b, : lengths[b]] = record.ids[: lengths[b]]
        self.state = drafter.start(len(records), 24)
        with torch.no_grad():
            drafter.prefill(self.state, ids, lengths, no_taps(*ids.shape))

    def left(self, row: int) -> int:
        return len(self.records[row].reply) - self.said[row]

    def emit(self, counts: Sequence[int]) -> None:
        """Commit the next true tokens; behind the counted ones stand others."""
        counts = [min(count, self.left(row)) for row, count in enumerate(counts)]
        tokens = torch.full((len(counts), max(counts) + 1), 9)
        for b, (record, count) in enumerate(zip(self.records, counts, strict=True)):
            tokens[b, :count] = record.reply[self.said[b] : self.said[b] + count]
            self.said[b] += count
        self.drafter.commit(self.state, tokens, counts, no_taps(*tokens.shape))
        keep = [row for row in range(len(self.records)) if self.left(row)]
        self.state.select(keep)
        for name in ("records", "said", "places"):
            setattr(self, name, [getattr(self, name)[row] for row in keep])

    def draft(self, right: Sequence[int], count: int = STEPS) -> tuple[Tensor, Tensor]:
        """Draft logits `[B, count, V_d]` and words, of each row's the first `right` true ones."""
        seen: list[Tensor] = []
        words = torch.full((len(self.records), count), 11)
        for b, (record, n) in enumerate(zip(self.records, right, strict=True)):
            true = record.reply[self.said[b] : self.said[b] + min(n, count)]
            words[b, : len(true)] = true

        def draw(logits: Tensor, k: int) -> Tensor:
            seen.append(logits)
            return words[:, k]

        with torch.no_grad():
            assert torch.equal(propose(self.drafter, self.state, count, draw), words)
        return torch.stack(seen, 1), words

    def expected(self, row: int, words: Tensor) -> Tensor:
        """From scratch: what the draft says behind the committed words and each drafted one."""
        known = self.records[row].ids[: self.records[row].prompt_len + self.said[row]]
        return alone(self.drafter, torch.cat([known, words[row]]))[len(known) - 1 : -1]


@pytest.mark.parametrize("ids", [None, SOME], ids=["full", "reduced"])
def test_decoding_equals_training(any_target: Target, ids: Tensor | None) -> None:
    """In rounds of full, partial and no acceptance, whatever the other row accepts."""
    drafter = CausalDrafter.from_target(any_target, CausalConfig(layers=(0, 2)), ids).eval()
    records = conversations()
    unrolled = steps_by_token(drafter, collate(records, ["chat"]))
    run = Decoding(drafter, records)
    run.emit([1, 1])
    number, kinds = 0, set()
    while run.records:
        right = [(number + 2 * place) % (STEPS + 1) for place in run.places]
        logits, words = run.draft(right)
        for row, place in enumerate(run.places):
            assert (logits[row] - run.expected(row, words)).abs().max() < TOLERANCE
            for k in range(min(right[row] + 1, run.left(row), STEPS)):
                same = unrolled[place, run.said[row] + k]
                assert (logits[row, k] - same).abs().max() < TOLERANCE
        kinds |= set(right)
        run.emit([n + 1 for n in right])
        number += 1
    assert kinds == {0, 1, 2, 3}  # none, some, all


def test_a_draft_of_one_token(tiny_target: Target) -> None:
    """With one token drafted, full acceptance leaves two words that the draft has not seen."""
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 1)), None).eval()
    run = Decoding(drafter, conversations((4,), (9,)))
    run.emit([1])
    while run.records:
        logits, words = run.draft([1], count=1)
        assert (logits[0] - run.expected(0, words)).abs().max() < TOLERANCE
        run.emit([2])
