"""What became of every row: kept or rejected, counted by reason, and the two together all."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..configs.collection import DomainSection
from ..configs.errors import UserError
from .prompts import Rejection
from .workers import Item

LOG = logging.getLogger(__name__)

REJECTED = "rejected.jsonl"
_NUMBER = re.compile(r"\b\d+\b")
_SHOWN = 20  # kinds of reasons printed; the file has all


class Tally:
    """Counts of a preparation, and its file of rejected rows; use it in a `with` block."""

    def __init__(self, path: Path, sections: Sequence[DomainSection]) -> None:
        self.sections = sections
        self.rows = [0] * len(sections)
        self.unusable = [0] * len(sections)
        self.left_out = [0] * len(sections)
        self.kept = [0] * len(sections)
        self.domains: dict[str, Counter[str]] = {}
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.first: dict[tuple[str, str], str] = {}
        self.first_unusable: dict[int, Rejection] = {}
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> "Tally":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def counted(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items as they come, which are what all counts must add up to."""
        for section, item in items:
            self.rows[section] += 1
            yield section, item

    def reject(self, section: int, rejection: Rejection) -> None:
        """A row that is no prompt."""
        self.unusable[section] += 1
        self.first_unusable.setdefault(section, rejection)
        kind = _NUMBER.sub("N", rejection.reason)
        self._write(self.sections[section].name, rejection, kind)

    def leave_out(self, section: int, domain: str, rejection: Rejection, kind: str) -> None:
        """A prompt that is not used."""
        self.left_out[section] += 1
        self._write(domain, rejection, kind)

    def keep(self, batch: pa.RecordBatch) -> None:
        """Rows of `MARKED` that are used."""
        names = ("section", "domain", "split", "tokens")
        columns = (batch.column(name).to_pylist() for name in names)
        for section, domain, split, tokens in zip(*columns, strict=True):
            self.kept[section] += 1
            of_domain = self.domains.setdefault(domain, Counter(train=0, heldout=0))
            of_domain[split] += 1
            of_domain["tokens"] += tokens

    def check_usable(self) -> None:
        """Raises `UserError` for a section of which no row is a prompt."""
        for number, section in enumerate(self.sections):
            if self.unusable[number] == self.rows[number]:
                first = self.first_unusable.get(number)
                raise UserError(
                    f"no usable prompt among the {self.rows[number]} rows of '{section.source}'"
                    + (f", the first being {first}" if first else "")
                )

    def counts(self) -> dict[str, Any]:
        """rows = kept + rejected, in all and of each section; kept by domain and split with their
        tokens; reasons by domain, most frequent first, with the place of
        the first row of each."""
        sections = []
        for n, section in enumerate(self.sections):
            assert self.rows[n] == self.kept[n] + self.unusable[n] + self.left_out[n]
            sections.append(
                {
                    "name": section.name,
                    "source": section.source,
                    "rows": self.rows[n],
                    "kept": self.kept[n],
                    "unusable": self.unusable[n],
                    "left_out": self.left_out[n],
                }
            )
        rows, kept, rejected = sum(self.rows), sum(self.kept), self.reasons.total()
        assert rows == kept + rejected
        return {
            "rows": rows,
            "kept": kept,
            "rejected": rejected,
            "sections": sections,
            "domains": {name: dict(self.domains[name]) for name in sorted(self.domains)},
            "reasons": [
                {"domain": key[0], "reason": key[1], "rows": n, "first": self.first[key]}
                for key, n in self.reasons.most_common()
            ],
        }

    def _write(self, domain: str, rejection: Rejection, kind: str) -> None:
        self.reasons[domain, kind] += 1
        self.first.setdefault((domain, kind), f"{rejection.source}:{rejection.line}")
        told = {
            "source": rejection.source,
            "line": rejection.line,
            "domain": domain,
            "reason": rejection.reason,
        }
        self._file.write(json.dumps(told, ensure_ascii=False) + "\n")


def tell(counts: dict[str, Any], folder: Path, console: Console) -> None:
    """Print `Tally.counts`, and warn where little is left of a source."""
    of = {
        split: sum(d[split] for d in counts["domains"].values()) for split in ("train", "heldout")
    }
    console.print(
        f"{counts['rows']} rows: {counts['kept']} prompts kept ({of['train']} to train on, "
        f"{of['heldout']} held out), {counts['rejected']} rows rejected"
    )
    if counts["rejected"]:
        console.print(rejection_table(counts))
        # As a Text: what a path or a row spells is no markup.
        console.print(Text(f"each of them is named in {folder / REJECTED}"), soft_wrap=True)
    for section in counts["sections"]:
        for name, what in (("unusable", "unusable"), ("left_out", "left out, though usable")):
            if section[name] > section["rows"] / 2:
                told = (section["source"], section[name], section["rows"], what)
                LOG.warning("%s: %d of %d rows are %s", *told)


def rejection_table(counts: dict[str, Any]) -> Table:
    """Reasons with counts, the most frequent first."""
    table = Table("domain", "rows", "reason", "first", style="yellow")
    for row in counts["reasons"][:_SHOWN]:
        cells = (row["domain"], str(row["rows"]), row["reason"], row["first"])
        table.add_row(*map(Text, cells))
    more = counts["reasons"][_SHOWN:]
    if more:
        table.add_row("", str(sum(row["rows"] for row in more)), f"{len(more)} other reasons", "")
    return table
