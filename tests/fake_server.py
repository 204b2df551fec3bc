"""A stand-in for servers of the target: loopback, threads, a tiny target, faults on demand."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import torch

from draftsmith.configs.collection import ServerSection
from draftsmith.data.gather import Backend, GatherSettings, Request, last_turn
from draftsmith.data.records import Record, request_seed
from draftsmith.data.remote import ServerBackend
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs

Kind = Literal["vllm", "llamacpp", "sglang", "other"]
Fault = int | Literal["close", "hang", "garbage", "abort"] | None
Script = Callable[[list[int]], tuple[list[int], str]]
KINDS: tuple[Kind, ...] = ("vllm", "llamacpp", "sglang", "other")
GREEDY = Law(0.0)
PATHS = {"llamacpp": "/completion", "sglang": "/generate"}


@dataclass
class FakeServer:
    """What it is, what it does wrong, and what it saw.

    faults: one for each coming completion, then none any more. script: prompt ids to (reply ids,
    finish), instead of the target's reply. own_ends: where the target's reply ends instead of at
    the asked tokens. texts: replies are told as text alone. of_law: log-probabilities are told at
    the sampled temperature. delay: seconds each completion takes at least. hold: completions wait
    until it is true, or for half a minute.
    """

    target: Target
    kind: Kind = "vllm"
    faults: list[Fault] = field(default_factory=list)
    script: Script | None = None
    own_ends: tuple[int, ...] | None = None
    texts: bool = False
    of_law: bool = False
    context: int | None = None
    shift: int = 0
    """Added to every token that /tokenize tells."""
    models: tuple[str, ...] = ("tiny",)
    delay: float = 0.0
    hold: Callable[[], bool] = lambda: True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of all completions, failed ones too."""
    in_flight: int = 0
    most_in_flight: int = 0
    address: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.stopped = threading.Event()

    # ---- what it says

    def listing(self) -> dict[str, Any]:
        owner = {"other": "somebody"}.get(self.kind, self.kind)
        told = {"max_model_len": self.context, "owned_by": owner}
        return {"object": "list", "data": [{"id": name, **told} for name in self.models]}

    def tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body["content" if self.kind == "llamacpp" else "prompt"]
        ids = self.target.tokenizer.encode(text, add_special_tokens=False)
        return {"tokens": [token + self.shift for token in ids]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        options = body.get("sampling_params", body)
        prompt = body.get("input_ids", body.get("prompt"))
        limit = options.get("max_tokens", options.get("n_predict", options.get("max_new_tokens")))
        seed = options.get("seed", options.get("sampling_seed"))
        law = Law(options["temperature"])
        if self.script is not None:
            ids, finish = self.script(prompt)
            rows = torch.zeros(len(ids), self.target.vocab_size).log_softmax(-1)
        else:
            ids, finish, rows = self._reply(prompt, limit, law, seed, options)
        k = body.get("logprobs", body.get("n_probs", body.get("top_logprobs_num"))) or 0
        if self.of_law and law.temperature:
            rows = (rows / law.temperature).log_softmax(-1)
        best = rows.topk(min(k, rows.shape[-1]), dim=-1)
        top = [
            list(zip(tokens.tolist(), values.tolist(), strict=True))
            for tokens, values in zip(best.indices, best.values, strict=True)
        ]
        return getattr(self, f"_as_{self.kind}")(body, ids, finish, top)

    @torch.inference_mode()
    def _reply(
        self, prompt: list[int], limit: int, law: Law, seed: int, options: dict[str, Any]
    ) -> tuple[list[int], str, torch.Tensor]:
        """Token by token, without any cache or batch."""
        ends = self.own_ends or options.get("stop_token_ids") or self.target.eos_ids
        draws = torch.Generator().manual_seed(seed)
        ids, rows = list(prompt), []
        with self._lock:
            while len(rows) < limit and (not rows or ids[-1] not in ends):
                logits = self.target.model(torch.tensor([ids])).logits[0, -1]
                logits = logits[: self.target.vocab_size].float()
                rows.append(logits.log_softmax(-1))
                weights = log_probs(logits, law).exp()
                ids.append(int(torch.multinomial(weights, 1, generator=draws)))
        finish = "stop" if ids[-1] in ends else "length"
        return ids[len(prompt) :], finish, torch.stack(rows)

    def _text(self, ids: list[int], ends: bool) -> str:
        shown = ids if ends else [token for token in ids if token not in self.target.eos_ids]
        return str(self.target.tokenizer.decode(shown))

    def _as_vllm(
        self, body: dict[str, Any], ids: list[int], finish: str, top: list[Any]
    ) -> dict[str, Any]:
        named = [f"token_id:{token}" for token in ids]
        told = None
        if body.get("logprobs") is not None:  # the drawn token is always among those told
            rows = [
                {f"token_id:{drawn}": -30.0} | {f"token_id:{token}": value for token, value in row}
                for drawn, row in zip(ids, top, strict=True)
            ]
            told = {"tokens": named, "top_logprobs": rows}
        choice = {"text": self._text(ids, ends=False), "finish_reason": finish, "logprobs": told}
        if self.texts:
            choice["logprobs"] = None
        elif self.kind == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        return {"choices": [choice]}

    _as_other = _as_vllm

    def _as_llamacpp(
        self, body: dict[str, Any], ids: list[int], finish: str, top: list[Any]
    ) -> dict[str, Any]:
        rows = [
            {"id": drawn, "top_logprobs": [{"id": t, "logprob": value} for t, value in row]}
            for drawn, row in zip(ids, top, strict=True)
        ]
        stop = {"stop": "eos", "length": "limit"}.get(finish, finish)
        reply = {"content": self._text(ids, ends=False), "stop_type": stop}
        reply["tokens"] = ids if body.get("return_tokens") else []
        return reply | ({"completion_probabilities": rows} if body.get("n_probs") else {})

    def _as_sglang(
        self, body: dict[str, Any], ids: list[int], finish: str, top: list[Any]
    ) -> dict[str, Any]:
        about: dict[str, Any] = {"finish_reason": {"type": finish}}
        if body["return_logprob"]:
            about["output_top_logprobs"] = [[(v, token, None) for token, v in row] for row in top]
        return {"text": self._text(ids, ends=False), "output_ids": ids, "meta_info": about}


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """The fake, served at `fake.address` for the block."""

    class Handler(_Handler):
        server_of = fake

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.stopped.set()  # lets go of what hangs
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, self.server_of.listing())
        else:
            self._send(404, {"error": {"message": f"nothing at {self.path}"}})

    def do_POST(self) -> None:
        fake = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and fake.kind != "other":
            self._send(200, fake.tokens(body))
        elif self.path == PATHS.get(fake.kind, "/v1/completions"):
            self._complete(body)
        else:
            self._send(404, {"error": {"message": f"nothing at {self.path}"}})

    def _complete(self, body: dict[str, Any]) -> None:
        fake = self.server_of
        with fake._lock:
            fake.bodies.append(body)
            fake.in_flight += 1
            fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
            fault = fake.faults.pop(0) if fake.faults else None
        try:
            time.sleep(fake.delay)
            until = time.monotonic() + 30
            while not fake.hold() and time.monotonic() < until and not fake.stopped.is_set():
                time.sleep(0.005)
            self._answer(body, fault)
        finally:
            with fake._lock:
                fake.in_flight -= 1

    def _answer(self, body: dict[str, Any], fault: Fault) -> None:
        fake = self.server_of
        if fault == "close":
            self.close_connection = True
        elif fault == "hang":
            fake.stopped.wait()
            self.close_connection = True
        elif fault == "garbage":
            self._send(200, {"choices": []})
        elif isinstance(fault, int):
            self._send(fault, {"error": {"message": f"fault {fault} on demand"}})
        else:
            reply = fake.complete(body)
            if fault == "abort":
                reply["choices"][0]["finish_reason"] = "abort"
            self._send(200, reply)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After-Ms", "1")  # tests need not wait
        self.end_headers()
        self.wfile.write(data)


# ---- asking it

TOKENS = 9


def settings(top: int = 0) -> GatherSettings:
    return GatherSettings(TOKENS, 4, (), keep="top" if top else "none", top=top)


def requests(law: Law = GREEDY, count: int = 6) -> list[Request]:
    draws = torch.Generator().manual_seed(1)
    made = []
    for n in range(count):
        ids = tuple(torch.randint(3, 400, (3 + n % 5,), generator=draws).tolist())
        seed = request_seed(0, f"p{n}", law)
        made.append(Request(f"p{n}", "chat", "train", ids, law, seed))
    return made


def backend(target: Target, *fakes: FakeServer, **options: Any) -> ServerBackend:
    section = ServerSection(
        **{"addresses": tuple(f.address for f in fakes), "retries": 2, **options}
    )
    return ServerBackend(section, target.tokenizer, target.eos_ids, target.vocab_size, 64)


def ask(answering: Backend, asked: Sequence[Request], top: int = 0) -> list[Record]:
    return answering.answer(asked, settings(top), lambda tokens: None, last_turn)
