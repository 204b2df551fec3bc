"""The records a run is trained and judged on, and their order."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..configs.errors import UserError, did_you_mean
from ..configs.recipe import Recipe
from ..configs.training import TrainSection
from ..data.records import Record
from ..data.shards import RowInfo
from ..data.store import RecordStore
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import TrainBatch
from ..drafters.batch import StateReader, check_identity, collate
from ..drafters.registry import family_config
from ..drafters.start import resolved_taps
from .batches import Plan, make_plan
from .objective import Objective, reverse


@dataclass(frozen=True)
class Data:
    """Training and held-out records with states, the domains' order.

    Training records are read when a batch is loaded. lawful: which of them are samples of `law`,
    the objective's; sampled: whether the first objective needs such, as all that take over do;
    limit: the collection's max_new_tokens.
    """

    training: StateReader
    held_out: Sequence[Record]
    domains: tuple[str, ...]
    law: Law
    lawful: tuple[bool, ...]
    sampled: bool
    limit: int
    section: TrainSection
    seed: int

    @property
    def computes(self) -> bool:
        """Whether the target runs to read a record."""
        return bool(self.training.store.settings["distributions"] == "none")

    def plan(
        self,
        second: bool = False,
        segment: int = 0,
        weights: Mapping[str, float] | None = None,
        renewed: Mapping[int, Record] | None = None,
    ) -> Plan:
        """The order of a segment: a stretch of training between changes of what is trained on.

        second: for the objective that takes over; weights: by domain, relative to each other;
        renewed: records that stand in for training records, by their index. Raises `UserError` if
        nothing is left to train on.
        """
        rows: list[RowInfo | Record] = list(self.training.rows)
        use = list(self.lawful)
        for index, record in (renewed or {}).items():
            rows[index], use[index] = record, record.drawn_from(self.law)
        return make_plan(
            rows,
            self.section.tokens_per_batch,
            self.seed if segment == 0 else f"{self.seed}/{segment}",
            use if second or self.sampled else None,
            None if not weights else [weights.get(row.domain, 1.0) for row in rows],
            grouped=not self.section.packing,
        )

    def load(
        self, indices: Sequence[int], renewed: Mapping[int, Record] | None = None
    ) -> TrainBatch:
        """A batch of the training records at these indices."""
        kept = renewed or {}
        missing = [i for i in indices if i not in kept]
        read = dict(zip(missing, self.training.read(missing), strict=True)) if missing else {}
        records = [kept[i] if i in kept else read[i] for i in indices]
        return collate(records, self.domains, self.section.packing)


def load_data(
    recipe: Recipe,
    target: Target,
    store: RecordStore,
    objective: Objective,
    accept: bool = False,
) -> Data:
    """The store's training records and the held-out ones, to be read when they are asked for.

    Raises `UserError` as `check_identity` does, where `accept` is explained; for domains that there
    are no records of; if the objective needs samples of a law that no training record is of; or if
    the course of training depends on held-out records that there are none of.
    """
    _, config = family_config(recipe.drafter, f"recipe '{recipe.name}'")
    taps = resolved_taps(config, target.num_layers)
    check_identity(store, target, taps, accept)
    _refuse_infinite(recipe, store, target.vocab_size)
    rows = _of_domains(store.index(), recipe.train, store)
    training = [r for r in rows if r.split == "train"]
    judging = [r for r in rows if r.split == "heldout" and r.drawn_from(objective.law)]
    judging.sort(key=lambda r: r.key)
    lawful = tuple(r.drawn_from(objective.law) for r in training)
    _check_samples(recipe, store, objective, any(lawful), bool(judging))
    judging = judging[: recipe.train.eval_conversations]
    # A sharded target's processes meet in each of its passes, so a batch is one pass.
    at_once = recipe.train.target == "sharded"
    data = Data(
        training=StateReader(store, target, taps, training, at_once),
        held_out=StateReader(store, target, taps, judging),
        domains=tuple(sorted({r.domain for r in rows})),
        law=objective.law,
        lawful=lawful,
        sampled=objective.needs_samples,
        limit=int(store.settings["max_new_tokens"]),
        section=recipe.train,
        seed=recipe.seed,
    )
    data.plan()  # what cannot be trained on shows before a drafter is made
    if objective.then is not None:
        data.plan(second=True)
    return data


def check_domains(section: TrainSection, domains: Collection[str], where: str) -> None:
    """Raise `UserError` for a domain that is named and not there; `where` begins what is."""
    known = sorted(domains)
    for name in (*(section.domains or ()), *section.domain_weights):
        if name not in known:
            raise UserError(
                f"train names domain '{name}', and {where} {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )


def _of_domains(
    rows: Sequence[RowInfo], section: TrainSection, store: RecordStore
) -> Sequence[RowInfo]:
    """The rows of the domains that are trained on."""
    check_domains(section, {r.domain for r in rows}, f"{store.folder} holds records of")
    if section.domains is None:
        return rows
    return [r for r in rows if r.domain in section.domains]


def _refuse_infinite(recipe: Recipe, store: RecordStore, vocab_size: int) -> None:
    """Refuse what is infinite, with gradient 0, where p is known of some tokens alone."""
    section, known = recipe.objective, store.settings
    mix = section.loss if isinstance(section.loss, dict) else {section.loss: 1.0}
    few = known["distributions"] == "top" and known["top"] < vocab_size
    if few and reverse({*mix, section.then}, section.beta):
        raise UserError(
            f"objective.loss rkl (jsd with beta 1) needs p of all {vocab_size} tokens, and the "
            f"records hold the {known['top']} most probable ones; take another, such as nla or "
            "jsd, or collect.distributions hidden or none"
        )


def _check_samples(
    recipe: Recipe, store: RecordStore, objective: Objective, trainable: bool, judged: bool
) -> None:
    """Refuse what needs samples of the objective's law where there are none."""
    law = objective.law
    if (objective.needs_samples or objective.then is not None) and not trainable:
        raise UserError(
            f"this objective is only valid on replies sampled under {law.label}, and "
            f"{store.folder} has none to train on; add {law.temperature:g} to "
            "collect.temperatures and collect again"
        )
    section = recipe.train
    options = {
        "train.patience": section.patience is not None,
        "train.result best": section.result == "best",
        "train.reweight": section.reweight > 0,
        "objective.switch_overlap": recipe.objective.switch_overlap is not None,
    }
    needy = [name for name, asked in options.items() if asked]
    if needy and not judged:
        raise UserError(
            f"{store.folder} has no held-out replies under {law.label}, which "
            f"{' and '.join(needy)} {'are' if len(needy) > 1 else 'is'} judged by"
        )
