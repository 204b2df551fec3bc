"""A benchmark's figures are ratios of pooled counts, and its tables put entries side by side."""

from collections.abc import Sequence
from typing import Any

import pytest

from draftsmith.eval.request_rows import Expected, Overlap, RequestRow, Timed
from draftsmith.eval.summary import pooled
from draftsmith.eval.summary_tables import summary_tables

Rounds = tuple[tuple[int, int], ...]


def row(
    prompt: str,
    rounds: Rounds,
    overlap: float = 0.0,
    seed: int = 0,
    expected: Expected | None = None,
    timing: Timed | None = None,
) -> RequestRow:
    """A reply whose rounds all came to their end: Σ (a + 1) tokens behind the first."""
    tokens = 1 + sum(accepted + 1 for _, accepted in rounds)
    return RequestRow(
        domain="x", law="T=1", prompt_id=prompt, turn=0, key=f"{prompt}|{seed}", seed=seed,
        prompt_tokens=1, prompt_sha256="", tokens=tokens, finish="stop", output_sha256="",
        rounds=rounds, overlap=Overlap(overlap, tokens - 1), expected=expected, timing=timing,
    )  # fmt: skip


ROWS = [
    row("a", ((2, 2), (2, 0)), 3.0, 0, Expected(4.0, 2.5), Timed(4.0, 8.0, 1.0, 4.0)),
    row("a", ((2, 1),), 0.5, 1, Expected(2.0, 1.0)),
    row("b", ((2, 2), (2, 2), (1, 0)), 4.5, 0, Expected(7.0, 2.5), Timed(2.0, 4.0, 2.0, 4.0)),
]


def test_every_figure_is_a_ratio_of_sums() -> None:
    """By hand: rounds of 2 + 1 + 3, tokens of 4 + 2 + 7, accepted 2 + 1 + 4 of 4 + 2 + 5."""
    found = pooled(ROWS, 100)
    assert (found["prompts"], found["replies"]) == (2, 3), "two seeds of one prompt are one prompt"
    assert (found["tokens"], found["rounds"]) == (13, 6)
    assert found["overlap"]["value"] == pytest.approx(8 / 13)
    assert found["tokens_per_round"]["value"] == pytest.approx(13 / 6)
    assert found["tokens_per_round_expected"] == pytest.approx(13 / 6.0)
    assert found["draft_acceptance_rate"] == pytest.approx(7 / 11)
    assert found["timed"] == 2
    assert found["speedup"]["value"] == pytest.approx((8 / 3) / (12 / 6))
    for name in ("overlap", "tokens_per_round", "speedup"):
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]


def test_replies_to_one_prompt_are_one_observation() -> None:
    """Whatever the seeds: a prompt repeated a hundred times says no more of other prompts."""
    alone = pooled([row("a", ((2, 1), (2, 0)), 1.0, seed) for seed in range(100)], 100)
    assert alone["tokens_per_round"] == {"value": 1.5, "low": None, "high": None}
    few = [row(p, r, 1.0) for p, r in (("a", ((2, 2),)), ("b", ((2, 0),)), ("c", ((2, 1),)))]
    many = [row(r.prompt_id, r.rounds, r.overlap.sum, seed) for r in few for seed in range(10)]
    assert pooled(many, 500)["tokens_per_round"] == pooled(few, 500)["tokens_per_round"]


def test_what_is_not_known_is_none() -> None:
    found = pooled([row("a", ()), row("b", ((0, 0),), 0.0)], 10)
    assert found["tokens_per_round_expected"] is None and found["speedup"] is None
    assert (found["timed"], found["draft_acceptance_rate"]) == (0, 0.0)
    assert (found["tokens"], found["rounds"], found["replies"]) == (1, 1, 2)


# ---- tables


def entry(
    name: str,
    *rows: dict[str, Any],
    cost: dict[str, Any] | None = None,
    totals: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    return {"name": name, "rows": list(rows), "cost": cost, "totals": list(totals)}


def told(domain: str, law: str, **changes: Any) -> dict[str, Any]:
    figure = {"value": 0.5, "low": 0.4, "high": 0.6}
    return {
        "domain": domain, "law": law, "prompts": 9, "overlap": figure,
        "tokens_per_round": {"value": 2.0, "low": 1.9, "high": 2.1},
        "tokens_per_round_expected": 2.05, "draft_acceptance_rate": 0.25,
        "speedup": {"value": 1.2, "low": 1.1, "high": 1.3}, "predicted": 1.25, **changes,
    }  # fmt: skip


def test_entries_stand_side_by_side() -> None:
    summary = {
        "entries": [
            entry("head, block", told("math", "T=1"), told("code", "T=0", prompts=7)),
            entry("lookup, block", told("math", "T=1", speedup=None, predicted=None)),
        ]
    }
    tables = {t.title: t for t in summary_tables(summary)}
    alpha = tables["α overlap"]
    assert alpha.headers == ("domain", "law", "n", "head, block", "lookup, block")
    assert alpha.rows == (
        ("code", "T=0", "7*", "0.500 [0.400–0.600]", "–"),
        ("math", "T=1", "9", "0.500 [0.400–0.600]", "0.500 [0.400–0.600]"),
    )
    assert tables["τ decoded | expected"].rows[1][3] == "2.00 [1.90–2.10] | 2.05"
    assert tables["speedup measured | predicted"].rows[1][3:] == ("1.20 [1.10–1.30] | 1.25", "–")
    assert tables["accepted ÷ drafted"].rows[1][3] == "0.250"
    assert tables["Costs"].rows == ()


def test_all_domains_together_stand_last() -> None:
    """Behind a domain whose name comes later; nothing is predicted of them."""
    total = {
        k: v for k, v in told("", "T=1", prompts=60).items() if k not in ("domain", "predicted")
    }
    tables = {
        t.title: t
        for t in summary_tables({"entries": [entry("a", told("zoo", "T=1"), totals=[total])]})
    }
    rows = tables["speedup measured | predicted"].rows
    assert [row[:3] for row in rows] == [("zoo", "T=1", "9"), ("(all, pooled)", "T=1", "60")]
    assert rows[1][3] == "1.20 [1.10–1.30] | –"


def test_what_was_not_predicted_or_expected_is_a_dash() -> None:
    """Of policies and trees, the one; of untimed runs, the other."""
    bare = told("math", "T=1", tokens_per_round_expected=None, predicted=None)
    tables = {t.title: t for t in summary_tables({"entries": [entry("a", bare)]})}
    assert tables["τ decoded | expected"].rows[0][3] == "2.00 [1.90–2.10]"
    assert tables["speedup measured | predicted"].rows[0][3] == "1.20 [1.10–1.30] | –"


def test_costs_are_told_by_entry_and_law() -> None:
    law = {"c_first": 0.2, "c": 0.1, "o": 0.05, "o_plain": 0.01, "v": [1.0, 1.1, 1.25]}
    summary = {"entries": [entry("a", cost={"by_law": {"T=0": law}}), entry("b", told("m", "T=0"))]}
    (costs,) = (t for t in summary_tables(summary) if t.title == "Costs")
    assert costs.rows == (("a", "T=0", "0.200", "0.100", "0.050", "0.010", "1.00 1.10 1.25"),)
