"""What servers tell of a reply becomes a record without guesses: its end, its distributions."""

from typing import Any

import pytest
import torch
from fake_server import (
    GREEDY,
    KINDS,
    TOKENS,
    FakeServer,
    Kind,
    ask,
    backend,
    requests,
    running,
)

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record
from draftsmith.data.remote import ServerBackend
from draftsmith.data.target import Target
from draftsmith.data.told import top_of_rows
from draftsmith.data.warp import Law


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


# ---- how replies end


def scripted(
    target: Target, ids: list[int], finish: str, **options: Any
) -> tuple[Record, ServerBackend]:
    with running(FakeServer(target, script=lambda prompt: (ids, finish), **options)) as fake:
        remote = backend(target, fake)
        return ask(remote, requests(count=1))[0], remote


@pytest.mark.parametrize("kind", KINDS)
def test_b031_cut_replies_get_no_end_token(kind: Kind, tiny_target: Target) -> None:
    end = tiny_target.eos_ids[0]
    cut, _ = scripted(tiny_target, [7, 8, 9], "length", kind=kind)
    whole, _ = scripted(tiny_target, [7, 8, end], "stop", kind=kind)
    kept_back, _ = scripted(tiny_target, [7, 8], "stop", kind=kind)  # the server leaves it out
    assert (cut.finish, cut.reply.tolist()) == ("length", [7, 8, 9])
    for record in (whole, kept_back):
        assert (record.finish, record.reply.tolist()) == ("stop", [7, 8, end])


def test_the_end_token_is_the_turns_own(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_target, "eos_ids", (0, 2))  # the tokenizer's own is 2
    assert scripted(tiny_target, [7, 8], "stop")[0].reply.tolist() == [7, 8, 2]
    assert scripted(tiny_target, [7, 8, 0], "stop")[0].reply.tolist() == [7, 8, 0]


def test_what_follows_the_targets_end_is_cut_off(tiny_target: Target) -> None:
    record, _ = scripted(tiny_target, [7, tiny_target.eos_ids[0], 9], "length")
    assert (record.finish, record.reply.tolist()) == ("stop", [7, tiny_target.eos_ids[0]])


def test_a_foreign_end_token_counts_as_a_cut(
    tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    record, _ = scripted(tiny_target, [7, 8, 0], "stop")  # <|endoftext|>, of no turn here
    assert (record.finish, record.reply.tolist()) == ("length", [7, 8, 0])
    assert "<|endoftext|>" in caplog.text


def test_texts_are_tokenised_again_and_counted(
    tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    reply = tiny_target.tokenizer.encode("Maya has 24 é", add_special_tokens=False)
    end = tiny_target.eos_ids[0]
    record, _ = scripted(tiny_target, [*reply, end], "stop", texts=True, kind="other")
    assert record.reply.tolist() == [*reply, end][:TOKENS]
    assert not record.exact and not record.drawn_from(record.law)
    assert "tokenised again" in caplog.text
    cut, _ = scripted(tiny_target, reply[:-1], "length", texts=True, kind="other")
    assert tiny_target.tokenizer.decode(reply[:-1]).endswith("\ufffd")
    assert cut.finish == "length"
    long, _ = scripted(tiny_target, [*range(10, 22), end], "stop", texts=True, kind="other")
    assert (long.finish, len(long.reply)) == ("length", TOKENS)
    assert cut.reply.tolist() == tiny_target.tokenizer.encode(
        "Maya has 24 ", add_special_tokens=False
    )


def test_b043_tokens_that_do_not_exist_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match=r"p0.*\[7, 400\].*below 400"):
        scripted(tiny_target, [7, 400], "length")
    with pytest.raises(UserError, match="at least one"):
        scripted(tiny_target, [], "length")


# ---- distributions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", [GREEDY, Law(0.7)], ids=lambda law: law.label)
def test_b040_told_log_probabilities_are_the_targets(
    kind: Kind, law: Law, tiny_target: Target
) -> None:
    with running(FakeServer(tiny_target, kind)) as fake:
        records = ask(backend(tiny_target, fake), requests(law, 3), top=6)
    for record in records:
        with torch.no_grad():
            logits = tiny_target.model(record.ids[None, :-1]).logits[0, record.prompt_len - 1 :]
        full = logits.float().log_softmax(-1)  # [R, V]
        top = record.top
        assert top is not None
        assert (top.ids.shape, top.ids.dtype) == ((len(record.reply), 6), torch.int32)
        assert (top.log_probs.dtype, top.temperature) == (torch.float32, 1.0)
        best = full.topk(6)
        torch.testing.assert_close(top.log_probs, best.values, atol=1e-5, rtol=0)
        assert (top.log_probs.exp().sum(-1) < 0.999).all()  # not renormalised to the six
        if law == GREEDY:
            assert torch.equal(top.ids[:, 0].long(), record.reply)


def test_b040_as_many_as_the_vocabulary(tiny_target: Target) -> None:
    with running(FakeServer(tiny_target)) as fake:
        (record,) = ask(backend(tiny_target, fake), requests(count=1), top=1000)
    assert record.top is not None
    assert record.top.ids.shape == (TOKENS, 400)
    torch.testing.assert_close(record.top.log_probs.exp().sum(-1), torch.ones(TOKENS))


def test_log_probabilities_of_the_sampled_law_are_marked(tiny_target: Target) -> None:
    with running(FakeServer(tiny_target, "sglang", of_law=True)) as fake:
        remote = backend(tiny_target, fake)
        (hot,) = ask(remote, requests(Law(0.7), 1), top=6)
        with pytest.raises(UserError, match=r"those of 0\.7, 1 cannot be used together"):
            ask(remote, requests(count=1), top=6)
        remote = backend(tiny_target, fake)
        (greedy,) = ask(remote, requests(count=1), top=6)
        with pytest.raises(UserError, match=r"T=0\.7 top_k=3 leaves.*RETURN_ORIGINAL_LOGPROB"):
            ask(remote, requests(Law(0.7, top_k=3), 1), top=6)
    assert hot.top is not None
    assert greedy.top is not None
    assert (hot.top.temperature, greedy.top.temperature) == (0.7, 1.0)


def test_untold_positions_are_empty_and_impossible_numbers_refused(tiny_target: Target) -> None:
    fake = FakeServer(tiny_target)
    whole = fake.complete

    def without_the_end(body: dict[str, Any]) -> dict[str, Any]:
        reply = whole(body)
        if body["max_tokens"] > 1:  # not the probes
            reply["choices"][0]["logprobs"]["top_logprobs"].pop()
        return reply

    def logits(body: dict[str, Any]) -> dict[str, Any]:
        reply = whole(body)
        for row in reply["choices"][0]["logprobs"]["top_logprobs"]:
            row |= {token: value + 9 for token, value in row.items()}
        return reply

    with running(fake):
        fake.complete = without_the_end  # type: ignore[method-assign]
        (record,) = ask(backend(tiny_target, fake), requests(count=1), top=6)
        fake.complete = logits  # type: ignore[method-assign]
        with pytest.raises(UserError, match="more than 1"):
            ask(backend(tiny_target, fake), requests(count=1), top=6)
    assert record.top is not None
    assert record.top.ids[-1].tolist() == [-1] * 6
    assert (record.top.log_probs[-1] == -torch.inf).all()
    assert (record.top.ids[:-1] >= 0).all()


def test_no_log_probabilities_no_records(tiny_target: Target) -> None:
    with (
        running(FakeServer(tiny_target, "other", texts=True)) as fake,
        pytest.raises(UserError, match="no log-probabilities by token id"),
    ):
        ask(backend(tiny_target, fake), requests(), top=6)


def test_equals_and_tokens_that_do_not_exist() -> None:
    """Of two tokens as probable the greedy law took the drawn one, whichever came first."""
    rows = [[(5, -1.0), (7, -1.0), (400, -0.9)], [(5, -2.0), (7, -1.0), (9, -3.0)]]
    greedy = top_of_rows(rows, [7, 7], 2, 400, GREEDY, 1.0)
    assert greedy.ids.tolist() == [[7, 5], [7, 5]]
    assert greedy.log_probs.tolist() == [[-1.0, -1.0], [-1.0, -2.0]]
    narrow = top_of_rows(rows, [7, 7, 7], 9, 400, Law(1.0), 0.7)
    assert narrow.ids.tolist() == [[5, 7, -1], [7, 5, 9], [-1, -1, -1]]
    assert narrow.temperature == 0.7
