"""`draftsmith train --dry-run`: on the records named, the recipe's own, or those still to come."""

from ..configs.errors import UserError
from ..data.collection import collect_settings
from ..data.plan import make_asks
from ..data.store import RecordStore
from ..drafters.registry import family_config
from ..drafters.start import resolved_taps
from ..train.blueprint import target_shapes
from ..train.dryrun import dry_run
from .pipeline import Run


def plan_training(run: Run, records: str | None) -> None:
    """Print what training would take. Raises `UserError` for what cannot work."""
    store = _own_records(run) if records is None else RecordStore.open(records)
    asks = []
    if store is None:
        run.console.print(
            "no records of this recipe yet: planned by its prompts, as if every reply were as long "
            "as collect.max_new_tokens allows"
        )
        asks = make_asks(run.recipe, run.prepared)
    dry_run(run.recipe, store, run.console, run.root, run.accept, asks)


def _own_records(run: Run) -> RecordStore | None:
    """The finished records that `collect` would find again, None if there are none.

    Told by their settings; whether the target's weights are still the same is not looked at.
    Folders that cannot be read are passed over, as those of other settings are.
    """
    target = target_shapes(run.recipe)
    _, config = family_config(run.recipe.drafter, f"recipe '{run.recipe.name}'")
    taps = resolved_taps(config, target.num_layers) if run.recipe.collect.server is None else ()
    wanted = collect_settings(run.recipe, target, taps)
    for folder in sorted(run.root.glob("records-*")):
        try:
            store = RecordStore.open(folder)
        except UserError:
            continue
        there = store.settings | {"target": store.settings["target"] | {"weights": None}}
        if store.complete and there == wanted:
            return store
    return None
