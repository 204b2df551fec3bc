"""Counters are read as engines write them, and what is missing is named."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from draftsmith.configs.errors import UserError
from draftsmith.eval.engines import counters
from draftsmith.eval.engines.counters import NOTHING, Counts, of_reply, parse, scraped

# Two engines behind one server, as prometheus_client writes them.
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="/models/a b"} 40.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="/models/a b"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="/models/a b"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="/models/a b"} 1.2e+02
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="/models/a b"} 6.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="/models/a b"} 61.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="/models/a b"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
vllm:generation_tokens_total{engine="0"} 101.0
"""
LLAMA = """\
llamacpp:spec_decode_num_draft_tokens_total 9
llamacpp:spec_decode_num_accepted_tokens_total 3
llamacpp:spec_decode_num_drafts_total 5
"""


def test_engines_behind_one_server_are_added() -> None:
    assert parse(VLLM, "vllm") == Counts(42, 126, 62, (34, 20, 8))


def test_nothing_by_position_is_told_before_anything_was_accepted() -> None:
    assert parse(LLAMA, "llamacpp") == Counts(5, 9, 3, ())


@pytest.mark.parametrize("text", ["", "vllm:generation_tokens_total 3.0\n", LLAMA])
def test_a_text_without_them(text: str) -> None:
    assert parse(text, "vllm") is None


def test_differences_where_positions_come_later() -> None:
    after = Counts(12, 24, 9, (6, 3))
    assert after - Counts(5, 9, 3, ()) == Counts(7, 15, 6, (6, 3))
    assert NOTHING + after == after


@pytest.mark.parametrize("name", ["spec_correct_drafts_histogram", "spec_accept_histogram"])
def test_a_reply_of_sglang_tells_its_rounds(name: str) -> None:
    """5 rounds accepted nothing, 3 one token, 2 all three."""
    reply = {"meta_info": {"spec_verify_ct": 10, name: [5, 3, 0, 2]}}
    assert of_reply(reply, 3) == Counts(10, 30, 9, (5, 2, 2))


@pytest.mark.parametrize("about", [None, {}, {"spec_verify_ct": 3}, {"spec_accept_histogram": [1]}])
def test_a_reply_that_tells_none(about: Any) -> None:
    with pytest.raises(UserError, match="no spec_verify_ct or no histogram"):
        of_reply({"meta_info": about}, 2)


@contextmanager
def telling(*texts: str) -> Iterator[str]:
    """A server whose metrics are these texts one after the other, and then the last one."""
    left = list(texts)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_counters_that_still_move_are_read_again() -> None:
    moved = LLAMA.replace("total 5", "total 6")
    with telling(LLAMA, moved, moved) as root:
        assert scraped(root, "llamacpp").rounds == 6


def test_counters_that_never_stand_still_are_read_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "SETTLE", 0.2)
    moving = [LLAMA.replace("total 5", f"total {n}") for n in range(5, 500)]
    with telling(*moving) as root:
        assert scraped(root, "llamacpp").rounds > 6


def test_a_server_without_counters_is_named() -> None:
    with telling(LLAMA) as root, pytest.raises(UserError, match=f"{root}/metrics has no counters"):
        scraped(root, "vllm")


def test_a_server_without_metrics_is_named() -> None:
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/metrics cannot be read"):
        scraped("http://127.0.0.1:9", "vllm")
