"""A server that a recipe starts is up when it is asked, and gone when it is not needed."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from draftsmith.configs.collection import ServerSection
from draftsmith.configs.errors import UserError
from draftsmith.data import served
from draftsmith.data.served import Program, serving, started

# Is ready after a while, as told by /health or, in an old one, by /v1/models alone. It tells both
# process ids; its child ignores SIGTERM.
SERVER = """
import http.server, json, os, signal, subprocess, sys, time
model, port, folder, age = sys.argv[1:]
helper = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
open(folder + "/pids", "w").write(f"{os.getpid()} {helper.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        health = self.path == "/health"
        Handler.asked += health
        ready = Handler.asked > 3
        absent, waiting = (404, 503) if age == "old" else (503, 200)
        self.send_response((200 if ready and age == "new" else absent) if health
                           else 200 if ready else waiting)
        self.end_headers()
        self.wfile.write(json.dumps([model, ready]).encode())
    def log_message(self, *args):
        pass
print("starting", flush=True)
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(served, "POLL", 0.02)


def section(*command: str, timeout: float = 30.0) -> ServerSection:
    return ServerSection(command=(sys.executable, "-c", *command), timeout=timeout)


def server(folder: Path, age: str = "new") -> ServerSection:
    return section(SERVER, "{model}", "{port}", str(folder), age)


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process ended, within a while; a zombie is one that did."""
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("draftsmith-server-*.log"))


@pytest.mark.parametrize("age", ["new", "old"])
def test_it_is_ready_within_the_block_and_gone_after(age: str, tmp_path: Path) -> None:
    with serving(server(tmp_path, age), "some/model") as addresses:
        (address,) = addresses
        with urllib.request.urlopen(f"{address}/models") as reply:
            assert reply.read() == b'["some/model", true]'
        assert len(logs(tmp_path)) == 1
    assert [gone(pid) for pid in pids(tmp_path)] == [True, True]
    assert logs(tmp_path) == []


def test_it_is_gone_after_any_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), serving(server(tmp_path), "m"):
        raise KeyboardInterrupt
    assert [gone(pid) for pid in pids(tmp_path)] == [True, True]
    assert logs(tmp_path) == []


def test_it_is_gone_after_this_process_was_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from draftsmith.configs.collection import ServerSection
from draftsmith.data.served import serving
with serving(ServerSection(command={server(tmp_path).command!r}), "m"):
    print("up", flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert [gone(pid) for pid in pids(tmp_path)] == [True, True]


def test_its_scratch_folder_is_gone_with_a_killed_process(tmp_path: Path) -> None:
    scratch = tmp_path / "some scratch"
    scratch.mkdir()
    (scratch / "big.gguf").touch()
    code = f"""
import time
from pathlib import Path
from draftsmith.data.served import Program, started
command = {server(tmp_path).command!r}
with started(Program(command, "it", "no option", 30.0, scratch=Path({str(scratch)!r}))):
    print("up", flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    assert scratch.exists()
    parent.terminate()
    parent.communicate()
    assert [gone(pid) for pid in pids(tmp_path)] == [True, True]
    for _ in range(200):
        if not scratch.exists():
            return
        time.sleep(0.02)
    pytest.fail("the folder is still there")


def test_its_environment_is_added_to_this_one(tmp_path: Path) -> None:
    code = "import os; print(os.environ['OWN'], 'PATH' in os.environ); raise SystemExit(1)"
    program = Program((sys.executable, "-c", code), "it", "no option", 30.0, {"OWN": "a b"})
    with (
        pytest.raises(UserError, match=r"it ended with status 1;.*\n  a b True$"),
        started(program),
    ):
        pass


@pytest.mark.parametrize("ready", [True, False])
def test_its_limit_ends_it_whatever_it_does(ready: bool, tmp_path: Path) -> None:
    """Before it answers, and while it is used."""
    quiet = (sys.executable, "-c", "import time; time.sleep(60)")
    command = server(tmp_path).command if ready else quiet
    program = Program(command, "it", "no option", 30.0, limit=3.0 if ready else 0.5)
    with pytest.raises(UserError, match="it was ended after"), started(program):
        assert ready
        assert gone(pids(tmp_path)[0])
        raise UserError("cannot be reached")


def test_one_that_ends_at_once_shows_what_it_said(tmp_path: Path) -> None:
    ending = section("print('no such model', flush=True); raise SystemExit(3)")
    with (
        pytest.raises(UserError, match=r"ended with status 3.*\n  no such model$"),
        serving(ending, "m"),
    ):
        pass
    (log,) = logs(tmp_path)
    assert log.read_text() == "no such model\n"


def test_one_that_never_answers_is_given_up(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pids')!r}, 'w').write(str(os.getpid())); "
    silent = section(code + "time.sleep(60)", timeout=0.5)
    with (
        pytest.raises(UserError, match=r"within 0\.5 s.*\n  \(it printed nothing\)"),
        serving(silent, "m"),
    ):
        pass
    assert gone(pids(tmp_path)[0])


def test_one_that_dies_later_is_blamed(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"cannot be reached\n.*status -9.*\n  starting"),
        serving(server(tmp_path), "m"),
    ):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert gone(pids(tmp_path)[0])
        raise UserError("cannot be reached")
    assert gone(pids(tmp_path)[1])


def test_a_program_that_is_not_there() -> None:
    absent = ServerSection(command=("/no/such/python", "{port}"))
    with pytest.raises(UserError, match=r"cannot be run: .*/no/such/python"), serving(absent, "m"):
        pass


def test_addresses_are_given_as_they_are() -> None:
    with serving(ServerSection(addresses=("http://a/v1", "http://b/v1")), "m") as addresses:
        assert addresses == ("http://a/v1", "http://b/v1")


def test_braces_of_other_meaning_stay(tmp_path: Path) -> None:
    code = "import sys; print(*sys.argv[1:], flush=True); raise SystemExit(1)"
    odd = section(code, '{"a": {"b": 1}}', "--path={model}/x")
    with (
        pytest.raises(UserError, match=r'  \{"a": \{"b": 1\}\} --path=here/x$'),
        serving(odd, "here"),
    ):
        pass
