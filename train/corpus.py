"""The records a run is trained and judged on, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..configs.errors import UserError
from ..configs.recipe import Recipe
from ..data.records import Record
from ..data.store import RecordStore
from ..data.target import Target
from ..drafters.base import TrainBatch
from ..drafters.batch import StateReader, check_identity, collate
from ..drafters.registry import family_config, resolved_taps
from .batches import Plan, make_plan
from .objective import Objective


@dataclass(frozen=True)
class Data:
    """Training and held-out records with states, the domains' order, the batch plans.

    Training records are read when a batch is loaded, held-out ones are there. plan, second: batches
    before and after the objective changes; lawful: training records sampled under the objective's
    law, None if any will do; limit: the collection's max_new_tokens.
    """

    training: StateReader
    held_out: Sequence[Record]
    domains: tuple[str, ...]
    plan: Plan
    second: Plan
    lawful: int | None
    limit: int

    def load(self, indices: Sequence[int]) -> TrainBatch:
        return collate(self.training.read(indices), self.domains)


def load_data(
    recipe: Recipe,
    target: Target,
    store: RecordStore,
    objective: Objective,
    accept: bool = False,
) -> Data:
    """Plan the batches of the store's training records, and read the held-out ones.

    Raises `UserError` as `check_identity` does, where `accept` is explained; if the objective needs
    samples of a law that no training record is of; or if the course of training depends on held-out
    records that there are none of.
    """
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    taps = resolved_taps(config, target.num_layers)
    check_identity(store, target, taps, accept)
    rows = store.index()
    training = [r for r in rows if r.split == "train"]
    judging = [r for r in rows if r.split == "heldout" and r.drawn_from(objective.law)]
    judging.sort(key=lambda r: r.key)
    domains = tuple(sorted({r.domain for r in rows}))
    size = recipe.train.tokens_per_batch
    valid = [r.drawn_from(objective.law) for r in training]
    needed = objective.needs_samples or objective.then is not None
    if needed and not any(valid):
        raise UserError(
            f"this objective is only valid on replies sampled under {objective.law.label}, and "
            f"{store.folder} has none to train on; add {objective.law.temperature:g} to "
            "collect.temperatures and collect again"
        )
    judged = recipe.train.patience is not None or recipe.objective.switch_overlap is not None
    if judged and not judging:
        raise UserError(
            f"{store.folder} has no held-out replies under {objective.law.label}, which "
            "train.patience and objective.switch_overlap are judged by"
        )
    judging = judging[: recipe.train.eval_conversations]
    lawful = make_plan(training, size, recipe.seed, valid) if needed else None
    every = make_plan(training, size, recipe.seed)
    first = lawful if objective.needs_samples and lawful is not None else every
    limit = int(store.settings["max_new_tokens"])
    count = sum(valid) if needed else None
    held_out = list(StateReader(store, target, taps, judging))
    reader = StateReader(store, target, taps, training)
    return Data(reader, held_out, domains, first, lawful or every, count, limit)
