"""One batch's loss: which tokens count and what they add; splits and padding add nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.train.losses import OBJECTIVES
from draftsmith.train.objective import Objective, bind_objective
from draftsmith.train.step import Scored, Scorer, scored_tokens

DOMAINS = ("a", "b")
STEPS = 3
IDS = torch.arange(0, 400, 3)


def drafter_of(family: str, target: Target) -> Eagle3Drafter | CausalDrafter:
    torch.manual_seed(5)
    if family == "causal":
        return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    return Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(IDS)), IDS)


def bound(temperature: float = 1.0, **objective: Any) -> Objective:
    served = ServingSection((LawSection(temperature),), num_draft_tokens=STEPS)
    return bind_objective(ObjectiveSection(**objective), served)


def scorer_of(
    family: str, target: Target, temperature: float = 1.0, drafter: Any = None, **objective: Any
) -> Scorer:
    section = ObjectiveSection(**objective)
    found = bound(temperature, **objective)
    drafter = drafter or drafter_of(family, target)
    p = DraftVocabularyP(target, drafter.draft_ids, found.law)
    return Scorer(drafter, section, found, p)


def total_of(rows: list[Record]) -> torch.Tensor:
    return scored_tokens(collate(rows, DOMAINS), STEPS).float()


def run(scorer: Scorer, rows: list[Record], **options: Any) -> Scored:
    """The loss of `rows` as a global batch of its own."""
    return scorer(collate(rows, DOMAINS), STEPS, options.pop("totals", total_of(rows)), **options)


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
    tokens = run(scorer_of(family, tiny_target), rows).token
    expected = [sum(max(0, len(r.reply) - 1 - k) for r in rows) for k in range(STEPS)]
    assert scored_tokens(batch, STEPS).tolist() == expected
    assert [len(t) for t in tokens] == expected[: len(tokens)]
    assert len(tokens) == (STEPS if family == "eagle3" else 1)
    for k, token in enumerate(tokens):
        wanted = [
            int(first) + j
            for first, r in zip(batch.first, rows, strict=True)
            for j in range(1 + k, len(r.reply))
        ]
        assert token.tolist() == wanted, "reply tokens 1 + k on, the first one never"


def test_loss_of_a_head_equals_a_hand_computation(tiny_target: Target, rows: list[Record]) -> None:
    batch = collate(rows, DOMAINS)
    scorer = scorer_of("eagle3", tiny_target, 0.7, loss="lk_hybrid", eta=2.0, position_decay=0.5)
    drafter = scorer.drafter
    found = run(scorer, rows)
    total = 0.0
    for k, step in enumerate(drafter.unroll(batch, STEPS)):
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
        total += 0.5**k / 1.75 * loss / len(step.token)  # a mean over the step's own tokens
        assert float(found.measured.overlap[k].sum()) == pytest.approx(overlap, rel=1e-5)
    assert found.loss.item() == pytest.approx(total, rel=1e-5)


def test_a_copy_of_the_target_has_overlap_one(tiny_target: Target, rows: list[Record]) -> None:
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 1, 2, 3)), None)
    scorer = scorer_of("causal", tiny_target, drafter=drafter, loss="fkl", then="rounds")
    found = run(scorer, rows)
    (shared,) = found.measured.overlap
    assert torch.allclose(shared, torch.ones_like(shared), atol=1e-4)
    assert abs(found.loss.item()) < 1e-4
    # Every draft is accepted: a reply of N further tokens takes ⌈N / (γ + 1)⌉ rounds.
    rounds = sum(-(-(len(r.reply) - 1) // (STEPS + 1)) for r in rows)
    supervised = sum(len(r.reply) - 1 for r in rows)
    found = run(scorer, rows, second=True)
    assert found.loss.item() == pytest.approx(rounds / supervised, rel=0.01)


@pytest.mark.parametrize("family", ["eagle3", "causal"])
@pytest.mark.parametrize(
    "objective",
    [
        *({"loss": name} for name in sorted(OBJECTIVES)),
        {"loss": {"ce": 0.1, "tv": 0.9}},
        {"position_weights": "product"},
        {"then": "rounds"},
        {"then": "accepted_length"},
    ],
    ids=str,
)
def test_every_objective_can_be_trained(
    objective: dict[str, Any], family: str, tiny_target: Target, rows: list[Record]
) -> None:
    scorer = scorer_of(family, tiny_target, **objective)
    run(scorer, rows, second="then" in objective).loss.backward()
    gradients = [p.grad for p in scorer.drafter.trainable()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert any(bool(g.any()) for g in gradients if g is not None)


def test_a_mix_is_the_weighted_sum(tiny_target: Target, rows: list[Record]) -> None:
    drafter = drafter_of("eagle3", tiny_target)
    one, other, both = (
        run(scorer_of("eagle3", tiny_target, drafter=drafter, loss=loss), rows).loss.item()
        for loss in ("ce", "tv", {"ce": 0.1, "tv": 0.9})
    )
    assert both == pytest.approx(0.1 * one + 0.9 * other, rel=1e-5)


def test_product_weights_fall_on_the_steps_they_belong_to(
    tiny_target: Target, rows: list[Record]
) -> None:
    """By hand for one reply: what start s expects to reach through each of its positions."""
    (row,) = [r for r in rows if len(r.reply) == 6][:1]
    drafter = drafter_of("eagle3", tiny_target)
    batch = collate([row], DOMAINS)
    place = {int(token): i for i, token in enumerate(IDS)}
    total = 0.0
    unrolled = drafter.unroll(batch, STEPS)
    chance, loss = {}, {}
    for k, step in enumerate(unrolled):
        log_q = drafter.head(step.hidden).detach().log_softmax(-1)
        log_p = tiny_target.logits(batch.hidden[step.token]).log_softmax(-1)[:, IDS]
        each = OBJECTIVES["nla"](log_p, drafter.head(step.hidden).detach())
        for i, token in enumerate(step.token.tolist()):
            at = place.get(int(row.reply[token]))
            chance[k, token] = 0.0 if at is None else float(log_q[i, at].exp())
            loss[k, token] = float(each[i])
    for s in range(1, 6):  # the reply token that a round's first position predicts
        inside = [k for k in range(STEPS) if s + k < 6]
        reached = torch.tensor([0.5 * chance[k, s + k] + 0.5 for k in inside]).cumprod(0)
        total += sum(float(reached[k:].sum()) * loss[k, s + k] for k in inside)
    scorer = scorer_of("eagle3", tiny_target, drafter=drafter, position_weights="product")
    assert run(scorer, [row]).loss.item() == pytest.approx(total / 5, rel=1e-4)


def test_options_reach_their_objectives(tiny_target: Target, rows: list[Record]) -> None:
    drafter = drafter_of("eagle3", tiny_target)

    def value(**objective: Any) -> float:
        scorer = scorer_of("eagle3", tiny_target, drafter=drafter, **objective)
        return run(scorer, rows).loss.item()

    assert value(loss="jsd", beta=0.0) == pytest.approx(value(loss="fkl"), rel=1e-5)
    assert value(loss="greedy_mass", sharpness=4.0) != pytest.approx(value(loss="greedy_mass"))
    assert value(loss="lk_hybrid", eta=0.0) == pytest.approx(value(loss="fkl"), rel=1e-5)


def test_ce_is_the_likelihood_of_the_sampled_token(tiny_target: Target, rows: list[Record]) -> None:
    batch = collate(rows, DOMAINS)
    scorer = scorer_of("causal", tiny_target, loss="ce")
    said = torch.cat([r.reply for r in rows])
    (step,) = scorer.drafter.unroll(batch, 1)
    log_q = scorer.drafter.head(step.hidden).detach().log_softmax(-1)
    expected = -log_q.gather(1, said[step.token][:, None]).mean()
    assert run(scorer, rows).loss.item() == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("family", ["eagle3", "causal"])
@pytest.mark.parametrize("then", [None, "rounds", "accepted_length"])
def test_padding_changes_nothing(
    then: Any, family: str, tiny_target: Target, rows: list[Record]
) -> None:
    scorer = scorer_of(family, tiny_target, then=then)
    options: dict[str, Any] = {"second": then is not None, "totals": total_of(rows)}
    alone = [run(scorer, [r], **options) for r in rows]
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
    together = run(scorer, [*rows, wide], **options)
    assert together.loss.item() == pytest.approx(sum(a.loss.item() for a in alone), rel=1e-5)
    for k, shared in enumerate(together.measured.overlap):
        apart = torch.cat([a.measured.overlap[k] for a in alone])
        torch.testing.assert_close(shared, apart, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["eagle3", "causal"])
@pytest.mark.parametrize("objective", [{}, {"position_weights": "product"}, {"then": "rounds"}])
def test_gradients_of_parts_add_up(
    objective: dict[str, Any], family: str, tiny_target: Target, rows: list[Record]
) -> None:
    scorer = scorer_of(family, tiny_target, **objective)
    options: dict[str, Any] = {"second": "then" in objective, "totals": total_of(rows)}

    def gradient(parts: list[list[Record]]) -> torch.Tensor:
        scorer.zero_grad()
        for part in parts:
            run(scorer, part, **options).loss.backward()
        return torch.cat(
            [p.grad.flatten() for p in scorer.drafter.trainable() if p.grad is not None]
        )

    whole = gradient([rows])
    assert float(whole.abs().max()) > 1e-3
    for size in (4, 1):
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        torch.testing.assert_close(gradient(parts), whole, rtol=1e-4, atol=1e-6)


def test_padding_rows_of_the_heads_are_left_out(load_tiny: Any, rows: list[Record]) -> None:
    """A head with more rows than the tokenizer has tokens (B104)."""
    target = load_tiny(vocab_size=416)
    assert target.vocab_size == 400
    found = run(scorer_of("causal", target), rows)
    assert torch.isfinite(found.loss)
    assert float(found.measured.mass.min()) == pytest.approx(1.0, abs=1e-5)


# ---- what a recipe means


def test_training_looks_at_the_first_served_law_that_samples() -> None:
    laws = (LawSection(0.0), LawSection(0.7, top_p=0.9), LawSection(1.0))
    section = ObjectiveSection()
    assert bind_objective(section, ServingSection(laws)).law == Law(0.7, top_p=0.9)
    assert bind_objective(section, ServingSection(laws[:1])).law == Law(0.0)


def test_the_draft_is_warped_by_temperature_alone() -> None:
    """A hard cut would take the gradient from what it excludes."""
    logits = torch.randn(4, 9)
    served = ServingSection((LawSection(0.5, top_k=2, top_p=0.5),))
    assert torch.equal(bind_objective(ObjectiveSection(), served).warp_draft(logits), logits / 0.5)
    greedy = bind_objective(ObjectiveSection(), ServingSection((LawSection(0.0),)))
    assert torch.equal(greedy.warp_draft(logits), logits)


@pytest.mark.parametrize(
    ("section", "serving", "said"),
    [
        ({"loss": "klk"}, {}, r"'klk'.*lk_hybrid"),
        ({"loss": {"fkl": 1.0, "klk": 1.0}}, {}, r"'klk'"),
        (
            {"loss": "rkl"},
            {"laws": (LawSection(1.0, top_k=5),)},
            "infinite under T=1 top_k=5",
        ),
        ({"loss": "jsd", "beta": 1.0}, {"laws": (LawSection(0.7, top_p=0.5),)}, "infinite under"),
        ({"then": "rounds"}, {"laws": (LawSection(0.0),)}, "greedy_mass or ce"),
        ({"then": "accepted_length"}, {"drafting": "greedy"}, "greedy_mass or ce"),
        ({"loss": "nla"}, {"drafting": "greedy"}, "greedy_mass or ce"),
        ({"then": "round"}, {}, "'round'"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    section: dict[str, Any], serving: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        bind_objective(ObjectiveSection(**section), ServingSection(**serving))
