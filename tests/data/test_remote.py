"""Servers answer as the target in this process does, or the collection says why not."""

import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_server import (
    KINDS,
    FakeServer,
    Kind,
    ask,
    backend,
    requests,
    running,
    settings,
)

from draftsmith.configs.errors import UserError
from draftsmith.data.gather import Request, TargetBackend, last_turn
from draftsmith.data.records import Record
from draftsmith.data.rules import Rules
from draftsmith.data.target import Target
from draftsmith.data.warp import Law


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


def essence(record: Record) -> tuple[Any, ...]:
    return record.key, record.ids.tolist(), record.prompt_len, record.finish, record.origin


def ending_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some greedy replies end: what one says fourth is made an end token."""
    said = ask(TargetBackend(target), requests())[0].reply
    monkeypatch.setattr(target, "eos_ids", (int(said[3]), 399))


# ---- the same records


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_records_are_those_of_this_process(
    kind: Kind, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending_target(tiny_target, monkeypatch)
    expected = ask(TargetBackend(tiny_target), requests())
    with running(FakeServer(tiny_target, kind)) as fake:
        remote = backend(tiny_target, fake)
        records = ask(remote, requests())
    assert [essence(r) for r in records] == [essence(r) for r in expected]
    assert {r.finish for r in records} == {"stop", "length"}
    assert all(r.exact for r in records)


def test_b041_servers_get_token_ids_and_every_option_of_the_law(tiny_target: Target) -> None:
    asked = requests(Law(0.7, top_k=5))[:1]
    bodies = {}
    for kind in ("vllm", "llamacpp", "sglang"):
        with running(FakeServer(tiny_target, kind)) as fake:
            ask(backend(tiny_target, fake), asked)
        bodies[kind] = fake.bodies[0] | fake.bodies[0].get("sampling_params", {})
        assert (bodies[kind]["temperature"], bodies[kind]["top_k"]) == (0.7, 5)
        assert (bodies[kind]["top_p"], bodies[kind]["min_p"]) == (1.0, 0.0)
    prompt = list(asked[0].ids)
    assert bodies["vllm"]["prompt"] == bodies["llamacpp"]["prompt"] == prompt
    assert bodies["sglang"]["input_ids"] == prompt
    assert bodies["llamacpp"]["samplers"][0] == "temperature"
    assert bodies["vllm"]["repetition_penalty"] == 1.0
    assert bodies["vllm"]["ignore_eos"]  # the server's ends, but not the target's
    assert bodies["vllm"]["stop_token_ids"] == list(tiny_target.eos_ids)


def test_samples_do_not_depend_on_neighbours(tiny_target: Target) -> None:
    asked = requests(Law(1.0))
    with running(FakeServer(tiny_target)) as fake:
        together = ask(backend(tiny_target, fake), asked)
        alone = ask(backend(tiny_target, fake, concurrency=1), asked[3:4])
    assert essence(together[3]) == essence(alone[0])
    assert all(0 <= body["seed"] < 2**31 for body in fake.bodies)
    assert len({body["seed"] for body in fake.bodies}) == len(asked)


def test_turns_follow_each_other_at_one_server(tiny_target: Target) -> None:
    def after(record: Record) -> Request | None:
        if record.turn == 2 or record.prompt_id == "p1":
            return None
        ids = (*record.ids.tolist(), 5, 6, record.turn + 7)
        return replace(requests()[int(record.prompt_id[1:])], ids=ids, turn=record.turn + 1)

    expected = TargetBackend(tiny_target).answer(requests(), settings(), lambda n: None, after)
    told: list[int] = []
    with running(FakeServer(tiny_target)) as one, running(FakeServer(tiny_target)) as two:
        remote = backend(tiny_target, one, two, concurrency=1)
        records = remote.answer(requests(), settings(), told.append, after)
    assert [essence(r) for r in records] == [essence(r) for r in expected]
    assert [(r.prompt_id, r.turn) for r in records][:4] == [
        ("p0", 0),
        ("p0", 1),
        ("p0", 2),
        ("p1", 0),
    ]
    assert sum(told) == sum(len(r.reply) for r in records)
    for fake in (one, two):
        prompts = [body["prompt"] for body in fake.bodies]
        turns = [len({len(p) for p in prompts if p[:3] == first[:3]}) for first in prompts]
        assert set(turns) <= {1, 3}  # whole conversations
        following = [b[: len(a)] == a for a, b in itertools.pairwise(prompts)]
        assert sum(following) == 2 * turns.count(3) // 3  # each turn right after the one before


# ---- faults


@pytest.mark.parametrize("faults", [[429, 503], [500, 408], ["close"]], ids=str)
def test_passing_faults_are_tried_again(faults: list[Any], tiny_target: Target) -> None:
    with running(FakeServer(tiny_target, faults=list(faults))) as fake:
        records = ask(backend(tiny_target, fake, concurrency=1), requests(count=2))
    assert [r.prompt_id for r in records] == ["p0", "p1"]
    assert len(fake.bodies) == 2 + len(faults)


def test_timeouts_are_tried_again(tiny_target: Target) -> None:
    with running(FakeServer(tiny_target, faults=["hang"])) as fake:
        records = ask(backend(tiny_target, fake, timeout=0.3), requests(count=1))
    assert (len(records), len(fake.bodies)) == (1, 2)


@pytest.mark.parametrize("fault", [400, 401, 404, 422])
def test_refusals_are_shown_and_not_tried_again(fault: int, tiny_target: Target) -> None:
    with running(FakeServer(tiny_target, faults=[None, fault])) as fake:
        told: list[int] = []
        with pytest.raises(
            UserError, match=rf"prompt p1 with HTTP {fault}: fault {fault} on demand"
        ):
            backend(tiny_target, fake, concurrency=1).answer(
                requests(), settings(), told.append, last_turn
            )
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("fault", [503, 429, "close", "abort"])
def test_a_dead_address_leaves_its_work_to_the_others(
    fault: Any, tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ask(TargetBackend(tiny_target), requests())
    with (
        running(FakeServer(tiny_target, faults=[None, *[fault] * 99])) as dying,
        running(FakeServer(tiny_target)) as healthy,
    ):
        healthy.hold = lambda: len(dying.bodies) > 1  # or it has answered all by then
        remote = backend(tiny_target, dying, healthy, concurrency=2, retries=1)
        records = ask(remote, requests())
        assert [essence(r) for r in records] == [essence(r) for r in expected]
        assert caplog.text.count("going on without it") == 1
        assert dying.address in caplog.text
        seen = len(dying.bodies)
        dying.faults.clear()
        healthy.hold = lambda: len(dying.bodies) > seen
        ask(remote, requests())
        assert len(dying.bodies) > seen  # it is back


def test_all_dead_names_the_last_reason_and_keeps_nothing(tiny_target: Target) -> None:
    fakes = [FakeServer(tiny_target, faults=[None, *[503] * 99]) for _ in range(2)]
    with (
        running(fakes[0]),
        running(fakes[1]),
        pytest.raises(UserError, match=r"no server answers.*HTTP 503: fault 503 on demand"),
    ):
        ask(backend(tiny_target, *fakes, retries=0), requests())
    with pytest.raises(UserError, match=r"no server answers.*cannot be reached"):
        ask(backend(tiny_target, *fakes, retries=0), requests())


def test_replies_of_another_shape_are_refused(tiny_target: Target) -> None:
    with (
        running(FakeServer(tiny_target, faults=["garbage"])) as fake,
        pytest.raises(UserError, match="prompt p0 otherwise than vLLM does"),
    ):
        ask(backend(tiny_target, fake), requests(count=1))


def test_a_fault_of_the_caller_comes_through_as_it_is(tiny_target: Target) -> None:
    def after(record: Record) -> Request | None:
        raise LookupError("no such conversation")

    with running(FakeServer(tiny_target)) as fake, pytest.raises(LookupError, match="no such"):
        backend(tiny_target, fake).answer(requests(), settings(), lambda tokens: None, after)


# ---- sharing


@pytest.mark.parametrize("count", [4, 24])
def test_the_work_is_shared_within_the_bound(count: int, tiny_target: Target) -> None:
    fakes, most = [FakeServer(tiny_target, delay=0.1) for _ in range(2)], min(3, count // 2)
    for fake in fakes:  # until both are at work
        fake.hold = lambda: all(len(other.bodies) >= most for other in fakes)
    with running(fakes[0]), running(fakes[1]):
        ask(backend(tiny_target, *fakes, concurrency=3), requests(count=count))
    assert [fake.most_in_flight for fake in fakes] == [most] * 2
    assert min(len(fake.bodies) for fake in fakes) >= count // 4


# ---- who may answer


def refusal(target: Target, fake: FakeServer, asked: Sequence[Request] = (), **options: Any) -> str:
    with running(fake), pytest.raises(UserError) as caught:
        ask(backend(target, fake, **options), asked or requests())
    assert fake.bodies == []
    return str(caught.value)


def test_another_tokenizer_is_refused(tiny_target: Target) -> None:
    assert "does not serve this target" in refusal(tiny_target, FakeServer(tiny_target, shift=1))


def test_a_server_without_tokenize_is_noted(
    tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with running(FakeServer(tiny_target, "other")) as fake:
        ask(backend(tiny_target, fake), requests(count=1))
    assert "not checked" in caplog.text


def test_a_context_that_is_too_short_is_refused(tiny_target: Target) -> None:
    """Before anything is asked: later prompts, and later turns, are longer than the first."""
    told = refusal(tiny_target, FakeServer(tiny_target, context=63), requests()[:1])
    assert "a context of 63 tokens, and conversations may have 64" in told
    assert "set collect.max_length to 63" in told


def test_the_model_is_found_or_named(tiny_target: Target) -> None:
    two = FakeServer(tiny_target, models=("large", "small"))
    assert "large, small: name one in collect.server.model" in refusal(tiny_target, two)
    assert "did you mean 'small'" in refusal(tiny_target, two, model="smal")
    with running(two):
        ask(backend(tiny_target, two, model="small"), requests(count=1))
    assert two.bodies[0]["model"] == "small"


@pytest.mark.parametrize(
    ("kind", "law", "reason"),
    [
        ("llamacpp", Law(1.0, typical_p=0.9), "no typical_p"),
        ("vllm", Law(1.0, top_p=0.9, min_p=0.1), "min_p with top_p"),
        ("sglang", Law(1.0, top_k=9, top_p=0.9), "top_k with top_p"),
        ("other", Law(1.0, top_k=9), "no top_k"),
        ("vllm", Law(0.005), r"between 0 and 0.01"),
    ],
)
def test_laws_that_a_server_draws_otherwise_are_refused(
    kind: Kind, law: Law, reason: str, tiny_target: Target
) -> None:
    told = refusal(tiny_target, FakeServer(tiny_target, kind), requests(law))
    assert reason in told
    assert law.label in told


def test_what_records_do_not_keep_is_refused(tiny_target: Target) -> None:
    fake = FakeServer(tiny_target)
    asked = [replace(requests()[0], stop=("\n",))]
    assert "stop strings" in refusal(tiny_target, fake, asked)
    assert "rules" in refusal(tiny_target, fake, [replace(asked[0], rules=Rules(min_new_tokens=2))])
    with running(fake), pytest.raises(UserError, match="tell no states"):
        backend(tiny_target, fake).answer(
            requests(), replace(settings(), keep="hidden"), lambda tokens: None, last_turn
        )


def test_a_missing_package_is_named(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install draftsmith\[server\]"):
        backend(tiny_target, FakeServer(tiny_target, address="http://127.0.0.1:1/v1"))


def test_no_requests_no_server(tiny_target: Target) -> None:
    assert (
        ask(backend(tiny_target, FakeServer(tiny_target, address="http://127.0.0.1:1/v1")), [])
        == []
    )


def test_the_clients_log_is_quiet(tiny_target: Target, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with running(FakeServer(tiny_target, faults=[503])) as fake:
        ask(backend(tiny_target, fake), requests(count=1))
    assert caplog.text == ""
