"""What engines should count, against our own decoding counted as they do, and how faults show."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from engine_counts import Counted, counted
from worlds import GAMMA, LIMIT, World

from draftsmith.data.gather import GatherSettings, answer, request_of
from draftsmith.data.records import Record
from draftsmith.data.warp import Law
from draftsmith.eval.engines.expected import (
    Rounds,
    deviations,
    foretold,
    law_figures,
    log_probs,
)
from draftsmith.train.score import score


def long_records(world: World, law: Law) -> list[Record]:
    records = world.store.records("heldout")
    return [r for r in records if r.law == law and len(r.reply) > 1]


def as_rounds(records: list[Record], outputs: list[Counted]) -> Rounds:
    reached = np.array(
        [[sum(a > k for _, a in o.rounds) for k in range(GAMMA)] for o in outputs], np.float64
    )
    return Rounds(
        tuple(r.prompt_id for r in records),
        np.array([len(o.ids) - 1.0 for o in outputs]),
        np.array([float(len(o.rounds)) for o in outputs]),
        reached,
        reached,
    )


def test_greedy_counts_are_foretold_exactly(world: World) -> None:
    records = long_records(world, Law(0.0))
    scores = score(world.target, world.drafter, records, Law(0.0), GAMMA, LIMIT, Law(0.0))
    expected = foretold(scores, GAMMA, overruns=True)
    outputs = counted(world.target, world.drafter, [request_of(r) for r in records], LIMIT, GAMMA)
    assert [o.ids for o in outputs] == [r.reply.tolist() for r in records]
    assert {o.finish for o in outputs} == {"stop", "length"}
    mine = as_rounds(records, outputs)
    assert mine.rounds == pytest.approx(expected.rounds)
    assert mine.tokens == pytest.approx(expected.tokens)
    assert (mine.most >= expected.least - 1e-9).all()
    assert (mine.most <= expected.most + 1e-9).all()
    assert (expected.most > expected.least).any(), "some rounds run beyond the end"
    assert deviations(mine, expected, np.ones(len(records), bool)) == []


def test_an_engine_that_keeps_within_the_limit_counts_no_more(world: World) -> None:
    """Beyond an end token it still drafts, beyond the limit it does not."""
    records = [r for r in long_records(world, Law(0.0)) if r.finish == "length"]
    scores = score(world.target, world.drafter, records, Law(0.0), GAMMA, LIMIT, Law(0.0))
    within = foretold(scores, GAMMA, overruns=False)
    assert within.least == pytest.approx(within.most)
    beyond = foretold(scores, GAMMA, overruns=True)
    assert (beyond.least >= within.least - 1e-9).all()


@pytest.mark.parametrize("drafting", ["sampled", "greedy"])
def test_sampled_rounds_are_foretold_in_the_mean(drafting: Any, world: World) -> None:
    """Token by token, with drafts of either kind, over many draws of all prompts."""
    law = Law(1.0)
    records = long_records(world, law)
    q_law = law if drafting == "sampled" else Law(0.0)
    scores = score(world.target, world.drafter, records, law, GAMMA, LIMIT, q_law)
    expected = foretold(scores, GAMMA, overruns=True)
    drawn, times = [], 12
    for n in range(times):
        asked = [replace(request_of(r), seed=1000 * n + i) for i, r in enumerate(records)]
        drawn += counted(world.target, world.drafter, asked, LIMIT, GAMMA, drafting)
    mine = as_rounds(records * times, drawn)
    assert deviations(mine, expected, None) == []
    share = mine.most.sum(0) / mine.rounds.sum()
    for k in range(GAMMA):
        low, high = (b[:, k].sum() / expected.rounds.sum() for b in (expected.least, expected.most))
        assert low - 0.15 < share[k] < high + 0.15


# ---- what cannot be


def some(count: int = 30, tau: float = 1.5, seed: int = 0) -> Rounds:
    """Conversations of 40 to 80 tokens whose rounds give `tau` tokens on average."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(40, 80, count).astype(np.float64)
    rounds = tokens / (tau + rng.normal(0, 0.15, count))
    accepted = (tokens - rounds)[:, None] * np.array([0.8, 0.2])
    return Rounds(tuple(map(str, range(count))), tokens, rounds, accepted, accepted)


def test_noise_is_no_deviation() -> None:
    assert deviations(some(seed=1), some(seed=2), None) == []


def test_another_mean_is_one() -> None:
    found = deviations(some(tau=1.3, seed=1), some(seed=2), None)
    assert found[0] == "τ is 1.26 where 1.48 is expected"
    assert any("accept position 1 is" in line for line in found)


def test_one_conversation_tells_nothing_of_a_mean() -> None:
    assert deviations(some(1, tau=1.1), some(1), None) == []


def test_a_drafter_that_is_never_accepted_shows_in_few_conversations() -> None:
    """The field's classic: it loads, drafts, and nothing is ever accepted."""
    good = some(2)
    none = np.zeros_like(good.least)
    dead = replace(good, rounds=good.tokens, least=none, most=none)
    (line,) = deviations(dead, good, None)
    assert line.startswith("it accepted no token where ")
    silent = replace(dead, rounds=np.zeros(2))
    assert deviations(silent, good, None) == ["it drafted nothing"]


def test_greedy_rounds_leave_room_for_near_ties_only() -> None:
    good = some(6)
    same = np.ones(6, bool)
    off = np.zeros(6)
    off[0] = 3.0
    assert deviations(replace(good, rounds=good.rounds + off), good, same) == []
    off[0] = 20.0
    (line,) = deviations(replace(good, rounds=good.rounds + off), good, same)
    assert "rounds where" in line
    other = np.array([False, *[True] * 5])
    assert deviations(replace(good, rounds=good.rounds + off), good, other) == []


def test_replies_that_are_all_others_are_of_another_target() -> None:
    good, none = some(6), np.zeros(6, bool)
    (line,) = deviations(good, good, none)
    assert line.startswith("none of its 6 greedy replies is the target's own")
    assert deviations(some(2), some(2), np.zeros(2, bool)) == []
    worse = some(tau=1.2)
    few = np.arange(30) < 3
    assert any(line.startswith("τ is 1.") for line in deviations(worse, some(), few))


def test_replies_of_the_law_are_as_probable_as_the_targets(world: World) -> None:
    law = Law(1.0)
    drawn = long_records(world, law)
    asked = [replace(request_of(r), seed=77 + i) for i, r in enumerate(drawn)]
    fresh = answer(world.target, asked, GatherSettings(LIMIT, 32, (), keep="none"))
    judge = partial(log_probs, world.target)
    figures, odd = law_figures(drawn, fresh, judge)
    assert odd == []
    with torch.no_grad():
        logits = world.target.model(drawn[0].ids[None]).logits[0, drawn[0].prompt_len - 1 : -1]
    theirs = logits.log_softmax(-1).gather(1, drawn[0].reply[:, None]).sum()
    assert judge(drawn[:1])[0] == pytest.approx(float(theirs), rel=1e-4)
    noise = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 12, (len(r.reply),), generator=noise) for r in fresh]
    garbage = [
        replace(r, ids=torch.cat([r.ids[: r.prompt_len], new]))
        for r, new in zip(fresh, ids, strict=True)
    ]
    told, odd = law_figures(drawn, garbage, judge)
    assert told["expected"] == figures["expected"] and told["measured"] < figures["measured"]
    assert "it does not draw from the target's law" in odd[0]


def test_greedy_positions_are_within_their_bounds() -> None:
    good = some(6)
    wide = replace(good, most=good.most + 2.0)
    assert deviations(replace(good, most=good.most + 1.5), wide, np.ones(6, bool)) == []
    more = replace(good, most=good.most + 10.0)
    found = deviations(more, wide, np.ones(6, bool))
    assert [line.partition(" where")[0][-10:] for line in found] == ["position 1", "position 2"]
