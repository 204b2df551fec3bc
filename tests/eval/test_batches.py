"""Decoding several conversations together: what is counted, and what it is compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup import LookupConfig
from draftsmith.drafters.registry import untrained_drafter
from draftsmith.eval import speed, timing
from draftsmith.eval.batches import AtBatch, _batches, batch_rows, grouped, measure_batch
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.draft import Clock
from draftsmith.eval.footprint import footprint
from draftsmith.eval.rows import Output
from draftsmith.eval.speed import Calibration, Cost, measure_rows
from draftsmith.eval.timing import Lap, Timing, time_groups

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]


@pytest.fixture
def requests(small_target: Target, make_requests: MakeRequests) -> list[Request]:
    return make_requests(small_target, [3, 7, 5], Law(1.0))


@pytest.mark.parametrize("gamma", [0, 2])
def test_a_batch_stops_with_the_first_reply_that_ends(
    gamma: int, small_target: Target, make_drafter: MakeDrafter, requests: list[Request],
    with_eos: Callable[..., Target],
) -> None:  # fmt: skip
    target = with_eos(small_target, 5)
    drafter = make_drafter("causal", target) if gamma else None
    clock = Clock()
    whole = decode(target, requests, DecodeSettings(40, gamma), drafter)
    cut = decode(target, requests, DecodeSettings(40, gamma, together=True), drafter, clock)
    least = min(len(out.rounds) for out in whole)
    assert len({len(out.rounds) for out in whole}) > 1, "or nothing is shown"
    assert [len(out.rounds) for out in cut] == [least] * 3 and clock.rounds == least
    assert any(out.finish for out in cut) and not all(out.finish for out in cut)
    for one, other in zip(cut, whole, strict=True):
        assert one.ids == other.ids[: len(one.ids)] and one.rounds == other.rounds[:least]


def test_one_conversation_is_decoded_to_its_end(
    small_target: Target, requests: list[Request]
) -> None:
    how = DecodeSettings(9, 0)
    for request in requests:
        (one,) = decode(small_target, [request], how)
        (other,) = decode(small_target, [request], DecodeSettings(9, 0, together=True))
        assert one == other and one.finish == "length"


def test_passes_are_over_rows_of_every_conversation(
    small_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    forward = Target.forward

    def noted(self: Target, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(Target, "forward", noted)
    rows = measure_rows(small_target, 20, (1, 3), batch=4)
    assert all(0 < seconds < 5 for seconds in rows.values())
    assert set(shapes) == {(4, 20), (4, 1), (4, 3)}


def test_calibration_counts_rounds_of_the_whole_batch(
    small_target: Target, make_drafter: MakeDrafter, requests: list[Request]
) -> None:
    drafter = make_drafter("causal", small_target)
    calibration = Calibration(small_target, drafter, Law(0.0), DecodeSettings(8, 2))
    calibration.run(*requests)
    assert calibration.plain.rounds == 7, "tokens behind the first, of all rows at once"
    assert 7 / 3 <= calibration.fast.rounds <= 7
    assert len(calibration.fast.passes) == calibration.fast.rounds


def test_laps_are_of_groups(
    small_target: Target, make_drafter: MakeDrafter, requests: list[Request]
) -> None:
    drafter = make_drafter("causal", small_target)
    found = time_groups(small_target, drafter, [requests, requests[:2]], DecodeSettings(6, 2))
    assert found.prompts == 2 and found.lengths == [2]
    assert [lap.tokens for lap in found.laps[0]] == [15, 10]


def test_no_request_is_in_two_groups(requests: list[Request]) -> None:
    assert grouped(requests, 2, 5) == [requests[:2]]
    assert grouped(requests, 1, 2) == [requests[:1], requests[1:2]]
    assert grouped(requests, 4, 5) == []


def test_batches_of_few_prompts_go_round_with_other_seeds(requests: list[Request]) -> None:
    endless = _batches(requests[:2], 3)
    first, second = next(endless), next(endless)
    assert [r.prompt_id for r in first + second] == ["p0", "p1", "p0", "p1", "p0", "p1"]
    assert [r.seed for r in first + second] == [0, 1, 1, 2, 2, 3]


SECONDS = {"target": 0.05, "first": 0.004, "later": 0.002, "rest": 0.001}


def clocked(
    target: Target,
    asked: Sequence[Request],
    settings: DecodeSettings,
    drafter: Drafter | None = None,
    clock: Clock | None = None,
) -> list[Output]:
    """Four rounds in known times: a pass costs as many `target` seconds as there are rows."""
    assert clock is not None and settings.together
    b = len(asked)
    spent = SECONDS["target"] * b
    clock.rounds += 4
    clock.target += 4 * spent
    clock.decode += 4 * (spent + SECONDS["rest"])
    if drafter is not None:
        drafts = SECONDS["first"] + SECONDS["later"] * (settings.num_draft_tokens - 1)
        clock.decode += 4 * drafts
        clock.draft_first += 4 * SECONDS["first"]
        clock.draft_later += 4 * SECONDS["later"] * (settings.num_draft_tokens - 1)
        clock.drafting_rounds += 4
        clock.later_steps += 4 * (settings.num_draft_tokens - 1)
        clock.passes += 4 * [(settings.num_draft_tokens + 1, spent)]
    return [Output([0] * (13 if drafter else 5)) for _ in asked]


def test_a_batch_is_measured_in_turns(
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hand-made clocks: two groups of chat, none of math, which is calibrated all the same."""
    drafter = make_drafter("causal", small_target)
    requests = make_requests(small_target, [3, 7, 5, 4], Law(0.0))
    for module in (speed, timing):
        monkeypatch.setattr(module, "decode", clocked)
    asked: list[int] = []

    def rows(target: Target, context: int, ns: Sequence[int], batch: int) -> dict[int, float]:
        asked.append(batch)
        return {n: 0.1 * (1 + 0.5 * (n - 1)) for n in ns}

    monkeypatch.setattr("draftsmith.eval.batches.measure_rows", rows)
    groups = {"chat": grouped(requests, 2, 5), "math": []}
    found = measure_batch(
        small_target, drafter, Law(0.0), groups, requests[:3], (1, 2, 3), 20,
        DecodeSettings(8, 2), 2,
    )  # fmt: skip
    assert asked == [2, 2] and found.timings.keys() == {"chat"}
    assert found.cost.seconds == pytest.approx(0.1)
    assert (found.cost.c_first, found.cost.c) == pytest.approx((0.04, 0.02))
    assert found.cost.v == pytest.approx({1: 1.0, 2: 0.75, 3: 1.0}), "as dear as the passes were"
    assert found.timings["chat"].tokens_per_s(0) == pytest.approx(2 * 4 / (4 * 0.101))


def test_what_the_report_says_of_batches() -> None:
    one = Cost(seconds=0.1, v={1: 1.0, 2: 1.5}, c_first=0.1, c=0.0, o=0.1, o_plain=0.2)
    four = Cost(seconds=0.2, v={1: 1.0, 2: 2.0}, c_first=0.2, c=0.0, o=0.1, o_plain=0.1)
    laps = {0: (Lap(0, 2.0, 20), Lap(0, 2.0, 20)), 1: (Lap(0, 1.0, 24), Lap(0, 3.0, 24))}
    rows = batch_rows(
        [AtBatch(4, four, {"chat": Timing(laps)}), AtBatch(1, one, {})], "T=0",
        {"chat": [0.5], "math": [0.9]},
    )  # fmt: skip
    assert [(row["batch"], row["law"], row["seconds"]) for row in rows] == [
        (1, "T=0", 0.1), (4, "T=0", 0.1),
    ]  # fmt: skip
    assert rows[1]["cost"]["v"] == pytest.approx({1: 2.0, 2: 4.0})
    assert rows[1]["cost"]["c_first"] == pytest.approx(0.4)
    chat, math = rows[1]["domains"]
    assert chat["predicted"] == pytest.approx(1.5 * 1.1 / 2.3)
    assert (chat["plain_tokens_per_s"], chat["speculative_tokens_per_s"]) == (10.0, 12.0)
    assert chat["groups"] == 2 and chat["measured"]["value"] == pytest.approx(1.2)
    assert math["measured"] is None and math["predicted"] == pytest.approx(1.9 * 1.1 / 2.3)


# ---- memory


def test_bytes_of_weights_and_caches(small_target: Target, make_drafter: MakeDrafter) -> None:
    text = small_target.model.config
    width = 2 * text.num_key_value_heads * text.head_dim * 4  # float32 keys and values of a layer
    held = footprint(small_target, make_drafter("causal", small_target))  # two of its layers
    assert held.target_kv == text.num_hidden_layers * width
    assert held.drafter_kv == 2 * width
    assert held.target_weights == sum(
        p.numel() * 4 for p in {id(p): p for p in small_target.model.parameters()}.values()
    )
    head = footprint(small_target, make_drafter("eagle3", small_target))
    assert head.drafter_kv == width and head.drafter_weights > 0
    assert footprint(small_target, make_drafter("medusa", small_target)).drafter_kv == 0


def test_what_looks_text_up_holds_nothing(small_target: Target) -> None:
    drafter = untrained_drafter(LookupConfig(), small_target)
    held = footprint(small_target, drafter)
    assert held.drafter_kv == 0 == held.drafter_weights and held.target_kv > 0
