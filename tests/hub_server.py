"""A stand-in for the Hub: loopback, threads, repositories in memory, faults on demand."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

TOKEN = "hf_" + "right" * 7
KINDS = {"models": "", "datasets": "datasets/"}
LARGE = (".safetensors",)
"""Kinds of files that go by the large-file route; others are in the commit."""


@dataclass
class Repository:
    """Files by branch: of each its content."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)

    def sha(self, revision: str) -> str:
        content = [(n, hashlib.sha1(d).hexdigest()) for n, d in self.at(revision).items()]
        return hashlib.sha1(repr(sorted(content)).encode()).hexdigest()

    def at(self, revision: str) -> dict[str, bytes]:
        """The files of a branch, or of the commit that one is at."""
        if revision in self.branches:
            return self.branches[revision]
        return next(files for name, files in self.branches.items() if self.sha(name) == revision)


@dataclass
class Hub:
    """What it holds, what it saw, and what it does wrong.

    faults: statuses by the start of a path, each answered once; 507 is one that huggingface_hub
    does not try again. requests: method and path of each.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""

    def sent(self) -> int:
        """Large files that were sent so far."""
        return sum(method == "PUT" for method, _ in self.requests)

    def commits(self) -> int:
        return sum(len(repository.messages) for repository in self.repositories.values())


@contextmanager
def running() -> Iterator[Hub]:
    """The Hub, which huggingface_hub takes for its own for the block; nobody is logged in."""
    hub = Hub()

    class Handler(_Handler):
        hub_of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", hub.address)
            template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
            patch.delenv("HF_TOKEN", raising=False)
            patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub_of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        hub, path = self.hub_of, unquote(urlsplit(self.path).path)
        body = self._body()
        hub.requests.append((self.command, path))
        for start, statuses in hub.faults.items():
            if path.startswith(start) and statuses:
                return self._send(statuses.pop(0), {"error": "fault on demand"})
        signed = path.startswith("/large/")  # an address that needs no token
        if not signed and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif parts[0] == "large":
            self._large(parts[1], body)
        elif parts[0] == "api":
            self._api(parts[1], "/".join(parts[2:4]), parts[4:], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            self._resolve(path)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    # ---- what it does

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{KINDS[asked.get('type', 'model') + 's']}{asked['organization']}/{asked['name']}"
        if name in self.hub_of.repositories:
            return self._send(409, {"error": "You already created this repo"})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub_of.repositories[name] = Repository(private)
        self._send(200, {"url": f"{self.hub_of.address}/{name}"})

    def _api(self, kind: str, name: str, what: list[str], body: bytes) -> None:
        repository = self.hub_of.repositories.get(KINDS[kind] + name)
        if repository is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        action, revision = what[0] if what else "revision", what[1] if len(what) > 1 else "main"
        if action == "branch":
            return self._branch(repository, revision)
        try:
            files = repository.at(revision)
        except StopIteration:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if action == "preupload":
            self._send(
                200, {"files": [self._mode(f["path"], files) for f in json.loads(body)["files"]]}
            )
        elif action == "commit":
            self._commit(KINDS[kind] + name, revision, body)
        elif action == "tree":
            self._send(200, [_entry(n, data) for n, data in files.items()])  # type: ignore[arg-type]
        else:
            told = {"id": name, "sha": repository.sha(revision), "private": repository.private}
            self._send(200, told | {"siblings": [{"rfilename": n} for n in files]})

    def _mode(self, name: str, files: dict[str, bytes]) -> dict[str, Any]:
        mode = "lfs" if name.endswith(LARGE) else "regular"
        oid = _oid(name, files[name]) if name in files else None
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _branch(self, repository: Repository, name: str) -> None:
        if name in repository.branches:
            return self._send(409, {"error": "Reference already exists"})
        repository.branches[name] = dict(repository.branches["main"])
        self._send(200, {})

    def _commit(self, name: str, revision: str, body: bytes) -> None:
        repository = self.hub_of.repositories[name]
        changed = dict(repository.branches[revision])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changed[value["path"]] = self.hub_of.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del changed[value["path"]]
        repository.branches[revision] = changed
        sha = repository.sha(revision)
        address = f"{self.hub_of.address}/{name}/commit/{sha}"
        self._send(200, {"commitUrl": address, "commitOid": sha})

    def _batch(self, asked: dict[str, Any]) -> None:
        told = []
        for entry in asked["objects"]:
            if entry["oid"] not in self.hub_of.large:
                place = {"href": f"{self.hub_of.address}/large/{entry['oid']}"}
                entry = entry | {"actions": {"upload": place}}
            told.append(entry)
        self._send(200, {"transfer": "basic", "objects": told})

    def _large(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._send(400, {"error": "other content"})
        self.hub_of.large[oid] = body
        self._send(200, {})

    def _resolve(self, path: str) -> None:
        name, _, rest = path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        repository = self.hub_of.repositories[name]
        files = repository.at(revision)
        if file not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content, sha = files[file], repository.sha(revision)
        headers = {"ETag": f'"{_oid(file, content)}"', "X-Repo-Commit": sha}
        self._bytes(200, content, headers)

    # ---- how it says it

    def _refuse(self, status: int, code: str | None, words: str) -> None:
        headers = {"X-Error-Message": words} | ({"X-Error-Code": code} if code else {})
        self._bytes(status, json.dumps({"error": words}).encode(), headers)

    def _send(self, status: int, content: dict[str, Any]) -> None:
        self._bytes(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _bytes(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": "file",
        "path": name,
        "size": len(data),
        "oid": _oid(name, data),
    }
    if name.endswith(LARGE):
        told["lfs"] = {"oid": told["oid"], "size": len(data), "pointerSize": 134}
    return told
