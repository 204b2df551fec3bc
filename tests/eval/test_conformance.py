"""The real loop, every branch of chance: each way of decoding is exact, each planted fault seen."""

import itertools
from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from draftsmith.data.gather import Request
from draftsmith.data.rules import Rules
from draftsmith.data.warp import Law
from draftsmith.eval import conformance, verify
from draftsmith.eval.conformance import OPTIONS, TOKENS, TOLERANCE, Bench, Case, covering, cross
from draftsmith.eval.decode import RULES, DecodeSettings, decode
from draftsmith.eval.draws import Draws
from draftsmith.eval.lossless import loop_law, plain_law, total_variation
from draftsmith.eval.planted import PLANTED, VISIBLE, Fault, caught

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the loop is exact


@pytest.mark.parametrize("case", covering(), ids=str)
def test_decoding_keeps_the_targets_law(case: Case, bench: Bench) -> None:
    assert bench.distance(case) < TOLERANCE


def check_pairs(cases: list[Case], law: Law | None) -> None:
    """Every two values meet in these cases; with `law`, every two that one of is this law."""
    met = {
        (a, getattr(case, a), b, getattr(case, b))
        for case in cases
        for a, b in itertools.combinations(OPTIONS, 2)
    }
    for a, b in itertools.combinations(OPTIONS, 2):
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b]):
            if law is None or law in (x, y):
                assert (a, x, b, y) in met, f"{a}={x} never meets {b}={y}"


def test_every_two_values_meet() -> None:
    assert [f.name for f in fields(Case)] == list(OPTIONS)
    cases = covering()
    check_pairs(cases, None)
    assert len({str(case) for case in cases}) == len(cases), "a case's name is its own"
    largest = sorted(map(len, OPTIONS.values()))[-2:]
    assert len(cases) < 2 * largest[0] * largest[1], "a small set"


def test_every_two_values_meet_where_they_have_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0 no rule, drafting or policy has any effect: pairs must meet above it."""
    cases = covering()
    check_pairs(cases, Law(0.0))
    monkeypatch.setitem(OPTIONS, "law", [law for law in OPTIONS["law"] if law.temperature])
    check_pairs([case for case in cases if case.law.temperature], None)


def test_the_cross_is_all_there_is() -> None:
    count = 1
    for name, values in OPTIONS.items():
        count *= 1 if name == "rows" else len(values)
    assert len(set(cross())) == count
    assert {replace(case, rows=4096) for case in covering()} <= set(cross())


def test_drafts_are_accepted_and_refused(bench: Bench) -> None:
    """A loop that never drafted would be exact, too."""
    request = Request("p", "", "", (2, 0, 1), Law(1.0), 0)
    for method in (("token", "static"), ("block", "static"), ("tree", "static")):
        for name, drafter in bench.drafters.items():
            case = Case(method, "sampled", Law(1.0), Rules(), (), name, 4096)
            (law,) = loop_law(bench.target, [request], case.settings, drafter)
            assert law.attempts[0] > 0.9, case
            assert 0.05 < law.accepted[0] / law.attempts[0] < 0.95, case


@pytest.mark.parametrize(
    "name",
    [
        "confidence",
        "adaedl",
        "cost_model",
    ],
)
def test_policies_end_drafts_early_now_and_then(name: str, bench: Bench) -> None:
    request = Request("p", "", "", (1,), Law(1.0), 0)
    case = Case(("token", name), "sampled", Law(1.0), Rules(), (), "causal", 4096)
    static = replace(case, method=("token", "static"))
    drafter = bench.drafters["causal"]
    (law,) = loop_law(bench.target, [request], case.settings, drafter)
    (most,) = loop_law(bench.target, [request], static.settings, drafter)
    assert 0.02 < law.attempts[1] < most.attempts[1] - 0.02


# ---- faults are seen


def test_planted_faults_are_caught(bench: Bench) -> None:
    distances = caught(bench)
    assert distances.keys() == PLANTED.keys()
    for name, distance in distances.items():
        assert distance > VISIBLE, name
    for case in {fault.case for fault in PLANTED.values()}:  # and nothing stays planted
        assert bench.distance(case) < TOLERANCE


def test_a_fault_that_is_none_is_missed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(PLANTED)[1:]:
        monkeypatch.delitem(PLANTED, name)
    (first,) = PLANTED
    harmless = Fault(nullcontext, PLANTED[first].case)
    monkeypatch.setitem(PLANTED, first, harmless)
    assert caught(bench)[first] < TOLERANCE


def test_chance_outside_of_the_draws_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumeration cannot vouch for a rule that throws coins of its own, and says so."""
    generator = torch.Generator().manual_seed(0)

    class Own:
        def __init__(self, draws: Draws):
            self.categorical, self.select = draws.categorical, draws.select

        def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
            return (torch.rand(p.shape, generator=generator) < p) & where

    monkeypatch.setitem(RULES, "token", lambda *laws: verify.token(*laws[:-1], Own(laws[-1])))
    case = Case(("token", "static"), "sampled", Law(1.0), Rules(), (), "eagle3", 4096)
    assert bench.distance(case) > VISIBLE


def test_a_model_that_differs_is_seen(bench: Bench) -> None:
    """Enumeration compares with the model alone: a loop on other weights is off."""
    other = Bench()
    weight = next(iter(other.target.model.parameters()))
    weight.data[0, 0] += 0.5
    request = Request("p", "", "", (2, 0, 1), Law(1.0), 0)
    settings = DecodeSettings(TOKENS, 0)
    (law,) = loop_law(other.target, [request], settings, None)
    plain = plain_law(bench.target, request, TOKENS)
    assert total_variation(law.outputs, plain) > 1e-4


# ---- on real streams


@pytest.mark.parametrize("method", conformance.METHODS, ids=" ".join)
def test_same_seeds_same_outputs(method: tuple[str, str], bench: Bench) -> None:
    case = Case(method, "sampled", Law(1.0), Rules(), (), "", 0)
    settings = replace(case.settings, max_new_tokens=12)
    requests = [Request(f"p{i}", "", "", (i % 3, 1)[: 1 + i % 2], Law(1.0), i) for i in range(6)]
    drafter = bench.drafters["causal"]
    first, again = (decode(bench.target, requests, settings, drafter) for _ in range(2))
    assert first == again
    reseeded = [replace(request, seed=request.seed + 100) for request in requests]
    other = decode(bench.target, reseeded, settings, drafter)
    assert all(a.ids != b.ids for a, b in zip(first, other, strict=True))
