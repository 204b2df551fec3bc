"""Servers as children of this process, each in an environment of its own."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..configs.collection import ServerSection
from ..configs.errors import UserError

POLL = 0.2
"""Seconds between two questions whether the server is up."""
GRACE = 10.0
"""Seconds that a server is given to end by itself."""
TAIL = 12
"""Lines of its log that an error shows."""


@dataclass(frozen=True)
class Program:
    """A server to start.

    command: its words, in which {port} is filled in; name: what errors call it; timeout: seconds
    until it answers, and option what sets them; environment: added to this process's own; limit:
    seconds after which it is ended whatever it does, None for never; scratch: a folder made for it,
    which goes, too, where this process is killed.
    """

    command: tuple[str, ...]
    name: str
    option: str
    timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)
    limit: float | None = None
    scratch: Path | None = None


@contextmanager
def serving(section: ServerSection, model: str | Path) -> Iterator[tuple[str, ...]]:
    """Addresses that answer: the section's, or that of a server its command starts for the block.

    The command's {model} and {port} are filled in, also within its words. Raises `UserError` as
    `started`.
    """
    if not section.command:
        yield section.addresses
        return
    command = tuple(_fill(word, "{model}", str(model)) for word in section.command)
    name, option = "the server of collect.server.command", "collect.server.timeout"
    with started(Program(command, name, option, section.timeout)) as root:
        yield (f"{root}/v1",)


@contextmanager
def started(program: Program) -> Iterator[str]:
    """The root of a server's addresses, which runs for the block.

    It runs in a process group of its own, which is ended with the block, and with this process
    however that ends. What it prints goes to a file, kept only where something failed.

    Raises `UserError`, with the end of that file, if the command cannot be run, ends by itself or
    by its limit, or does not answer within its timeout.
    """
    port = _free_port()
    command = [_fill(word, "{port}", str(port)) for word in program.command]
    handle, name = tempfile.mkstemp(prefix="draftsmith-server-", suffix=".log")
    log = Path(name)
    with open(handle, "wb") as out:
        child = _Child(program, command, out.fileno(), log)
    told = True  # whether an error tells of the log
    try:
        child.await_answer(port)
        told = False
        try:
            yield f"http://127.0.0.1:{port}"
        except UserError as error:
            if child.runs:
                raise
            told = True  # it may be an error only because the server is gone
            raise UserError(f"{error}\n{child.ended}") from error
    finally:
        child.end()
        if not told:
            log.unlink(missing_ok=True)


def _fill(word: str, name: str, value: str) -> str:
    return word.replace(name, value)  # words may hold other braces, as JSON does


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Child:
    """A program that runs, what ends it with this process, and what ends it in time."""

    def __init__(self, program: Program, command: list[str], out: int, log: Path) -> None:
        self._program, self._log = program, log
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **program.environment},
            )
        except OSError as error:
            log.unlink(missing_ok=True)
            raise UserError(
                f"{program.name} cannot be run: {error}; its first word is a program, such as the "
                "python of the environment that vLLM is installed in"
            ) from error
        self._guard = _guard(self._process.pid, program.scratch)
        self._late = threading.Event()
        self._timer: threading.Timer | None = None
        if program.limit is not None:
            self._timer = threading.Timer(program.limit, self._give_up)
            self._timer.daemon = True
            self._timer.start()

    @property
    def runs(self) -> bool:
        return not self._late.is_set() and self._process.poll() is None

    @property
    def ended(self) -> str:
        """Why it no longer runs, and what it said."""
        if self._late.is_set():
            return f"{self._program.name} was ended after {self._program.limit:g} s; {self._tail}"
        return f"{self._program.name} ended with status {self._process.poll()}; {self._tail}"

    def await_answer(self, port: int) -> None:
        timeout = self._program.timeout
        deadline = time.monotonic() + timeout
        while not (_healthy(port, "/health", (404,)) and _healthy(port, "/v1/models")):
            if not self.runs:
                raise UserError(self.ended)
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._program.name} did not answer within {timeout:g} s "
                    f"({self._program.option}); {self._tail}"
                )
            time.sleep(POLL)

    def end(self) -> None:
        """End it and all of its group, which outlives a child that ended by itself."""
        if self._timer is not None:
            self._timer.cancel()
        gone = suppress(ProcessLookupError, PermissionError)  # the latter for zombies, on macOS
        with gone, suppress(subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(GRACE)
        with gone:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.kill()
        self._guard.communicate()

    def _give_up(self) -> None:
        self._late.set()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(f"  {line}" for line in lines[-TAIL:]) or "  (it printed nothing)"
        return f"its output is kept in {self._log}, which ends:\n{last}"


def _guard(group: int, scratch: Path | None) -> "subprocess.Popen[bytes]":
    """A process that ends the group when this one is gone, even if it was killed, and its folder.

    It waits on a pipe that only this process holds, which closes then.
    """
    script = 'read -r _; kill -9 "-$1"; [ -z "$2" ] || rm -rf -- "$2"'
    return subprocess.Popen(
        ["sh", "-c", script, "sh", str(group), str(scratch or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _healthy(port: int, path: str, also: tuple[int, ...] = ()) -> bool:
    """Whether it answers there with success or one of the statuses `also`."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=GRACE):
            return True
    except urllib.error.HTTPError as error:
        return error.code in also
    except OSError:
        return False
