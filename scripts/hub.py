"""Push: a published folder, or records, to the Hub; what fails there loses nothing here."""

import shlex
from pathlib import Path

from rich.console import Console

from ..configs.errors import NotSent, UserError
from ..data.files import size_text
from ..drafters.push import Parcel, check_name, pack, send


def check_place(to: list[str] | None, revision: str | None, public: bool) -> None:
    """Raise `UserError` for a place to send to that is none, before there is anything to send."""
    if to is None:
        if public or revision is not None:
            raise UserError("--public and --revision say how to send: name --to hub OWNER/NAME")
        return
    place, name = to
    if place != "hub":
        raise UserError(f"--to {place} {name}: what is published is sent to 'hub' alone")
    check_name(name)


def push(folder: Path, repo_id: str, revision: str | None, public: bool, console: Console) -> str:
    """Send the folder, after a list of what goes; returns the address of what was sent.

    Raises `UserError` as `pack`, and `NotSent` with the command that sends it again.
    """
    parcel = pack(folder, repo_id)
    _show(parcel, repo_id, public, console)
    try:
        address = send(parcel, repo_id, revision, public)
    except NotSent as error:
        again = shlex.join(command(folder, repo_id, revision, public))
        raise NotSent(f"{error}; {folder} is whole and can be sent with: {again}") from error
    console.print(f"sent to {address}", soft_wrap=True)
    return address


def command(folder: Path, repo_id: str, revision: str | None, public: bool) -> list[str]:
    """The words of the command that sends a folder."""
    branch = [] if revision is None else ["--revision", revision]
    return ["draftsmith", "push", str(folder), repo_id, *branch, *(["--public"] if public else [])]


def _show(parcel: Parcel, repo_id: str, public: bool, console: Console) -> None:
    sizes = parcel.sizes()
    seen = "public" if public else "private"
    console.print(f"to {repo_id}, a {seen} {parcel.kind} repository on the Hub:")
    width = max(map(len, sizes))
    for name, size in sizes.items():
        console.print(f"  {name:<{width}}  {size_text(size):>9}")
    console.print(f"  {len(sizes)} files, {size_text(sum(sizes.values()))}")
