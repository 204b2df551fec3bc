"""The MLP speculator: what it learns is what it decodes, tied and untied, in chains and trees."""

import math
from collections.abc import Callable
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
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.train.losses import nla
from draftsmith.train.score import unrolled as with_heads

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_weights": True},
    "untied": {"tie_weights": False, "inner_dim": 24},
    "scaled": {"scale_input": True, "inner_dim": 40},
}


def new_mlp(
    target: Target, ids: Tensor | None = None, n_predict: int = STEPS, **options: Any
) -> MLPDrafter:
    """With no neutral value anywhere: a skipped norm or shift changes what it says."""
    torch.manual_seed(1)
    drafter = MLPDrafter.from_target(target, MLPConfig(n_predict=n_predict, **options), ids)
    with torch.no_grad():
        for parameter in drafter.trainable():
            parameter += 0.2 * torch.randn_like(parameter)
    return drafter.eval()


def plain(drafter: MLPDrafter, state: Tensor, tokens: list[int]) -> list[Tensor]:
    """Logits of each step by the paper's formula, of weights by name; tied ones by the last."""
    weights, n = drafter.state_dict(), drafter.n_predict
    share = 0.5 ** (0.5 / n)
    mix = math.sqrt(1 - share**2) * math.sqrt(drafter.inner_dim / 2)
    if drafter.scaled:
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / math.sqrt(2)
    found = []
    for i, token in enumerate(tokens):
        at, projected = (0, min(i, 1)) if drafter.tied else (i, i)
        mixed = weights[f"proj.{projected}.weight"] @ state * share
        mixed = (mixed + mix * weights[f"emb.{at}.weight"][token]) / share
        normed = mixed / (mixed.pow(2).mean() + 1e-6).sqrt()
        x = weights[f"ln.{at}.weight"] * normed + weights[f"ln.{at}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        found.append(weights[f"heads.{at}.weight"] @ state)
    return found


@pytest.fixture(scope="module")
def records(tiny_target: Target) -> list[Record]:
    return conversations(tiny_target, (4,))


# ---- parity of training and decoding


@pytest.mark.parametrize("kind", KINDS)
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
    accept: Callable[[int, int], int], kind: str, tiny_target: Target, records: list[Record]
) -> None:
    assert_parity(new_mlp(tiny_target, **KINDS[kind]), records, accept)


def test_parity_for_every_family(any_target: Target) -> None:
    records = conversations(any_target, (any_target.num_layers,))
    assert_parity(new_mlp(any_target, SOME), records, lambda number, row: (number + row) % 4)


@pytest.mark.parametrize("prompts", [(1, 1), (1, 6)])
def test_parity_from_prompts_of_one_token(tiny_target: Target, prompts: tuple[int, int]) -> None:
    records = conversations(tiny_target, (4,), prompts, (6, 5))
    assert_parity(new_mlp(tiny_target), records, lambda number, row: (number + row) % 3)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_say_what_chains_do(kind: str, tiny_target: Target, records: list[Record]) -> None:
    """Tokens of several depths at a time too, each by the weights of its depth."""
    drafter = new_mlp(tiny_target, n_predict=STEPS + 1, **KINDS[kind])
    assert_trees(drafter, records, (3, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows(kind: str, tiny_target: Target) -> None:
    records = conversations(tiny_target, (4,), (4, 6, 3, 1), (6, 1, 3, 8))
    assert_packed(new_mlp(tiny_target, **KINDS[kind]), records)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_the_formula_on_the_round(
    kind: str, tiny_target: Target, records: list[Record]
) -> None:
    """A round that drafts reply token r at step k begins behind token r - k - 1."""
    drafter = new_mlp(tiny_target, SOME, **KINDS[kind])
    for k, step in enumerate(unrolled(drafter, collate(records, ["chat"]))):
        for (row, r), logits in step.items():
            record = records[row]
            last = record.prompt_len + r - 1 - k  # where the last emitted token lies
            tokens = record.ids[last : last + k + 1].tolist()
            expected = plain(drafter, taps_of(record)[last - 1], tokens)[-1]
            assert (logits - expected).abs().max() < TOLERANCE


def test_supervision_covers_replies_and_nothing_else(
    tiny_target: Target, records: list[Record]
) -> None:
    batch = collate(records, ["chat"])
    for k, step in enumerate(new_mlp(tiny_target).unroll(batch, STEPS)):
        assert step.head == k
        found = set(by_token(batch, step, step.hidden))
        assert found == {(0, r) for r in range(1 + k, 12)} | {(1, r) for r in range(1 + k, 7)}
    short = collate(conversations(tiny_target, (4,), (4, 6, 3), (1, 2, 3)), ["chat"])
    steps = new_mlp(tiny_target).unroll(short, STEPS)
    assert [s.token.tolist() for s in steps] == [[2, 4, 5], [5], [], []]


# ---- parameters


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_what_is_trained(
    kind: str, tiny_target: Target, records: list[Record]
) -> None:
    """Through the products of every head, as training takes them."""
    drafter = new_mlp(tiny_target, SOME, **KINDS[kind]).train()
    batch = collate(records, ["chat"])
    p = DraftVocabularyP(tiny_target, SOME, Law(1.0))
    x, heads = with_heads(drafter, p, batch, STEPS, lambda z: z.log_softmax(-1))
    loss = sum(
        nla(x.log_p(x.token[k]), h.logits(x.hidden[k] @ h.weight.T)).sum()
        for k, h in enumerate(heads)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert len(drafter.trainable()) == len(list(drafter.parameters()))
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and (parameter.grad != 0).any(), name


def test_tied_weights_are_held_once(tiny_target: Target) -> None:
    tied = {n for n, _ in new_mlp(tiny_target).named_parameters()}
    words = {"emb.0.weight", "heads.0.weight", "ln.0.weight", "ln.0.bias"}
    assert tied == words | {"proj.0.weight", "proj.1.weight"}
    untied = new_mlp(tiny_target, n_predict=3, tie_weights=False)
    assert len(list(untied.parameters())) == 3 * 5
    alone = MLPDrafter.from_target(tiny_target, MLPConfig(n_predict=1), None)
    assert not alone.tied, "there is nothing to tie"


@pytest.mark.parametrize("init", ["target", "random"])
def test_a_new_one_is_finite_for_every_family(any_target: Target, init: str) -> None:
    torch.manual_seed(0)
    drafter = MLPDrafter.from_target(any_target, MLPConfig(init=init), SOME)
    same = torch.equal(drafter.heads[0].weight, any_target.head.weight[SOME])
    assert same == (init == "target")
    for name, parameter in drafter.named_parameters():
        assert torch.isfinite(parameter).all() and parameter.dtype == torch.float32, name
    words = drafter.emb[0].weight.detach()
    assert float(words.std()) == pytest.approx(32**-0.5, rel=0.15), "as the mix takes it"
    if init == "target":
        theirs = any_target.embedding.detach()
        assert torch.allclose(words, theirs * (words.std() / theirs.std()), rtol=1e-4)
        assert torch.equal(drafter.proj[0].weight, torch.eye(32))
    narrow = MLPDrafter.from_target(any_target, MLPConfig(inner_dim=16), None)
    assert narrow.heads[0].weight.shape == (400, 16)
    with pytest.raises(UserError, match=r"'target' .* 32 wide, and drafter.inner_dim is 16"):
        MLPDrafter.from_target(any_target, MLPConfig(inner_dim=16, init="target"), None)


@pytest.mark.parametrize("options", [{"logit_scale": 0.25}, {"logits_scaling": 4.0}])
def test_a_factor_on_logits_goes_into_the_rows(
    options: dict[str, float], load_tiny: Callable[..., Target]
) -> None:
    target = load_tiny()
    for name, value in options.items():
        setattr(target.text_config, name, value)
    drafter = MLPDrafter.from_target(target, MLPConfig(), None)
    assert torch.equal(drafter.heads[0].weight, target.head.weight / 4)


# ---- options and folders


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_predict": 0}, "n_predict is 0"),
        ({"inner_dim": -1}, "inner_dim is -1"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"tie_weights": True, "n_predict": 1}, "needs drafter.n_predict 2"),
        ({"init": "zeros"}, "init is 'zeros'"),
        ({"init": "target", "start": "x"}, "leave one of them out"),
        ({"domain_floor": -1.0}, "domain_floor"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        MLPConfig(**options)


def test_what_a_recipe_tells_beforehand() -> None:
    assert MLPConfig().most == 3 and MLPConfig(n_predict=5).most == 5
    assert MLPConfig(start="x").most is None
    assert MLPConfig().resolved_taps(30) == (30,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_vocabulary_is_kept_in_a_folder_of_our_own(
    kind: str, tiny_target: Target, records: list[Record], tmp_path: Path
) -> None:
    drafter = new_mlp(tiny_target, SOME, **KINDS[kind])
    assert drafter.layout == "draftsmith"
    assert drafter.unserved == "a reduced draft vocabulary"
    again = load_drafter(save_drafter(drafter, tmp_path / "d", tiny_target, {}), tiny_target)
    assert again.draft_ids is not None and torch.equal(again.draft_ids, SOME)
    assert again.options == drafter.options
    batch = collate(records, ["chat"])
    for one, two in zip(unrolled(drafter, batch), unrolled(again, batch), strict=True):
        assert all(torch.equal(one[at], two[at]) for at in one)
