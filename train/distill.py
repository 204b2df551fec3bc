"""The training entry: `accelerate launch train/distill.py --config R.yaml --records DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from draftsmith.configs.errors import UserError
from draftsmith.configs.load import load_recipe
from draftsmith.data.store import RecordStore
from draftsmith.data.target import load_target, pick_device
from draftsmith.train.loop import train


def main(argv: Sequence[str] | None = None) -> int:
    """Train the recipe's drafter on collected records; 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML recipe, or a shipped one's name")
    parser.add_argument("--records", required=True, help="the folder or URL `collect` wrote")
    parser.add_argument("--accept-records", action="store_true", help="of another target, too")
    parser.add_argument("--out", type=Path, required=True, help="folder of the training run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.config, args.overrides)
        store = RecordStore.open(args.records)
        # First, so that each process of several loads the target onto its own device.
        PartialState(cpu=pick_device(recipe.target.device).type == "cpu")
        target = load_target(recipe.target, few_rows=False)
        console = Console(stderr=True, markup=False)
        print(train(recipe, target, store, args.out, console, args.accept_records))
    except UserError as error:
        print(f"distill: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("distill: stopped; the same command goes on from the checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
