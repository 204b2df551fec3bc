"""Known sets of prompts by name, each from its own files or from where it is published.

`source: gsm8k` reads the published set, `source: gsm8k:PATH` the user's own copy of it: a file of
its layout, or a folder that holds one under a usual name. Nothing of them is in the package.

A set is asked as the domain's `kind` says, a chat unless it is set: HumanEval's prompts are then a
user's turn that holds the beginning of a function; with `kind: raw` the target writes on from it.
MBPP is asked its text alone, without the tests. Of sets with several turns every reply is the
target's own. Sets are for evaluation: all of their prompts are to be held out (`holdout: 1.0`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..configs.collection import DomainSection
from ..configs.errors import UserError


@dataclass(frozen=True)
class KnownSet:
    """Where a set is and how its rows look.

    published: a source of its evaluation part; key: holds the prompt, or the user's turns; id: of a
    row, None where rows have none; by: the key that names each row's domain, None where all are of
    one; files: usual names of its own file; lines: the first and the last of that file's lines that
    are its evaluation part, None for all.
    """

    published: str
    key: str
    id: str | None = None
    by: str | None = None
    files: tuple[str, ...] = ()
    lines: tuple[int, int] | None = None


def _speed_bench(config: str) -> KnownSet:
    files: tuple[str, ...] = (f"{config}.jsonl", f"{config}.parquet")
    if config == "qualitative":
        files += ("speed_bench.jsonl",)
    published = f"datasets:nvidia/SPEED-Bench:{config}:test"
    return KnownSet(published, "turns", "question_id", "category", files)


KNOWN_SETS: dict[str, KnownSet] = {
    "gsm8k": KnownSet(
        "datasets:openai/gsm8k:main:test", "question", files=("gsm8k_test.jsonl", "test.jsonl")
    ),
    "mbpp": KnownSet(
        "datasets:google-research-datasets/mbpp:full:test",
        "text",
        "task_id",
        files=("mbpp.jsonl",),
        lines=(11, 510),  # a task's id is its line; the others are to train on
    ),
    "humaneval": KnownSet(
        "datasets:openai/openai_humaneval::test",
        "prompt",
        "task_id",
        files=("humaneval.jsonl", "HumanEval.jsonl", "HumanEval.jsonl.gz"),
    ),
    "spec_bench": KnownSet(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "turns",
        "question_id",
        "category",
        ("spec_bench.jsonl", "question.jsonl"),
    ),
    "speed_bench": _speed_bench("qualitative"),
    "speed_bench_1k": _speed_bench("throughput_1k"),
    "speed_bench_2k": _speed_bench("throughput_2k"),
    "speed_bench_8k": _speed_bench("throughput_8k"),
    "speed_bench_16k": _speed_bench("throughput_16k"),
    "speed_bench_32k": _speed_bench("throughput_32k"),
}
"""The last five have prompts of about as many tokens."""


def known_set_of(source: str) -> tuple[str, KnownSet, str | None] | None:
    """The set that a source names, with its name and the path behind it, None if it names none."""
    name, colon, path = source.partition(":")
    known = KNOWN_SETS.get(name)
    return None if known is None else (name, known, path if colon else None)


def resolved(section: DomainSection) -> DomainSection:
    """The section with its set's own source, domains and lines in place of the name.

    What the section says itself stays. Raises `UserError` where the user's own copy is not there,
    and where a part would be trained on.
    """
    found = known_set_of(section.source)
    if found is None:
        return section
    name, known, path = found
    if section.holdout < 1:
        raise UserError(
            f"domain '{section.name}': {name} is there to be evaluated on, so that its holdout "
            f"must be 1.0, not {section.holdout:g}; to train on a set, give its path or data set "
            "alone"
        )
    section = replace(section, by=section.by or known.by)
    if path is None:
        return replace(section, source=known.published)
    if known.lines is not None and section.first_line == 1 and section.last_line is None:
        section = replace(section, first_line=known.lines[0], last_line=known.lines[1])
    return replace(section, source=_own_file(name, known, path))


def _own_file(name: str, known: KnownSet, path: str) -> str:
    """The path itself, or the file of the set in that folder."""
    if not path:
        raise UserError(f"'{name}:' names no file: give {name}:PATH, or {name} alone")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return str(folder) if "://" not in path else path
    for file in known.files:
        if (folder / file).is_file():
            return str(folder / file)
    raise UserError(f"{path} holds no file of {name}: looked for {', '.join(known.files)}")


def check_layout(section: DomainSection, rows: Iterable[object]) -> None:
    """Raises `UserError` where the user's own copy of a set is something else.

    `rows` are those of the resolved section; no more than the first is read.
    """
    found = known_set_of(section.source)
    if found is None or found[2] is None:
        return
    name, known, path = found
    row = next(iter(rows), None)
    if row is None:
        raise UserError(f"{path} holds no row of {name}")
    for key in (known.key, known.by):
        if key is not None and (not isinstance(row, dict) or row.get(key) is None):
            raise UserError(
                f"the rows of {path} have no '{key}', which those of {name} have; give the path "
                "alone to read it as any other file"
            )
