"""`draftsmith bench`: drafters side by side, each served in every way, on the same replies.

A benchmark's folder is named by all that its numbers depend on. A finished one is never changed; a
stopped one goes on with the same command.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from ..configs.benchmark import Benchmark, ContestantSection, WaySection
from ..configs.errors import UserError
from ..configs.load import to_dict
from ..configs.recipe import Recipe, ServingSection
from ..data.files import whole_file, write_json
from ..data.known_sets import KNOWN_SETS
from ..data.store import RecordStore, settings_hash
from ..drafters.checkpoint import weights_hash
from ..drafters.registry import UntrainedConfig, family_config
from ..eval.compare import Evaluation, compare
from ..eval.report import HTML_NAME, benchmark_page, print_table, read_replies, read_report
from ..eval.serving import check_length, check_serving
from ..eval.summary import pooled
from ..eval.summary_tables import summary_tables
from .pipeline import Run

SUMMARY = "benchmark.json"


@dataclass(frozen=True)
class Entry:
    """One drafter served in one way."""

    drafter: ContestantSection
    way: WaySection

    @property
    def name(self) -> str:
        return f"{self.drafter.name}, {self.way.name}"


@dataclass
class Bench:
    """A benchmark in its folder; one target serves all of it."""

    spec: Benchmark
    runs: Path
    console: Console

    def __post_init__(self) -> None:
        self.root = self.runs / self.spec.name
        self._base = Run(self._recipe(self.spec.seeds[0]), self.root, self.console)

    @cached_property
    def entries(self) -> list[Entry]:
        """Every drafter in every way it is to be served in."""
        return [
            Entry(drafter, way)
            for drafter in self.spec.drafters
            for way in self.spec.servings
            if drafter.servings is None or way.name in drafter.servings
        ]

    # ---- what is run

    def _recipe(self, seed: int, entry: Entry | None = None) -> Recipe:
        """One evaluation; without an entry, the collection that all of them share."""
        spec = self.spec
        # A greedy reply is the same whatever the seed.
        laws = [law for law in spec.laws if law.temperature or seed == spec.seeds[0]]
        served = ServingSection(tuple(laws))
        if entry is not None:
            way = entry.way
            served = replace(
                served, num_draft_tokens=way.num_draft_tokens, verifier=way.verifier,
                drafting=way.drafting, policy=way.policy, tree=way.tree,
            )  # fmt: skip
        options = None if entry is None else entry.drafter.options
        return Recipe(
            name=spec.name,
            seed=seed,
            target=spec.target,
            serving=served,
            domains=tuple(replace(domain, holdout=1.0) for domain in spec.domains),
            collect=spec.collect,
            drafter=options or {"family": "lookup"},
            eval=spec.eval,
        )

    def _run(self, seed: int, root: Path, entry: Entry | None = None) -> Run:
        run = replace(self._base, recipe=self._recipe(seed, entry), root=root)
        run._target = self._base.target
        return run

    def check(self) -> None:
        """Everything that can be wrong without loading a model. Raises `UserError`."""
        for way in self.spec.servings:
            entry = Entry(self.spec.drafters[0], way)
            with _named(f"serving '{way.name}'"):
                check_serving(self._recipe(self.spec.seeds[0], entry))
        for drafter in self.spec.drafters:
            if drafter.options is not None:
                _, config = family_config(drafter.options, f"drafter '{drafter.name}'")
                if not isinstance(config, UntrainedConfig):
                    raise UserError(
                        f"drafter '{drafter.name}': family '{drafter.options['family']}' has to be "
                        "trained; name the folder of a trained one"
                    )
            elif drafter.folder is not None and not Path(drafter.folder).is_dir():
                raise UserError(f"drafter '{drafter.name}': there is no folder {drafter.folder}")

    @property
    def seeds(self) -> Iterator[int]:
        """Those that have anything to draw."""
        sampled = any(law.temperature for law in self.spec.laws)
        yield from self.spec.seeds if sampled else self.spec.seeds[:1]

    def measure(self) -> Path:
        """Run what is not there yet; returns the benchmark's folder."""
        self.check()
        places = {drafter.name: self._place(drafter) for drafter in self.spec.drafters}
        self._check_lengths(places)
        stores = {seed: self._collect(seed, list(places.values())) for seed in self.seeds}
        depends = {
            "spec": _without_places(self.spec),
            "target": self._base.target.provenance["weights"],
            "drafters": {name: weights_hash(place) for name, place in places.items()},
            "records": {str(seed): store.identity for seed, store in stores.items()},
        }
        folder = self.root / f"bench-{settings_hash(depends)}"
        if (folder / SUMMARY).exists():
            return folder
        write_json(folder / "manifest.json", {"created": _now(), **depends})
        found: dict[str, list[Path]] = {}
        for number, entry in enumerate(self.entries):
            for seed, store in stores.items():
                self.console.print(f"entry     {entry.name}, seed {seed}")
                root = folder / f"{number:02d}-{_slug(entry.name)}" / f"seed-{seed}"
                report = self._run(seed, root, entry).evaluate(store, places[entry.drafter.name])
                found.setdefault(entry.name, []).append(report)
        self._page(folder, found)
        write_json(folder / SUMMARY, self._summary(folder, found))  # last: with it, all is there
        return folder

    def _place(self, drafter: ContestantSection) -> Path:
        if drafter.folder is not None:
            return Path(drafter.folder)
        way = self.spec.servings[0]
        run = self._run(self.spec.seeds[0], self.root, Entry(drafter, way))
        place = run.untrained()
        assert place is not None
        return place

    def _check_lengths(self, places: Mapping[str, Path]) -> None:
        """Raises `UserError` for drafts longer than a drafter was made for, before any is run."""
        for drafter in self.spec.drafters:
            made = self._base.drafter(places[drafter.name])
            for entry in self.entries:
                if entry.drafter is drafter:
                    with _named(entry.name):
                        check_length(made.family, made.max_draft_tokens, entry.way.num_draft_tokens)

    def _collect(self, seed: int, places: Sequence[Path]) -> RecordStore:
        return self._run(seed, self.root).collect(*places)

    # ---- what is found

    def _summary(self, folder: Path, found: dict[str, list[Path]]) -> dict[str, Any]:
        """Figures of every entry by domain and law, all seeds together; no text, no path."""
        sides = {name: [Evaluation.read(place) for place in own] for name, own in found.items()}
        first = next(iter(sides.values()))[0].report
        alarms = [
            f"{name}: {alarm}"
            for name, own in sides.items()
            for side in own
            for alarm in side.report["alarms"]
        ]
        return {
            "format": 1,
            "created": _now(),
            "name": self.spec.name,
            "spec": _without_places(self.spec),
            "provenance": {k: first["provenance"][k] for k in ("draftsmith", "target", "versions",
                                                               "machine")},
            "entries": [
                {
                    "name": name,
                    "drafter": own[0].report["provenance"]["drafter"],
                    "settings": own[0].report["settings"],
                    "reports": [str(place.relative_to(folder)) for place in found[name]],
                    "cost": own[0].report["cost"],
                    "rows": self._rows(own),
                    "totals": self._totals(own),
                }
                for name, own in sides.items()
            ],
            "compared": self._compared(sides),
            "alarms": list(dict.fromkeys(alarms)),
            "lossless": [
                {"entry": name, "verdict": side.report["lossless"]["verdict"],
                 "prompts": side.report["lossless"].get("prompts", 0)}
                for name, own in sides.items()
                for side in own[:1]
            ],
        }  # fmt: skip

    def _page(self, folder: Path, found: dict[str, list[Path]]) -> None:
        """All entries on one page, those of the first seed."""
        entries = [(name, read_report(own[0])) for name, own in found.items()]
        replies = [
            {"entry": name, **reply}
            for name, own in found.items()
            for reply in read_replies(own[0])
        ]
        drafters, ways = len(self.spec.drafters), len(self.spec.servings)
        told = f"{drafters} drafters, {ways} ways of serving, on the same prompts"
        page = benchmark_page(f"draftsmith: {self.spec.name}", told, entries, replies)
        with whole_file(folder / HTML_NAME) as part:
            part.write_text(page, encoding="utf-8")

    def _rows(self, own: Sequence[Evaluation]) -> list[dict[str, Any]]:
        predicted: dict[tuple[str, str], list[float]] = {}
        for side in own:
            for cell in side.report["cells"]:
                if cell["speed"] is not None:
                    key = (cell["domain"], cell["law"])
                    predicted.setdefault(key, []).append(cell["speed"]["predicted"])
        cells: dict[tuple[str, str], list[Any]] = {}
        for side in own:
            for row in side.rows:
                cells.setdefault((row.domain, row.law), []).append(row)
        return [
            {
                "domain": domain,
                "law": law,
                **pooled(rows, self.spec.eval.bootstrap),
                "predicted": _mean(predicted.get((domain, law), [])),
                "prompt_ids": sorted({row.prompt_id for row in rows}),
            }
            for (domain, law), rows in cells.items()
        ]

    def _totals(self, own: Sequence[Evaluation]) -> list[dict[str, Any]]:
        """By law, all domains' counts together."""
        rows = [row for side in own for row in side.rows]
        return [
            {"law": law, **pooled([r for r in rows if r.law == law], self.spec.eval.bootstrap)}
            for law in dict.fromkeys(row.law for row in rows)
        ]

    def _compared(self, sides: dict[str, list[Evaluation]]) -> dict[str, Any] | None:
        """All entries against the first one, whatever the seed."""
        if len(sides) < 2:
            return None
        joined = [
            Evaluation(name, own[0].report, [row for side in own for row in side.rows])
            for name, own in sides.items()
        ]
        return compare(joined)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """A mistake in here is said to be one of `what`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _slug(name: str) -> str:
    """A folder's name that tells which entry it is; its number makes it the only one."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def _without_places(spec: Benchmark) -> dict[str, Any]:
    """The specification without paths and addresses, which say nothing elsewhere: files by their
    own names."""
    found = to_dict(spec)
    for drafter in found["drafters"]:
        drafter["folder"] = _own_name(drafter["folder"])
    for domain in found["domains"]:
        domain["source"] = _source_name(domain["source"])
    target = found["target"]
    target["adapter"] = _own_name(target["adapter"])
    if Path(target["name"]).expanduser().exists():
        target["name"] = _own_name(target["name"])
    if found["collect"]["server"] is not None:
        found["collect"]["server"] |= {"addresses": [], "command": []}
    return found


def _source_name(source: str) -> str:
    """A set of the Hub as it is called there, a file by its own name, which set it is before it."""
    label, _, place = source.partition(":")
    if label == "datasets":
        local = Path(place.partition(":")[0]).expanduser().exists()
        return f"{label}:{_own_name(place)}" if local else source
    named = label in KNOWN_SETS and place
    return f"{label}:{_own_name(place)}" if named else str(_own_name(source))


def _own_name(place: str | None) -> str | None:
    """The last part of a path or URL, without what a URL asks behind it."""
    return None if place is None else Path(place.partition("?")[0]).name


def bench(spec: Benchmark, runs: Path, console: Console, out: Path | None) -> None:
    """Run the benchmark, print its tables, and write what is found to `out`."""
    folder = Bench(spec, runs, console).measure()
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    for table in summary_tables(summary):
        if table.rows:
            print_table(table, console)
    for alarm in summary["alarms"]:
        console.print(f"Alarm: {alarm}.", style="bold red", soft_wrap=True)
    console.print(f"benchmark: {folder}")
    if out is not None:
        write_json(out, summary)
