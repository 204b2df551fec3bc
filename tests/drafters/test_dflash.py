"""DFlash: training computes what decoding will, and a place sees what it may."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, save_tiny
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from unrolling import (
    STEPS,
    TOLERANCE,
    Decoding,
    assert_packed,
    assert_parity,
    by_token,
    conversations,
    taps_of,
    unrolled,
)

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target, load_target
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_begin import free_token
from draftsmith.drafters.dflash_config import DFlashConfig

TAPS = (0, 1, 2)
SIZE = 6  # a tree of four levels below the committed text has a fifth behind it
SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])

pytestmark = pytest.mark.usefixtures("one_thread")


def new_drafter(target: Target, ids: Tensor | None = None, **options: object) -> DFlashDrafter:
    """With no neutral value anywhere: a skipped norm or map changes what it says."""
    torch.manual_seed(1)
    said = {"layers": 2, "block_size": SIZE, "taps": TAPS, "init": "random", **options}
    drafter = DFlashDrafter.from_target(target, DFlashConfig(**said), ids)
    for parameter in drafter.trainable():
        parameter.data += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return drafter.eval()


KINDS: dict[str, Callable[[Target], DFlashDrafter]] = {
    "plain": new_drafter,
    "sequential": lambda target: new_drafter(target, sequential=True),
    "reduced": lambda target: new_drafter(target, SOME, draft_vocab_size=len(SOME)),
}


@pytest.fixture(scope="module", params=KINDS)
def drafter(request: pytest.FixtureRequest, tiny_target: Target) -> DFlashDrafter:
    return KINDS[request.param](tiny_target)


@pytest.fixture(scope="module")
def records(tiny_target: Target) -> list[Record]:
    return conversations(tiny_target, TAPS)


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
    drafter: DFlashDrafter, records: list[Record], accept: Callable[[int, int], int]
) -> None:
    assert_parity(drafter, records, accept)


@pytest.mark.parametrize("prompts", [(1, 1), (1, 6)])
def test_parity_from_prompts_of_one_token(
    drafter: DFlashDrafter, tiny_target: Target, prompts: tuple[int, int]
) -> None:
    records = conversations(tiny_target, TAPS, prompts, (6, 5))
    assert_parity(drafter, records, lambda number, row: (number + row) % 3)


@pytest.mark.parametrize("family", ["llama-padded", "qwen3", "gemma2", "gpt2", "phi", "mixtral"])
def test_parity_for_targets_of_other_families(
    family: str,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Head sizes, soft caps and biases of the target's head, in both passes."""
    folder = save_tiny(FAMILIES[family](), tiny_tokenizer, tmp_path_factory.mktemp(family))
    target = load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)
    records = conversations(target, TAPS)
    for init in ("random", None):
        drafter = DFlashDrafter.from_target(target, DFlashConfig(taps=TAPS, init=init)).eval()
        assert_parity(drafter, records, lambda number, row: (number + row) % 4, 3)
    state = torch.randn(5, 32)
    with torch.no_grad():  # the head is the target's, whatever it does to its output
        mine = drafter.head(state)[:, : target.vocab_size]
        assert (mine - target.logits(drafter.norm(state))).abs().max() < 1e-5
    assert torch.equal(drafter.embed_tokens.weight, target.embedding)
    assert drafter.unserved == ("the bias of the target's head" if family == "phi" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind: str, tiny_target: Target, records: list[Record]) -> None:
    """A node is followed by the place of its depth, corrected by its token alone.

    Whatever is fed together, of whichever depths: what a chain of other tokens says there.
    """
    drafter = KINDS[kind](tiny_target)

    def begun() -> Decoding:
        run = Decoding(drafter, records)
        run.emit([2, 1])
        return run

    parents = torch.tensor([[-1, -1], [0, 1], [-1, 3], [4, 2]])
    depths = [[1, 1], [2, 2], [1, 3], [2, 3]]
    with torch.no_grad():
        run = begun()
        drafter.first(run.state)
        for above, deep in zip(parents, depths, strict=True):
            tokens = torch.randint(3, 400, (2, 2))
            found = drafter.extend(run.state, tokens, above.expand(2, -1))
            for node, depth in enumerate(deep):
                chain = begun()
                drafter.first(chain.state)
                for _ in range(depth - 1):
                    drafter.extend(chain.state, torch.full((2, 1), 11))
                said = drafter.extend(chain.state, tokens[:, node, None])[:, 0]
                assert (found[:, node] - said).abs().max() < 1e-5


def test_packed_rows(drafter: DFlashDrafter, tiny_target: Target) -> None:
    assert_packed(drafter, conversations(tiny_target, TAPS, (5, 9, 1, 3), (12, 7, 4, 1)))


def test_more_blocks_than_are_computed_at_a_time(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, batch: TrainBatch
) -> None:
    drafter = new_drafter(tiny_target)
    whole = unrolled(drafter, batch)
    monkeypatch.setattr("draftsmith.drafters.dflash_layer.PLACES", 3 * SIZE)
    for one, other in zip(whole, unrolled(drafter, batch), strict=True):
        assert all((one[at] - other[at]).abs().max() < 1e-5 for at in one)


def test_a_target_in_low_precision(drafter: DFlashDrafter, records: list[Record]) -> None:
    """States arrive in the target's dtype, whatever that of the drafter."""
    one, n = records[0], records[0].prompt_len
    half = taps_of(one)[None].bfloat16()
    with torch.no_grad():
        state = drafter.start(1, 32)
        drafter.prefill(state, one.ids[None, :n], [n], half[:, :n])
        drafter.commit(state, one.ids[None, n : n + 1], [1], half[:, n - 1 : n])
        assert drafter.first(state).dtype == torch.float32


# ---- what a place sees


def test_a_prediction_reads_only_what_decoding_knows(
    drafter: DFlashDrafter, records: list[Record]
) -> None:
    """Step k of token r began its round behind r - k - 1: states of the tokens before that one."""
    record = records[0]
    batch = collate([record], ["chat"])
    taps = batch.taps.clone().requires_grad_()
    steps = drafter.unroll(dataclasses.replace(batch, taps=taps), STEPS)
    for k, step in enumerate(steps):
        for n, r in enumerate(step.token.tolist()):
            (grad,) = torch.autograd.grad(step.hidden[n].sum(), taps, retain_graph=True)
            used = grad[0].abs().sum(-1).nonzero().flatten().tolist()
            assert used == list(range(record.prompt_len + r - k - 1))


@pytest.mark.parametrize("kind", ["plain", "sequential"])
def test_which_tokens_a_step_knows(
    kind: str, tiny_target: Target, batch: TrainBatch, records: list[Record]
) -> None:
    """The one its round began behind, and the one before its place if places are corrected."""
    drafter = KINDS[kind](tiny_target)
    before = unrolled(drafter, batch)
    at, prompt = 6, records[0].prompt_len  # reply token 6 of the first conversation
    ids = batch.ids.clone()
    ids[0, prompt + at] = 3 + (ids[0, prompt + at] - 2) % 397
    after = unrolled(drafter, dataclasses.replace(batch, ids=ids))
    for k, (one, other) in enumerate(zip(before, after, strict=True)):
        moved = {r for b, r in one if (one[b, r] - other[b, r]).abs().max() > TOLERANCE}
        assert moved == ({at + 1 + k} | ({at + 1} if kind == "sequential" else set())), k


def test_supervision_covers_replies_and_nothing_else(
    drafter: DFlashDrafter, batch: TrainBatch
) -> None:
    for k, step in enumerate(drafter.unroll(batch, STEPS)):
        found = set(by_token(batch, step, step.hidden))
        assert found == {(0, r) for r in range(1 + k, 12)} | {(1, r) for r in range(1 + k, 7)}


def test_replies_too_short_for_a_step(drafter: DFlashDrafter, tiny_target: Target) -> None:
    batch = collate(conversations(tiny_target, TAPS, (4, 6, 3), (1, 2, 3)), ["chat"])
    assert [s.token.tolist() for s in drafter.unroll(batch, STEPS)] == [[2, 4, 5], [5], [], []]
    with torch.no_grad():
        alone = drafter.unroll(collate(conversations(tiny_target, TAPS, (4,), (1,)), ["chat"]), 2)
    assert [len(step.token) for step in alone] == [0, 0]


# ---- parameters


def test_gradients_reach_what_is_trained(drafter: DFlashDrafter, batch: TrainBatch) -> None:
    drafter.zero_grad()
    steps = drafter.unroll(batch, SIZE - 1)
    loss = torch.stack([drafter.head(s.hidden).log_softmax(-1)[:, 3].sum() for s in steps]).sum()
    loss.backward()
    trained = {id(p) for p in drafter.trainable()}
    for name, parameter in drafter.named_parameters():
        assert (id(parameter) in trained) == (name not in drafter.shared), name
        if name in drafter.shared:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
            assert (parameter.grad.abs().sum(-1) > 0).any(), name
    assert drafter.fc.weight.grad is not None
    assert (drafter.fc.weight.grad.view(32, 3, 32).abs().sum((0, 2)) > 0).all()  # every tap


def test_layers_computed_again_give_the_same_gradients(
    drafter: DFlashDrafter, batch: TrainBatch
) -> None:
    def gradients(again: bool) -> list[Tensor]:
        drafter.zero_grad()
        drafter.checkpoint(again)
        drafter.train()
        sum(drafter.head(s.hidden).square().sum() for s in drafter.unroll(batch, 3)).backward()
        drafter.eval()
        drafter.checkpoint(False)
        return [p.grad.clone() for p in drafter.trainable() if p.grad is not None]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


def test_it_begins_as_the_targets_last_layers(load_tiny: Callable[..., Target]) -> None:
    for family in ("llama", "qwen3"):
        target = load_tiny(family)
        config = DFlashConfig(layers=2, taps=TAPS)
        drafter = DFlashDrafter.from_target(target, config)
        for mine, theirs in zip(drafter.layers, target.layers[-2:], strict=True):
            held = theirs.state_dict()
            for name, weight in mine.state_dict().items():
                if name in held:
                    assert torch.equal(weight, held[name]), name
                else:
                    assert family == "llama" and name.endswith(("q_norm.weight", "k_norm.weight"))
        assert torch.equal(drafter.norm.weight, target.body.norm.weight)
        last = target.layers[-1].input_layernorm.weight
        assert torch.equal(drafter.hidden_norm.weight, last)


def test_a_beginning_that_cannot_be_had_is_refused(load_tiny: Callable[..., Target]) -> None:
    """Said by the recipe; left to the drafter, it begins from noise."""
    target = load_tiny("gpt2")
    with pytest.raises(UserError, match=r"init 'target' takes over no layers .* \(gpt2\)"):
        DFlashDrafter.from_target(target, DFlashConfig(init="target"))
    DFlashDrafter.from_target(target, DFlashConfig())


def test_a_new_correction_changes_nothing(tiny_target: Target, batch: TrainBatch) -> None:
    config = DFlashConfig(taps=TAPS)
    plain = DFlashDrafter.from_target(tiny_target, config)
    corrected = DFlashDrafter.from_target(tiny_target, dataclasses.replace(config, sequential=True))
    corrected.load_state_dict(plain.state_dict(), strict=False)
    for one, other in zip(unrolled(plain, batch, 3), unrolled(corrected, batch, 3), strict=True):
        assert all(torch.equal(one[at], other[at]) for at in one)
    assert plain.unserved is None and plain.layout == "dflash"
    assert corrected.unserved == "the sequential correction (drafter.sequential)"
    assert corrected.layout == "draftsmith"


# ---- options


def test_layers_that_are_read() -> None:
    assert DFlashConfig().resolved_taps(30) == (1, 14, 27)
    assert DFlashConfig(layers=5).resolved_taps(36) == (1, 9, 17, 25, 33)
    assert DFlashConfig().resolved_taps(4) == (1,)
    assert DFlashConfig().resolved_taps(2) == (0,)
    with pytest.raises(UserError, match=r"taps \[3\] must lie between 0 and 2"):
        DFlashConfig(taps=(3,)).resolved_taps(4)
    with pytest.raises(UserError, match="before the target's last one, and this one has 1"):
        DFlashConfig().resolved_taps(1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 1}, "drafter.block_size is 1, must be 2 or more"),
        ({"layers": 0}, "drafter.layers is 0"),
        ({"taps": (1, 1)}, r"drafter.taps takes different layers, got \[1, 1\]"),
        ({"taps": ()}, r"drafter.taps takes different layers, got \[\]"),
        ({"init": "zero"}, "drafter.init is 'zero'"),
        ({"init": "random", "start": "x"}, "leave one of them out"),
        ({"domain_floor": 2.0}, "domain_floor"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DFlashConfig(**options)


def test_how_many_tokens_a_round_drafts(tiny_target: Target) -> None:
    assert DFlashConfig().most == 3 and DFlashConfig(block_size=8).most == 7
    assert DFlashConfig(start="x").most is None and DFlashConfig(start="x", block_size=8).most == 7
    drafter = new_drafter(tiny_target)
    assert drafter.max_draft_tokens == SIZE - 1
    run = Decoding(drafter, conversations(tiny_target, TAPS))
    run.emit([1, 1])
    with torch.no_grad():
        drafter.first(run.state)
        for _ in range(SIZE - 2):
            drafter.extend(run.state, torch.full((2, 1), 5))
        with pytest.raises(IndexError):  # there is no such place
            drafter.extend(run.state, torch.full((2, 1), 5))


def test_the_mask_token_is_one_that_text_has_not(
    load_tiny: Callable[..., Target], tiny_target: Target
) -> None:
    assert free_token(tiny_target) == 0  # the unknown one: the others are in the chat template
    target = load_tiny(vocab_size=448)
    target.tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    target.vocab_size = len(target.tokenizer)
    assert free_token(target) == 401
    target.tokenizer.chat_template += "{{ '<|b|>' }}"
    assert free_token(target) == 400
    target.tokenizer.mask_token = "<|im_end|>"
    assert free_token(target) == 2
    assert DFlashDrafter.from_target(target, DFlashConfig()).mask_token_id == 2
    assert DFlashDrafter.from_target(target, DFlashConfig(mask_token_id=9)).mask_token_id == 9
    with pytest.raises(UserError, match="mask_token_id 448 must lie between 0 and 447"):
        DFlashDrafter.from_target(target, DFlashConfig(mask_token_id=448))
