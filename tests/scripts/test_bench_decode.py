"""The decoding benchmark's arithmetic: acceptance by position, ratios, order, merged sections."""

import itertools
from collections.abc import Sequence

import pytest

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.eval.decode import DecodeSettings
from draftsmith.eval.speed import Cost, TreeCost
from draftsmith.scripts import bench_timing
from draftsmith.scripts.bench_decode import _compared
from draftsmith.scripts.bench_timing import (
    Sample,
    batches,
    in_turns,
    interleaved,
    median_interval,
    merged,
    per_round,
    ratio,
    rounded,
    steady_loop,
    steady_rounds,
    survival,
)

ROUNDS = [(3, 3), (3, 1), (3, 0), (2, 2), (0, 0)]
TREE = TreeCost(seconds=0.01, draft=0.4, v=1.3, o=0.05, o_plain=0.02)
CHAIN = Cost(seconds=0.01, v={1: 1.0, 3: 1.3}, c_first=0.25, c=0.15, o=0.05, o_plain=0.02)


def request(name: str, domain: str = "a") -> Request:
    return Request(name, domain, "heldout", (1, 2), Law(0.0), 0)


def test_survival_is_over_all_rounds() -> None:
    assert survival(ROUNDS, 4) == pytest.approx([3 / 5, 2 / 5, 1 / 5, 0.0])
    assert survival([], 2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("emitted", "budget", "depth", "rounds"),
    [
        ([1, 3, 1, 1, 3, 1], 10, 4, 3),  # 1, 4, 5, 6 and 9 tokens before the five rounds
        ([1, 3, 1, 1, 3, 1], 10, 3, 4),  # the fourth has room for just three
        ([1, 3, 1, 1, 3, 1], 30, 3, 4),  # the last is left out
        ([1, 1, 1, 1], 4, 0, 2),
        ([1, 1], 2, 0, 0),
        ([1], 1, 3, 0),
    ],
)
def test_steady_rounds_had_room_for_a_whole_draft(
    emitted: list[int], budget: int, depth: int, rounds: int
) -> None:
    assert steady_rounds(emitted, budget, depth) == rounds


def test_a_steady_loop_times_whole_rounds_only(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_target, "eos_ids", ())
    config = CausalConfig(layers=(0, 1, 2, 3))  # the target itself: everything is accepted
    drafter = CausalDrafter.from_target(tiny_target, config, None).eval()
    loop = steady_loop(tiny_target, DecodeSettings(1, 3), drafter)
    found = loop([request("p")], 12)  # 1 token, rounds of 4, 4 and 3 with the last one cut
    assert found.tokens == 8 and found.rounds == [(3, 3), (3, 3)]
    assert 0 < found.seconds < found.whole and found.forwards < found.whole
    assert len(found.ids[0]) == 12


def test_every_round_emits_a_token_beside_the_accepted_ones() -> None:
    assert per_round([Sample(1.0, 1.0, rounds=ROUNDS)]) == pytest.approx(1 + 6 / 5)


def test_predicted_speedup_of_a_tree_is_the_formula() -> None:
    assert TREE.speedup([0.7, 0.4]) == pytest.approx(2.1 * 1.02 / (0.4 + 1.3 + 0.05))


@pytest.mark.parametrize("cost", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_loop_as_fast_as_predicted_has_quotient_one(cost: Cost | TreeCost) -> None:
    plain, fast = [], []
    for rounds in ([(2, 2)] * 6, [(2, 0)] * 8 + [(2, 1)] * 2):
        tokens = sum(a + 1 for _, a in rounds)
        speedup = cost.speedup(survival(rounds, 2))
        plain.append(Sample(seconds=1.0, tokens=20.0, whole=1.0, forwards=0.8))
        fast.append(
            Sample(
                tokens / (20.0 * speedup), float(tokens), whole=0.03, forwards=0.02, rounds=rounds
            )
        )
    cell = _compared(cost, 2, plain, [*fast])
    found = cell["measured_over_predicted"]
    assert (found.low, found.value, found.high) == pytest.approx((1.0, 1.0, 1.0))
    assert cell["plain_round_over_forwards"] == pytest.approx(1 / 0.8)
    assert cell["round_over_forwards"] == pytest.approx(1.5)
    every = [r for s in fast for r in s.rounds]
    assert cell["predicted"] == pytest.approx(cost.speedup(survival(every, 2)))


def test_a_ratio_says_how_much_faster_the_second_is() -> None:
    slow = [Sample(2.0, 10.0), Sample(4.0, 20.0)]
    fast = [Sample(1.0, 10.0), Sample(2.0, 20.0)]
    found = ratio(slow, fast)
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_median_has_an_interval_from_two_values_on() -> None:
    assert median_interval([1.5]).low is None
    found = median_interval([1.0, 1.1, 1.2, 5.0, 0.9])
    assert found.value == 1.1 and found.low is not None and found.high is not None
    assert 0.9 <= found.low < 1.1 < found.high <= 5.0


def test_loops_take_turns_in_both_orders_behind_a_warm_up() -> None:
    order: list[tuple[str, str, int]] = []

    def loop(name: str):  # type: ignore[no-untyped-def]
        def run(asked: Sequence[Request], tokens: int) -> Sample:
            order.append((name, asked[0].prompt_id, tokens))
            return Sample(1.0, float(len(order)))

        return run

    work = [[request("p")], [request("q")]]
    samples = interleaved({"x": loop("x"), "y": loop("y")}, work, 30, repeats=2)
    warm = bench_timing.WARM_UP_TOKENS
    assert order[:2] == [("x", "p", warm), ("y", "p", warm)]
    assert [(n, p) for n, p, _ in order[2:]] == [
        ("x", "p"), ("y", "p"), ("y", "q"), ("x", "q"),
        ("x", "p"), ("y", "p"), ("y", "q"), ("x", "q"),
    ]  # fmt: skip
    assert [s.tokens for s in samples["x"]] == [3.0, 6.0, 7.0, 10.0], "the warm-up is not counted"


def test_domains_take_turns_by_id() -> None:
    asked = [request(f"{i}", domain) for domain, i in itertools.product("ab", (3, 1, 2))]
    assert [(r.domain, r.prompt_id) for r in in_turns(asked)] == [
        ("a", "1"), ("b", "1"), ("a", "2"), ("b", "2"), ("a", "3"), ("b", "3"),
    ]  # fmt: skip


def test_batches_are_whole() -> None:
    asked = [request(str(i)) for i in range(5)]
    assert [[r.prompt_id for r in part] for part in batches(asked, 2, 9)] == [
        ["0", "1"],
        ["2", "3"],
    ]
    assert len(batches(asked, 1, 3)) == 3
    assert batches(asked, 6, 1) == []


def test_a_section_replaces_its_own_and_keeps_the_others() -> None:
    saved = {"date": "x", "sections": {"plain": {"a": 1, "old": 2}, "batch": {"b": 3}}}
    assert merged(saved, "plain", {"a": 4}) == {"sections": {"batch": {"b": 3}, "plain": {"a": 4}}}
    assert merged({}, "plain", {"a": 4}) == {"sections": {"plain": {"a": 4}}}
    assert saved["sections"]["plain"] == {"a": 1, "old": 2}


def test_saved_figures_are_plain_and_short() -> None:
    value = {"r": median_interval([2.0]), "rows": [{"x": 0.123456, "n": 3, "s": "t", "none": None}]}
    assert rounded(value) == {
        "r": {"value": 2.0, "low": None, "high": None},
        "rows": [{"x": 0.123, "n": 3, "s": "t", "none": None}],
    }
