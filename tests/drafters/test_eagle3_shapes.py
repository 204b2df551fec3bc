"""EAGLE-3 heads of other shapes than the default one, which stays what it always was."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, save_tiny
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from unrolling import (
    STEPS,
    TOLERANCE,
    assert_packed,
    assert_parity,
    assert_trees,
    conversations,
    unrolled,
)

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target, load_target
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter

TAPS = (0, 1, 2)
IDS = torch.tensor(sorted([0, 1, 2, *random.Random(0).sample(range(3, 400), 57)]))

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES: dict[str, dict[str, Any]] = {
    "three layers": {"layers": 3},
    "narrower": {"hidden_size": 24, "train_embedding": True},
    "wider": {"hidden_size": 48, "intermediate_size": 40},
    "normed residual": {"norm_before_residual": True},
    "one norm before": {"norm_before_fc": True},
    "a norm each": {"fc_norm": True, "hidden_size": 24},
    "normed output": {"norm_output": True},
    "two factors": {"head_rank": 8},
    "all of it": {
        "hidden_size": 24,
        "layers": 2,
        "head_rank": 6,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
    },
}

NAMES = [
    "fc.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "norm.weight",
    "lm_head.weight",
    "embed_tokens.weight",
]
NOTED = [487.509502, 326.262223, 929.416242, 1095.800173, 1175.477681, -182.911926, 4237.826751]


def new_head(target: Target, **options: Any) -> Eagle3Drafter:
    """A head with no neutral value anywhere: a skipped norm or map changes its output."""
    torch.manual_seed(1)
    ids = None if "head_rank" in options else IDS
    config = Eagle3Config(TAPS, None if ids is None else len(ids), init="random", **options)
    drafter = Eagle3Drafter.from_target(target, config, ids)
    for parameter in drafter.trainable():
        parameter.data += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return drafter.eval()


@pytest.fixture(scope="module", params=SHAPES)
def head(request: pytest.FixtureRequest, tiny_target: Target) -> Eagle3Drafter:
    return new_head(tiny_target, **SHAPES[request.param])


@pytest.fixture(scope="module")
def records(tiny_target: Target) -> list[Record]:
    return conversations(tiny_target, TAPS)


# ---- parity of training and decoding


@pytest.mark.parametrize(
    "accept",
    [
        lambda number, row: STEPS,
        lambda number, row: (number + row) % (STEPS + 1),
        lambda number, row: (3 * number + 2 * row + 2) % (STEPS + 1),
    ],
    ids=["all", "mixed", "mixed again"],
)
def test_parity(
    head: Eagle3Drafter, records: list[Record], accept: Callable[[int, int], int]
) -> None:
    assert_parity(head, records, accept)


def test_trees_and_packed_rows(head: Eagle3Drafter, records: list[Record]) -> None:
    assert_trees(head, records, (3, 2))
    assert_packed(head, records)


def test_computed_again_it_is_the_same(head: Eagle3Drafter, records: list[Record]) -> None:
    batch = collate(records, ["chat"])
    grads = []
    for again in (False, True):
        head.train()
        head.checkpoint(again)
        loss = sum(head.head(s.hidden).log_softmax(-1)[:, 3].sum() for s in head.unroll(batch, 3))
        assert isinstance(loss, Tensor)
        grads.append(torch.autograd.grad(loss, head.trainable()))
        head.checkpoint(False)
        head.eval()
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", ["llama-padded", "qwen3", "gemma2", "gpt2", "gpt_neox"])
def test_targets_of_other_kinds(
    family: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Any
) -> None:
    save_tiny(FAMILIES[family](), tiny_tokenizer, tmp_path)
    target = load_target(TargetSection(name=str(tmp_path), device="cpu"), few_rows=False)
    torch.manual_seed(1)
    for options in ({"layers": 2}, {"hidden_size": 24, "head_rank": 5}, {"head_rank": 8}):
        ids = None if "head_rank" in options else IDS
        config = Eagle3Config(TAPS, None if ids is None else len(ids), **options)
        drafter = Eagle3Drafter.from_target(target, config, ids).eval()
        assert all(torch.isfinite(p).all() for p in drafter.parameters())
        made = conversations(target, TAPS, (4, 7), (6, 5))
        assert_parity(drafter, made, lambda number, row: (number + row) % 3)


# ---- parameters


def test_gradients_reach_what_is_trained(head: Eagle3Drafter, records: list[Record]) -> None:
    batch = collate(records, ["chat"])
    head.train()
    loss = sum(head.head(s.hidden).log_softmax(-1)[:, 3].sum() for s in head.unroll(batch, 3))
    assert isinstance(loss, Tensor)
    head.zero_grad()
    loss.backward()
    trained = {id(p) for p in head.trainable()}
    for name, parameter in head.named_parameters():
        if id(parameter) in trained:
            assert parameter.grad is not None, name
            assert (parameter.grad != 0).any(), name
        else:
            assert name == "embed_tokens.weight" and parameter.grad is None
    assert head.shared == (("embed_tokens.weight",) if head.config.hidden_size == 32 else ())
    head.zero_grad()
    head.eval()


def test_the_targets_rows_may_stay(tiny_target: Target) -> None:
    drafter = new_head(tiny_target, train_head=False)
    assert not drafter.lm_head.weight.requires_grad
    assert torch.equal(drafter.lm_head.weight, tiny_target.head.weight[IDS])
    assert all(p is not drafter.lm_head.weight for p in drafter.trainable())


def test_later_layers_add_nothing_at_first(tiny_target: Target, records: list[Record]) -> None:
    batch = collate(records, ["chat"])
    found = []
    for layers in (1, 3):
        torch.manual_seed(1)
        config = Eagle3Config(TAPS, len(IDS), layers=layers)
        found.append(Eagle3Drafter.from_target(tiny_target, config, IDS).eval())
    weights = found[0].state_dict()
    found[1].load_state_dict(weights, strict=False)
    for one, other in zip(*(unrolled(d, batch) for d in found), strict=True):
        assert all(torch.equal(one[at], other[at]) for at in one)
    assert all((p != 0).any() for p in found[1].later[0].self_attn.q_proj.parameters())


def test_another_width_begins_as_the_target_in_fewer_directions(tiny_target: Target) -> None:
    drafter = new_head(tiny_target, hidden_size=24)
    rows = tiny_target.embedding.detach()  # [V, 32]
    left, values, _ = torch.linalg.svd(rows, full_matrices=False)
    nearest = left[:, :24] * values[:24]  # of that rank, Eckart and Young
    mine = drafter.embed_tokens.weight
    assert (mine @ mine.T - nearest @ nearest.T).abs().max() < 1e-3
    wide = new_head(tiny_target, hidden_size=48)
    assert torch.equal(wide.embed_tokens.weight[:, :32], rows)
    assert not wide.embed_tokens.weight[:, 32:].any()
    assert (drafter.config.num_attention_heads, drafter.config.num_key_value_heads) == (4, 2)
    assert drafter.config.intermediate_size == 36


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden_size": 24, "train_head": False}, "24 wide cannot keep the target's rows"),
        ({"train_embedding": True}, "train_embedding is for a head with an embedding of its own"),
        ({"hidden_size": 32, "train_embedding": True}, "train_embedding"),
        ({"hidden_size": 25}, "hidden_size 25 must be a multiple of 2"),
        ({"head_rank": 8, "draft_vocab_size": 60}, "leave one of them out"),
        ({"head_rank": 8, "train_head": False}, "train_head cannot be off"),
        ({"head_rank": 33}, "head_rank 33 is more than the head's width 32"),
        ({"head_rank": 25, "hidden_size": 24}, "head_rank 25 is more than the head's width 24"),
        ({"layers": 0}, "layers is 0, must be above 0"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    ],
)
def test_what_is_refused(tiny_target: Target, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Eagle3Drafter.from_target(tiny_target, Eagle3Config(**options), IDS)


# ---- the default head


def test_the_default_head_is_what_it_was(tiny_target: Target) -> None:
    """Sums of its first weights, states and gradients, noted before it had any other shape."""
    torch.manual_seed(1)
    drafter = Eagle3Drafter.from_target(tiny_target, Eagle3Config(TAPS, 60, init="random"), IDS)
    generator = torch.Generator().manual_seed(3)
    batch = TrainBatch(
        ids=torch.randint(0, 400, (2, 14), generator=generator),
        row=torch.tensor([0, 1]),
        begin=torch.tensor([0, 0]),
        lengths=torch.tensor([14, 11]),
        prompt_lens=torch.tensor([4, 5]),
        taps=torch.randn(2, 13, 96, generator=generator),
        domain=torch.zeros(16, dtype=torch.long),
        first=torch.tensor([0, 10]),
    )
    steps = drafter.unroll(batch, 3)
    loss = sum(drafter.head(s.hidden).log_softmax(-1)[:, 3].sum() for s in steps)
    assert isinstance(loss, Tensor)
    loss.backward()
    names = [name for name, _ in drafter.named_parameters()]
    assert names == NAMES, "optimisers of unfinished runs keep their moments in this order"
    found = [
        float(drafter.fc.weight.detach().double().abs().sum()),
        float(drafter.midlayer.self_attn.q_proj.weight.detach().double().abs().sum()),
        *(float(s.hidden.detach().double().abs().sum()) for s in steps),
        float(loss.detach()),
        float(drafter.fc.weight.grad.double().abs().sum()),  # type: ignore[union-attr]
    ]
    torch.testing.assert_close(found, NOTED, rtol=TOLERANCE, atol=0.0)
