"""Training records made anew: replies that the drafter wrote, or that the target gives once more.

What was collected beforehand are the target's texts. A drafter that is trained on its own ones
meets what it will meet when it drafts (on-policy distillation: Agarwal et al. 2024,
arXiv:2306.13649; for drafters Zhou et al. 2023, arXiv:2310.08461).

A renewal is a folder of records of its own, so that a run that was stopped goes on with the same.
"""

import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..configs.errors import UserError
from ..configs.training import OnPolicySection
from ..data.gather import GatherSettings, Request, answer, request_of
from ..data.records import Record, request_seed
from ..data.shards import RowInfo
from ..data.store import RecordStore, settings_hash
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.batch import StateReader
from .drafted import draft_replies
from .objective import Objective

_ROWS = 32  # replies that are made together, and lie in one shard


def check(
    section: OnPolicySection, training: StateReader, whole: bool, objective: Objective
) -> None:
    """Whether these records can be renewed; `whole`: whether all of the target is in each process.

    Raises `UserError` if not.
    """
    folder = training.store.folder
    if not whole:
        raise UserError(
            "train.on_policy lets the target read new text, for which each process needs all of "
            "it; take train.target replicated, or leave train.on_policy out"
        )
    if section.drafted and objective.needs_samples:
        raise UserError(
            "train.on_policy.drafted makes records that are no samples of the target, and this "
            "objective (ce) is trained on such alone; take train.on_policy.resampled, or another "
            "objective.loss"
        )
    if training.store.settings["distributions"] == "top":
        raise UserError(
            f"{folder} holds the target's most probable tokens alone, which share no batch with "
            "the states of records made anew; take collect.distributions hidden or none, or leave "
            "train.on_policy out"
        )
    if section.resampled and not any(_varies(row) for row in training.rows):
        raise UserError(
            f"train.on_policy.resampled would change nothing: all training replies in {folder} are "
            "greedy ones, which the target gives again; add a temperature above 0 to "
            "collect.temperatures, or take train.on_policy.drafted"
        )


def chosen(
    rows: Sequence[RowInfo], section: OnPolicySection, seed: int, number: int
) -> tuple[list[int], list[int]]:
    """Places of the records that renewal `number` drafts, and of those it asks the target again.

    Others each time, and none in both. Shares are of the records that have something to train on;
    greedy ones are not asked again, for the same would come of it.
    """
    order = [i for i, row in enumerate(rows) if len(row.reply) > 1]
    random.Random(f"{seed}/{number}").shuffle(order)
    again = [i for i in order if _varies(rows[i])][: _share(section.resampled, len(order))]
    taken = set(again)
    drafted = [i for i in order if i not in taken][: _share(section.drafted, len(order))]
    return drafted, again


def _share(share: float, count: int) -> int:
    return max(1, round(share * count)) if share else 0


def _varies(row: RowInfo) -> bool:
    """Whether the target, asked again, may say something else."""
    return row.origin == "given" or row.law.temperature > 0


# ---- on disk


def renew(
    folder: Path,
    number: int,
    section: OnPolicySection,
    seed: int,
    target: Target,
    drafter: Drafter,
    training: StateReader,
    objective: Objective,
    accelerator: Accelerator,
) -> dict[int, Record]:
    """Records in the place of a part of `training`, by their index there, with the target's states.

    Called in all processes, each of which holds the whole drafter; they share the work. It is kept
    under `folder`, which they share too, and renewal `number` is read back if it lies there whole.
    Replies of one token are left out, as nothing of them can be drafted: the collected ones stay.

    Raises `UserError` for states that are not finite, or a drafter whose logits are not.
    """
    path = _path(folder, number)
    settings = _settings(section, seed, number, drafter, training, objective)
    if accelerator.is_main_process:
        known = _whole(path)
        if known is None or known.settings != settings:
            shutil.rmtree(path, ignore_errors=True)
            RecordStore.create(path, settings)
    accelerator.wait_for_everyone()
    store = RecordStore.open(path)
    drafted, again = chosen(training.rows, section, seed, number)
    seeds = {i: _seed(seed, number, training.rows[i]) for i in drafted + again}
    if not store.complete:
        maker = _Maker(target, drafter, training, objective, section.max_new_tokens, seeds)
        maker.fill(store, drafted, again, accelerator.process_index, accelerator.num_processes)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            store.finish({})
        accelerator.wait_for_everyone()
        store = RecordStore.open(path)
    places = {own: i for i, own in seeds.items()}
    rows = [row for row in store.index() if len(row.reply) > 1]
    return {places[r.seed]: r for r in store.read(rows)}


def is_made(folder: Path, number: int) -> bool:
    """Whether renewal `number` lies there whole."""
    return _whole(_path(folder, number)) is not None


def keep_renewals(folder: Path, numbers: Collection[int]) -> None:
    """Remove all renewals but these; those that kept checkpoints were being trained on are needed.

    Made anew after its time, one would be the work of other weights.
    """
    kept = {_path(folder, number) for number in numbers}
    for path in folder.glob("renewed-*"):
        if path not in kept:
            shutil.rmtree(path)


def _path(folder: Path, number: int) -> Path:
    return folder / f"renewed-{number:06d}"


def _whole(path: Path) -> RecordStore | None:
    try:
        store = RecordStore.open(path)
    except UserError:
        return None
    return store if store.complete else None


def _settings(
    section: OnPolicySection,
    seed: int,
    number: int,
    drafter: Drafter,
    training: StateReader,
    objective: Objective,
) -> dict[str, Any]:
    """All that a renewal depends on, the drafter's weights aside."""
    known = training.store.settings
    keys = [row.key for row in training.rows]
    return {
        "target": known["target"],
        "store_dtype": known["store_dtype"],
        "distributions": "hidden",
        "taps": list(training.taps),
        "records": settings_hash({"store": training.store.fingerprint, "keys": keys}),
        "seed": seed,
        "number": number,
        **asdict(section),
        "family": drafter.family,
        "law": objective.law.label,
        "num_draft_tokens": objective.num_draft_tokens,
        "drafting": objective.drafting,
    }


def _seed(seed: int, number: int, row: RowInfo) -> int:
    """A record's own seed, another one in each renewal."""
    return request_seed(seed, f"{number}|{row.key}", row.law)


# ---- making them


@dataclass(frozen=True)
class _Maker:
    """What a renewal is made with; seeds: of each record that is renewed, by its place."""

    target: Target
    drafter: Drafter
    training: StateReader
    objective: Objective
    max_new_tokens: int
    seeds: dict[int, int]

    def fill(
        self, store: RecordStore, drafted: list[int], again: list[int], rank: int, world: int
    ) -> None:
        """Write every world-th shard; which records lie in it is the same in any world."""
        parts = [(True, part) for part in self._parts(drafted)]
        parts += [(False, part) for part in self._parts(again)]
        assert isinstance(self.drafter, nn.Module)
        was = self.drafter.training
        self.drafter.eval()
        try:
            for place, (own, part) in list(enumerate(parts))[rank::world]:
                store.add(f"{place:06d}", self._drafted(part) if own else self._again(part))
        finally:
            self.drafter.train(was)

    def _parts(self, places: list[int]) -> list[list[int]]:
        """Records with prompts of like length, as many as are made together."""
        order = sorted(places, key=lambda i: (self.training.rows[i].prompt_len, i))
        return [order[k : k + _ROWS] for k in range(0, len(order), _ROWS)]

    def _drafted(self, part: list[int]) -> list[Record]:
        requests = [self._request(record, i, own=True) for i, record in self._read(part)]
        limits = [self._limit(request) for request in requests]
        return draft_replies(self.target, self.drafter, requests, limits, self.objective)

    def _again(self, part: list[int]) -> list[Record]:
        requests = [self._request(record, i, own=False) for i, record in self._read(part)]
        limits = [self._limit(request) for request in requests]
        found = []
        for limit in sorted(set(limits)):  # several where a context ends, which is rare
            mine = [r for r, own in zip(requests, limits, strict=True) if own == limit]
            settings = GatherSettings(limit, _ROWS, self.training.taps, keep="hidden")
            found += answer(self.target, mine, settings)
        return found

    def _read(self, part: list[int]) -> list[tuple[int, Record]]:
        """The records as they were collected: only their prompts are asked for."""
        found = self.training.store.read([self.training.rows[i] for i in part])
        return list(zip(part, found, strict=True))

    def _request(self, record: Record, place: int, own: bool) -> Request:
        """The record's prompt, under its own law, or that of the objective if none holds for it."""
        lawless = own or record.origin != "target"
        law = self.objective.law if lawless else record.law
        return replace(request_of(record), law=law, seed=self.seeds[place])

    def _limit(self, request: Request) -> int:
        """Tokens that the reply may have: what the shortest context leaves, the first always."""
        longest = (
            self.target.max_positions,
            self.drafter.max_positions,
            self.training.store.settings["max_length"],
        )
        room = [n - len(request.ids) for n in longest if n is not None]
        return max(1, min([self.max_new_tokens, *room]))
