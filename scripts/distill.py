"""Training by itself: records in, drafter folder out, in one process or as one of several."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from ..configs.errors import UserError
from ..configs.load import load_recipe
from ..configs.recipe import Recipe
from ..data.devices import pick_device
from ..data.store import RecordStore
from ..data.target import load_target
from ..data.work import start_processes
from ..train.distributed import target_use
from ..train.dryrun import dry_run
from ..train.loop import train
from .pipeline import check_recipe
from .samples import sampler


def main(argv: Sequence[str] | None = None) -> int:
    """Train the recipe's drafter on collected records; 2 for input that cannot be used."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True, markup=False)
    try:
        recipe = load_recipe(args.config, args.overrides)
        check_recipe(recipe)
        store = RecordStore.open(args.records)
        if args.dry_run:
            dry_run(recipe, store, console, args.out, args.accept_records)
            return 0
        processes = start_processes(pick_device(recipe.target.device))
        # A target that is to be cut down or spread need not fit on the device first.
        use = target_use(recipe, store)
        on = processes.device if use == "replicated" else torch.device("cpu")
        folder = _train(recipe, store, args, console, on)
        if processes.is_main_process:
            print(folder)
    except UserError as error:
        print(f"distill: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("distill: stopped; the same command goes on from the checkpoint", file=sys.stderr)
        return 130
    return 0


def _train(
    recipe: Recipe, store: RecordStore, args: argparse.Namespace, console: Console, on: torch.device
) -> Path:
    if not recipe.train.samples:
        # Nothing here holds the target: an absent one's layers go when training lets go of them.
        return train(
            recipe, load_target(recipe.target, few_rows=False, on=on), store, args.out, console,
            args.accept_records,
        )  # fmt: skip
    target = load_target(recipe.target, few_rows=False, on=on)
    decode = sampler(recipe, target)
    return train(recipe, target, store, args.out, console, args.accept_records, decode)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distill", description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML recipe, or a shipped one's name")
    parser.add_argument("--records", required=True, help="the folder or URL `collect` wrote")
    parser.add_argument("--accept-records", action="store_true", help="of another target, too")
    parser.add_argument("--out", type=Path, required=True, help="folder of the training run")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what it takes and whether it can work"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser
