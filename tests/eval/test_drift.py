"""A changed target: what is lost, and which advice follows."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compared import report_of, row
from worlds import GAMMA, LIMIT, World

from draftsmith.data.gather import GatherSettings, answer, request_of
from draftsmith.data.records import Record, held_out
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.eval.cells import Cell, cells_of
from draftsmith.eval.drift import (
    ADVICE,
    After,
    accepted_after,
    advise,
    by_domain,
    cost_of,
    drift_rows,
    moved,
)
from draftsmith.eval.intervals import Interval
from draftsmith.eval.paired import Difference
from draftsmith.eval.request_rows import Expected, Overlap, RequestRow

COSTS = {
    "rows": [1, 2, 3],
    "plain_seconds_per_token": 0.011,
    "by_law": {"T=1": {"o": 0.1, "o_plain": 0.1, "c": 0.1, "c_first": 0.2, "v": [1.0, 1.1, 1.2]}},
}


def apart(one: float, other: float, p: float | None = 0.01) -> Difference:
    return Difference(one, other, Interval(other - one, None, None), p)


# ---- advice


@pytest.mark.parametrize(
    ("alpha", "tau", "conversations", "speedup", "advice", "why"),
    [
        (apart(0.6, 0.59), apart(2.0, 1.97), 20, 1.3, "reuse", "less than 2%"),
        (apart(0.6, 0.61), apart(2.0, 2.01), 20, None, "reuse", "whether it pays was not measured"),
        (apart(0.6, 0.5), apart(2.0, 1.7), 20, 1.2, "warm start", "τ fell by 15.0%"),
        (apart(0.6, 0.5, 0.4), apart(2.0, 1.7, 0.4), 20, 1.2, "reuse", "no more than chance"),
        (apart(0.6, 0.5, 0.01), apart(2.0, 1.7, 0.4), 20, 1.2, "warm start", "τ fell by 15.0%"),
        (apart(0.6, 0.5, 0.4), apart(2.0, 1.7, 0.4), 7, 1.2, "warm start", "from 7 conversations"),
        (apart(0.6, 0.29), apart(2.0, 1.3), 20, 1.0, "retrain", "from 0.600 to 0.290"),
        (apart(0.6, 0.29, None), apart(2.0, 1.3, None), 1, 1.0, "retrain", "1 conversations only"),
        (apart(0.6, 0.6), apart(2.0, 2.0), 20, 0.93, "warm start", "0.93 does not pay"),
    ],
)
def test_what_follows_from_a_loss(
    alpha: Difference,
    tau: Difference,
    conversations: int,
    speedup: float | None,
    advice: str,
    why: str,
) -> None:
    found, said = advise(alpha, tau, conversations, speedup)
    assert found == advice and why in said


def test_a_domain_is_advised_what_its_worst_law_asks_for() -> None:
    rows = [
        {"domain": domain, "law": law, "advice": advice, "why": "so"}
        for domain, law, advice in (
            ("code", "T=0", "reuse"),
            ("code", "T=1", "retrain"),
            ("chat", "T=0", "warm start"),
            ("chat", "T=1", "reuse"),
        )
    ]
    assert by_domain(rows) == {
        "chat": {"advice": "warm start", "why": "T=0: so"},
        "code": {"advice": "retrain", "why": "T=1: so"},
    }
    assert set(ADVICE) == {"reuse", "warm start", "retrain"}


def test_costs_come_from_the_report() -> None:
    cost = cost_of({"cost": COSTS}, "T=1")
    assert cost is not None and cost.seconds == pytest.approx(0.01)
    # 2 drafts of S = 0.5, 0.25: 1.75 tokens for 0.2 + 0.1 + 1.2 + 0.1, plainly 1.1 each
    assert cost.speedup((0.5, 0.25)) == pytest.approx(1.75 * 1.1 / 1.6)
    assert cost_of({"cost": COSTS}, "T=0") is None and cost_of({"cost": None}, "T=1") is None


# ---- tiny targets


@pytest.fixture
def before(world: World) -> list[RequestRow]:
    """The world's held-out replies as an evaluation lists them."""
    return as_listed(world, cells(world, list(world.store.records("heldout"))))


def cells(world: World, records: list[Record]) -> list[Cell]:
    return cells_of(world.recipe, records)


def as_listed(world: World, found: list[Cell]) -> list[RequestRow]:
    scored = accepted_after(world.recipe, world.target, world.drafter, found, LIMIT)
    return [
        row(
            s.prompt_id,
            domain=s.domain,
            law=s.law,
            turn=s.turn,
            seed=s.seed,
            overlap=s.overlap,
            expected=s.expected,
        )
        for own in scored.values()
        for s in own.scored
    ]


def changed(world: World, noise: float) -> Target:
    """The target with every weight off by some noise, in shares of the weight's own size."""
    other = copy.copy(world.target)
    other.model = copy.deepcopy(world.target.model)
    other._captured, other._hooked = {}, set()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in other.model.parameters():
            p += noise * p.std() * torch.randn(p.shape, generator=generator)
    other.__post_init__()
    return other


def replies(world: World, target: Target) -> list[Record]:
    """What this target says to the held-out prompts."""
    asked = [request_of(r) for r in world.store.records("heldout")]
    return answer(target, asked, GatherSettings(LIMIT, 32, (1, 1, 2), keep="hidden"))


def drifted(world: World, before: list[RequestRow], noise: float) -> list[dict[str, Any]]:
    target = changed(world, noise)
    found = cells(world, replies(world, target))
    after = accepted_after(world.recipe, target, world.drafter, found, LIMIT)
    after = {k: replace(a, moved=moved(world.target, target, c, 50))
             for (k, a), c in zip(after.items(), found, strict=True)}  # fmt: skip
    return drift_rows(before, after, {"cost": None})


def test_an_unchanged_target_has_lost_nothing(world: World, before: list[RequestRow]) -> None:
    rows = drifted(world, before, 0.0)
    assert {(r["domain"], r["law"]) for r in rows} == {(r.domain, r.law) for r in before}
    for line in rows:
        assert line["lost"] == pytest.approx(0, abs=1e-5)
        assert line["overlap"]["change"]["value"] == pytest.approx(0, abs=1e-5)
        assert line["target_moved"]["value"] == pytest.approx(0, abs=1e-5)
        assert line["advice"] == "reuse"


def test_a_target_moves_as_far_as_it_is_changed(world: World) -> None:
    law = Law(1.0)
    shifts = []
    for noise in (0.0001, 0.003, 0.1):
        target = changed(world, noise)
        records = [r for d in ("chat", "co/de") for r in held_out(replies(world, target), law, d)]
        shifts.append(moved(world.target, target, Cell("all", law, records), 50).value)
    assert 0 < shifts[0] < 0.02 < shifts[1] < shifts[2] < 1


def test_the_shift_is_the_total_variation(world: World) -> None:
    """Against probabilities from the models' own logits."""
    law, target = Law(1.0), changed(world, 0.1)
    records = held_out(replies(world, target), law, "chat")
    sums, tokens = 0.0, 0
    with torch.no_grad():
        for r in records:
            laws = [
                t.model(input_ids=r.ids[None, :-1], use_cache=False)
                .logits[0, r.prompt_len - 1 :, : t.vocab_size]
                .double()
                .softmax(-1)
                for t in (world.target, target)
            ]
            sums += float((laws[0] - laws[1]).abs().sum() / 2)
            tokens += len(laws[0])
    found = moved(world.target, target, Cell("chat", law, records), 50)
    assert found.value == pytest.approx(sums / tokens, rel=1e-4)


# ---- made-up acceptance


def after_of(rows: list[RequestRow], alpha: Callable[[int], float]) -> dict[Any, After]:
    """The same requests with this overlap, and the τ that follows from it."""
    scored: list[Any] = []
    for i, r in enumerate(rows):
        a = alpha(i)
        scored.append(
            replace(r, overlap=Overlap(40 * a, 40), expected=Expected(40.0, 40 / (1 + a + a * a)))
        )
    a = float(np.mean([s.overlap.sum / 40 for s in scored]))
    return {("chat", "T=1"): After(scored, (a, a * a))}


@pytest.mark.parametrize(
    ("alpha", "advice"), [(0.6, "reuse"), (0.598, "reuse"), (0.5, "warm start"), (0.25, "retrain")]
)
def test_the_advice_follows_the_acceptance(alpha: float, advice: str) -> None:
    """Twenty conversations at α = 0.6 before, noisy ones."""
    noise = np.random.default_rng(0).normal(0, 0.02, 20)
    rows = [row(f"p{i}") for i in range(20)]
    known: Any = after_of(rows, lambda i: 0.6 + noise[i])["chat", "T=1"].scored
    report = report_of(cost=None) | {"cost": COSTS}
    (found,) = drift_rows(known, after_of(rows, lambda i: alpha + noise[-i]), report)
    assert found["advice"] == advice
    assert found["conversations"] == 20 and found["overlap"]["one"] == pytest.approx(0.6, abs=0.02)
    assert found["speedup_predicted"] == pytest.approx((1 + alpha + alpha**2) * 1.1 / 1.6, rel=0.05)
    change = found["overlap"]["change"]
    assert change["low"] <= change["value"] <= change["high"]


def test_a_lucky_prompt_is_no_loss() -> None:
    """One conversation of ten that fell from 0.6 to 0.2 may be chance."""
    rows = [row(f"p{i}") for i in range(10)]
    known: Any = after_of(rows, lambda i: 0.6)["chat", "T=1"].scored
    (found,) = drift_rows(known, after_of(rows, lambda i: 0.2 if i == 3 else 0.6), {"cost": None})
    assert found["lost"] > 0.02 and found["advice"] == "reuse"
    assert "no more than chance" in found["why"]


def test_replies_without_estimates_are_left_out() -> None:
    rows = [row(f"p{i}", expected=None if i else Expected(40.0, 20.0)) for i in range(4)]
    (found,) = drift_rows(rows, after_of(rows, lambda i: 0.5), {"cost": None})
    assert found["replies"] == 1
    assert GAMMA == 2
