"""What a collection asks, in batches that are fixed once: the units of restart and of sharing.

A conversation is asked as a whole under one law. What it is called depends on its content alone, so
that moved, added or removed prompts ask nothing anew.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..configs.recipe import Recipe
from .files import write_json
from .prepare import Prepared
from .records import Origin, request_key, request_seed
from .shards import RowInfo
from .warp import Law, law_of

PLAN = "plan.json"


@dataclass(frozen=True)
class Ask:
    """One prepared conversation under one law; `row` is its place among the prepared ones."""

    row: int
    prompt_id: str
    domain: str
    split: str
    law: Law
    origin: Origin
    seed: int
    """Of the first turn."""
    tokens: int
    """Of the first prompt."""
    turns: int
    """Replies, were none cut or too long; those of a rendered text count as one."""

    @property
    def key(self) -> str:
        """Identity of the conversation, which is that of its first record."""
        return request_key(self.prompt_id, self.law, self.seed, 0, self.origin)


@dataclass(frozen=True)
class Batch:
    """Conversations that are asked together and lie in one shard of that name."""

    name: str
    asks: tuple[Ask, ...]


def make_asks(recipe: Recipe, prepared: Prepared) -> list[Ask]:
    """Training prompts at every temperature and under the served laws that truncate, held-out ones
    once per served law, given replies once; in the order of length.

    Held-out answers are samples of exactly the law they are evaluated under, because estimators
    are valid on no others.
    """
    served = list(dict.fromkeys(law_of(law) for law in recipe.serving.laws))
    training = [Law(t) for t in recipe.collect.temperatures]
    training += [law for law in served if law.truncates]
    training = list(dict.fromkeys(training))
    rows = prepared.rows
    asks = []
    columns = (rows[name] for name in ("id", "domain", "split", "given", "tokens", "turns"))
    for row, (name, domain, split, given, *sizes) in enumerate(zip(*columns, strict=True)):
        if given:
            asks.append(Ask(row, name, domain, split, Law(0.0), "given", 0, *sizes))
            continue
        for law in training if split == "train" else served:
            seed = request_seed(recipe.seed, name, law)
            asks.append(Ask(row, name, domain, split, law, "target", seed, *sizes))
    return sorted(asks, key=lambda a: (a.tokens, a.prompt_id, a.law.label))


def make_plan(
    folder: Path, asks: Sequence[Ask], held: Collection[str], whole: Collection[str], size: int
) -> list[Batch]:
    """The batches that are still to be asked, of up to `size` conversations.

    Those of an earlier start are kept as they are as long as all that is asked is either held or
    among them, so that a run that was killed computes the same batches as one that was not.

    Args:
        held: keys of the conversations whose records are there.
        whole: names of the shards that are there.
    """
    by_key = {ask.key: ask for ask in asks}
    kept = [_batch([by_key.get(key) for key in keys], keys) for keys in _read(folder, size)]
    batches = [b for b in kept if b.asks and b.name not in whole]
    covered = {ask.key for b in batches for ask in b.asks} | set(held)
    if all(key in covered for key in by_key) and all(len(b.asks) for b in kept):
        return batches
    missing = [ask for ask in asks if ask.key not in held]
    parts = [missing[i : i + size] for i in range(0, len(missing), size)]
    write_json(folder / PLAN, {"size": size, "batches": [[a.key for a in p] for p in parts]})
    return [_batch(part, [a.key for a in part]) for part in parts]


def _batch(asks: Sequence[Ask | None], keys: Sequence[str]) -> Batch:
    """A batch by its keys; one that asks for what nobody wants any more is empty."""
    name = hashlib.sha256(json.dumps(list(keys)).encode()).hexdigest()[:16]
    wanted = tuple(ask for ask in asks if ask is not None)
    return Batch(name, wanted if len(wanted) == len(keys) else ())


def _read(folder: Path, size: int) -> list[list[str]]:
    """The batches planned before; none where there is no plan of that size that can be read."""
    try:
        known = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return list(known["batches"]) if known["size"] == size else []
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []  # what is held is known without it


def asked_for(
    asks: Sequence[Ask], recipe: Recipe, rows: Sequence[RowInfo]
) -> list[tuple[RowInfo, Ask]]:
    """The records on disk that answer what the plan asks, each with its conversation."""
    wanted = {ask.key: ask for ask in asks}
    found = ((row, wanted.get(conversation_key(recipe, row))) for row in rows)
    return [(row, ask) for row, ask in found if ask is not None]


def conversation_key(recipe: Recipe, row: RowInfo) -> str:
    """The key of the `Ask` that a record belongs to, whichever turn it is."""
    seed = 0 if row.origin == "given" else request_seed(recipe.seed, row.prompt_id, row.law)
    return request_key(row.prompt_id, row.law, seed, 0, row.origin)


def is_dropped(recipe: Recipe, row: RowInfo, ask: Ask) -> bool:
    """Whether a reply cut by length is left out of training, as the recipe may say.

    Held-out ones stay, for what they say about acceptance is no less true.
    """
    return recipe.collect.cut == "drop" and row.finish == "length" and ask.split == "train"
