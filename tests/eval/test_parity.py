"""Parity of training forward and decoder: it holds for every family, and planted faults show."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from echoes import echoing
from misserved import (
    change_rope,
    edit_config,
    feed_normed,
    keep_drafted,
    late_taps,
    lost_tensor,
    other_layers,
    other_rope,
    random_fc,
    shift_taps,
    stale_weights,
    swap_norms,
)
from torch import nn

from draftsmith.configs.recipe import LawSection, ServingSection
from draftsmith.data.gather import recompute_states
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.lookup import LookupConfig
from draftsmith.drafters.registry import untrained_drafter
from draftsmith.drafters.skip import SkipConfig
from draftsmith.eval import decode as decode_module
from draftsmith.eval.parity import Parity, parity
from draftsmith.eval.replay import Place, decoded_logits

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 14
SERVING = ServingSection((LawSection(0.0), LawSection(1.0)), num_draft_tokens=3)

MakeDrafter = Callable[[str, Target], Drafter]


@pytest.fixture(scope="module")
def rows(tiny_target: Target, answers: Callable[..., list[Record]]) -> list[Record]:
    """Twelve greedy replies and twelve sampled ones, with states of the default layers."""
    requests = [
        *echoing(tiny_target, [3 + i % 5 for i in range(12)], Law(0.0)),
        *echoing(tiny_target, [3 + i % 5 for i in range(12)], Law(1.0)),
    ]
    return answers(tiny_target, requests, LIMIT)


@pytest.fixture(scope="module")
def family(tiny_target: Target, make_drafter: MakeDrafter) -> Callable[[str], Drafter]:
    def make(kind: str) -> Drafter:
        if kind == "lookup":
            return untrained_drafter(LookupConfig(), tiny_target)
        if kind == "skip":
            return untrained_drafter(SkipConfig((0, 3)), tiny_target)
        return make_drafter(kind, tiny_target)

    return make


KINDS = [
    "eagle3",
    "eagle3 reduced",
    "causal",
    "causal reduced",
    "self",
    "lookup",
    "skip",
    "dflash",
    "dflash reduced",
    "dflash sequential",
    "jump reduced",
    "medusa",
    "medusa reduced",
    "mlp",
    "mlp reduced",
]


def verdicts(found: Parity) -> dict[str, str]:
    return {part.name: part.verdict for part in found.parts}


def faults(found: Parity, name: str) -> tuple[str, ...]:
    (part,) = [p for p in found.parts if p.name == name]
    return part.lines if part.verdict == "different" else ()


# ---- nothing is wrong


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_served_as_it_is_trained(
    kind: str,
    family: Callable[[str], Drafter],
    tiny_target: Target,
    rows: list[Record],
    tmp_path: Path,
) -> None:
    trained = family(kind)
    if trained.taps not in ((), (1, 1, 2)):  # of which the rows have no states
        rows = list(recompute_states(tiny_target, rows, trained.taps))
    served = load_drafter(save_drafter(trained, tmp_path / "d", tiny_target, {}), tiny_target)
    found = parity(tiny_target, served, rows, SERVING, LIMIT, trained)
    assert found.ok, found.lines
    names = ["drafter", "states", "logits", "rounds at T=0", "rounds at T=1"]
    none = {"drafter": "not checked"} if kind in ("lookup", "skip") else {}  # without tensors
    assert verdicts(found) == dict.fromkeys(names, "equal") | none
    figures = found.figures
    assert figures["tokens_per_round"] == pytest.approx(figures["expected_tokens_per_round"])
    if kind == "self":
        assert figures["agreement"] == figures["first_accepted"] == 1.0
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True


@pytest.mark.parametrize("kind", ["eagle3 reduced", "causal", "lookup"])
def test_end_tokens_and_short_contexts_are_foretold(
    kind: str,
    family: Callable[[str], Drafter],
    tiny_target: Target,
    with_eos: Callable[..., Target],
    answers: Callable[..., list[Record]],
) -> None:
    """Drafts are cut by the budget and by the drafter's context, replies by an end token."""
    target = with_eos(tiny_target, *range(3, 60))
    records = answers(target, echoing(target, [4, 9, 2, 6, 5, 7, 3, 8] * 3), LIMIT)
    assert {r.finish for r in records} == {"stop", "length"}
    drafter = copy.deepcopy(family(kind))
    if kind != "lookup":
        config = drafter.config if kind == "eagle3 reduced" else drafter.model.config  # type: ignore[attr-defined]
        config.max_position_embeddings = 24
        assert drafter.max_positions == 24
    found = parity(target, drafter, records, SERVING, LIMIT)
    assert found.ok, found.lines
    assert verdicts(found)["rounds at T=0"] == "equal"


def test_greedy_replies_are_made_where_there_are_none(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    """Records without states, of a server or of the data, do as well."""
    bare = [replace(r, states=None) for r in rows if r.law == Law(1.0)]
    bare[0] = replace(bare[0], origin="given", law=Law(0.0))
    found = parity(tiny_target, family("eagle3"), bare, SERVING, LIMIT)
    assert found.ok, found.lines
    assert verdicts(found)["states"] == "not checked"
    assert verdicts(found)["rounds at T=0"] == verdicts(found)["rounds at T=1"] == "equal"
    (part,) = [p for p in found.parts if p.name == "rounds at T=0"]
    assert "12 replies take" in part.lines[-1]


def test_what_cannot_be_checked_is_said(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    short = [replace(r, ids=r.ids[: r.prompt_len + 1], states=None) for r in rows[:3]]
    found = parity(tiny_target, family("eagle3"), short, SERVING, LIMIT)
    assert set(verdicts(found).values()) == {"not checked"} and not (found.checked or found.ok)


def test_a_drafter_in_training_stays_so(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    drafter = family("causal")
    assert isinstance(drafter, nn.Module)
    drafter.train()
    parity(tiny_target, drafter, rows[:2], SERVING, LIMIT)
    assert drafter.training


# ---- planted faults: what is served is not what was trained


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (shift_taps, "position 1"),
        (swap_norms, "position 1"),
        (change_rope, "position 1"),
        (random_fc, "position 1"),
        (stale_weights, "position 1"),
        (feed_normed, "position 2"),
        (keep_drafted, "position 1"),
        (late_taps, "position 1"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_head_that_is_served_otherwise_is_found(
    plant: Callable[[Eagle3Drafter], None],
    where: str,
    family: Callable[[str], Drafter],
    tiny_target: Target,
    rows: list[Record],
) -> None:
    trained = family("eagle3")
    served = copy.deepcopy(trained)
    assert isinstance(served, Eagle3Drafter)
    plant(served)
    found = parity(tiny_target, served, rows, SERVING, LIMIT, trained)
    assert not found.ok
    first = faults(found, "logits")[0]
    assert where in first and "record p" in first and "round begun behind" in first, first
    by_identity = {
        shift_taps: "layers [1, 1, 2] were trained on, [2, 2, 3] are read",
        random_fc: "tensor 'fc.weight' differs",
        stale_weights: "tensor 'fc.weight' differs",
    }
    if plant in by_identity:
        assert any(by_identity[plant] in line for line in faults(found, "drafter"))


def test_faults_of_the_decoder_show_without_a_drafter_in_memory(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    for plant in (feed_normed, keep_drafted, late_taps):
        drafter = copy.deepcopy(family("eagle3"))
        assert isinstance(drafter, Eagle3Drafter)
        plant(drafter)
        found = parity(tiny_target, drafter, rows, SERVING, LIMIT)
        assert faults(found, "logits"), plant.__name__


@pytest.mark.parametrize(
    ("kind", "harm"),
    [(kind, harm) for kind in ("eagle3", "causal") for harm in ("rope", "tensor")]
    + [("eagle3", "layers")],
)
def test_a_folder_that_is_not_what_was_saved_is_found(
    harm: str,
    kind: str,
    family: Callable[[str], Drafter],
    tiny_target: Target,
    rows: list[Record],
    tmp_path: Path,
) -> None:
    trained = family(kind)
    folder = save_drafter(trained, tmp_path / "d", tiny_target, {})
    if harm == "tensor":
        lost_tensor(folder)
    else:
        edit_config(folder, other_rope if harm == "rope" else other_layers)
    found = parity(tiny_target, load_drafter(folder, tiny_target), rows, SERVING, LIMIT, trained)
    assert faults(found, "logits")


# ---- planted faults elsewhere


def test_states_of_other_layers_are_found(
    family: Callable[[str], Drafter],
    tiny_target: Target,
    answers: Callable[..., list[Record]],
) -> None:
    records = answers(tiny_target, echoing(tiny_target, [4, 6]), LIMIT, (0, 1, 2))
    found = parity(tiny_target, family("eagle3"), records, SERVING, LIMIT)
    assert "states of its layers [1, 1, 2] differ" in faults(found, "states")[0]


def test_a_round_that_accepts_less_than_it_should_is_named(
    family: Callable[[str], Drafter],
    tiny_target: Target,
    rows: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A greedy rule that keeps one draft at most: text and logits are right all the same."""
    honest = decode_module.verify.greedy

    def shy(draft: Any, best: Any, drafted: Any) -> Any:
        accepted, _ = honest(draft, best, drafted)
        accepted = accepted.clamp_max(1)
        return accepted, best.gather(1, accepted[:, None]).squeeze(1)

    monkeypatch.setattr(decode_module.verify, "greedy", shy)
    found = parity(tiny_target, family("self"), rows, SERVING, LIMIT)
    assert [n for n, v in verdicts(found).items() if v == "different"] == ["rounds at T=0"]
    first = faults(found, "rounds at T=0")[0]
    assert "round 1, position 2: training foretells 3 of 3 accepted, decoding accepts 1" in first


def test_a_rule_that_refuses_too_much_is_found_in_the_mean(
    family: Callable[[str], Drafter],
    tiny_target: Target,
    rows: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deaf(draft: Any, log_q: Any, log_p: Any, drafted: Any, draws: Any) -> Any:
        none = torch.zeros_like(drafted)
        return none, draws.categorical(log_p[:, 0].exp(), none == 0)

    monkeypatch.setitem(decode_module.RULES, "block", deaf)
    found = parity(tiny_target, family("self"), rows, SERVING, LIMIT)
    assert [n for n, v in verdicts(found).items() if v == "different"] == ["rounds at T=1"]
    assert "tokens per round" in faults(found, "rounds at T=1")[0]
    assert "standard errors apart" in faults(found, "rounds at T=1")[0]


def test_near_ties_of_the_draft_are_listed(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    """Two tokens with the same row of the head but for rounding, which is turned when served."""
    trained = family("self")
    greedy = [r for r in rows if r.law == Law(0.0)]
    said = torch.cat([r.reply for r in greedy]).bincount()
    token, other = int(said.argmax()), 399
    served = copy.deepcopy(trained)
    for drafter, sign in ((trained, 1), (served, -1)):
        head = drafter.model.get_output_embeddings()  # type: ignore[attr-defined]
        head.weight = nn.Parameter(head.weight.detach().clone())
        head.weight.data[other] = head.weight.data[token] * (1 + sign * 1e-6)
    found = parity(tiny_target, served, greedy, SERVING, LIMIT, trained)
    (part,) = [p for p in found.parts if p.name == "rounds at T=0"]
    assert part.verdict == "equal"
    ties = [line for line in part.lines if "a near-tie of the draft's" in line]
    assert ties and all("record p" in line for line in ties)


def test_acceptance_of_exactly_zero_rings(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    """New weights that were dropped when serving: teacher forcing looks fine."""
    trained = family("self")
    served = copy.deepcopy(trained)
    assert isinstance(served, nn.Module)
    torch.manual_seed(0)
    for parameter in served.parameters():
        parameter.data = torch.randn_like(parameter)
    found = parity(tiny_target, served, rows, SERVING, LIMIT, trained)
    (warning,) = found.warnings
    assert "acceptance is exactly 0" in warning and "100% of the tokens" in warning
    assert not found.ok and found.lines[-1] == f"warning: {warning}"


def test_figures_far_apart_ring(
    family: Callable[[str], Drafter],
    tiny_target: Target,
    rows: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from draftsmith.eval.courses import _warnings

    assert _warnings({"agreement": 0.9, "first_accepted": 0.6}, 100) != []
    assert _warnings({"agreement": 0.9, "first_accepted": 0.8}, 100) == []
    assert _warnings({"agreement": 0.9, "first_accepted": 0.6}, 5) == [], "too few to tell"


# ---- the replay


@pytest.mark.parametrize("kind", ["eagle3 reduced", "causal", "lookup"])
def test_a_replay_sees_every_position_of_a_reply(
    kind: str, family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    """Also of drafters that guess nothing: the text is drawn for them."""
    record = next(r for r in rows if len(r.reply) == LIMIT)
    seen = decoded_logits(tiny_target, family(kind), record, 3)
    assert {place.k for place in seen} == {0, 1, 2} or kind == "lookup"
    assert all(p.start >= 0 and p.start + 1 + p.k < LIMIT for p in seen)
    starts = sorted({p.start for p in seen})
    assert Place(0, 0) in seen and len(starts) >= 4, "rounds begin at many places"


def test_the_mean_is_of_held_out_text_alone(
    family: Callable[[str], Drafter], tiny_target: Target, rows: list[Record]
) -> None:
    """A drafter knows the text that it was trained on better than what decoding will draw."""
    seen = [replace(r, split="train") for r in rows]
    found = parity(tiny_target, family("eagle3"), seen, SERVING, LIMIT)
    assert found.ok and verdicts(found)["rounds at T=0"] == "equal"
    assert verdicts(found)["rounds at T=1"] == "not checked"


def test_rounds_without_a_draft_are_no_refusals(
    family: Callable[[str], Drafter], tiny_target: Target, answers: Callable[..., list[Record]]
) -> None:
    """Lookup proposes nothing in most rounds, which the estimator counts and attempts do not."""
    records = answers(tiny_target, echoing(tiny_target, [5] * 300, Law(0.4)), LIMIT)
    serving = ServingSection((LawSection(0.4),), num_draft_tokens=2)
    found = parity(tiny_target, family("lookup"), records, serving, LIMIT)
    assert found.ok, found.lines
    first = [found.figures[f"S_1 of all rounds {side}, T=0.4"] for side in ("expected", "decoded")]
    assert first[0] > 0.005 and first[1] == pytest.approx(first[0], rel=0.5)
