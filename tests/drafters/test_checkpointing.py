"""Gradient checkpointing: the same loss and gradients, bit for bit, and less kept for them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TargetFactory
from drafting import propose
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.drafters.adapters import LoraSection
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.lookup import LookupConfig, LookupDrafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.drafters.skip import SkipConfig, SkipDrafter
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
DOMAINS = ("a", "b")
IDS = torch.arange(0, 400, 3)
TRAINED = ("eagle3", "causal", "medusa", "mlp")


def drafter_of(family: str, target: Target) -> Any:
    torch.manual_seed(5)
    if family == "causal":
        return CausalDrafter.from_target(target, CausalConfig(layers=(0, 1, 3)), None)
    if family == "medusa":
        config = MedusaConfig(num_heads=STEPS, num_layers=4)
        return MedusaDrafter.from_target(target, config, IDS)
    if family == "mlp":
        return MLPDrafter.from_target(target, MLPConfig(n_predict=STEPS), IDS)
    return Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(IDS)), IDS)


def kept_bytes(drafter: Any, batch: TrainBatch, steps: int = STEPS) -> int:
    """Bytes that autograd keeps of an unrolled pass, weights apart, each storage counted once."""
    weights = {t.untyped_storage().data_ptr() for t in (*drafter.parameters(), *drafter.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = drafter.unroll(batch, steps)
    del alive  # or what was kept could have been freed, and counted again
    return sum(kept.values())


def trained_on(
    drafter: Any, target: Target, batch: TrainBatch, **objective: Any
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one batch, from one random state."""
    section = ObjectiveSection(**objective)
    bound = bind_objective(section, ServingSection((LawSection(1.0),), num_draft_tokens=STEPS))
    scorer = Scorer(drafter, section, bound, DraftVocabularyP(target, drafter.draft_ids, bound.law))
    drafter.zero_grad()
    torch.manual_seed(9)
    totals = scored_tokens(batch, STEPS).float()
    loss = scorer(batch, STEPS, totals, second="then" in objective).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in drafter.trainable()]


def batch_of(records: list[Record], packed: bool = False, drafter: Any = None) -> TrainBatch:
    """With as many states as the drafter reads, whatever layers they are of."""
    batch = collate(records[:10], DOMAINS, packed)
    return replace(batch, taps=batch.taps[..., : 32 * len(drafter.taps)]) if drafter else batch


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("objective", [{}, {"position_weights": "product"}, {"then": "rounds"}])
@pytest.mark.parametrize("family", TRAINED)
def test_loss_and_gradients_are_the_same_bit_for_bit(
    family: str, objective: dict[str, Any], packed: bool, tiny_target: Target, records: list[Record]
) -> None:
    drafter = drafter_of(family, tiny_target).train()
    batch = batch_of(records, packed, drafter)
    loss, grads = trained_on(drafter, tiny_target, batch, **objective)
    drafter.checkpoint(True)
    again, same = trained_on(drafter, tiny_target, batch, **objective)
    assert torch.equal(again, loss)
    assert all(torch.equal(a, b) for a, b in zip(same, grads, strict=True))
    assert any(g.any() for g in grads)


def test_dropout_is_drawn_the_same_twice(load_tiny: TargetFactory, records: list[Record]) -> None:
    target = load_tiny("gpt2")
    drafter, batch = drafter_of("causal", target).train(), batch_of(records)
    assert drafter.model.config.resid_pdrop == 0.1
    loss, grads = trained_on(drafter, target, batch)
    drafter.checkpoint(True)
    again, same = trained_on(drafter, target, batch)
    assert torch.equal(again, loss)
    assert all(torch.equal(a, b) for a, b in zip(same, grads, strict=True))
    drafter.eval()
    assert not torch.equal(trained_on(drafter, target, batch)[0], loss)  # there was dropout


def test_an_adapter_is_trained_the_same(tiny_target: Target, records: list[Record]) -> None:
    """All below it is frozen, and its dropout is drawn again."""
    drafter, batch = drafter_of("causal", tiny_target), batch_of(records)
    drafter.adapt(LoraSection(rank=4, dropout=0.2))
    drafter.train()
    loss, grads = trained_on(drafter, tiny_target, batch)
    before = kept_bytes(drafter, batch)
    drafter.checkpoint(True)
    again, same = trained_on(drafter, tiny_target, batch)
    assert torch.equal(again, loss)
    assert all(torch.equal(a, b) for a, b in zip(same, grads, strict=True))
    assert any(g.any() for g in grads)
    assert 0 < kept_bytes(drafter, batch) < before / 3


@pytest.mark.parametrize("family", [*TRAINED, "gpt2", "gemma2", "mistral"])
def test_less_is_kept_and_only_in_training(
    family: str, load_tiny: TargetFactory, tiny_target: Target, records: list[Record]
) -> None:
    if family in TRAINED:
        drafter = drafter_of(family, tiny_target).train()
    else:
        drafter = drafter_of("causal", load_tiny(family)).train()
    batch = batch_of(records, False, drafter)
    before = kept_bytes(drafter, batch)
    drafter.checkpoint(True)
    assert 0 < kept_bytes(drafter, batch) < before / 3
    drafter.eval()
    in_evaluation = kept_bytes(drafter, batch)
    drafter.checkpoint(False)
    assert kept_bytes(drafter, batch) == in_evaluation
    assert kept_bytes(drafter.train(), batch) == before


def test_what_is_kept_grows_with_the_steps_by_little(
    tiny_target: Target, records: list[Record]
) -> None:
    """Of each unrolled step its input and its keys and values, and nothing between."""
    drafter, batch = drafter_of("eagle3", tiny_target).train(), batch_of(records)
    grown = {}
    for on in (False, True):
        drafter.checkpoint(on)
        grown[on] = kept_bytes(drafter, batch, 5) - kept_bytes(drafter, batch, 4)
    window = batch.ids.shape[1] - int(batch.prompt_lens.min())
    states = 4 * batch.ids.shape[0] * window * 32  # [B, W, h] in float32
    assert states <= grown[True] < 4 * states < grown[False] / 2


@pytest.mark.parametrize("family", TRAINED)
def test_drafting_is_not_touched(family: str, tiny_target: Target, records: list[Record]) -> None:
    """In training mode, too: a cache is written once."""
    drafter = drafter_of(family, tiny_target).train()
    record = records[5]
    assert record.states is not None
    n = record.prompt_len

    def drafted() -> list[int]:
        state = drafter.start(1, 40)
        taps = record.states.taps[None, :, : 32 * len(drafter.taps)].float()  # type: ignore[union-attr]
        drafter.prefill(state, record.ids[None, :n], [n], taps[:, :n])
        drafter.commit(state, record.ids[None, n : n + 1], [1], taps[:, n - 1 : n])
        return propose(drafter, state, STEPS, lambda logits, k: logits.argmax(-1))[0].tolist()

    with torch.no_grad():
        plain = drafted()
        drafter.checkpoint(True)
        assert drafted() == plain


@pytest.mark.parametrize("family", ["lookup", "skip"])
def test_families_that_are_not_trained_take_it_and_stay(
    family: str, tiny_target: Target, records: list[Record]
) -> None:
    drafter: Any = (
        LookupDrafter.from_target(tiny_target, LookupConfig())
        if family == "lookup"
        else SkipDrafter.from_target(tiny_target, SkipConfig())
    )
    (before,) = drafter.unroll(batch_of(records), 1)
    drafter.checkpoint(True)
    (after,) = drafter.unroll(batch_of(records), 1)
    assert torch.equal(before.hidden, after.hidden)
    modules = tiny_target.model.modules()
    assert not any(getattr(m, "gradient_checkpointing", False) for m in modules)


def test_layers_that_cannot_are_refused_by_name(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of("causal", tiny_target)
    monkeypatch.setattr(type(drafter.model), "supports_gradient_checkpointing", False)
    with pytest.raises(UserError, match=r"'llama'.*train.gradient_checkpointing false"):
        drafter.checkpoint(True)
