"""The prompts of a recipe, ready to be asked: read, audited, tokenised, none of them twice.

Rows pass through in chunks, so that memory does not grow with their texts; a few numbers of each
stay, to find duplicates and to keep to caps and weights. What comes out lies in the cache folder
under a hash of all it depends on, and is mapped into memory.
"""

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa
from filelock import FileLock
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..configs.collection import CollectSection, DomainSection
from ..configs.errors import UserError
from .chat import rules_hash, template_hash, tokenizer_hash, tokenizer_name
from .duplicates import Sketch
from .files import cache_folder, whole_folder, write_json
from .known_sets import check_layout, resolved
from .prompts import Prompt, read_prompts
from .selection import Selection, select
from .sources import DATASETS, read_rows, reason_of, source_files
from .store import settings_hash
from .tally import REJECTED, Tally, tell
from .workers import MARKED, ROWS, Renderer, parse_row, render_all

if TYPE_CHECKING:
    import datasets

VERSION = 4  # of what is written here; another one is prepared anew
ROWS_FILE, MANIFEST = "rows.arrow", "manifest.json"
LIBRARIES = ("transformers", "tokenizers", "datasketch")


@dataclass(frozen=True)
class Prepared:
    """Prompts in the order of their rows.

    rows: memory-mapped, with the fields of `Prompt` (messages and tools as JSON), ids (of the
    prompt of the first reply), tokens (how many those are) and turns (how many replies); counts:
    see `Tally.counts`; folder: also holds rejected.jsonl, a line for each row left out (source,
    line, domain, reason), and manifest.json, which says what all this was made from.
    """

    rows: "datasets.Dataset"
    counts: dict[str, Any]
    folder: Path

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, row: int) -> Prompt:
        return parse_row(self.rows[row])

    def ids(self, row: int) -> tuple[int, ...]:
        """What the target is asked first, as a server gets it."""
        return tuple(self.rows[row]["ids"])


def prepare(
    domains: Sequence[DomainSection],
    collect: CollectSection,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    limit: int | None,
    options: Mapping[str, Any],
    console: Console,
) -> Prepared:
    """All prompts of a recipe that can be used, and every other row with its reason.

    Args:
        eos_ids: the tokens that end the target's turns.
        limit: tokens of the target's longest conversation, or None where it has no such limit.
        options: variables of the chat template.
    Raises:
        UserError: no such source, a line that cannot be read, a domain without a usable row, or a
            tokenizer without the chat template that is needed.
    """
    domains = [_known(section) for section in domains]
    longest = longest_conversation(limit, collect)
    console.print(_limits(longest, limit, collect))
    depends = _depends(domains, collect, tokenizer, eos_ids, longest, options)
    near = collect.near_duplicates
    renderer = Renderer(
        tokenizer=tokenizer,
        eos_ids=tuple(eos_ids),
        options=dict(options),
        limit=longest,
        max_new_tokens=collect.max_new_tokens,
        sketch=None if near is None else Sketch.of(near),
    )
    folder = cache_folder() / "prepared" / settings_hash(depends)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Of several processes that want the same, on any machine, one prepares it.
    with FileLock(folder.parent / f".{folder.name}.lock"):
        prepared = _open(folder)
        if prepared:
            console.print(Text(f"prepared prompts found in {folder}"), soft_wrap=True)
        else:
            for left in folder.parent.glob(f".{folder.name}.*.part"):  # by a run that was killed
                shutil.rmtree(left)
            prepared = _make(folder, depends, domains, collect, renderer, console)
    tell(prepared.counts, prepared.folder, console)
    return prepared


def _known(section: DomainSection) -> DomainSection:
    """A set's own section where the recipe names it, checked to be what its name says."""
    found = resolved(section)
    check_layout(section, (row for _, row in read_rows(found)))
    return found


def longest_conversation(positions: int | None, collect: CollectSection) -> int | None:
    """Tokens that a conversation may have, None for any number; `positions` is the target's."""
    known = [n for n in (positions, collect.max_length) if n is not None]
    return min(known) if known else None


def _limits(longest: int | None, limit: int | None, collect: CollectSection) -> str:
    replies = f"replies up to {collect.max_new_tokens} of them"
    if longest is None:
        return f"conversations of any length: no limit is known; {replies}"
    whose = "the target's limit" if longest == limit else "collect.max_length"
    return f"conversations of at most {longest} tokens ({whose}), {replies}"


def _open(folder: Path) -> Prepared | None:
    """What lies in a folder, if it is there and whole."""
    import datasets  # slow to import, and only needed here

    manifest, rows = folder / MANIFEST, folder / ROWS_FILE
    if not (manifest.is_file() and rows.is_file() and (folder / REJECTED).is_file()):
        return None
    known = json.loads(manifest.read_text(encoding="utf-8"))
    if rows.stat().st_size != known["bytes"]:
        return None
    return Prepared(datasets.Dataset.from_file(str(rows)), known["counts"], folder)


# ---- what the result depends on


def _depends(
    domains: Sequence[DomainSection],
    collect: CollectSection,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    longest: int | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """All that decides what is kept and which ids it has; as readable as the manifest has to be."""
    sections = []
    for domain in domains:
        section = {**asdict(domain), "content": _content(domain)}
        del section["streaming"]
        sections.append(section)
    names = ("replies", "turns", "max_new_tokens", "near_duplicates")
    return {
        "version": [VERSION, __version__],
        "domains": sections,
        "collect": {name: getattr(collect, name) for name in names},
        "max_length": longest,
        "tokenizer": tokenizer_hash(tokenizer),
        "tokenizer_name": tokenizer_name(tokenizer),
        "tokenizer_rules": rules_hash(tokenizer),
        "template": template_hash(tokenizer, options),
        "template_options": dict(options),
        "end_tokens": sorted(eos_ids),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def _content(section: DomainSection) -> list[list[str]]:
    """What the files of a source hold, or which version of a data set it is."""
    if not section.source.startswith(DATASETS):
        return [[name, _file_content(path)] for name, path in source_files(section.source)]
    import datasets

    name, _, rest = section.source.removeprefix(DATASETS).partition(":")
    config = rest.partition(":")[0] or None
    try:
        builder = datasets.load_dataset_builder(name, config, revision=section.revision)
    except Exception as error:  # the library's own, or those of the storage behind it
        raise UserError(f"cannot load '{section.source}': {reason_of(error)}") from error
    return [[section.source, f"{builder.config_id} {builder.hash}"]]


def _file_content(path: str) -> str:
    try:
        files, bare = fsspec.core.url_to_fs(path)
        info = files.info(bare)
        for tag in ("ETag", "etag", "md5Hash", "content_md5"):
            if info.get(tag):
                return f"{tag} {info[tag]}"
        with files.open(bare, "rb") as handle:
            return f"sha256 {hashlib.file_digest(handle, 'sha256').hexdigest()}"
    except Exception as error:  # each kind of storage has its own
        raise UserError(f"cannot read the prompts in '{path}': {reason_of(error)}") from error


# ---- rows to files


def _make(
    folder: Path,
    depends: Mapping[str, Any],
    domains: Sequence[DomainSection],
    collect: CollectSection,
    renderer: Renderer,
    console: Console,
) -> Prepared:
    with whole_folder(folder) as part:
        counts = _write(part, domains, collect, renderer, console)
        size = (part / ROWS_FILE).stat().st_size
        write_json(part / MANIFEST, {**depends, "counts": counts, "bytes": size})
    made = _open(folder)
    assert made is not None
    return made


def _write(
    folder: Path,
    domains: Sequence[DomainSection],
    collect: CollectSection,
    renderer: Renderer,
    console: Console,
) -> dict[str, Any]:
    """Write the kept rows and the rejected ones; returns `Tally.counts`."""
    usable = folder / "usable.arrow"
    items = (
        (n, item) for n, section in enumerate(domains) for item in read_prompts(section, collect)
    )
    with Tally(folder / REJECTED, domains) as tally:
        chunks = render_all(renderer, tally.counted(items), collect.workers)
        with console.status("preparing prompts") as status, _writer(usable, MARKED) as writer:
            for batch, rejected in chunks:
                writer.write_batch(batch)
                for section, rejection in rejected:
                    tally.reject(section, rejection)
                status.update(f"preparing prompts: {sum(tally.rows)} rows")
        tally.check_usable()
        with pa.memory_map(str(usable)) as file, _writer(folder / ROWS_FILE, ROWS) as writer:
            table = pa.ipc.open_stream(file).read_all()
            _write_selected(table, select(table, domains, renderer.sketch), writer, tally)
        usable.unlink()
        return tally.counts()


def _writer(path: Path, schema: pa.Schema) -> pa.RecordBatchStreamWriter:
    return pa.ipc.new_stream(str(path), schema)


def _write_selected(
    table: pa.Table, selection: Selection, writer: pa.RecordBatchStreamWriter, tally: Tally
) -> None:
    start = 0
    for batch in table.to_batches():
        kept = selection.kept[start : start + len(batch)]
        rows = batch.filter(pa.array(kept))
        tally.keep(rows)
        writer.write_batch(rows.select(ROWS.names))
        for at in (~kept).nonzero()[0].tolist():
            kind, rejection = selection.reason(start + at)
            section = batch.column("section")[at].as_py()
            tally.leave_out(section, batch.column("domain")[at].as_py(), rejection, kind)
        start += len(batch)
