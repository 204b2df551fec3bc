"""A server of the target as a child of this process, in an environment of its own."""

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..configs.collection import ServerSection
from ..configs.errors import UserError

POLL = 0.2
"""Seconds between two questions whether the server is up."""
GRACE = 10.0
"""Seconds that a server is given to end by itself."""
TAIL = 12
"""Lines of its log that an error shows."""


@contextmanager
def serving(section: ServerSection, model: str | Path) -> Iterator[tuple[str, ...]]:
    """Addresses that answer: the section's, or that of a server its command starts for the block.

    The command's {model} and {port} are filled in, also within its words. It runs in a process
    group of its own, which is ended with the block, and with this process however that ends. What
    it prints goes to a file, kept only where something failed.

    Raises `UserError`, with the end of that file, if the command cannot be run, ends by itself, or
    does not answer within the section's timeout.
    """
    if not section.command:
        yield section.addresses
        return
    port = _free_port()
    filled = {"{model}": str(model), "{port}": str(port)}
    command = [_fill(word, filled) for word in section.command]
    handle, name = tempfile.mkstemp(prefix="draftsmith-server-", suffix=".log")
    log = Path(name)
    with open(handle, "wb") as out:
        child = _start(command, out.fileno(), log)
    guard = _guard(child.pid)
    told = True  # whether an error tells of the log
    try:
        _await_answer(child, port, section.timeout, log)
        told = False
        try:
            yield (f"http://127.0.0.1:{port}/v1",)
        except UserError as error:
            if child.poll() is None:
                raise
            told = True  # it may be an error only because the server is gone
            raise UserError(f"{error}\n{_ended(child, log)}") from error
    finally:
        _end(child)
        guard.kill()
        guard.communicate()
        if not told:
            log.unlink(missing_ok=True)


def _fill(word: str, filled: dict[str, str]) -> str:
    for name, value in filled.items():  # words may hold other braces, as JSON does
        word = word.replace(name, value)
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: list[str], out: int, log: Path) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        log.unlink(missing_ok=True)
        raise UserError(
            f"collect.server.command cannot be run: {error}; its first word is a program, such as "
            "the python of the environment that vLLM is installed in"
        ) from error


def _guard(group: int) -> "subprocess.Popen[bytes]":
    """A process that ends the group when this one is gone, even if it was killed.

    It waits on a pipe that only this process holds, which closes then.
    """
    return subprocess.Popen(
        ["sh", "-c", f"read -r _; kill -9 -{group}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _await_answer(child: "subprocess.Popen[bytes]", port: int, timeout: float, log: Path) -> None:
    deadline = time.monotonic() + timeout
    while not (_healthy(port, "/health", (404,)) and _healthy(port, "/v1/models")):
        if child.poll() is not None:
            raise UserError(_ended(child, log))
        if time.monotonic() > deadline:
            raise UserError(
                f"the server of collect.server.command did not answer within {timeout:g} s "
                f"(collect.server.timeout); {_tail(log)}"
            )
        time.sleep(POLL)


def _healthy(port: int, path: str, also: tuple[int, ...] = ()) -> bool:
    """Whether it answers there with success or one of the statuses `also`."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=GRACE):
            return True
    except urllib.error.HTTPError as error:
        return error.code in also
    except OSError:
        return False


def _ended(child: "subprocess.Popen[bytes]", log: Path) -> str:
    return f"the server of collect.server.command ended with status {child.poll()}; {_tail(log)}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = "\n".join(f"  {line}" for line in lines[-TAIL:]) or "  (it printed nothing)"
    return f"its output is kept in {log}, which ends:\n{last}"


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the child and all of its group, which outlives a child that ended by itself."""
    gone = suppress(ProcessLookupError, PermissionError)  # the latter for zombies, on macOS
    with gone, suppress(subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(GRACE)
    with gone:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
