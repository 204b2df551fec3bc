"""What may leave this machine: text without local paths, and a search for what has to stay."""

import os
import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

# A path inside a sentence: "Q8_0 from /models/x.gguf", "(~/x)", "file:///x", "C:\\x".
_PATH = re.compile(
    r"(?:(?<=^)|(?<=[\s\"'(=,:]))(?:file:/+|~/|\.{1,2}/|/|[A-Za-z]:[\\/])[^\s\"'),]+"
)

# Of one part alone, "/think" in a chat template is no path. Nor are ends of lines, "Q:\nA:\n".
_LOCAL = re.compile(
    r"(?:^|(?<=[\s\"'`(=,:\[]))"
    r"(?:file:/+|~/|/[^\s/\"'`),<>]+/|[A-Za-z]:[\\/]+Users[\\/]+)[^\s\"'`),]+",
    re.MULTILINE,
)
_SECRET = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|github_pat_\w{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_SECRET_NAMES = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_SECRET_LENGTH = 16  # shorter values of such variables may be ordinary words


def public(text: str) -> str:
    """`text` with every local path cut down to its last part; Hub names stay as they are."""
    whole = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    local = whole.is_absolute() or whole.parts[:1] in (("~",), (".",), ("..",))
    if local or (len(whole.parts) > 2 and " " not in text):
        return whole.name
    return _PATH.sub(lambda found: re.split(r"[\\/]", found.group().rstrip("\\/"))[-1], text)


def public_values(value: Any) -> Any:
    """The same JSON value with `public` texts in it; keys stay."""
    if isinstance(value, str):
        return public(value)
    if isinstance(value, dict):
        return {key: public_values(entry) for key, entry in value.items()}
    return [public_values(entry) for entry in value] if isinstance(value, list | tuple) else value


def one_line(text: str) -> str:
    """One line of Markdown that cannot break a table or bring its own HTML; no local path."""
    text = " ".join(public(text).split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def local_paths(text: str) -> list[str]:
    """Paths of some machine that the text names."""
    return [found.group() for found in _LOCAL.finditer(text)]


def secrets(text: str) -> list[str]:
    """What looks like a key, or is the value of a variable named like one; its start alone."""
    found = [match.group() for match in _SECRET.finditer(text)]
    for name, value in os.environ.items():
        if name.endswith(_SECRET_NAMES) and len(value) >= _SECRET_LENGTH and value in text:
            found.append(value)
    return [f"{secret[:5]}…" for secret in found]
