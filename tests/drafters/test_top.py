"""Training and scoring a draft LM on the target's most probable tokens alone (B040)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.top import captured_mass, top_of
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.train.losses import OBJECTIVES
from draftsmith.train.objective import bind_objective
from draftsmith.train.score import score
from draftsmith.train.step import Scored, Scorer, scored_tokens
from draftsmith.train.validate import held_out_figures

DOMAINS = ("a", "b")
STEPS = 3
VOCAB = 400
IDS = torch.arange(0, VOCAB, 3)
REVERSE = {"loss": "rkl"}
EVERY = [
    *({"loss": name} for name in sorted(OBJECTIVES)),
    {"loss": {"ce": 0.1, "tv": 0.9}},
    {"loss": "jsd", "beta": 1.0},
    {"position_weights": "product"},
    {"then": "rounds"},
    {"then": "accepted_length"},
]


def told(record: Record, target: Target, k: int) -> Record:
    """The record as a server would have told it."""
    assert record.states is not None
    return replace(record, states=None, top=top_of(target.logits(record.states.hidden), k))


def draft_lm(target: Target, ids: Tensor | None = None) -> CausalDrafter:
    torch.manual_seed(5)
    return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), ids)


def run(
    drafter: Drafter, target: Target, rows: list[Record], law: LawSection, **objective: Any
) -> tuple[Scored, Tensor]:
    """A batch's loss and figures, and the gradient of all weights together."""
    section = ObjectiveSection(**objective)
    bound = bind_objective(section, ServingSection((law,), num_draft_tokens=STEPS))
    scorer = Scorer(drafter, section, bound, DraftVocabularyP(target, drafter.draft_ids, bound.law))
    batch = collate(rows, DOMAINS)
    totals = scored_tokens(batch, STEPS).float()
    found = scorer(batch, STEPS, totals, second=section.then is not None)
    scorer.zero_grad()
    found.loss.backward()
    return found, torch.cat([p.grad.flatten() for p in drafter.trainable() if p.grad is not None])


@pytest.fixture(scope="module")
def rows(records: list[Record]) -> list[Record]:
    return [r for r in records if len(r.reply) > 8 and r.law == Law(1.0)][:6]


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("law", [Law(1.0), Law(0.0), Law(0.7, top_k=9, top_p=0.8)])
def test_b040_p_of_all_tokens_is_that_of_the_states(
    law: Law, reduced: bool, tiny_target: Target, rows: list[Record]
) -> None:
    p = DraftVocabularyP(tiny_target, IDS if reduced else None, law)
    full, batch = (
        collate(part, DOMAINS) for part in (rows, [told(r, tiny_target, VOCAB) for r in rows])
    )
    at = torch.arange(len(full.domain))[1::3]
    found, expected = p.rows(batch, at), p.rows(full, at)
    assert found.shape == (len(at), len(IDS) if reduced else VOCAB)
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduced", [True, False])
def test_told_tokens_keep_their_probabilities_and_others_have_none(
    reduced: bool, tiny_target: Target, rows: list[Record]
) -> None:
    k = 16
    batch = collate([told(r, tiny_target, k) for r in rows], DOMAINS)
    full = collate(rows, DOMAINS)
    p = DraftVocabularyP(tiny_target, IDS if reduced else None, Law(1.0))
    at = torch.arange(len(full.domain))
    found, expected = p.rows(batch, at).exp(), p.rows(full, at).exp()  # [R, V_d]
    assert batch.top is not None
    ids = IDS if reduced else torch.arange(VOCAB)
    here = (batch.top.ids[:, :, None] == ids).any(1)  # [R, V_d]
    torch.testing.assert_close(found, expected.masked_fill(~here, 0.0), rtol=1e-5, atol=1e-7)
    if not reduced:
        torch.testing.assert_close(found.sum(-1), captured_mass(batch.top))


@pytest.mark.parametrize("objective", EVERY, ids=str)
def test_b040_all_tokens_give_the_full_loss_and_gradient(
    objective: dict[str, Any], tiny_target: Target, rows: list[Record]
) -> None:
    drafter = draft_lm(tiny_target)
    full, slope = run(drafter, tiny_target, rows, LawSection(1.0), **objective)
    whole = [told(r, tiny_target, VOCAB) for r in rows]
    found, own = run(drafter, tiny_target, whole, LawSection(1.0), **objective)
    assert found.loss.item() == pytest.approx(full.loss.item(), abs=1e-5, rel=1e-5)
    torch.testing.assert_close(own, slope, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
@pytest.mark.parametrize("objective", [o for o in EVERY if o.get("beta") != 1], ids=str)
def test_b040_every_objective_learns_from_few_tokens(
    objective: dict[str, Any], ids: Tensor | None, tiny_target: Target, rows: list[Record]
) -> None:
    if objective == REVERSE:
        return
    few = [told(r, tiny_target, 16) for r in rows]
    found, slope = run(draft_lm(tiny_target, ids), tiny_target, few, LawSection(1.0), **objective)
    assert bool(torch.isfinite(slope).all()) and bool(slope.any())
    assert found.loss.item() >= 0 or objective.get("then") == "accepted_length"
    kept = IDS if ids is not None else torch.arange(VOCAB)
    mass = torch.cat(
        [
            (r.top.log_probs.exp() * torch.isin(r.top.ids, kept)).sum(-1)[1:]
            for r in few
            if r.top is not None
        ]
    )
    torch.testing.assert_close(found.measured.mass, mass)  # the ceiling, as it is reported
    assert float(mass.max()) < 1


def test_the_likelihood_needs_no_distribution(tiny_target: Target, rows: list[Record]) -> None:
    drafter = draft_lm(tiny_target)
    full, slope = run(drafter, tiny_target, rows, LawSection(1.0), loss="ce")
    one = [told(r, tiny_target, 1) for r in rows]
    found, own = run(drafter, tiny_target, one, LawSection(1.0), loss="ce")
    assert found.loss.item() == full.loss.item() and torch.equal(own, slope)


@pytest.mark.parametrize("objective", [{"loss": "nla"}, {"loss": "tv"}, {"loss": "greedy_mass"}])
def test_the_greedy_law_needs_one_token(
    objective: dict[str, Any], tiny_target: Target, rows: list[Record]
) -> None:
    drafter = draft_lm(tiny_target)
    full, slope = run(drafter, tiny_target, rows, LawSection(0.0), **objective)
    one = [told(r, tiny_target, 1) for r in rows]
    found, own = run(drafter, tiny_target, one, LawSection(0.0), **objective)
    assert found.loss.item() == full.loss.item() and torch.equal(own, slope)


def test_b040_scores_are_bounds_that_tighten(tiny_target: Target, rows: list[Record]) -> None:
    """Overlap is too low by no more than the tail, and no sampled token looks too acceptable."""
    drafter = draft_lm(tiny_target).eval()
    full = score(tiny_target, drafter, rows, Law(1.0), STEPS, 14)
    before = [0.0] * len(full)
    for k in (4, 32, VOCAB):
        found = score(
            tiny_target, drafter, [told(r, tiny_target, k) for r in rows], Law(1.0), STEPS, 14
        )
        for i, (c, exact) in enumerate(zip(found, full, strict=True)):
            gap = exact.overlap[0][0] - c.overlap[0][0]
            assert -1e-4 <= gap <= exact.tokens - c.mass + 1e-4
            assert c.overlap[0][0] >= before[i] - 1e-5
            assert bool((c.log_ratio <= exact.log_ratio + 1e-4).all())
            before[i] = c.overlap[0][0]
    for c, exact in zip(found, full, strict=True):
        assert c.mass == pytest.approx(exact.tokens, rel=1e-5) and c.excluded == 0
        assert c.overlap[0][0] == pytest.approx(exact.overlap[0][0], rel=1e-4)


def test_b040_the_captured_mass_that_is_reported_is_the_told_one(
    tiny_target: Target, rows: list[Record]
) -> None:
    few = [told(r, tiny_target, 16) for r in rows]
    served = ServingSection((LawSection(1.0),), num_draft_tokens=STEPS)
    objective = bind_objective(ObjectiveSection(), served)
    drafter = draft_lm(tiny_target).eval()
    figures = held_out_figures(tiny_target, drafter, few, objective, STEPS, 14)
    mass = torch.cat([captured_mass(r.top)[1:] for r in few if r.top is not None])
    assert figures["captured_mass"] == pytest.approx(float(mass.mean()), rel=1e-5)
    assert figures["captured_mass"] < 0.99


def test_training_on_few_tokens_raises_the_true_overlap(
    tiny_target: Target, rows: list[Record]
) -> None:
    drafter = draft_lm(tiny_target)
    few = [told(r, tiny_target, 32) for r in rows]

    def overlap() -> float:
        found = score(tiny_target, drafter.eval(), rows, Law(1.0), STEPS, 14)
        return sum(c.overlap[0][0] for c in found) / sum(c.tokens for c in found)

    before = overlap()
    optimizer = torch.optim.AdamW(drafter.train().trainable(), lr=3e-3)
    for _ in range(15):
        run(drafter, tiny_target, few, LawSection(1.0), loss="nla")
        optimizer.step()
    assert overlap() > before + 0.1


# ---- what cannot be had


def test_laws_that_are_not_known_are_refused(tiny_target: Target, rows: list[Record]) -> None:
    few = [told(r, tiny_target, 16) for r in rows]
    with pytest.raises(UserError, match=r"the 16 most probable tokens at T=1, .* tell T=0\.7,"):
        run(draft_lm(tiny_target), tiny_target, few, LawSection(0.7))


def test_records_that_do_not_all_tell_the_same_are_refused(
    tiny_target: Target, rows: list[Record]
) -> None:
    mixed = [told(rows[0], tiny_target, 16), *rows[1:5], replace(rows[5], states=None)]
    said = "of 6 records, 4 hold the target's states and 1 its most probable tokens"
    with pytest.raises(UserError, match=said):
        collate(mixed, DOMAINS)


def test_a_batch_takes_its_tops_along(tiny_target: Target, rows: list[Record]) -> None:
    batch = collate([told(r, tiny_target, 16) for r in rows], DOMAINS).to(torch.device("meta"))
    assert batch.top is not None and batch.hidden is None
    assert {t.device.type for t in (batch.ids, batch.top.ids, batch.top.log_probs)} == {"meta"}
