"""One batch's loss: which tokens count and what they add; splits and padding add nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import ObjectiveSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.train.losses import OBJECTIVES
from draftsmith.train.step import Scorer, bound_objective, objective_law, scored_tokens

DOMAINS = ("a", "b")
STEPS = 3
IDS = torch.arange(0, 400, 3)


def drafter_of(family: str, target: Target) -> Eagle3Drafter | CausalDrafter:
    torch.manual_seed(5)
    if family == "causal":
        return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    return Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(IDS)), IDS)


def scorer_of(family: str, target: Target, **objective: Any) -> Scorer:
    section = ObjectiveSection(**objective)
    drafter = drafter_of(family, target)
    return Scorer(
        drafter, section, DraftVocabularyP(target, drafter.draft_ids, Law(section.temperature))
    )


@pytest.fixture
def rows(records: list[Record]) -> list[Record]:
    """Replies of 1, 2, 3 and more tokens: 0, 1, 2 and more that can be drafted."""
    chosen = [next(r for r in records if len(r.reply) == n) for n in (1, 2, 3, 6)]
    return [*chosen, *(r for r in records if len(r.reply) > 8)][:8]


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_counts_known_before_the_forward_are_those_scored(
    family: str, tiny_target: Target, rows: list[Record]
) -> None:
    batch = collate(rows, DOMAINS)
    sums = scorer_of(family, tiny_target)(batch, STEPS)
    expected = [sum(max(0, len(r.reply) - 1 - k) for r in rows) for k in range(STEPS)]
    assert scored_tokens(batch, STEPS).tolist() == expected
    assert [len(s.token) for s in sums] == expected[: len(sums)]
    assert len(sums) == (STEPS if family == "eagle3" else 1)
    for k, s in enumerate(sums):
        wanted = [
            int(first) + j
            for first, r in zip(batch.first, rows, strict=True)
            for j in range(1 + k, len(r.reply))
        ]
        assert s.token.tolist() == wanted, "reply tokens 1 + k on, the first one never"


def test_loss_of_a_head_equals_a_hand_computation(tiny_target: Target, rows: list[Record]) -> None:
    batch = collate(rows, DOMAINS)
    scorer = scorer_of("eagle3", tiny_target, name="lk_hybrid", eta=2.0, temperature=0.7)
    drafter = scorer.drafter
    sums = scorer(batch, STEPS)
    for step, found in zip(drafter.unroll(batch, STEPS), sums, strict=True):
        loss = overlap = 0.0
        for logits, token in zip(drafter.head(step.hidden).detach(), step.token, strict=True):
            full = tiny_target.logits(batch.hidden[token]).double()
            p = (full / 0.7).softmax(-1)[IDS]  # not renormalised
            q = (logits.double() / 0.7).softmax(-1)
            mass, shared = float(p.sum()), float(torch.minimum(p, q).sum())
            kl = float((p * (p / mass / q).log()).sum())  # P(V_d)·KL(p̃‖q)
            weight = torch.tensor(-2.0 * shared).double().exp().item()
            loss += weight * kl + (1 - weight) * (1 - shared)
            overlap += shared
        assert found.loss.item() == pytest.approx(loss, rel=1e-5)
        assert float(found.overlap.sum()) == pytest.approx(overlap, rel=1e-5)


def test_a_copy_of_the_target_has_overlap_one(tiny_target: Target, rows: list[Record]) -> None:
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 1, 2, 3)), None)
    p = DraftVocabularyP(tiny_target, None, Law(1.0))
    (sums,) = Scorer(drafter, ObjectiveSection(name="fkl"), p)(collate(rows, DOMAINS), 1)
    assert torch.allclose(sums.overlap, torch.ones_like(sums.overlap), atol=1e-4)
    assert abs(sums.loss.item()) < 1e-4 * len(sums.token)


@pytest.mark.parametrize("family", ["eagle3", "causal"])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_can_be_trained(
    name: str, family: str, tiny_target: Target, rows: list[Record]
) -> None:
    scorer = scorer_of(family, tiny_target, name=name)
    sums = scorer(collate(rows, DOMAINS), STEPS)
    sum(s.loss for s in sums).backward()
    gradients = [p.grad for p in scorer.drafter.trainable()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert any(bool(g.any()) for g in gradients if g is not None)


def test_ce_is_the_likelihood_of_the_sampled_token(tiny_target: Target, rows: list[Record]) -> None:
    batch = collate(rows, DOMAINS)
    scorer = scorer_of("causal", tiny_target, name="ce")
    (sums,) = scorer(batch, 1)
    said = torch.cat([r.reply for r in rows])
    (step,) = scorer.drafter.unroll(batch, 1)
    log_q = scorer.drafter.head(step.hidden).detach().log_softmax(-1)
    expected = -log_q.gather(1, said[step.token][:, None]).sum()
    assert sums.loss.item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_padding_changes_nothing(family: str, tiny_target: Target, rows: list[Record]) -> None:
    scorer = scorer_of(family, tiny_target)
    alone = [scorer(collate([r], DOMAINS), STEPS) for r in rows]
    # A long prompt with nothing to draft behind it pads every other row.
    states = rows[-1].states
    assert states is not None
    wide = replace(
        rows[-1],
        ids=torch.randint(3, 400, (150,)),
        prompt_len=149,
        states=replace(
            states,
            hidden=states.hidden[:1],
            log_z=states.log_z[:1],
            taps=torch.randn(149, states.taps.shape[1]),
        ),
    )
    together = scorer(collate([*rows, wide], DOMAINS), STEPS)
    for k, sums in enumerate(together):
        expected = sum(a[k].loss.item() for a in alone)
        assert sums.loss.item() == pytest.approx(expected, rel=1e-5)
        apart = torch.cat([a[k].overlap for a in alone])
        torch.testing.assert_close(sums.overlap, apart, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_gradients_of_parts_add_up(family: str, tiny_target: Target, rows: list[Record]) -> None:
    scorer = scorer_of(family, tiny_target)

    def gradient(parts: list[list[Record]]) -> torch.Tensor:
        scorer.zero_grad()
        for part in parts:
            torch.stack([s.loss for s in scorer(collate(part, DOMAINS), STEPS)]).sum().backward()
        return torch.cat(
            [p.grad.flatten() for p in scorer.drafter.trainable() if p.grad is not None]
        )

    whole = gradient([rows])
    for size in (4, 1):
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        torch.testing.assert_close(gradient(parts), whole, rtol=1e-4, atol=1e-5)


def test_padding_rows_of_the_heads_are_left_out(load_tiny: Any, rows: list[Record]) -> None:
    """A head with more rows than the tokenizer has tokens (B104)."""
    target = load_tiny(vocab_size=416)
    assert target.vocab_size == 400
    scorer = scorer_of("causal", target)
    (sums,) = scorer(collate(rows, DOMAINS), 1)
    assert torch.isfinite(sums.loss)
    assert float(sums.mass.min()) == pytest.approx(1.0, abs=1e-5)


def test_the_temperature_is_that_of_the_law() -> None:
    assert objective_law(ObjectiveSection(temperature=0.7)) == Law(0.7)


def test_an_unknown_objective_is_named() -> None:
    with pytest.raises(UserError, match=r"'klk'.*lk_hybrid"):
        bound_objective(ObjectiveSection(name="klk"))
