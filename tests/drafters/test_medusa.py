"""Medusa: every head says in training what it says in decoding, whatever was drafted between."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unrolling import (
    STEPS,
    TOLERANCE,
    assert_packed,
    assert_parity,
    assert_trees,
    by_token,
    conversations,
    taps_of,
    unrolled,
)

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.train.losses import nla
from draftsmith.train.score import unrolled as with_heads

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])


def new_heads(
    target: Target, ids: Tensor | None = None, num_heads: int = STEPS, **options: Any
) -> MedusaDrafter:
    """Heads of two blocks with no neutral value anywhere."""
    torch.manual_seed(1)
    config = MedusaConfig(num_heads=num_heads, num_layers=2, **options)
    drafter = MedusaDrafter.from_target(target, config, ids)
    with torch.no_grad():
        for parameter in drafter.trainable():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter.eval()


def plain(drafter: MedusaDrafter, which: int, state: Tensor) -> Tensor:
    """A head's logits by the paper's formula, of its weights by name."""
    weights = drafter.state_dict()
    for layer in range(2):
        name = f"blocks.{which}.layers.{layer}"
        z = weights[f"{name}.weight"] @ state + weights[f"{name}.bias"]
        state = state + z / (1 + (-z).exp())
    return weights[f"lm_heads.{0 if drafter.shared_head else which}.weight"] @ state


@pytest.fixture(scope="module")
def records(tiny_target: Target) -> list[Record]:
    return conversations(tiny_target, (4,))


# ---- parity of training and decoding


@pytest.mark.parametrize(
    "options", [{}, {"shared_head": True}, {"ids": SOME}], ids=["own", "shared", "reduced"]
)
@pytest.mark.parametrize(
    "accept",
    [
        lambda number, row: 0,
        lambda number, row: STEPS,
        lambda number, row: (3 * number + 2 * row + 2) % (STEPS + 1),
    ],
    ids=["none", "all", "mixed"],
)
def test_parity_after_rounds_of_any_acceptance(
    accept: Callable[[int, int], int],
    options: dict[str, Any],
    tiny_target: Target,
    records: list[Record],
) -> None:
    assert_parity(new_heads(tiny_target, **options), records, accept)


def test_parity_for_every_family(any_target: Target) -> None:
    records = conversations(any_target, (any_target.num_layers,))
    assert_parity(new_heads(any_target), records, lambda number, row: (number + row) % 4)


@pytest.mark.parametrize("prompts", [(1, 1), (1, 6)])
def test_parity_from_prompts_of_one_token(tiny_target: Target, prompts: tuple[int, int]) -> None:
    records = conversations(tiny_target, (4,), prompts, (6, 5))
    assert_parity(new_heads(tiny_target), records, lambda number, row: (number + row) % 3)


def test_trees_say_what_chains_do(tiny_target: Target, records: list[Record]) -> None:
    """At every depth its own head, whatever token lies there."""
    drafter = new_heads(tiny_target, num_heads=STEPS + 1)
    assert_trees(drafter, records, (3, 2), reads_drafts=False)


def test_packed_rows(tiny_target: Target) -> None:
    records = conversations(tiny_target, (4,), (4, 6, 3, 1), (6, 1, 3, 8))
    assert_packed(new_heads(tiny_target), records)


def test_every_step_is_the_formula_on_the_state_before_the_round(
    tiny_target: Target, records: list[Record]
) -> None:
    """Step k of reply token r reads the state where token r - k - 1 was decided: two behind it."""
    drafter = new_heads(tiny_target, SOME)
    found = unrolled(drafter, collate(records, ["chat"]))
    for k, step in enumerate(found):
        for (row, r), logits in step.items():
            state = taps_of(records[row])[records[row].prompt_len + r - 2 - k]
            assert (logits - plain(drafter, k, state)).abs().max() < TOLERANCE
    heads = [torch.stack([step[0, r] for r in range(4, 9)]) for step in found]
    assert all((one - two).abs().max() > 0.1 for one, two in pairwise(heads))


def test_supervision_covers_replies_and_nothing_else(
    tiny_target: Target, records: list[Record]
) -> None:
    batch = collate(records, ["chat"])
    for k, step in enumerate(new_heads(tiny_target).unroll(batch, STEPS)):
        assert step.head == k
        found = set(by_token(batch, step, step.hidden))
        assert found == {(0, r) for r in range(1 + k, 12)} | {(1, r) for r in range(1 + k, 7)}
    short = collate(conversations(tiny_target, (4,), (4, 6, 3), (1, 2, 3)), ["chat"])
    steps = new_heads(tiny_target).unroll(short, STEPS)
    assert [s.token.tolist() for s in steps] == [[2, 4, 5], [5], [], []]


def test_a_head_is_asked_once_a_round(tiny_target: Target, records: list[Record]) -> None:
    """However many tokens of a tree lie at its depth."""
    drafter = new_heads(tiny_target)
    asked: list[int] = []
    for number, head in enumerate(drafter.lm_heads):
        head.register_forward_hook(lambda *_, number=number: asked.append(number))
    state = drafter.start(1, 40)
    first, second = torch.tensor([[5, 6]]), torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        for _ in range(2):
            drafter.commit(state, torch.tensor([[3]]), [1], taps_of(records[0])[None, :1])
            drafter.first(state)
            drafter.extend(state, first, torch.tensor([[-1, -1]]))
            drafter.extend(state, second, torch.tensor([[-1, 0, 1]]))
    assert asked == [0, 1, 2] * 2


# ---- parameters


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_reach_what_is_trained(
    frozen: bool, tiny_target: Target, records: list[Record]
) -> None:
    """Through the products of every head, as training takes them."""
    drafter = new_heads(tiny_target, SOME, shared_head=frozen, train_head=not frozen).train()
    batch = collate(records, ["chat"])
    p = DraftVocabularyP(tiny_target, SOME, Law(1.0))
    x, heads = with_heads(drafter, p, batch, STEPS, lambda z: z.log_softmax(-1))
    loss = sum(
        nla(x.log_p(x.token[k]), h.logits(x.hidden[k] @ h.weight.T)).sum()
        for k, h in enumerate(heads)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    trained = {id(p) for p in drafter.trainable()}
    for name, parameter in drafter.named_parameters():
        if frozen and name.startswith("lm_heads"):
            assert id(parameter) not in trained and parameter.grad is None
        else:
            assert id(parameter) in trained
            assert parameter.grad is not None and (parameter.grad != 0).any(), name
    assert sum(n.startswith("lm_heads") for n, _ in drafter.named_parameters()) == (
        1 if frozen else STEPS
    )


@pytest.mark.parametrize("ids", [None, SOME], ids=["all", "reduced"])
def test_new_heads_are_the_targets_own(any_target: Target, ids: Tensor | None) -> None:
    """But for a soft cap, which engines leave out, and which moves no token before another."""
    drafter = MedusaDrafter.from_target(any_target, MedusaConfig(), ids)
    states = torch.randn(5, any_target.hidden_size)
    own = any_target.logits(states)
    own = own if ids is None else own[:, ids]
    cap = getattr(any_target.text_config, "final_logit_softcapping", None)
    for k in range(3):
        logits = drafter.head(drafter.blocks[k](states), k)
        if cap is None:
            assert (logits - own).abs().max() < TOLERANCE
        else:
            assert torch.equal(logits.argmax(-1), own.argmax(-1))
            assert (torch.tanh(logits / cap) * cap - own).abs().max() < TOLERANCE


@pytest.mark.parametrize("options", [{"logit_scale": 0.25}, {"logits_scaling": 4.0}])
def test_a_factor_on_logits_goes_into_the_rows(
    options: dict[str, float], load_tiny: Callable[..., Target]
) -> None:
    target = load_tiny()
    for name, value in options.items():
        setattr(target.text_config, name, value)
    drafter = MedusaDrafter.from_target(target, MedusaConfig(), None)
    states = torch.randn(5, 32)
    assert (drafter.head(states) - target.logits(states)).abs().max() < TOLERANCE
    assert (drafter.head(states) - states @ target.head.weight.T / 4).abs().max() < TOLERANCE


def test_a_frozen_head_stays_frozen(tiny_target: Target, tmp_path: Path) -> None:
    drafter = new_heads(tiny_target, shared_head=True, train_head=False)
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    again = load_drafter(folder, tiny_target)
    assert again.options == drafter.options
    assert len(again.trainable()) == len(drafter.trainable()) == 2 * 2 * STEPS
    assert torch.equal(again.head_rows()[0], tiny_target.head.weight)  # engines share none


# ---- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"train_head": False}, "say drafter.shared_head true"),
        ({"domain_floor": 2.0}, "domain_floor"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        MedusaConfig(**options)


def test_what_a_recipe_tells_beforehand() -> None:
    assert MedusaConfig().most == 3 and MedusaConfig(num_heads=5).most == 5
    assert MedusaConfig(start="x").most is None
    assert MedusaConfig().resolved_taps(30) == (30,)
