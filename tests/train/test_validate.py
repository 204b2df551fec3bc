"""Held-out figures while training: pooled over rounds, in all and by domain."""

from collections.abc import Sequence

import pytest
import torch
from conftest import cut

from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.causal import CausalConfig
from draftsmith.drafters.start import new_drafter
from draftsmith.train.objective import Objective, bind_objective
from draftsmith.train.score import Conversation, score
from draftsmith.train.validate import TAU, held_out_figures

GAMMA, LIMIT = 3, 14


@pytest.fixture
def objective() -> Objective:
    laws = (LawSection(temperature=1.0),)
    serving = ServingSection(laws=laws, num_draft_tokens=GAMMA, verifier="token")
    return bind_objective(ObjectiveSection(), serving)


def course(found: Sequence[Conversation]) -> tuple[list[float], float]:
    """S_k and tokens per round, walking through each reply round by round."""
    accepted, drafted, rounds = [0.0] * GAMMA, [0.0] * GAMMA, 0.0
    for c in found:
        begun = [1.0] + [0.0] * c.tokens  # chance that a round begins at each token
        for start in range(c.tokens):
            rounds += begun[start]
            reached = begun[start]
            for k in range(GAMMA):
                if start + k + 1 >= c.limit:  # no room: a round always adds a token of its own
                    begun[min(start + k + 1, c.tokens)] += reached
                    break
                drafted[k] += begun[start]
                inside = start + k < c.tokens
                taken = reached * min(1.0, float(c.log_ratio[start, k].exp())) if inside else 0.0
                begun[min(start + k + 1, c.tokens)] += reached - taken
                accepted[k] += taken
                reached = taken
            else:
                begun[min(start + GAMMA + 1, c.tokens)] += reached
    tokens = sum(c.tokens for c in found)
    return [a / n for a, n in zip(accepted, drafted, strict=True)], tokens / rounds


def test_survival_and_tokens_per_round_are_those_of_a_walk_through_the_replies(
    tiny_target: Target, records: list[Record], objective: Objective
) -> None:
    drafter = new_drafter(CausalConfig(layers=(0, 3)), tiny_target, [])
    chosen = [r for r in records if r.drawn_from(Law(1.0))]
    figures = held_out_figures(tiny_target, drafter, chosen, objective, GAMMA, LIMIT)
    found = score(tiny_target, drafter, chosen, Law(1.0), GAMMA, LIMIT)
    assert {c.domain for c in found} == {"a", "b"}
    for suffix, own in (
        ("", found),
        ("/a", [c for c in found if c.domain == "a"]),
        ("/b", [c for c in found if c.domain == "b"]),
    ):
        survival, tau = course(own)
        told = [figures[f"survival_{k + 1}{suffix}"] for k in range(GAMMA)]
        assert told == pytest.approx(survival, abs=1e-9)
        assert figures[f"{TAU}{suffix}"] == pytest.approx(tau, abs=1e-9)
        assert 0.01 < told[2] < told[1] < told[0] < 1
    assert figures["survival_1/a"] != pytest.approx(figures["survival_1/b"], rel=1e-3)


def test_positions_that_no_reply_reaches_have_no_figure(
    tiny_target: Target, records: list[Record], objective: Objective
) -> None:
    """A reply of three tokens that a limit of three cut: a round drafts one token at most."""
    drafter = new_drafter(CausalConfig(layers=(0, 3)), tiny_target, [])
    short = [cut(r, 3) for r in records if r.drawn_from(Law(1.0)) and len(r.reply) >= 3]
    figures = held_out_figures(tiny_target, drafter, short, objective, GAMMA, limit=3)
    assert "survival_1" in figures
    assert not {"survival_2", "survival_3"} & set(figures)


def test_no_records_have_no_figures(tiny_target: Target, objective: Objective) -> None:
    drafter = new_drafter(CausalConfig(layers=(0, 3)), tiny_target, [])
    with torch.no_grad():
        assert held_out_figures(tiny_target, drafter, [], objective, GAMMA, LIMIT) == {}
