"""Jump drafting: training says what decoding will, the target's layers are run and left alone."""

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, save_tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast
from unrolling import (
    STEPS,
    TOLERANCE,
    Decoding,
    assert_packed,
    assert_parity,
    assert_trees,
    by_token,
    conversations,
    taps_of,
    unrolled,
)

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data import linear
from draftsmith.data.cache import SlabCache
from draftsmith.data.records import Record
from draftsmith.data.target import Target, load_target
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.jump import JumpConfig, JumpDrafter

IDS = torch.tensor(sorted([0, 1, 2, *random.Random(0).sample(range(3, 400), 57)]))


def new_drafter(target: Target, **options: Any) -> JumpDrafter:
    """With no neutral value anywhere: a skipped norm or map changes its output."""
    torch.manual_seed(1)
    config = JumpConfig(**{"begin": 1, "draft_vocab_size": len(IDS), **options})
    drafter = JumpDrafter.from_target(target, config, IDS)
    for parameter in drafter.trainable():
        parameter.data += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return drafter.eval()


@pytest.fixture(scope="module")
def drafter(tiny_target: Target) -> JumpDrafter:
    return new_drafter(tiny_target)


@pytest.fixture(scope="module")
def records(tiny_target: Target, drafter: JumpDrafter) -> list[Record]:
    return conversations(tiny_target, drafter.taps)


@pytest.fixture(scope="module")
def batch(records: list[Record]) -> TrainBatch:
    return collate(records, ["chat"])


# ---- parity of training and decoding


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
    drafter: JumpDrafter, records: list[Record], accept: Callable[[int, int], int]
) -> None:
    assert_parity(drafter, records, accept)


def test_trees_say_what_their_paths_do(drafter: JumpDrafter, records: list[Record]) -> None:
    assert_trees(drafter, records, [3, 2])


def test_packed_rows(tiny_target: Target, drafter: JumpDrafter) -> None:
    three = conversations(tiny_target, drafter.taps, (5, 9, 3), (12, 7, 6))
    assert_packed(drafter, three)


@pytest.mark.parametrize(
    "options",
    [{"begin": 0, "end": 2}, {"begin": 2, "layers": 2, "hidden": 24}, {"layers": 0}],
    ids=["ends early", "two blocks", "no block"],
)
def test_parity_of_other_shapes(options: dict[str, Any], tiny_target: Target) -> None:
    drafter = new_drafter(tiny_target, **options)
    three = conversations(tiny_target, drafter.taps)
    assert_parity(drafter, three, lambda number, row: (number + row) % 4)


@pytest.mark.parametrize("prompts", [(1, 1), (1, 6)])
def test_parity_from_prompts_of_one_token(
    tiny_target: Target, drafter: JumpDrafter, prompts: tuple[int, int]
) -> None:
    records = conversations(tiny_target, drafter.taps, prompts, (6, 5))
    assert_parity(drafter, records, lambda number, row: (number + row) % 3)


REFUSED = {"gpt2", "opt"}  # positions are added to what their bodies are given


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parity_for_every_family(
    family: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: Any
) -> None:
    """Rotations, windows, soft caps and experts are the target's own in both passes."""
    folder = tmp_path_factory.mktemp(family)
    save_tiny(FAMILIES[family](), tiny_tokenizer, folder)
    target = load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)
    if family in REFUSED:
        with pytest.raises(UserError, match=rf"\({family}\) cannot be run apart .*; take a family"):
            new_drafter(target)
        return
    drafter = new_drafter(target)
    records = conversations(target, drafter.taps)
    assert_parity(drafter, records, lambda number, row: (number + row) % 4)
    assert_trees(drafter, records, [3, 2])
    assert_packed(drafter, records)


# ---- what it computes


def guessed(tensors: dict[str, Tensor], late: Tensor, embedding: Tensor) -> Tensor:
    """The predictor by its definition, of tensors by their names."""

    def rms(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors[f"{name}.weight"]

    both = torch.cat([rms(late, "late_norm"), rms(embedding, "token_norm")], -1)
    x = both @ tensors["fc.weight"].T
    y = rms(x, "blocks.0.norm")
    gate, up = (y @ tensors[f"blocks.0.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ tensors["blocks.0.down_proj.weight"].T


def test_it_is_what_the_target_says_of_the_guessed_state(
    tiny_target: Target, drafter: JumpDrafter, records: list[Record]
) -> None:
    """One forward of the target as it is, its layer's output exchanged at the last token."""
    record, n = records[0], records[0].prompt_len + 4
    begin, late = taps_of(record).chunk(2, -1)  # [T-1, h] each
    expected = unrolled(drafter, collate([record], ["chat"]), 1)[0][0, 5]
    tensors = {name: p.detach() for name, p in drafter.named_parameters()}
    guess = guessed(tensors, late[n - 1], tiny_target.embedding[record.ids[n]])

    def exchange(module: Any, args: Any, output: Tensor) -> Tensor:
        assert (output[0, :n] - begin[:n]).abs().max() < 1e-4
        return torch.cat([output[:, :n], guess[None, None]], 1)

    found: list[Tensor] = []
    hooks = [
        tiny_target.layers[1].register_forward_hook(exchange),
        tiny_target.layers[3].register_forward_hook(lambda m, a, out: found.append(out[0, -1])),
    ]
    with torch.no_grad():
        tiny_target.model(input_ids=record.ids[None, : n + 1], use_cache=False)
    for hook in hooks:
        hook.remove()
    rms = found[0] * (found[0].pow(2).mean() + 1e-5).rsqrt() * tensors["norm.weight"]
    assert (tiny_target.head.weight[IDS] @ rms - expected).abs().max() < TOLERANCE


def test_a_right_guess_is_what_the_target_says(tiny_target: Target, records: list[Record]) -> None:
    """With the state that layer 1 really has, the draft is the target's own law."""
    drafter = JumpDrafter.from_target(tiny_target, JumpConfig(begin=1), IDS).eval()
    record, r = records[0], 6
    n = record.prompt_len + r - 1
    true = taps_of(record)[n, :32]
    drafter._guess = lambda late, tokens: true.expand_as(late)  # type: ignore[method-assign]
    said = unrolled(drafter, collate([record], ["chat"]), 1)[0][0, r]
    cache = tiny_target.new_cache(1, 40)
    with torch.no_grad():
        states = tiny_target.forward(record.ids[None, : n + 1], cache).hidden
        assert (tiny_target.logits(states[0, -1])[IDS] - said).abs().max() < TOLERANCE


def test_first_is_one_pass_over_what_is_new(
    drafter: JumpDrafter, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    behind = drafter.span.behind

    def counted(cache: SlabCache, states: Tensor) -> Tensor:
        widths.append(states.shape[1])
        return behind(cache, states)

    monkeypatch.setattr(drafter.span, "behind", counted)
    run = Decoding(drafter, records[:1])
    run.emit([1])
    run.draft([2])
    run.emit([3])
    run.draft([0])
    prompt = records[0].prompt_len
    # Two columns of padding each: what is committed is wider than it counts.
    assert widths == [prompt - 1, 1 + 2, 1, 1, 1, 3 + 2, 1, 1, 1]


def test_rows_and_padding_do_not_touch_each_other(
    drafter: JumpDrafter, records: list[Record], batch: TrainBatch
) -> None:
    together = unrolled(drafter, batch)
    for row, record in enumerate(records):
        alone = unrolled(drafter, collate([record], ["chat"]))
        for step, own in zip(together, alone, strict=True):
            assert {r for place, r in step if place == row} == {r for _, r in own}
            for (_, r), logits in own.items():
                assert (step[row, r] - logits).abs().max() < 1e-5


def test_a_prediction_reads_only_what_decoding_knows(
    drafter: JumpDrafter, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step k of token r began its round at r - k: later states of the target are unknown then."""
    monkeypatch.setattr(JumpDrafter, "_known", JumpDrafter._known.__wrapped__)  # with gradients
    record = records[0]
    batch = collate([record], ["chat"])
    taps = batch.taps.clone().requires_grad_()
    for k, step in enumerate(drafter.unroll(dataclasses.replace(batch, taps=taps), STEPS)):
        for n, r in enumerate(step.token.tolist()):
            (grad,) = torch.autograd.grad(step.hidden[n].sum(), taps, retain_graph=True)
            begin, late = (
                g.abs().sum(-1).nonzero().flatten().tolist() for g in grad[0].chunk(2, -1)
            )
            last = record.prompt_len + r - 2 - k  # the state before the round's first known word
            assert begin == list(range(last + 1))
            assert late == [last]


def test_supervision_covers_replies_and_nothing_else(
    drafter: JumpDrafter, batch: TrainBatch
) -> None:
    for k, step in enumerate(drafter.unroll(batch, STEPS)):
        assert step.hidden.shape == (len(step.token), 32)
        found = set(by_token(batch, step, step.hidden))
        assert found == {(0, r) for r in range(1 + k, 12)} | {(1, r) for r in range(1 + k, 7)}


# ---- parameters


@pytest.mark.parametrize("train_head", [False, True])
def test_gradients_reach_what_is_trained(
    train_head: bool, tiny_target: Target, batch: TrainBatch
) -> None:
    """Through layers that are as they were, and get none themselves."""
    drafter = new_drafter(tiny_target, train_head=train_head).train()
    before = copy.deepcopy(tiny_target.model.state_dict())
    loss = sum(drafter.head(s.hidden).log_softmax(-1)[:, 3].sum() for s in drafter.unroll(batch, 3))
    assert isinstance(loss, Tensor)
    loss.backward()
    trained = {id(p) for p in drafter.trainable()}
    assert drafter.shared == (() if train_head else ("lm_head.weight",))
    for name, parameter in drafter.named_parameters():
        if name in drafter.shared:
            assert id(parameter) not in trained and parameter.grad is None
            continue
        assert id(parameter) in trained
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all()
        assert (parameter.grad.abs().sum(-1) > 0).any(), name
    assert all(p.grad is None for p in tiny_target.model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in tiny_target.model.state_dict().items())


@pytest.mark.parametrize("form", linear.FORMS)
def test_gradients_pass_layers_that_are_made_for_few_rows(
    batch: TrainBatch, load_tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Products with packed weights, which decoding may be fastest with, have no gradients."""
    monkeypatch.setattr(
        linear, "measured_forms", lambda *size: [(form, rows) for rows in linear.COUNTS]
    )
    target = load_tiny()
    for plain in (True, False):
        if not plain:
            linear.speed_up_few_rows(target.model)
        drafter = new_drafter(target)
        loss = sum(s.hidden.sum() for s in drafter.unroll(batch, 3))
        assert isinstance(loss, Tensor)
        loss.backward()
        assert drafter.fc.weight.grad is not None
        if plain:
            expected = drafter.fc.weight.grad
    torch.testing.assert_close(drafter.fc.weight.grad, expected, rtol=1e-4, atol=1e-4)


def test_layers_are_borrowed(tiny_target: Target, batch: TrainBatch) -> None:
    """They are no part of the drafter: not saved, not copied, not moved, not put in training."""
    drafter = new_drafter(tiny_target)
    names = {name.split(".")[0] for name in drafter.state_dict()}
    assert names == {"late_norm", "token_norm", "fc", "blocks", "norm", "lm_head"}
    twin = copy.deepcopy(drafter)
    assert twin.span is drafter.span
    twin.double().train()
    assert tiny_target.dtype == torch.float32 and not tiny_target.model.training
    assert drafter.fc.weight.dtype == torch.float32
    with torch.no_grad():
        kept, found = (d.unroll(batch, 1)[0].hidden for d in (drafter, twin))
    assert (kept - found).abs().max() < 1e-4


def test_what_it_begins_with(tiny_target: Target) -> None:
    drafter = JumpDrafter.from_target(tiny_target, JumpConfig(), IDS)
    assert drafter.taps == (0, 3)
    assert torch.equal(drafter.lm_head.weight, tiny_target.head.weight[IDS])
    norm: Any = tiny_target.body.norm
    assert torch.equal(drafter.norm.weight, norm.weight) and drafter.norm.weight is not norm.weight
    late, tokens = torch.randn(2, 32) * 50, torch.tensor([5, 8])
    with torch.no_grad():
        linear_part = drafter.fc(
            torch.cat([drafter.late_norm(late), drafter.token_norm(drafter.span.embed(tokens))], -1)
        )
        assert torch.equal(drafter._guess(late, tokens), linear_part)  # blocks add nothing yet
    assert drafter.options == {
        "begin": 0, "end": 3, "layers": 1, "hidden": 48, "draft_vocab_size": len(IDS),
        "train_head": False,
    }  # fmt: skip


def test_options() -> None:
    assert JumpConfig().resolved_taps(30) == (24, 29)
    assert JumpConfig(begin=3).resolved_taps(30) == (3, 29)
    assert JumpConfig(begin=3, end=9).resolved_taps(30) == (3, 9)
    assert JumpConfig().vocab_size == 8192
    for options in ({"begin": 29}, {"begin": -1}, {"end": 30}, {"begin": 9, "end": 9}):
        with pytest.raises(UserError, match=r"drafter.begin .* and drafter.end .* 0 to 29"):
            JumpConfig(**options).resolved_taps(30)
    for name in ("layers", "hidden", "draft_vocab_size"):
        with pytest.raises(UserError, match=rf"drafter.{name} is -1"):
            JumpConfig(**{name: -1})
