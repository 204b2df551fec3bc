"""Advice from a report whose answers are worked out by hand."""

import copy
from typing import Any

import planned
import pytest

from draftsmith.eval.advice import advice, most_adaptive, raised, sentences, verdict_of
from draftsmith.eval.advice_tables import advice_table, batch_costs_table, batch_speed_table
from draftsmith.eval.speed import Cost

COST = Cost(seconds=0.1, v={1: 1.0, 2: 1.2, 3: 1.4}, c_first=0.1, c=0.05, o=0.05, o_plain=0.0)


def found(report: dict[str, Any] | None = None) -> dict[str, Any]:
    got = advice(report or planned.report())
    assert got is not None
    return got


def row(domain: str, batch: int, got: dict[str, Any]) -> dict[str, Any]:
    (one,) = (r for r in got["rows"] if (r["domain"], r["batch"]) == (domain, batch))
    return dict(one)


def test_the_best_static_length_by_batch() -> None:
    """1.6 / 1.35 against 1.9 / 1.6 alone; 1.6·2 / 3.6 against 1.9·2 / 5 in a batch of eight."""
    got = found()
    alone, together = row("chat", 1, got), row("chat", 8, got)
    assert alone["num_draft_tokens"] == alone["best"] == 2 and alone["alike"] == [1, 2]
    assert alone["predicted"]["value"] == pytest.approx(1.9 / 1.6)
    assert together["best"] == 1 and together["alike"] == [1]
    assert together["predicted"]["value"] == pytest.approx(3.2 / 3.6)
    assert together["predicted"]["high"] == pytest.approx(3.2 / 3.6 * 1.7 / 1.6)
    assert together["verdict"] == "should not pay" and together["num_draft_tokens"] == 0


def test_intervals_decide_or_do_not() -> None:
    """The predicted 1.19 [0.94–1.44] decides nothing; what was measured there does."""
    report = planned.report()
    assert row("chat", 1, found(report))["verdict"] == "pays"
    report["sweep"][0]["measured"] = []
    open_one = row("chat", 1, found(report))
    assert open_one["predicted"]["low"] == pytest.approx(1.5 / 1.6)
    assert (open_one["verdict"], open_one["num_draft_tokens"]) == ("not decided", 2)
    measured = {"num_draft_tokens": 2, **planned.figure(0.9, 0.85, 0.95)}
    report["sweep"][0]["measured"] = [measured]
    assert row("chat", 1, found(report))["num_draft_tokens"] == 0, "measured in vain"
    single = {"num_draft_tokens": 2, **planned.figure(1.3)}
    report["sweep"][0]["measured"] = [single]
    assert row("chat", 1, found(report))["verdict"] == "not decided", "one prompt says nothing"


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ((0.9, 0.04, 19.0), "should pay"),  # the measurement says nothing
        ((1.1, 1.02, 1.18), "pays"),
        ((0.9, 0.85, 0.95), "does not pay"),
        ((1.0, 0.9, 1.1), "not decided"),  # it contradicts the prediction
        (None, "should pay"),
    ],
)
def test_what_is_measured_goes_before_what_is_predicted(
    measured: tuple[float, float, float] | None, verdict: str
) -> None:
    known = None if measured is None else planned.figure(*measured)
    assert verdict_of(planned.figure(1.17, 1.06, 1.3), known) == verdict


def test_a_batch_is_judged_by_what_was_measured_in_it() -> None:
    report = planned.report()
    (large,) = (e for e in report["batches"] if e["batch"] == 8)
    large["domains"][1]["measured"] = planned.figure(0.8, 0.7, 0.9)  # of math, at 2 tokens
    report["sweep"][1]["measured"] = [{"num_draft_tokens": 1, **planned.figure(1.4, 1.3, 1.5)}]
    got = row("math", 8, found(report))
    assert got["best"] == 1, "1.8·2 / 3.6 against 2.4·2 / 5"
    assert got["measured"] is None, "neither is of that length and that batch"
    large["domains"][1]["num_draft_tokens"] = 1
    assert row("math", 8, found(report))["measured"]["value"] == 0.8


def test_the_overlap_that_breaks_even() -> None:
    """1 + α = 1.35 needs less than 1 + α + α² = 1.6 does."""
    need = row("chat", 1, found())["break_even"]
    assert need["overlap"] == pytest.approx(0.35, abs=1e-6) and need["num_draft_tokens"] == 1
    dear = planned.report()
    for entry in dear["batches"]:
        entry["cost"] = {**entry["cost"], "c_first": 30.0}
    assert row("chat", 1, found(dear))["break_even"] is None


def test_no_policy_can_do_better_than_knowing_what_is_accepted() -> None:
    """0.4 reject at once, 0.3 accept one, 0.3 both: 1.9 tokens for 0.7·1.35 + 0.3·1.6."""
    assert most_adaptive(COST, [0.6, 0.3]) == pytest.approx(1.9 / 1.425)
    assert most_adaptive(COST, [1.0, 1.0]) == pytest.approx(COST.speedup([1.0, 1.0]))
    assert most_adaptive(COST, [0.0, 0.0]) == pytest.approx(COST.speedup([0.0]))
    steep = Cost(seconds=1, v={1: 1, 2: 1.1, 3: 9}, c_first=0.1, c=0, o=0, o_plain=0.2)
    assert most_adaptive(steep, [0.6, 0.3]) == pytest.approx(1.6 * 1.2 / 1.2), "never two"


def test_the_policy_that_was_measured_is_told() -> None:
    report = planned.report()
    assert row("chat", 1, found(report))["adaptive"] is None
    report["settings"]["policy"] = {planned.LAW: {"name": "cost_model"}}
    told = row("chat", 1, found(report))["adaptive"]
    assert told["name"] == "cost_model" and told["predicted"] == 1.1
    assert row("chat", 8, found(report))["adaptive"] is None, "it was measured alone"


def test_the_batch_at_which_it_stops_paying() -> None:
    """From 1.1875 at 1 down to 0.8889 at 8, in the logarithm."""
    chat = found()["limits"][0]
    assert chat["batch"] == pytest.approx(8 ** (0.1875 / (1.1875 - 3.2 / 3.6)))
    report = planned.report()
    report["batches"] = [e for e in report["batches"] if e["batch"] == 1]
    alone = found(report)["limits"][0]
    assert (alone["batch"], alone["largest"], alone["pays"]) == (None, 1, True)
    report["batches"][0]["cost"] = {**planned.SMALL, "o": 3.0}
    never = found(report)["limits"][0]
    assert (never["batch"], never["pays"]) == (None, False)


def test_more_overlap_raises_every_token_s_chance() -> None:
    assert raised([0.6, 0.3], 1.5) == pytest.approx([0.9, 0.675])
    assert raised([0.8, 0.8], 2.0) == [1.0, 1.0]
    assert raised([0.0, 0.0], 2.0) == [0.0, 0.0]


def test_the_domain_with_most_to_gain() -> None:
    first, second = found()["gains"]
    assert (first["domain"], second["domain"]) == ("math", "chat")
    assert first["then"] == pytest.approx((1 + 0.9 * (1 + 0.75 * 1.125)) / 1.6)
    assert second["to"] == 0.65, "its draft vocabulary allows no more"
    assert second["then"] == pytest.approx((1 + 0.65 + 0.65 * 0.5 * 0.65 / 0.6) / 1.6)
    assert second["gain"] == pytest.approx(second["then"] - 1.1875)
    assert second["at_ceiling"] == pytest.approx(second["then"])


def test_in_words() -> None:
    said = sentences(found())
    assert len(said) == 3
    assert said[0].startswith(
        "chat, T=0: draft γ = 2 (or 1, as good): speedup predicted 1.19 [0.94"
    )
    assert "measured 1.20 [1.05–1.35]; breaks even at α = 0.35, α is 0.60" in said[0]
    assert "gains at most 12 %" in said[0] and "stop paying at batch 3.7" in said[0]
    assert said[2].startswith("Most to gain: math, T=0. α of 0.90 instead of 0.80")


def test_a_report_without_costs_says_nothing() -> None:
    report = {**planned.report(), "batches": []}
    assert advice(report) is None
    assert not advice_table(report).rows and not batch_costs_table(report).rows


def test_one_domain_is_not_another() -> None:
    """Every figure of a row is of its own domain: with one domain alone, the same is said of it."""
    whole, report = found(), copy.deepcopy(planned.report())
    report["cells"], report["sweep"] = report["cells"][1:], report["sweep"][1:]
    assert row("math", 1, found(report)) == row("math", 1, whole)


def test_tables() -> None:
    report = planned.report()
    table = advice_table(report)
    assert len(table.rows) == 4 and all(len(r) == len(table.headers) for r in table.rows)
    assert table.rows[0][:5] == ("chat", "T=0", "1", "2", "1")
    costs = batch_costs_table(report)
    assert costs.headers[2:5] == ("v(1)", "v(2)", "v(3)")
    assert ("T=0", "8", "2.00", "3.20", "4.40", "0.300", "0.200", "0.100", "0.000") in costs.rows
    speeds = batch_speed_table(report)
    assert speeds.rows[0][-2:] == ("–", "1.00")
