"""Sending a published folder, or records, to the Hub.

Only what is meant to be read there is sent, after a look through every text for local paths and
keys. huggingface_hub moves the files: what the Hub has already is not sent again, so the same call
goes on where it was interrupted.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..configs.errors import NotSent, UserError
from ..data.shards import Damaged
from ..data.shelves import check, shard_file
from ..data.store import MANIFEST, SELECTION, RecordStore
from .about import OWN
from .checksums import CARD, SUMS, files_of, read_checksums, verify_checksums
from .dataset_card import records_card
from .formats.eagle3_speculators import FOLDER
from .formats.tensors import INDEX, metadata
from .hub import UNNAMED
from .public import local_paths, public_values, secrets

_NAME = re.compile(r"(?!.*(?:--|\.\.))\w(?:[\w.-]*\w)?", re.ASCII)
_LONGEST = 96
_WEIGHTS = ("*.safetensors", INDEX)
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
_TEXTS = (OWN, CARD, SUMS, "*.json", "*.txt", "*.jinja", "LICENSE*", "NOTICE*")
_KINDS = (*_WEIGHTS, *_TEXTS, "*.model")
_BESIDE = (CARD, SUMS, "LICENSE*", "NOTICE*")
"""Files of a published folder that its checksums need not list."""


@dataclass(frozen=True)
class Parcel:
    """What is to be sent.

    files: by the name that each gets, where it lies or what it says; mark: the file by which the
    Hub's copy is known as one of ours; replaced: patterns of files that go if they are not among
    those sent, as shards of another number do.
    """

    kind: Literal["model", "dataset"]
    files: Mapping[str, Path | str]
    mark: str
    replaced: tuple[str, ...]

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {name: _size(content) for name, content in self.files.items()}

    def lay_out(self, folder: Path) -> None:
        """Put links and texts into an empty folder."""
        for name, content in self.files.items():
            place = folder / name
            place.parent.mkdir(exist_ok=True)
            if isinstance(content, str):
                place.write_text(content, encoding="utf-8")
            else:
                place.symlink_to(content.resolve())


def _size(content: Path | str) -> int:
    return len(content.encode()) if isinstance(content, str) else content.stat().st_size


# ---- what is sent


def check_name(repo_id: str) -> None:
    """Raise `UserError` for what cannot be a name on the Hub."""
    parts = repo_id.split("/")
    ok = len(parts) == 2 and all(map(_NAME.fullmatch, parts)) and len(repo_id) <= _LONGEST
    if not ok or repo_id.endswith(".git"):
        raise UserError(
            f"'{repo_id}' is no name on the Hub, which is OWNER/NAME of letters, digits, '-', '_' "
            f"and '.', at most {_LONGEST}"
        )


def pack(folder: Path, repo_id: str) -> Parcel:
    """What of a published folder, or of finished records, goes to `repo_id`.

    Raises `UserError` for another name, for a folder that is neither, holds other files, or is
    damaged, and for texts that name local paths or keys.
    """
    check_name(repo_id)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    parcel = _records(folder, repo_id) if (folder / MANIFEST).exists() else _draft(folder, repo_id)
    for name, content in parcel.files.items():
        _check_text(folder / name, _text_of(name, content))
    return parcel


def _draft(folder: Path, repo_id: str) -> Parcel:
    for name in (SUMS, CARD, OWN):
        if not (folder / name).exists():
            raise UserError(
                f"{folder} has no {name}: only folders that `draftsmith publish` or `draftsmith "
                "collect` wrote are sent"
            )
    names, listed = files_of(folder), read_checksums(folder)
    strange = [n for n in names if n not in listed and not _matches(n, _BESIDE)]
    strange += [n for n in listed if not _is_part(n)]
    if strange:
        shown = ", ".join(strange[:5]) + (f" and {len(strange) - 5} more" * (len(strange) > 5))
        raise UserError(
            f"{folder} holds what is no part of a published drafter: {shown}; remove it, or "
            "publish into another folder"
        )
    verify_checksums(folder)
    files: dict[str, Path | str] = {name: folder / name for name in names}
    files[CARD] = (folder / CARD).read_text(encoding="utf-8").replace(UNNAMED, repo_id)
    return Parcel("model", files, mark=OWN, replaced=(*_WEIGHTS, f"{FOLDER}/*"))


def _is_part(name: str) -> bool:
    folder, _, own = name.rpartition("/")
    return folder in ("", FOLDER) and _matches(own, _KINDS)


def _records(folder: Path, repo_id: str) -> Parcel:
    """The shards that the manifest lists, and no plan or other file beside them."""
    store = RecordStore.open(folder)
    if not store.complete:
        raise UserError(f"{folder} is not finished; end `draftsmith collect` before sending it")
    for name, known in store.listed.items():
        try:
            check(folder / shard_file(name), known)
        except Damaged as error:
            raise UserError(f"{folder / shard_file(name)} is damaged: {error}") from error
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["summary"] = public_values(manifest["summary"])
    files: dict[str, Path | str] = {
        shard_file(name): folder / shard_file(name) for name in store.listed
    }
    files[MANIFEST] = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    files[CARD] = records_card(store, repo_id)
    if store.selection is not None:
        files[SELECTION] = folder / SELECTION
    return Parcel(
        "dataset", dict(sorted(files.items())), mark=MANIFEST, replaced=(shard_file("*"),)
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _text_of(name: str, content: Path | str) -> str:
    if isinstance(content, str):
        return content
    if name.endswith(".safetensors"):
        return metadata(content)
    return content.read_text(encoding="utf-8") if _matches(name, _TEXTS) else ""


def _check_text(path: Path, text: str) -> None:
    """Raise `UserError` for a local path or a key; tokens of a vocabulary may look like paths."""
    found = [] if path.name in _VOCABULARIES else [f"path '{p}'" for p in local_paths(text)]
    found += [f"key '{secret}'" for secret in secrets(text)]
    if found:
        raise UserError(f"{path} names the {found[0]}, which should stay here; take it out first")


# ---- sending it


def send(parcel: Parcel, repo_id: str, revision: str | None = None, public: bool = False) -> str:
    """Send to the Hub, into a repository that is made if there is none; returns its address.

    `revision` names a branch, made if there is none. A new repository is private unless `public`.
    Raises `NotSent` with the reason, in which no token is named.
    """
    token = get_token()
    if token is None:
        raise NotSent("no token for the Hub is known here; run `hf auth login`, or set HF_TOKEN")
    try:
        return _send(
            HfApi(token=token, library_name="draftsmith"), parcel, repo_id, revision, public
        )
    except UserError:
        raise
    except Exception as error:  # of huggingface_hub, of its client, of the system
        raise NotSent(_reason(error, repo_id).replace(token, "…")) from error


def _send(api: HfApi, parcel: Parcel, repo_id: str, revision: str | None, public: bool) -> str:
    kind = parcel.kind
    known = _existing(api, repo_id, kind, revision)
    stale: list[str] = []
    if known is None:
        api.create_repo(repo_id, repo_type=kind, private=not public)
    else:
        there = [file.rfilename for file in known.siblings or []]
        _check_existing(repo_id, parcel, there, bool(known.private), public)
        old = [name for name in there if _matches(name, parcel.replaced)]
        stale = [name for name in old if name not in parcel.files]
    if revision is not None:
        api.create_branch(repo_id, branch=revision, repo_type=kind, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        parcel.lay_out(Path(place))
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=place,
            repo_type=kind,
            revision=revision,
            commit_message="Sent by draftsmith",
            delete_patterns=stale or None,
        )
    return str(done.commit_url)


def _existing(api: HfApi, repo_id: str, kind: str, revision: str | None) -> Any:
    """What the Hub tells of the repository, at its main branch if it lacks the other; or None."""
    try:
        return api.repo_info(repo_id, repo_type=kind, revision=revision)
    except RevisionNotFoundError:
        return api.repo_info(repo_id, repo_type=kind)
    except RepositoryNotFoundError:
        return None


def _check_existing(
    repo_id: str, parcel: Parcel, there: list[str], private: bool, public: bool
) -> None:
    """Refuse to mix with what others put there, and to show what was not meant to be shown."""
    others = [name for name in there if name not in (".gitattributes", CARD)]
    if others and parcel.mark not in there:
        raise NotSent(
            f"{repo_id} exists and holds other files ({', '.join(others[:3])}); name another, or "
            "one that is empty"
        )
    if public and private:
        raise NotSent(f"{repo_id} exists and is private; leave out --public, or open it there")
    if not public and not private:
        raise NotSent(f"{repo_id} exists and is public; say --public to send to it")


def _reason(error: BaseException, repo_id: str) -> str:
    """Why it failed, in one sentence."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing is sent"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"sending to {constants.ENDPOINT} failed: {words}"
    status = cause.response.status_code
    if status == 401:
        return f"{constants.ENDPOINT} does not accept the token (401); run `hf auth login` again"
    if status == 403:
        return f"the token may not write to {repo_id} (403); take one with the right to write"
    words = (cause.server_message or str(cause)).strip().splitlines()[0]
    return f"{constants.ENDPOINT} answered {status}: {words}"
