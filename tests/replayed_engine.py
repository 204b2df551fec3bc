"""An engine that answers what a file says, and counts the rounds it says; standard library alone.

    python replayed_engine.py PORT FILE

The file is JSON: kind (vllm, llamacpp or sglang); replies by prompt and temperature, as `key` puts
them, each with ids, finish and rounds (drafted, accepted); and a fault, or null. Without rounds it
has no drafter.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def key(ids: Any, temperature: float) -> str:
    return f"{' '.join(map(str, ids))} at {temperature:g}"


class Replayed:
    def __init__(self, said: dict[str, Any]) -> None:
        self.kind, self.replies, self.fault = said["kind"], said["replies"], said["fault"]
        self.rounds: list[list[int]] = []
        self.asked = 0

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        options = body.get("sampling_params", body)
        prompt = body.get("input_ids", body.get("prompt"))
        limit = options.get("max_tokens", options.get("n_predict", options.get("max_new_tokens")))
        reply = self.replies[key(prompt, options["temperature"])]
        ids, finish, rounds = reply["ids"][:limit], reply["finish"], reply["rounds"]
        if len(ids) < len(reply["ids"]):
            finish, rounds = "length", rounds[:1]
        self.asked += 1
        if self.fault == "dies" and self.asked > 3:
            print("out of memory", flush=True)
            os._exit(7)
        if self.fault == "hangs" and self.asked > 3:
            time.sleep(60)
        self.rounds += rounds
        return getattr(self, f"_as_{self.kind}")(ids, finish, rounds)

    def _as_vllm(self, ids: list[int], finish: str, rounds: Any) -> dict[str, Any]:
        return {"choices": [{"text": "", "finish_reason": finish, "token_ids": ids}]}

    def _as_llamacpp(self, ids: list[int], finish: str, rounds: Any) -> dict[str, Any]:
        stop = {"stop": "eos", "length": "limit"}[finish]
        return {"content": "", "stop_type": stop, "tokens": ids}

    def _as_sglang(self, ids: list[int], finish: str, rounds: Any) -> dict[str, Any]:
        longest = max((d for d, _ in rounds), default=0)
        histogram = [sum(a == n for _, a in rounds) for n in range(longest + 1)]
        about = {"finish_reason": {"type": finish}, "spec_verify_ct": len(rounds)}
        about |= {"spec_correct_drafts_histogram": histogram} if rounds else {}
        return {"text": "", "output_ids": ids, "meta_info": about}

    def metrics(self) -> str:
        if self.fault == "tells nothing":
            return "# nothing\n"
        rounds = [r for r in self.rounds if r[0]]
        names = {
            "drafts": len(rounds),
            "draft_tokens": sum(d for d, _ in rounds),
            "accepted_tokens": sum(a for _, a in rounds),
        }
        head = f"{self.kind}:spec_decode_num_"
        lines = [f'{head}{name}_total{{engine="0"}} {n:.1f}' for name, n in names.items()]
        for place in range(max((d for d, _ in rounds), default=0)):
            reached = sum(a > place for _, a in rounds)
            lines.append(
                f'{head}accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {reached}.0'
            )
        return "\n".join(["# HELP x", *lines]) + "\n"


class Handler(BaseHTTPRequestHandler):
    engine: Replayed
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = {
            "/health": {},
            "/version": {"version": "0.0.7"},
            "/v1/models": {"data": [{"id": "tiny", "owned_by": self.engine.kind}]},
        }
        if self.path == "/metrics":
            self._send(200, self.engine.metrics().encode())
        else:
            self._send(
                200 if self.path in known else 404, json.dumps(known.get(self.path)).encode()
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        paths = {"llamacpp": "/completion", "sglang": "/generate"}
        if self.path != paths.get(self.engine.kind, "/v1/completions"):
            self._send(404, b"{}")
        else:
            self._send(200, json.dumps(self.engine.complete(body)).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    print("up", os.getpid(), flush=True)
    with open(sys.argv[2], encoding="utf-8") as file:
        Handler.engine = Replayed(json.load(file))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
