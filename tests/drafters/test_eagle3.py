"""EAGLE-3: the unrolled training pass computes what the decode protocol will, and nothing leaks."""

import copy
import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from drafting import propose
from torch import Tensor
from unrolling import (
    STEPS,
    TOLERANCE,
    Decoding,
    assert_parity,
    by_token,
    conversations,
    taps_of,
    unrolled,
)

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.drafters.base import TrainBatch, supervised_at, token_index
from draftsmith.drafters.batch import collate
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter

TAPS = (0, 1, 2)


def draft_ids(count: int = 60) -> Tensor:
    others = random.Random(0).sample(range(3, 400), count - 3)
    return torch.tensor(sorted([0, 1, 2, *others]))


def new_head(
    target: Target, init: str | None = "random", taps: tuple[int, ...] = TAPS
) -> Eagle3Drafter:
    """A head with no neutral value anywhere: a skipped norm or map changes its output."""
    torch.manual_seed(1)
    config = Eagle3Config(taps=taps, draft_vocab_size=60, init=init)
    drafter = Eagle3Drafter.from_target(target, config, draft_ids())
    if init == "random":
        for parameter in drafter.trainable():
            parameter.data += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return drafter.eval()


@pytest.fixture(scope="module")
def head(tiny_target: Target) -> Eagle3Drafter:
    return new_head(tiny_target)


@pytest.fixture(scope="module")
def records(tiny_target: Target) -> list[Record]:
    return conversations(tiny_target, TAPS)


@pytest.fixture(scope="module")
def batch(records: list[Record]) -> TrainBatch:
    return collate(records, ["chat"])


# ---- parity of training and decoding


def test_every_step_from_every_start(head: Eagle3Drafter, records: list[Record]) -> None:
    """Each round begins one token later and drafts the true words: all (step, token) pairs."""
    expected = unrolled(head, collate(records, ["chat"]))
    run = Decoding(head, records)
    compared: list[set[tuple[int, int]]] = [set() for _ in range(STEPS)]
    run.emit([1, 1])
    while run.records:
        for k, step in enumerate(run.draft([STEPS] * len(run.records))):
            for at, logits in step.items():
                if at in expected[k]:
                    assert (logits - expected[k][at]).abs().max() < TOLERANCE, (k, at)
                    compared[k].add(at)
        run.emit([1] * len(run.records))
    assert compared == [set(step) for step in expected]
    steps = [torch.stack(list(step.values())) for step in expected]
    assert all(step.std() > 0.1 for step in steps)  # the logits do say something
    both = [at for at in expected[3] if at in expected[0]]
    assert all((expected[3][at] - expected[0][at]).abs().max() > 0.01 for at in both)


@pytest.mark.parametrize(
    "accept",
    [
        lambda number, row: 0,
        lambda number, row: STEPS,
        lambda number, row: (number + row) % (STEPS + 1),
        lambda number, row: (3 * number + 2 * row + 2) % (STEPS + 1),
    ],
    ids=["none", "all", "mixed", "mixed again"],
)
def test_parity_after_rounds_of_any_acceptance(
    head: Eagle3Drafter, records: list[Record], accept: Callable[[int, int], int]
) -> None:
    assert_parity(head, records, accept)


def test_parity_for_every_family(any_target: Target) -> None:
    """Head sizes, RoPE and windows of the target's family are the draft's own in both passes."""
    drafter = new_head(any_target, init="random")
    assert_parity(drafter, conversations(any_target, TAPS), lambda number, row: (number + row) % 4)


@pytest.mark.parametrize("prompts", [(1, 1), (1, 6)])
def test_parity_from_prompts_of_one_token(tiny_target: Target, prompts: tuple[int, int]) -> None:
    drafter = new_head(tiny_target)
    records = conversations(tiny_target, TAPS, prompts, (6, 5))
    assert_parity(drafter, records, lambda number, row: (number + row) % 3)


def test_a_target_in_low_precision(tiny_target: Target, load_tiny: Callable[..., Target]) -> None:
    """States arrive in the target's dtype, whatever that of the head."""
    drafter = new_head(tiny_target)
    (one, _) = conversations(tiny_target, TAPS)
    state = drafter.start(1, 32)
    with torch.no_grad():
        half = taps_of(one)[None].bfloat16()
        n = one.prompt_len
        drafter.prefill(state, one.ids[None, :n], [n], half[:, :n])
        drafter.commit(state, one.ids[None, n : n + 1], [1], half[:, n - 1 : n])
        drafted = propose(drafter, state, 2, lambda logits, k: drafter.draft_ids[logits.argmax(-1)])
    assert set(drafted.flatten().tolist()) <= set(drafter.draft_ids.tolist())


# ---- nothing leaks


def test_rows_and_padding_do_not_touch_each_other(
    head: Eagle3Drafter, records: list[Record], batch: TrainBatch
) -> None:
    together = unrolled(head, batch)
    for row, record in enumerate(records):
        alone = unrolled(head, collate([record], ["chat"]))
        for step, own in zip(together, alone, strict=True):
            assert {r for place, r in step if place == row} == {r for _, r in own}
            for (_, r), logits in own.items():
                assert (step[row, r] - logits).abs().max() < 1e-5
    ids = torch.nn.functional.pad(batch.ids, (0, 20), value=33)
    taps = torch.nn.functional.pad(batch.taps, (0, 0, 0, 20), value=40.0)
    for row, length in enumerate(batch.lengths.tolist()):
        ids[row, length:] = 33
        taps[row, length - 1 :] = 40.0
    wider = unrolled(head, dataclasses.replace(batch, ids=ids, taps=taps))
    for step, own in zip(together, wider, strict=True):
        assert step.keys() == own.keys()
        assert all((step[at] - own[at]).abs().max() < 1e-5 for at in step)


def test_a_prediction_reads_only_what_decoding_knows(
    head: Eagle3Drafter, records: list[Record]
) -> None:
    """Step k of token r began its round at r - k: later states of the target are unknown then."""
    record = records[0]
    batch = collate([record], ["chat"])
    taps = batch.taps.clone().requires_grad_()
    steps = head.unroll(dataclasses.replace(batch, taps=taps), STEPS)
    for k, step in enumerate(steps):
        for n, r in enumerate(step.token.tolist()):
            (grad,) = torch.autograd.grad(step.hidden[n].sum(), taps, retain_graph=True)
            used = grad[0].abs().sum(-1).nonzero().flatten().tolist()
            last = record.prompt_len + r - 2 - k  # the state before the round's first known word
            assert used == list(range(last + 1))


def test_supervision_covers_replies_and_nothing_else(
    head: Eagle3Drafter, batch: TrainBatch
) -> None:
    """Reply at positions 5..16 and 9..15; its first token comes from prefill, in every step k
    the first k after it belong to shorter drafts."""
    for k, step in enumerate(head.unroll(batch, STEPS)):
        assert step.hidden.shape == (len(step.token), 32)
        found = set(by_token(batch, step, step.hidden))
        assert found == {(0, r) for r in range(1 + k, 12)} | {(1, r) for r in range(1 + k, 7)}
    position = torch.arange(20)
    for k in range(STEPS):
        allowed = supervised_at(batch, position, k)
        assert allowed[0].nonzero().flatten().tolist() == list(range(6 + k, 17))
        assert allowed[1].nonzero().flatten().tolist() == list(range(10 + k, 16))
    assert token_index(batch, position)[1, 9] == 12  # row 1's first word follows row 0's twelve


def test_replies_too_short_for_a_step(tiny_target: Target) -> None:
    drafter = new_head(tiny_target)
    batch = collate(conversations(tiny_target, TAPS, (4, 6, 3), (1, 2, 3)), ["chat"])
    assert [s.token.tolist() for s in drafter.unroll(batch, STEPS)] == [[2, 4, 5], [5], [], []]
    assert batch.supervised == 3
    with torch.no_grad():
        alone = drafter.unroll(collate(conversations(tiny_target, TAPS, (4,), (1,)), ["chat"]), 2)
    assert [len(step.token) for step in alone] == [0, 0]


# ---- parameters


def test_gradients_reach_what_is_trained(tiny_target: Target, batch: TrainBatch) -> None:
    drafter = new_head(tiny_target)
    drafter.train()
    loss = sum(drafter.head(s.hidden).log_softmax(-1)[:, 3].sum() for s in drafter.unroll(batch, 3))
    assert isinstance(loss, Tensor)
    loss.backward()
    trained = {id(p) for p in drafter.trainable()}
    for name, parameter in drafter.named_parameters():
        if name == "embed_tokens.weight":  # the target's own, shared when served
            assert id(parameter) not in trained
            assert parameter.grad is None
        else:
            assert id(parameter) in trained
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all()
            assert (parameter.grad.abs().sum(-1) > 0).any(), name
    assert drafter.fc.weight.grad is not None
    each = drafter.fc.weight.grad.view(32, 3, 32).abs().sum((0, 2))
    assert (each > 0).all()  # every tapped layer


@pytest.mark.parametrize("init", [None, "random"])
def test_a_new_head_is_finite_for_every_family(any_target: Target, init: str | None) -> None:
    torch.manual_seed(0)
    config = Eagle3Config(taps=TAPS, draft_vocab_size=60, init=init)
    drafter = Eagle3Drafter.from_target(any_target, config, draft_ids())
    for name, parameter in drafter.named_parameters():
        assert torch.isfinite(parameter).all()
        assert parameter.dtype == torch.float32
        assert (parameter != 0).any(), name
    assert torch.equal(drafter.embed_tokens.weight, any_target.model.get_input_embeddings().weight)
    assert torch.equal(drafter.lm_head.weight, any_target.head.weight[draft_ids()])
    source = any_target.text_config
    head_dim = getattr(source, "head_dim", None) or 32 // 4
    assert drafter.config.head_dim == head_dim
    assert drafter.midlayer.self_attn.q_proj.weight.shape == (4 * head_dim, 64)


def test_a_new_head_says_something_for_every_family(any_target: Target) -> None:
    """Norm weights of another meaning (Gemma adds one) are not copied as if they were scales."""
    drafter = new_head(any_target, init=None)
    batch = collate(conversations(any_target, TAPS), ["chat"])
    with torch.no_grad():
        (step,) = drafter.unroll(batch, 1)
        normed = drafter.norm(step.hidden)
    assert 0.5 < float(normed.pow(2).mean().sqrt()) < 2.0


def test_it_starts_as_the_targets_last_layer(tiny_target: Target, records: list[Record]) -> None:
    drafter = new_head(tiny_target, init="target")
    last = tiny_target.layers[-1]
    layer = drafter.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = getattr(layer.self_attn, name), getattr(last.self_attn, name)
        assert torch.equal(mine.weight[:, 32:], theirs.weight)
        mine.weight.data[:, :32] = 0  # what reads the embedding starts from noise
    assert torch.equal(drafter.norm.weight, tiny_target.body.norm.weight)
    assert (drafter.fc.weight[:, -32:] - torch.eye(32)).abs().max() < 6 * 0.2
    drafter.fc.weight.data = torch.cat([torch.zeros(32, 64), torch.eye(32)], 1)
    batch = collate(records, ["chat"])
    with torch.no_grad():
        (step,) = drafter.unroll(batch, 1)
        logits = drafter.head(step.hidden)
        # Pair t holds the state of token t: as the last layer it says what the target says there.
        expected = tiny_target.logits(batch.hidden[step.token - 1])[:, drafter.draft_ids]
    assert (logits - expected).abs().max() < TOLERANCE


def test_a_last_layer_of_other_names_is_not_copied_in_part(tiny_target: Target) -> None:
    """Such as OLMo-2's, which has the projections of a Llama but no norm before them."""
    target = copy.deepcopy(tiny_target)
    del target.layers[-1].input_layernorm
    with pytest.raises(UserError, match="'target' takes over no layers"):
        new_head(target, init="target")
    drafter = new_head(target, init=None)
    for name, weight in target.layers[-1].state_dict().items():
        mine = drafter.midlayer.state_dict()[name]
        assert not torch.equal(mine[..., -weight.shape[-1] :], weight), name
    assert drafter.fc.weight.abs().max() < 1  # nor does the last tap pass through
