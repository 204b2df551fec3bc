"""Draft length policies: decisions by hand, calibration, throughput by exact enumeration."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from draftsmith.configs.errors import OptionError, UserError
from draftsmith.configs.load import parse
from draftsmith.eval.gamma import (
    LEAST,
    POLICIES,
    AdaEDL,
    Calibration,
    Confidence,
    CostModel,
    Costs,
    Policy,
    Static,
    as_mapping,
    calibrate,
    confidence_of,
    make_policy,
    observations,
)

CPU = torch.device("cpu")
LEVELS = np.array([0.15, 0.6, 0.95])  # confidences of the simulated draft
WEIGHTS = np.array([0.3, 0.3, 0.4])  # how often it has each
CHANCES = np.array([0.1, 0.55, 0.97])  # how often such a token is accepted
COSTS = Costs(c_first=0.15, c=0.1, o=0.05, v={1: (1.0, 1.05, 1.1, 1.15, 1.2, 1.25)})
BUMP = replace(COSTS, v={1: (1.0, 1.02, 1.04, 1.6, 1.62, 1.64)})


def ask(policy: Policy, confidences: Sequence[Sequence[float]] | np.ndarray) -> list[int]:
    """How many tokens each row drafts if its tokens have these confidences `[B, limit]`."""
    p = torch.tensor(np.asarray(confidences), dtype=torch.float64)  # [B, limit]
    rows = len(p)
    round_, going = policy.begin(rows, CPU), torch.ones(rows, dtype=torch.bool)
    drafted = torch.ones(rows, dtype=torch.long)
    for k in range(policy.limit):
        logits = torch.stack([p[:, k], 1 - p[:, k]], 1).log() + k  # [B, 2], no law of any sort
        going &= round_.go_on(k, logits, torch.zeros(rows, dtype=torch.long))
        drafted += going
    assert bool((drafted <= policy.limit).all())
    return drafted.tolist()


def known(chances: np.ndarray = CHANCES, weights: np.ndarray = WEIGHTS) -> Calibration:
    """The truth about the simulated draft, as a calibration."""
    mean = float(chances @ weights)
    return Calibration(((0.4, 0.8),), (tuple(chances.tolist()),), (mean,), (1000,))


def flat(*means: float) -> Calibration:
    """A confidence that tells nothing."""
    return Calibration(((),) * len(means), tuple((m,) for m in means), means, (99,) * len(means))


# ---- decisions by hand


def test_static_drafts_its_length() -> None:
    assert [ask(Static(n), np.full((1, n), 0.01)) for n in (1, 2, 5)] == [[1], [2], [5]]


def test_confidence_keeps_the_token_it_doubts() -> None:
    policy = Confidence(4, threshold=0.4)
    rows = [[0.9, 0.3, 0.9, 0.9], [0.39, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.1], [0.41, 0.9, 0.2, 1]]
    assert ask(policy, rows) == [2, 1, 4, 3]
    assert ask(Confidence(4, threshold=0.0), np.zeros((1, 4))) == [4]


def test_confidence_is_the_plain_softmax_of_the_chosen_token() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.75, 0.25]], dtype=torch.float64)
    chosen = torch.tensor([2, 1])
    want = torch.tensor([0.2, 0.75], dtype=torch.float64)
    assert torch.allclose(confidence_of(p.log() - 3.0, chosen), want, atol=1e-12)
    assert confidence_of(p.log().to(torch.bfloat16), chosen).dtype == torch.float32


def test_adaedl_by_hand() -> None:
    bound = 1 - math.sqrt(0.2 * math.log(2))  # two equal tokens: H = ln 2
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf], [0.0, 0.0, 0.0]])
    chosen = torch.zeros(3, dtype=torch.long)
    for threshold, want in ((bound - 1e-3, [True, True, False]), (bound + 1e-3, [0, 1, 0])):
        got = AdaEDL(3, threshold).go_on(0, logits, chosen)
        assert got.tolist() == [bool(x) for x in want]
    assert AdaEDL(3, 1.0).go_on(0, logits, chosen).tolist() == [False, True, False]
    assert not AdaEDL(3, 0.0).go_on(2, logits, chosen).any()  # the limit
    assert AdaEDL(3, bound, g=0.4).go_on(0, logits, chosen).tolist() == [False, True, False]


def test_cost_model_by_hand() -> None:
    """S = 0.9, 0.54, 0.27 at costs 1.4, 1.5, 1.6: the price is 2.71/1.6, reached at 3 tokens."""
    costs = Costs(c_first=0.2, c=0.05, o=0.1, v={1: (1.0, 1.1, 1.15, 1.2)})
    policy = CostModel(3, flat(0.9, 0.6, 0.5), costs)
    want = (2.71 / 1.6 * 0.1 / 0.6, 2.71 / 1.6 * 0.1 / 0.5, math.inf)
    assert policy.thresholds[1] == pytest.approx(want)
    assert ask(policy, np.ones((1, 3))) == [3]  # 0.9 > 0.28, 0.54 > 0.34
    doubtful = replace(policy.calibration, chances=((0.9,), (0.3,), (0.5,)))
    assert ask(replace(policy, calibration=doubtful), np.ones((1, 3))) == [2]  # 0.27 < 0.34


def test_cost_model_looks_beyond_a_bump() -> None:
    """Token 3 alone does not pay for v(3) -> v(4), tokens 3 to 5 together do."""
    policy = CostModel(5, flat(0.9, 0.9, 0.9, 0.9, 0.9), BUMP)
    cost = BUMP.of(1, 5)
    price = ((1 + np.cumprod([0.9] * 5).cumsum()) / cost).max()
    assert price * (cost[2] - cost[1]) > 0.9**3  # a look at the next token only would stop
    assert ask(policy, np.full((1, 5), 0.5)) == [5]
    assert ask(replace(policy, limit=3), np.full((1, 3), 0.5)) == [2]


def test_cost_model_takes_the_costs_of_the_nearest_batch() -> None:
    costs = replace(COSTS, v={1: COSTS.v[1], 8: (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)})
    policy = CostModel(5, known(), costs)
    assert policy.looks_at_batch and not CostModel(5, known(), COSTS).looks_at_batch
    assert [costs.nearest(rows) for rows in (1, 4, 5, 8, 99)] == [1, 1, 8, 8, 8]
    rows = [[0.95] * 5]
    assert ask(policy, rows * 4) == [5] * 4
    assert max(ask(policy, rows * 5)) < 5
    thin, steep = policy.thresholds[1], policy.thresholds[8]
    assert all(a < b for a, b in zip(thin[:-1], steep[:-1], strict=True))


# ---- monotonicity, independence of rows


def paths(limit: int) -> np.ndarray:
    """Indices of every sequence of confidence levels, `[3^limit, limit]`."""
    return np.array(list(itertools.product(range(len(LEVELS)), repeat=limit)))


@pytest.mark.parametrize(
    "policy",
    [
        Confidence(4, 0.5),
        AdaEDL(4, 0.65),
        CostModel(4, known(), COSTS),
        CostModel(4, known(), BUMP),
    ],
    ids=["confidence", "adaedl", "cost_model", "cost_model with a bump"],
)
def test_more_confidence_never_shortens_a_draft(policy: Policy) -> None:
    levels = np.array([0.55, 0.8, 0.97]) if isinstance(policy, AdaEDL) else LEVELS
    index = paths(4)
    drafted = np.array(ask(policy, levels[index]))
    assert len(set(drafted.tolist())) > 1
    below = (index[:, None] <= index[None]).all(-1)  # [81, 81]
    assert bool((drafted[:, None] <= drafted[None])[below].all())
    alone = [ask(policy, levels[row][None])[0] for row in index]
    assert alone == drafted.tolist()


@pytest.mark.parametrize("kind", [Confidence, AdaEDL])
def test_a_higher_threshold_shortens_drafts(kind: type[Confidence] | type[AdaEDL]) -> None:
    lengths = [np.array(ask(kind(4, t), LEVELS[paths(4)])) for t in (0.0, 0.3, 0.65, 0.8, 0.99)]
    assert all(bool((b <= a).all()) for a, b in itertools.pairwise(lengths))
    assert lengths[0].mean() > lengths[2].mean() > lengths[-1].mean()


def test_dearer_draft_steps_shorten_drafts() -> None:
    lengths = []
    for c in (0.0, 0.1, 0.4, 1.0):
        policy = CostModel(4, known(), replace(COSTS, c=c))
        lengths.append(np.array(ask(policy, LEVELS[paths(4)])))
    assert all(bool((b <= a).all()) for a, b in itertools.pairwise(lengths))
    assert lengths[0].mean() > lengths[1].mean() > lengths[-1].mean()


# ---- throughput: tokens per cost, exact over all sequences of confidences


def throughput(
    drafted: Sequence[int], costs: Costs, chances: np.ndarray = CHANCES, limit: int = 4
) -> float:
    """E[tokens] / E[cost] of a policy that drafts `drafted` on the sequences of `paths`."""
    index = paths(limit)
    weight = WEIGHTS[index].prod(1)
    survival = np.pad(chances[index].cumprod(1).cumsum(1), ((0, 0), (1, 0)))
    length = np.array(drafted)
    tokens = 1 + survival[np.arange(len(index)), length]
    return float(weight @ tokens / (weight @ costs.of(1, limit)[length - 1]))


def best_static(costs: Costs, chances: np.ndarray = CHANCES) -> float:
    return max(throughput([n] * 81, costs, chances) for n in range(1, 5))


def optimum(costs: Costs, chances: np.ndarray = CHANCES) -> float:
    """The fastest policy there is: Dinkelbach's iteration over a full dynamic programme."""
    cost, index = costs.of(1, 4), paths(4)
    rate = 0.0

    @functools.cache
    def value(k: int, survival: float) -> float:
        """Gain, at price `rate`, of going on after k tokens of which all survive with this."""
        if k == 4:
            return -math.inf
        ahead = [survival * a + max(0.0, value(k + 1, survival * a)) for a in chances]
        return float(WEIGHTS @ ahead) - rate * float(cost[k] - cost[k - 1])

    for _ in range(6):
        drafted = []
        for path in index:
            n, survival = 1, chances[path[0]]
            while value(n, survival) > 0:
                survival *= chances[path[n]]
                n += 1
            drafted.append(n)
        rate = throughput(drafted, costs, chances)
        value.cache_clear()
    return rate


def simulated_rounds(
    chances: np.ndarray, count: int = 6000, limit: int = 4, seed: int = 0
) -> list[tuple[list[float], int]]:
    """Static rounds of the simulated draft: confidences, and how many tokens were accepted."""
    g = np.random.default_rng(seed)
    index = g.choice(len(LEVELS), size=(count, limit), p=WEIGHTS)
    accepted = (g.random((count, limit)) < chances[index]).cumprod(1).sum(1)
    return list(zip(LEVELS[index].tolist(), accepted.tolist(), strict=True))


@pytest.mark.parametrize(
    "costs", [COSTS, BUMP, replace(COSTS, c=0.3)], ids=["cheap", "bump", "dear"]
)
def test_calibrated_cost_model_beats_the_best_static_length(costs: Costs) -> None:
    calibration = calibrate(*observations(simulated_rounds(CHANCES)))
    ours = throughput(ask(CostModel(4, calibration, costs), LEVELS[paths(4)]), costs)
    static, fastest = best_static(costs), optimum(costs)
    assert ours > 1.015 * static
    assert 0.985 * fastest < ours <= fastest + 1e-12

    # Planted: costs that leave out the draft steps; a calibration that leaves out confidence.
    blind = replace(costs, c=0.0, v={1: (1.0,) * 6})
    assert throughput(ask(CostModel(4, calibration, blind), LEVELS[paths(4)]), costs) < ours - 0.02
    mean = float(CHANCES @ WEIGHTS)
    untold = throughput(ask(CostModel(4, flat(mean), costs), LEVELS[paths(4)]), costs)
    assert untold == pytest.approx(static)


def test_cost_model_is_no_worse_where_confidence_tells_nothing() -> None:
    for chance, seed in itertools.product((0.3, 0.6, 0.9), range(3)):
        chances = np.full(3, chance)
        calibration = calibrate(*observations(simulated_rounds(chances, seed=seed)))
        for costs in (COSTS, BUMP, replace(COSTS, c=0.3)):
            ours = ask(CostModel(4, calibration, costs), LEVELS[paths(4)])
            assert throughput(ours, costs, chances) > 0.99 * best_static(costs, chances)


def test_never_below_the_best_static_length_over_random_drafts() -> None:
    """The guarantee, on 60 drafts and machines with the true calibration."""
    g = np.random.default_rng(1)
    gains = []
    for _ in range(60):
        chances = np.sort(g.random(3))
        v = (1.0, *(1 + g.exponential(0.15, 5).cumsum()))
        costs = Costs(float(g.uniform(0, 0.4)), float(g.uniform(0, 0.4)), 0.05, {1: v})
        ours = throughput(
            ask(CostModel(4, known(chances), costs), LEVELS[paths(4)]), costs, chances
        )
        assert ours <= optimum(costs, chances) + 1e-12
        gains.append(ours / best_static(costs, chances))
    assert min(gains) > 1 - 1e-12
    assert np.mean(gains) > 1.005


# ---- calibration


def test_observations_end_at_the_first_refusal() -> None:
    confidence, accepted, position = observations([([0.9, 0.4, 0.7], 1), ([0.8, 0.6], 2), ([], 0)])
    assert confidence.tolist() == [0.9, 0.4, 0.8, 0.6]
    assert accepted.tolist() == [True, False, True, True]
    assert position.tolist() == [0, 1, 0, 1]


def test_calibration_recovers_the_truth_of_each_position() -> None:
    g = np.random.default_rng(0)
    truths: list[Callable[[np.ndarray], np.ndarray]] = [lambda c: c**2, lambda c: 0.2 + 0.6 * c]
    confidence, position = g.random(160_000), g.integers(0, 2, 160_000)
    chance = np.where(position == 0, truths[0](confidence), truths[1](confidence))
    got = calibrate(confidence, g.random(160_000) < chance, position)
    for truth, edges, chances, mean in zip(truths, got.edges, got.chances, got.means, strict=True):
        middle = np.convolve([0.0, *edges, 1.0], [0.5, 0.5], "valid")
        assert len(chances) == 20
        assert np.abs(truth(middle) - chances).max() < 0.03
        assert mean == pytest.approx(truth(np.linspace(0, 1, 1001)).mean(), abs=0.01)


def test_a_calibration_never_falls_with_confidence() -> None:
    g = np.random.default_rng(0)
    confidence = g.random(2000)
    noisy = calibrate(confidence, g.random(2000) < 0.5, np.zeros(2000))
    assert noisy.chances[0] == tuple(sorted(noisy.chances[0]))
    falling = calibrate(confidence, g.random(2000) < 0.9 - 0.8 * confidence, np.zeros(2000))
    assert falling.chances[0] == pytest.approx([falling.means[0]] * len(falling.chances[0]))


def test_means_multiply_to_the_survival_of_static_rounds() -> None:
    rounds = simulated_rounds(CHANCES)
    got = calibrate(*observations(rounds))
    accepted = np.array([a for _, a in rounds])
    assert got.mean(4).cumprod() == pytest.approx([(accepted >= k).mean() for k in range(1, 5)])
    assert got.mean(6)[4:].tolist() == [got.means[3]] * 2
    for edges, chances in zip(got.edges, got.chances, strict=True):
        assert edges == pytest.approx((0.375, 0.775))  # ties stay together
        assert np.abs(np.array(chances) - CHANCES).max() < 0.06


@pytest.mark.parametrize(
    ("counts", "tables"),
    [
        ((500, 200, 40, 20), (500, 200, 60)),
        ((500, 200, 40), (500, 240)),
        ((500, 40, 5), (545,)),
        ((LEAST, LEAST), (LEAST, LEAST)),
        ((3, 1), (4,)),
    ],
)
def test_positions_with_few_tokens_share_a_table(
    counts: tuple[int, ...], tables: tuple[int, ...]
) -> None:
    position = np.repeat(np.arange(len(counts)), counts)
    got = calibrate(np.linspace(0, 1, len(position)), position % 2 == 0, position)
    assert got.counts == tables
    assert all(len(c) <= max(1, n // LEAST) for c, n in zip(got.chances, tables, strict=True))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (observations([]), "no drafted token was judged"),
        (([0.5, 0.5], [True], [0]), "equally long"),
        (([math.nan], [True], [0]), "probability"),
        (([1.5], [True], [0]), "probability"),
        (([0.5], [True], [-1]), "position"),
    ],
)
def test_a_calibration_needs_sound_data(columns: tuple[np.ndarray, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        calibrate(*(np.asarray(column) for column in columns))


# ---- by name, and as JSON


def test_every_policy_survives_json() -> None:
    calibration = calibrate(*observations(simulated_rounds(CHANCES, count=500)))
    costs = replace(COSTS, v={1: COSTS.v[1], 8: BUMP.v[1]})
    for policy in (Static(3), Confidence(4, 0.5), AdaEDL(4, 0.5), CostModel(4, calibration, costs)):
        assert type(policy) in POLICIES.values()
        assert make_policy(json.loads(json.dumps(as_mapping(policy))), "run.yaml") == policy
    for kind, part in ((Calibration, calibration), (Costs, costs)):
        assert parse(kind, json.loads(json.dumps(asdict(part))), "costs.json") == part


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"name": "confidense", "limit": 3}, r"'name' in r\.yaml .*did you mean 'confidence'"),
        ({"limit": 3}, "known: static, confidence, adaedl, cost_model"),
        ({"name": ["static"]}, r"must be a draft length policy, not \["),
        ({"name": "static", "limits": 3}, "unknown key 'limits' .*did you mean 'limit'"),
        ({"name": "static", "limit": 0}, "'limit' in r.yaml must be at least 1, not 0"),
        ({"name": "confidence", "limit": 3}, "missing key 'threshold'"),
        ({"name": "confidence", "limit": 3, "threshold": 1.5}, "between 0 and 1, not 1.5"),
        ({"name": "adaedl", "limit": 3, "threshold": 2.0}, "'threshold' .*at most 1"),
        ({"name": "adaedl", "limit": 3, "threshold": 0.5, "g": 0.0}, "'g' .*above 0"),
    ],
)
def test_mistakes_in_a_policy_are_named(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_policy(mapping, "r.yaml")


def test_broken_tables_and_costs_are_refused() -> None:
    with pytest.raises(OptionError, match="at most 5: v was measured up to v"):
        CostModel(6, known(), COSTS)
    with pytest.raises(OptionError, match="never falling"):
        Calibration(((0.5,),), ((0.9, 0.1),), (0.5,), (9,))
    with pytest.raises(OptionError, match="'edges' must be ascending"):
        Calibration(((0.5, 0.5),), ((0.1, 0.2, 0.3),), (0.5,), (9,))
    with pytest.raises(OptionError, match="as many as there are tables"):
        Calibration((), (), (), ())
    unsound: list[dict[int, tuple[float, ...]]] = [{}, {1: ()}, {0: (1.0,)}, {1: (1.0, math.nan)}]
    for broken in unsound:
        with pytest.raises(OptionError, match="'v' must be"):
            replace(COSTS, v=broken)
    with pytest.raises(OptionError, match="'c' must be"):
        replace(COSTS, c=-0.1)
