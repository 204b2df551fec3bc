"""Evaluations side by side: differences where there are some, and none where there are none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import report_of, row, saved
from scripted import Scripted, Words, ask, new_target, tiny_llama

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.eval.compare import FIGURES, Evaluation, compare, differs
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.paired import holm, ratio_difference, speedup_ratio
from draftsmith.eval.request_rows import (
    Expected,
    Overlap,
    RequestRow,
    Timed,
    read_requests,
    write_requests,
)

PROMPTS = [f"p{i}" for i in range(12)]


def evaluation(rows: list[RequestRow], name: str = "one", **settings: Any) -> Evaluation:
    return Evaluation(name, report_of(**settings), rows)


def verdicts(found: dict[str, Any], figure: str) -> list[str]:
    rows = [line for other in found["comparisons"] for line in other["rows"]]
    return [line["figures"][figure]["verdict"] for line in rows if line["figures"][figure]]


# ---- the file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [
        row("p0", rounds=((2, 0), (1, 1)), timing=Timed(1.0, 4, 0.5, 4)),
        row("p1", turn=1, expected=None, rounds=()),
    ]
    path = write_requests(tmp_path, rows)
    assert read_requests(tmp_path) == rows
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert line["rounds"] == [[2, 0], [1, 1]] and line["overlap"] == {"sum": 2.0, "count": 4}


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text.replace('"count": 4', '"count": "many"', 1), "requests.jsonl:1"),
        (lambda text: text[:-40], "requests.jsonl:2"),
        (lambda text: text + "\n", "requests.jsonl:3"),
        (lambda text: text + text.splitlines()[0], "p0|T=1|0 stands there twice"),
        (lambda text: text.replace('"law"', '"lore"', 1), "law: Field required"),
        (lambda text: "", "is empty"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Any, told: str) -> None:
    path = write_requests(tmp_path, [row("p0"), row("p1")])
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_requests(tmp_path)
    assert told in str(caught.value) and "evaluate again" in str(caught.value)


def test_a_folder_without_requests_is_no_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no requests\.jsonl"):
        read_requests(tmp_path)


# ---- pairing


def test_figures_are_pooled_over_the_pairs() -> None:
    """And what has no partner is counted, not used."""
    mine = [row(p) for p in PROMPTS] + [row("alone", overlap=Overlap(0.0, 1000))]
    theirs = [
        row(p, rounds=((2, 2),) * (i + 1), tokens=3 * (i + 1) + 1, overlap=Overlap(3.0, 4))
        for i, p in enumerate(PROMPTS)
    ]
    theirs += [row("p0", law="T=0"), row("p0", turn=1), row("p0", seed=9)]
    found = compare([evaluation(mine), evaluation(theirs, "two")], 200)
    other = found["comparisons"][0]
    assert (other["pairs"], other["only_first"], other["only_other"]) == (12, 1, 3)
    (line,) = other["rows"]
    assert (line["domain"], line["law"], line["conversations"]) == ("chat", "T=1", 12)
    sides = {k: (f["one"], f["other"]) for k, f in line["figures"].items() if f is not None}
    assert sides == {
        "overlap": (0.5, 0.75),
        "tokens_per_round": (2.0, 3.0),
        "tokens_per_round_estimated": (2.0, 2.0),
        "draft_acceptance_rate": (0.5, 1.0),
    }
    assert line["figures"]["overlap"]["change"]["value"] == pytest.approx(0.25)
    assert line["figures"]["speedup"] is None, "nothing was timed"
    assert line["figures"]["overlap"]["verdict"] == "higher"
    assert line["figures"]["tokens_per_round_estimated"]["verdict"] == "no difference found"


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([row("p0", seed=9)], "asked with other seeds"),
        ([row("p0", domain="math")], "two has math T=1"),
        ([row("q", law="T=0")], "two has chat T=0"),
    ],
)
def test_nothing_in_common_is_refused(theirs: list[RequestRow], told: str) -> None:
    with pytest.raises(UserError, match="share no request") as caught:
        compare([evaluation([row("p0")]), evaluation(theirs, "two")])
    assert told in str(caught.value)


def test_one_evaluation_is_not_compared() -> None:
    with pytest.raises(UserError, match="two folders or more"):
        compare([evaluation([row()])])


def test_what_else_differs_is_told() -> None:
    other = report_of(num_draft_tokens=3)
    other["provenance"]["target"]["weights"] = "v"
    other["provenance"]["drafter"]["weights_sha256"] = "another drafter, as is the point"
    other["cells"].append({"domain": "chat", "law": "T=0"})
    assert differs(report_of(), other) == [
        ["settings.num_draft_tokens", "2", "3"],
        ["target.weights", "w", "v"],
        ["laws", "T=1", "T=0, T=1"],
    ]
    assert differs(other, other) == []


def test_prompts_in_other_tokens_are_counted() -> None:
    mine, theirs = [row(p) for p in PROMPTS], [row(p, prompt_sha256="zz") for p in PROMPTS]
    found = compare([evaluation(mine), evaluation(theirs)], 50)
    assert found["comparisons"][0]["other_prompts"] == 12


def test_a_single_conversation_says_nothing() -> None:
    found = compare([evaluation([row("p0")]), evaluation([row("p0", tokens=9)])])
    assert verdicts(found, "tokens_per_round") == ["too few"]


# ---- no difference where there is none


def ease(cells: int, prompts: int) -> np.ndarray:
    """By how much a prompt is easier than others, the same in every call."""
    return np.random.default_rng(5).normal(0, 0.1, (cells, prompts)).clip(-0.3, 0.3)


def drawn(
    rng: np.random.Generator, prompts: int, cells: int, alpha: float = 0.5
) -> list[RequestRow]:
    """Decoded by a drafter of this acceptance: 30 rounds a reply, of up to 2 tokens."""
    rows, easier = [], ease(cells, prompts)
    for cell, prompt in np.ndindex(cells, prompts):
        hit = rng.random((30, 2)) < alpha * (1 + easier[cell, prompt])
        accepted = hit[:, 0] * (1 + hit[:, 1])
        rows.append(
            row(
                f"p{prompt}",
                domain=f"d{cell}",
                tokens=int(accepted.sum()) + 31,
                rounds=tuple((2, int(a)) for a in accepted),
                overlap=Overlap(float(hit.sum()), 60),
                expected=Expected(60.0, 60.0 / (1 + alpha)),
            )
        )
    return rows


def test_two_copies_of_a_drafter_do_not_differ() -> None:
    """The same replies twice: every difference is zero."""
    rows = drawn(np.random.default_rng(0), 10, 4)
    timed = [replace(r, timing=Timed(2.0, 60, 1.0, 60)) for r in rows]
    found = compare([evaluation(timed), evaluation(timed, "copy")], 100)
    for line in found["comparisons"][0]["rows"]:
        for name, figure in line["figures"].items():
            assert figure["verdict"] == "no difference found", name
            assert figure["p_adjusted"] == 1.0
            value = 1.0 if name == "speedup" else 0.0
            assert [figure["change"][end] for end in ("low", "high")] == [value, value]


@pytest.mark.parametrize("prompts", [6, 16])
def test_copies_that_drew_differently_are_rarely_told_apart(prompts: int) -> None:
    """200 evaluations of two copies, 6 rows each: false alarms as often as promised, for all rows
    of a figure together, also with few prompts."""
    alarms = dict.fromkeys(("overlap", "tokens_per_round", "draft_acceptance_rate"), 0)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        sides = [evaluation(drawn(rng, prompts, 6)) for _ in range(2)]
        found = compare(sides, 199)
        for name in alarms:
            alarms[name] += any(v != "no difference found" for v in verdicts(found, name))
    # 0.05 of 200 is 10; one in a thousand such tests would count 21.
    assert all(count <= 20 for count in alarms.values()), alarms


# ---- a difference where there is one


def test_two_percent_are_found_with_enough_prompts() -> None:
    """τ and α planted 2 % higher; with a tenth of the prompts no such difference can be found."""
    tau = 1 + 0.5 + 0.25
    alpha = (-1 + np.sqrt(1 + 4 * (1.02 * tau - 1))) / 2  # 1 + a + a² = 1.02 τ
    hits, few, size = 0, 0, 0.0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        sides = [evaluation(drawn(rng, 700, 2, a)) for a in (0.5, float(alpha))]
        found = compare(sides, 999)
        for name in ("overlap", "tokens_per_round"):
            hits += verdicts(found, name).count("higher")
        figure = found["comparisons"][0]["rows"][0]["figures"]["tokens_per_round"]
        size += figure["other"] / figure["one"] / 10
        rng = np.random.default_rng(seed)
        sides = [evaluation(drawn(rng, 20, 2, a)) for a in (0.5, float(alpha))]
        few += verdicts(compare(sides, 999), "tokens_per_round").count("higher")
    assert size == pytest.approx(1.02, abs=0.004)
    assert hits >= 0.9 * 40, "four figures in 10 evaluations"
    assert few <= 0.5 * 20


def test_a_planted_speedup_is_found() -> None:
    """Each over the plain loop of its own run, on whatever machine that was."""
    rng = np.random.default_rng(1)

    def times(speedup: float, slower: float = 1.0) -> list[RequestRow]:
        noise = slower * rng.normal(1, 0.01, (6, 2))
        return [
            row(f"p{i}", timing=Timed(2.0 * a, 60, 2.0 / speedup * b, 60))
            for i, (a, b) in enumerate(noise)
        ]

    found = compare(
        [evaluation(times(1.3)), evaluation(times(1.5)), evaluation(times(1.3, 3.0))], 50
    )
    assert verdicts(found, "speedup") == ["higher", "no difference found"]
    figure = found["comparisons"][0]["rows"][0]["figures"]["speedup"]
    assert figure["change"]["low"] < 1.5 / 1.3 < figure["change"]["high"]


def test_every_row_of_a_figure_counts_in_its_verdict() -> None:
    """A p-value of 0.03 is a finding alone, and none among forty."""
    rng = np.random.default_rng(3)
    one = [row(p, overlap=Overlap(5.0, 10)) for p in PROMPTS]
    other = [replace(r, overlap=Overlap(5.0 + d, 10)) for r, d in zip(
        one, (1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1), strict=True)]  # fmt: skip
    assert verdicts(compare([evaluation(one), evaluation(other)]), "overlap") == ["higher"]
    more = [replace(r, domain=f"d{i}") for i in range(39) for r in one]
    noisy = [replace(r, overlap=Overlap(5.0 + rng.choice([-1, 1]), 10)) for r in more]
    found = compare([evaluation(one + more), evaluation(other + noisy)], 2000)
    assert set(verdicts(found, "overlap")) == {"no difference found"}


# ---- on what was really decoded


@pytest.fixture(scope="module")
def target() -> Target:
    return new_target(tiny_llama(40))


def truthful(target: Target, right: int) -> Scripted:
    """Drafts what the target would say, in the first `right` places of a draft; then what not."""

    @torch.no_grad()
    def say(text: Words, drafted: Words) -> torch.Tensor:
        logits = target.model(input_ids=torch.tensor([[*text, *drafted]])).logits[0, -1]
        return logits if len(drafted) < right else -logits

    return Scripted(say)


def decoded(target: Target, drafter: Any, prompts: int) -> list[RequestRow]:
    requests = [ask((1 + i, 7, 3), seed=i) for i in range(prompts)]
    outputs = decode(target, requests, DecodeSettings(13, 2), drafter)
    return [
        row(
            request.prompt_id,
            law="T=0",
            tokens=len(output.ids),
            rounds=tuple(output.rounds),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def test_scripted_drafters_are_as_far_apart_as_they_were_made(target: Target) -> None:
    """12 tokens behind the first: 4 rounds of 3, 6 of 2 or 12 of 1."""
    full, half, none = (evaluation(decoded(target, truthful(target, n), 8)) for n in (2, 1, 0))
    found = compare([half, full, none, half])
    taus = [c["rows"][0]["figures"]["tokens_per_round"] for c in found["comparisons"]]
    assert [(f["one"], f["other"]) for f in taus] == [(2.0, 3.0), (2.0, 1.0), (2.0, 2.0)]
    assert [f["verdict"] for f in taus] == ["higher", "lower", "no difference found"]
    assert [f["change"]["low"] for f in taus] == [1.0, -1.0, 0.0]
    rates = [c["rows"][0]["figures"]["draft_acceptance_rate"] for c in found["comparisons"]]
    assert rates[0]["other"] == 1.0 and rates[1]["other"] == 0.0


# ---- the statistics


def test_turns_of_one_conversation_go_together() -> None:
    """Sixty turns of five conversations are five, and five cannot tell anything."""
    rng = np.random.default_rng(2)
    one = np.stack([rng.integers(4, 6, 60), np.full(60, 10)], 1).astype(float)
    other = one + np.array([1.0, 0.0])
    alone = ratio_difference(one, other, [str(i) for i in range(60)], 2000)
    together = ratio_difference(one, other, [str(i // 12) for i in range(60)], 2000)
    assert alone is not None and together is not None
    assert alone.p is not None and alone.p < 0.001
    assert together.p == 2 / 2**5
    assert together.change.value == pytest.approx(alone.change.value) == pytest.approx(0.1)


def test_no_denominator_is_no_figure() -> None:
    nothing = np.zeros((4, 2))
    assert ratio_difference(nothing, nothing + 1, list("abcd"), 50) is None
    assert speedup_ratio(np.zeros((0, 4)), np.zeros((0, 4)), []) is None


def test_the_interval_of_a_difference_covers_as_often_as_it_says() -> None:
    hits, chances = 0, [a * (1 + ease(1, 30)) for a in (0.5, 0.6)]
    rates = [float((c + c**2).mean() / 2) for c in chances]
    for seed in range(200):
        rng = np.random.default_rng(seed)
        sides = [evaluation(drawn(rng, 30, 1, a)) for a in (0.5, 0.6)]
        line = compare(sides, 300)["comparisons"][0]["rows"][0]["figures"]["draft_acceptance_rate"]
        hits += line["change"]["low"] <= rates[1] - rates[0] <= line["change"]["high"]
    assert 178 <= hits <= 199


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_figures_are_named_as_in_reports() -> None:
    assert [f.name for f in FIGURES] == [
        "overlap",
        "tokens_per_round",
        "tokens_per_round_estimated",
        "draft_acceptance_rate",
    ]


def test_an_evaluation_is_read_from_its_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "eval-1", [row()], report_of())
    found = Evaluation.read(folder)
    assert (found.name, found.rows) == ("eval-1", [row()])
