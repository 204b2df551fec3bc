"""What a run's own figures say: a rate that is too high, a plateau, a domain that falls."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import ObjectiveSection, Recipe
from draftsmith.configs.training import TrainSection
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train.loop import train
from draftsmith.train.watch import Watch, domain_weights, lower_rate

SECTION = TrainSection(lr=0.5)


def line(overlap: float, loss: float = 1.0, norm: float = 0.5) -> dict[str, float]:
    return {"overlap": overlap, "loss": loss, "gradient_norm": norm}


def said(lines: list[dict[str, float]], watch: Watch | None = None) -> list[str]:
    watch = watch or Watch(SECTION, {})
    return [sentence for n, told in enumerate(lines) for sentence in watch.train(n + 1, told)]


# ---- the learning rate


def test_an_overlap_that_collapses_names_the_rate() -> None:
    (sentence,) = said([line(x) for x in (0.2, 0.25, 0.24, 0.2, 0.1, 0.01, 0.01, 0.01)])
    assert sentence == (
        "train.lr 0.5 is too high: by step 6 overlap on training batches fell from 0.230 to "
        "0.103; try 0.001"
    )


def test_a_loss_that_rises_under_clipped_gradients_names_the_rate() -> None:
    (sentence,) = said([line(0.1, loss, 30.0) for loss in (3.0, 3.5, 5.0, 6.0)])
    assert "by step 3 the loss rose from 3 to 3.83 under clipped gradients" in sentence
    assert said([line(0.1, loss, 0.9) for loss in (3.0, 3.5, 5.0, 6.0)]) == []
    (sentence,) = said([line(0.1, loss, 30.0) for loss in (-3.0, -2.9, -1.0, -1.0)])
    assert "rose from -3 to" in sentence, "an objective that is maximised has losses below 0"


def test_a_gradient_that_vanishes_names_the_rate() -> None:
    (sentence,) = said([line(0.01, 17.0, 0.0)] * 3)
    assert "the gradient vanished (norm 0) at an overlap of 0.010" in sentence
    fitted = [line(x, 1 - x, 1e-4) for x in (0.1, 0.9, 0.99, 1.0, 1.0)]
    assert said(fitted) == [], "a drafter that has learned all has no gradient either"


def test_the_course_of_good_runs_is_no_sign() -> None:
    """Clipped at every step, with lines that jump from domain to domain."""
    good = [line(x, 4 - 4 * x, 8.0) for x in (0.06, 0.1, 0.3, 0.09, 0.2, 0.12, 0.35, 0.15, 0.14)]
    assert said(good) == []


def test_lines_before_a_change_of_what_is_trained_on_are_no_measure() -> None:
    watch = Watch(SECTION, {})
    before, after = [line(0.8, -3.0, 9.0)] * 4, [line(0.3, 1.0, 9.0)] * 4
    assert said(before, watch) == []
    watch.restart()
    assert said(after, watch) == []
    assert len(said(before + after)) == 1


def test_a_rate_to_try_is_lower() -> None:
    assert [lower_rate(lr) for lr in (10.0, 1e-3)] == pytest.approx([1e-3, 1e-4])


@pytest.mark.parametrize(
    ("family", "loss"), [("eagle3", "nla"), ("causal", "fkl"), ("eagle3", "tv")]
)
def test_real_runs_are_judged_rightly(
    family: str,
    loss: str,
    make_recipe: Callable[..., Recipe],
    tiny_target: Target,
    store: RecordStore,
    tmp_path: Path,
) -> None:
    """Rates of 10 and 1 are named; 0.01 is not, nor one that is merely worse."""
    for lr, high in ((10.0, True), (1.0, True), (0.1, False), (0.01, False)):
        recipe = make_recipe(family, lr=lr, steps=24, eval_every=100, save_every=100)
        recipe = replace(recipe, objective=ObjectiveSection(loss=loss))
        folder = tmp_path / str(lr)
        try:
            train(recipe, tiny_target, store, folder, Console(file=io.StringIO()))
        except UserError as error:
            assert "train.lr" in str(error), "what is not finite ends training"
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        sentences = said([r for r in rows if r["kind"] == "train"], Watch(recipe.train, {}))
        assert len(sentences) == high, (lr, sentences)
        assert all(s.startswith(f"train.lr {lr:g} is too high") for s in sentences)


# ---- held-out figures


def test_a_plateau_is_said_once_until_it_is_left() -> None:
    watch = Watch(SECTION, {})
    course = [
        1.2,
        1.4,
        1.4005,
        1.39,
        1.401,
        1.4,
        1.38,
        1.37,
        1.36,
        1.5,
        1.49,
        1.48,
        1.47,
        1.46,
        1.45,
    ]
    told = [watch.heldout(100 * n, {"tokens_per_round": tau}) for n, tau in enumerate(course)]
    assert [n for n, sentences in enumerate(told) if sentences] == [6, 14]
    assert told[6] == [
        "a plateau: held-out tokens per round have not risen in 5 evaluations (1.380 at step 600, "
        "1.400 at step 100)"
    ]


def test_slow_progress_is_no_plateau() -> None:
    watch = Watch(SECTION, {})
    course = [1.4 + 0.001 * n for n in range(30)]
    assert [s for tau in course for s in watch.heldout(0, {"tokens_per_round": tau})] == []


def domains(**overlap: float) -> dict[str, float]:
    return {"tokens_per_round": 1.5, **{f"overlap/{name}": x for name, x in overlap.items()}}


def test_a_domain_that_falls_while_others_rise_is_named_with_numbers() -> None:
    watch, found = Watch(SECTION, {}), []
    course = [
        (0.30, 0.2, 0.2),
        (0.32, 0.25, 0.2),
        (0.30, 0.3, 0.25),
        (0.28, 0.3, 0.3),
        (0.2, 0.4, 0.4),
    ]
    for n, (chat, code, extract) in enumerate(course):
        watch = Watch(SECTION, json.loads(json.dumps(watch.state())))  # as a resumed run would
        found.append(watch.heldout(100 * n, domains(chat=chat, code=code, extract=extract)))
    assert [len(sentences) for sentences in found] == [0, 0, 0, 1, 0]
    assert found[3] == [
        "domain chat falls while the others rise: its held-out overlap is 0.280 at step 300 and "
        "was 0.320 at step 100, theirs went from 0.225 to 0.300; raise "
        "train.domain_weights.chat or train.reweight"
    ]


def test_domains_that_fall_together_are_not_named() -> None:
    watch = Watch(SECTION, {})
    for step, x in enumerate((0.3, 0.2, 0.1)):
        assert watch.heldout(step, domains(chat=x, code=x)) == []
    assert watch.heldout(3, domains(chat=0.1)) == [], "a domain by itself has no others"


def test_a_resumed_watch_goes_on() -> None:
    course = [line(x) for x in (0.2, 0.25, 0.24, 0.2, 0.05, 0.01, 0.01)]
    whole = Watch(SECTION, {})
    sentences = said(course, whole)
    for cut in range(len(course)):
        first = Watch(SECTION, {})
        told = said(course[:cut], first)
        second = Watch(SECTION, json.loads(json.dumps(first.state())))
        told += [s for n in range(cut, len(course)) for s in second.train(n + 1, course[n])]
        assert told == sentences
        assert second.state() == whole.state()


# ---- weights of domains


def gains(**gain: float) -> dict[str, float]:
    return {f"tokens_per_round/{name}": 1 + value for name, value in gain.items()}


def test_half_the_gain_is_seen_twice_as_often() -> None:
    found = domain_weights(gains(a=0.2, b=0.4, c=0.4), {"a": 1.0, "b": 1.0, "c": 1.0}, 1.0)
    assert found == pytest.approx({"a": 1.5, "b": 0.75, "c": 0.75})


def test_no_pull_leaves_the_recipe_s_weights() -> None:
    found = domain_weights(gains(a=0.2, b=0.4), {"a": 3.0, "b": 1.0}, 0.0)
    assert found == pytest.approx({"a": 1.5, "b": 0.5})


def test_a_domain_without_figures_keeps_its_weight_among_the_others() -> None:
    found = domain_weights(gains(a=0.1, b=0.3), {"a": 1.0, "b": 1.0, "c": 1.0}, 1.0)
    assert found["a"] / found["c"] == pytest.approx(2.0)
    assert found["c"] / found["b"] == pytest.approx(1.5)
    assert domain_weights({}, {"a": 1.0, "b": 1.0}, 1.0) == {"a": 1.0, "b": 1.0}


@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0.1, 10)), min_size=1, max_size=5),
    st.floats(0, 5),
)
def test_weights_stay_within_bounds(domain: list[tuple[float, float]], pull: float) -> None:
    base = {str(n): weight for n, (_, weight) in enumerate(domain)}
    figures = gains(**{str(n): gain for n, (gain, _) in enumerate(domain)})
    found = domain_weights(figures, base, pull)
    assert sum(found.values()) / len(found) == pytest.approx(1)
    factors = [found[name] / base[name] for name in base]
    assert max(factors) <= 16 * min(factors) * (1 + 1e-9)
    order = sorted(base, key=lambda name: figures[f"tokens_per_round/{name}"])
    for weak, strong in pairwise(order):
        assert found[weak] / base[weak] >= found[strong] / base[strong] * (1 - 1e-9)
