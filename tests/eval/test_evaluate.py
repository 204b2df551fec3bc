"""The evaluation from records to report: sums are real, faults show, a kill costs nothing."""

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import misserved
import pytest
import torch
from rich.console import Console
from torch import Tensor
from worlds import GAMMA, LIMIT, World

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import (
    LawSection,
    ServingSection,
)
from draftsmith.data.store import RecordStore
from draftsmith.drafters.checkpoint import weights_hash
from draftsmith.eval import evaluate as module
from draftsmith.eval import measuring, verify
from draftsmith.eval.cells import _position, cells_of
from draftsmith.eval.decode import RULES
from draftsmith.eval.draws import Draws
from draftsmith.eval.measuring import timed
from draftsmith.eval.report import alarms, print_report, read_report, write_report


@pytest.fixture(scope="module")
def report(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return world.evaluate(tmp_path_factory.mktemp("eval"))


def held_out(world: World, domain: str, law: str) -> list[Any]:
    return [r for r in world.store.records("heldout") if (r.domain, r.law.label) == (domain, law)]


# ---- what the report holds


def test_every_domain_and_law_is_a_cell(report: dict[str, Any], world: World) -> None:
    labels = ["T=0", "T=1", "T=0.7 top_k=8"]
    cells = [(c["domain"], c["law"]) for c in report["cells"]]
    assert cells == [(d, law) for d in ("chat", "co/de") for law in labels]
    for cell in report["cells"]:
        assert cell["prompts"] == len(held_out(world, cell["domain"], cell["law"])) > 2
    assert [(s["domain"], s["law"]) for s in report["sweep"]] == cells
    for line in report["sweep"]:
        assert line["num_draft_tokens"] == [1, 2, 3]
        assert len(line["predicted"]) == 3
        assert 1.0 <= line["tokens_per_round_estimated"][0]["value"] <= 2.0
        assert [len(s) for s in line["survival_estimated"]] == [1, 2, 3]
        assert [point["num_draft_tokens"] for point in line["measured"]] == [1, 2]


def test_a_cell_without_anything_to_draft_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies of one token come whole from prefill: no row can say anything about them."""
    whole = RecordStore.records

    def cut(self: RecordStore, split: str | None = None) -> Any:
        for record in whole(self, split):
            short = record.domain == "chat" and record.law.temperature == 0
            yield replace(record, ids=record.ids[: record.prompt_len + 1]) if short else record

    monkeypatch.setattr(RecordStore, "records", cut)
    report = world.evaluate(tmp_path, timing_prompts=0)
    count = len(held_out(world, "chat", "T=0"))
    assert (
        f"chat T=0 is left out: none of its {count} replies has a second token" in report["alarms"]
    )
    assert ("chat", "T=0") not in [(c["domain"], c["law"]) for c in report["cells"]]


def test_every_way_of_serving_has_its_expected_length(report: dict[str, Any]) -> None:
    for cell in report["cells"]:
        ways = {k: v["value"] for k, v in cell["tokens_per_round_by_serving"].items()}
        if cell["law"] == "T=0":
            assert ways == {}, "all are the same"
            continue
        assert ways["sampled, block"] == cell["tokens_per_round_estimated"]["value"]
        assert ways["sampled, block"] >= ways["sampled, token"] - 1e-9, "block accepts no less"
        assert set(ways) == {"sampled, token", "sampled, block", "greedy"}
        assert 1.0 <= ways["greedy"] <= GAMMA + 1
        assert cell["excluded_samples"] == 0


def test_counts_are_sums_over_the_outputs(world: World, tmp_path: Path) -> None:
    """Recomputed here from the stored rounds, with formulas of our own."""
    report = world.evaluate(tmp_path, timing_prompts=0)
    outputs: dict[str, Any] = {}
    for path in (tmp_path / "parts").glob("decode-*.json"):
        outputs |= json.loads(path.read_text(encoding="utf-8"))
    assert len(outputs) == sum(c["prompts"] for c in report["cells"])
    for cell in report["cells"]:
        own = [outputs[r.key] for r in held_out(world, cell["domain"], cell["law"])]
        rounds = [tuple(r) for output in own for r in output["rounds"]]
        tokens = sum(len(output["ids"]) - 1 for output in own)
        drafted, accepted = (sum(column) for column in zip(*rounds, strict=True))
        assert (cell["tokens"], cell["rounds"]) == (tokens, len(rounds))
        assert cell["tokens_per_round"]["value"] == pytest.approx(tokens / len(rounds))
        assert cell["mean_accepted"] == pytest.approx(accepted / len(rounds))
        assert cell["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
        assert cell["undrafted_rounds"] == sum(d == 0 for d, _ in rounds)
        places = cell["acceptance_by_position"]
        assert [p["position"] for p in places] == [1, 2]
        assert sum(p["attempts"] for p in places) == drafted
        assert sum(p["accepted"] for p in places) == accepted
        for k, p in enumerate(places, start=1):
            reached = sum(d >= k and a >= k - 1 for d, a in rounds)
            assert p["survival"] == pytest.approx(p["accepted"] / max(1, p["attempts"]))
            assert p["conditional"] == pytest.approx(p["accepted"] / max(1, reached))
        assert 0 < cell["overlap"]["value"] <= cell["captured_mass"] + 1e-6
        assert len(cell["survival_estimated"]) == GAMMA


def test_totals_are_the_counts_of_all_domains(report: dict[str, Any]) -> None:
    counts = ("prompts", "replies", "tokens", "rounds", "drafted", "tested", "accepted")
    assert [total["law"] for total in report["totals"]] == ["T=0", "T=1", "T=0.7 top_k=8"]
    for total in report["totals"]:
        own = [cell for cell in report["cells"] if cell["law"] == total["law"]]
        assert len(own) == 2 and "domain" not in total
        for name in counts:
            assert total[name] == sum(cell[name] for cell in own), name
        assert total["tokens_per_round"]["value"] == pytest.approx(
            total["tokens"] / total["rounds"]
        )
        shared = sum(cell["overlap"]["value"] * cell["tokens"] for cell in own)
        if total["law"] == "T=0":  # elsewhere what is decoded is not what is scored
            assert total["overlap"]["value"] == pytest.approx(shared / total["tokens"])


def test_position_figures_of_a_known_pattern() -> None:
    rounds = [(3, 0)] * 20 + [(3, 1)] * 30 + [(3, 3)] * 50
    places = [_position(rounds, k) for k in (1, 2, 3)]
    assert [p["survival"] for p in places] == [0.8, 0.5, 0.5]
    assert [p["conditional"] for p in places] == [0.8, 0.625, 1.0]
    shorter = [*rounds, (1, 1), (0, 0)]
    assert [_position(shorter, k)["attempts"] for k in (1, 2, 3)] == [101, 100, 100]
    assert _position(shorter, 2)["conditional"] == 0.625, "a short draft is no failure"


def test_greedy_estimates_are_the_decoded_figures(report: dict[str, Any]) -> None:
    for cell in report["cells"]:
        if cell["law"] == "T=0":
            estimated = cell["tokens_per_round_estimated"]
            assert estimated == pytest.approx(cell["tokens_per_round"])
            survival = [p["survival"] for p in cell["acceptance_by_position"]]
            assert [s["value"] for s in cell["survival_estimated"]] == pytest.approx(survival)


def test_the_outputs_are_equal_and_nothing_rings(
    report: dict[str, Any], world: World, tmp_path: Path
) -> None:
    lossless = report["lossless"]
    greedy = [c for c in report["cells"] if c["law"] == "T=0"]
    assert lossless["verdict"] == "equal"
    assert lossless["prompts"] == sum(c["replies"] for c in greedy)
    # Timings of milliseconds on a busy machine are noise: their alarms are tested by themselves.
    quiet = [a for a in alarms(report) if "plain loop" not in a and "speedup" not in a]
    assert quiet == []
    write_report(report, tmp_path)
    assert read_report(tmp_path)["cells"] == json.loads(json.dumps(report["cells"]))
    assert "Lossless" in (tmp_path / "report.html").read_text(encoding="utf-8")
    print_report(report, Console(file=io.StringIO()))


def test_the_report_says_what_it_measured(report: dict[str, Any], world: World) -> None:
    stand, settings = report["provenance"], report["settings"]
    assert stand["drafter"]["weights_sha256"] == weights_hash(world.drafter_folder)
    assert stand["drafter"]["family"] == world.drafter.family
    assert stand["drafter"]["draft_vocab_size"] == (8 if world.drafter.taps else 12)
    assert stand["target"]["weights"] == world.target.provenance["weights"]
    assert stand["prompts_sha256"] == world.store.identity
    assert settings["max_new_tokens"] == LIMIT
    assert settings["num_draft_tokens"] == GAMMA


def test_costs_are_told_by_law(report: dict[str, Any]) -> None:
    cost = report["cost"]
    assert cost["by_law"].keys() == {"T=0", "T=1", "T=0.7 top_k=8"}
    for costs in cost["by_law"].values():
        assert costs.keys() == {"o", "o_plain", "c", "c_first", "v"}
    assert cost["rows"] == [1, 2, 3, 4] and cost["v"][0] == 1.0
    for cell in report["cells"]:
        speed, known = cell["speed"], cost["by_law"][cell["law"]]
        total = 1 + sum(s["value"] for s in cell["survival_estimated"])
        spent = known["c_first"] + known["c"] + known["v"][2] + known["o"]
        assert speed["predicted"] == pytest.approx(total * (1 + known["o_plain"]) / spent)
        assert speed["prompts"] == 2
        ratio = speed["speculative_tokens_per_s"] / speed["plain_tokens_per_s"]
        assert speed["speedup"]["value"] == pytest.approx(ratio)


def test_without_timing_there_is_no_speed(world: World, tmp_path: Path) -> None:
    report = world.evaluate(tmp_path, timing_prompts=0)
    assert report["cost"] is None
    for line in report["sweep"]:
        assert line["predicted"] is None and line["measured"] == []
        assert len(line["tokens_per_round_estimated"]) == 3, "which no clock is needed for"
    assert all(cell["speed"] is None for cell in report["cells"])
    print_report(report, Console(file=io.StringIO()))


# ---- which prompts


def test_costs_are_calibrated_on_other_prompts_than_the_timed_ones(world: World) -> None:
    cells = cells_of(world.recipe, list(world.store.records("heldout")))
    training = {r.prompt_id for r in world.store.records("train")}
    chosen = module._calibration(world.recipe, world.store, cells)
    assert len(chosen) == 2 and {r.prompt_id for r in chosen} <= training

    class HeldOutOnly(RecordStore):
        def records(self, split: str | None = None) -> Any:
            return super().records("heldout") if split != "train" else iter(())

    store = HeldOutOnly(world.store.folder, world.store.settings, True)
    section = replace(world.recipe.eval, timing_prompts=2)
    used = {r.prompt_id for c in cells for r in timed(c, section)}
    left = {r.prompt_id for c in cells for r in c.records} - used
    chosen = module._calibration(world.recipe, store, cells)
    assert left and {r.prompt_id for r in chosen} <= left


def test_replies_that_are_long_enough_are_timed_first_and_in_order_of_their_ids(
    world: World,
) -> None:
    (cell, *_) = cells_of(world.recipe, list(world.store.records("heldout")))
    lengths = sorted(len(r.reply) for r in cell.records)
    enough = lengths[len(lengths) // 2]
    section = replace(world.recipe.eval, timing_prompts=len(lengths), timing_tokens=enough)
    chosen = timed(cell, section)
    long = [r.key for r in chosen if len(r.reply) >= enough]
    short = [len(r.reply) for r in chosen if len(r.reply) < enough]
    assert long == sorted(long) and long == [r.key for r in chosen[: len(long)]]
    assert short == sorted(short, reverse=True)


def test_a_law_without_records_is_refused(world: World, tmp_path: Path) -> None:
    recipe = replace(world.recipe, serving=ServingSection((LawSection(0.3),)))
    with pytest.raises(UserError, match=r"no held-out record .* \(T=0\.3\)"):
        replace(world, recipe=recipe).evaluate(tmp_path)


def test_states_that_were_not_kept_are_recomputed(
    world: World, report: dict[str, Any], tmp_path: Path
) -> None:
    bare = RecordStore.create(tmp_path / "bare", {**world.store.settings, "distributions": "none"})
    bare.add("a", [replace(r, states=None) for r in world.store.records()])
    again = replace(world, store=bare).evaluate(tmp_path, timing_prompts=0)
    for one, other in zip(report["cells"], again["cells"], strict=True):
        assert one["overlap"]["value"] == pytest.approx(other["overlap"]["value"], abs=1e-4)
        assert one["rounds"] == other["rounds"]


# ---- kills and faults


def test_parts_that_are_done_are_not_repeated(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_decoding = {"timing_prompts": 0, "parity_replies": 0}
    decode, calls = measuring.decode, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return decode(*args, **options)

    monkeypatch.setattr(measuring, "decode", counted)
    with pytest.raises(KeyboardInterrupt):
        world.evaluate(tmp_path, **only_decoding)
    done = len(list((tmp_path / "parts").glob("*.json")))
    assert done == 3
    calls = 1000
    killed = world.run(tmp_path, **only_decoding)
    total = len(list((tmp_path / "parts").glob("*.json")))
    assert calls - 1000 == total - done
    calls = 2000
    world.evaluate(tmp_path, **only_decoding)
    assert calls == 2000, "a second evaluation decodes nothing"
    monkeypatch.undo()
    straight = world.run(tmp_path / "straight", **only_decoding)
    assert killed.report["cells"] == straight.report["cells"]
    assert killed.requests == straight.requests


def accept_everything(draft: Tensor, target_argmax: Tensor, drafted: Tensor) -> Any:
    """A verifier that believes the draft."""
    return drafted, target_argmax.gather(1, drafted[:, None]).squeeze(1)


def test_a_verifier_that_believes_the_draft_is_found_out(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "greedy", accept_everything)
    report = world.evaluate(tmp_path, timing_prompts=0)
    assert report["lossless"]["verdict"] == "different"
    assert any("changed the target's output" in alarm for alarm in alarms(report))


def test_corrupt_proposals_change_no_output(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's logits are negated: useless, and seen as such, but lossless."""
    head = type(world.drafter).head
    negated = lambda self, hidden, which=0: -head(self, hidden, which)  # noqa: E731
    monkeypatch.setattr(type(world.drafter), "head", negated)
    report = world.evaluate(tmp_path, timing_prompts=0)
    assert report["lossless"]["verdict"] == "equal"
    for cell in report["cells"]:
        assert cell["draft_acceptance_rate"] < 0.35


def test_a_draft_decoded_otherwise_than_trained_rings(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding never accepts, the estimate knows that it should."""
    monkeypatch.setitem(RULES, "block", refuse_everything)
    monkeypatch.setattr(
        verify, "greedy", lambda draft, argmax, drafted: (torch.zeros_like(drafted), argmax[:, 0])
    )
    report = world.evaluate(tmp_path, timing_prompts=0)
    assert report["lossless"]["verdict"] == "equal"
    assert any("not decoded as it was trained" in alarm for alarm in alarms(report))


def refuse_everything(
    draft: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Draws
) -> Any:
    return verify.token(draft[:, :0], log_q[:, :0], log_p[:, :1], 0 * drafted, draws)


# ---- parity


def test_what_was_trained_is_what_decodes(report: dict[str, Any], world: World) -> None:
    parity = report["parity"]
    assert parity["checked"] and parity["ok"], parity
    laws = len(world.recipe.serving.laws)
    assert parity["replies"] == laws * world.recipe.eval.parity_replies
    assert {part["name"]: part["verdict"] for part in parity["parts"]} == {
        "states": "equal",
        "logits": "equal",
        "rounds at T=0": "equal",
    }


def test_a_drafter_that_is_served_otherwise_rings(world: World, tmp_path: Path) -> None:
    """Decoding pairs states with the wrong tokens, or gives the logits to the wrong tokens."""
    drafter: Any = copy.deepcopy(world.drafter)
    if drafter.taps:
        misserved.late_taps(drafter)
    else:
        first = drafter.first
        drafter.first = lambda state: first(state).roll(1, -1)
    report = replace(world, drafter=drafter).evaluate(tmp_path, timing_prompts=0)
    assert not report["parity"]["ok"]
    (alarm,) = (a for a in alarms(report) if "what was trained is not what decodes" in a)
    assert "logits" in alarm and "`draftsmith parity` says where" in alarm
    assert report["lossless"]["verdict"] == "equal", "a poor draft changes no output"


def test_parity_may_be_left_out(world: World, tmp_path: Path) -> None:
    report = world.evaluate(tmp_path, timing_prompts=0, parity_replies=0)
    assert report["parity"] is None
    assert not (tmp_path / "parts" / "parity.json").exists()
    assert not any("trained" in alarm for alarm in alarms(report))
