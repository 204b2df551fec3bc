"""The checksums of a published folder, in the form that `sha256sum --check` reads."""

from pathlib import Path

from ..configs.errors import UserError
from ..data.shelves import sha256
from .formats.tensors import header

SUMS = "SHA256SUMS"
CARD = "README.md"
"""Not among them: it may be edited where it is published."""


def files_of(folder: Path) -> list[str]:
    """All files under the folder, hidden ones too, by their paths in it."""
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def write_checksums(folder: Path) -> None:
    """List all files of the folder but its card."""
    names = [name for name in files_of(folder) if name not in (CARD, SUMS)]
    lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Checksums by file. Raises `UserError` if there is no list of them, or a damaged one."""
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def verify_checksums(folder: Path) -> None:
    """Raise `UserError` naming every listed file that is absent, cut off or another."""
    faults = []
    for name, digest in read_checksums(folder).items():
        path = folder / name
        if not path.exists():
            faults.append(f"'{name}' is missing")
            continue
        if path.suffix == ".safetensors":
            header(path)  # which tells how long it should be
        if sha256(path) != digest:
            faults.append(f"'{name}' is another file ({path.stat().st_size} bytes)")
    if faults:
        raise UserError(f"{folder} is not as its {SUMS} says: {'; '.join(faults)}")
