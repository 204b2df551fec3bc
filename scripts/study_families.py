"""Which family of drafters is worth its price? All of them on one target, trained for equal times.

    python scripts/study_families.py --prompts ../shared/prompts [--runs runs/study] [--only ...]

Parts, in this order: collect (one collection for all), train, cost, accept, parity, speed and
table, which prints what is finished and saves it as scripts/results/families.json. Training, costs
and speed are worth nothing unless the machine does nothing else meanwhile.
"""

from collections.abc import Sequence

from rich.console import Console

from draftsmith.configs.errors import UserError, did_you_mean
from draftsmith.drafters.registry import trained_families
from draftsmith.scripts.study import LAWS, Run, Study, parser_of
from draftsmith.scripts.study_tables import (
    domain_table,
    measure_all,
    row_of,
    save,
    summary_table,
    time_all,
    train_all,
    training_table,
)

RUNS = {
    "eagle3": Run("demo"),
    "eagle3-384": Run("demo", ("drafter.hidden_size=384",)),
    "dflash": Run("dflash"),
    "dflash-8192": Run("dflash", ("drafter.draft_vocab_size=8192",)),
    "dflash-8192-seq": Run("dflash", ("drafter.draft_vocab_size=8192", "drafter.sequential=true")),
    "medusa": Run("medusa"),
    "mlp": Run("mlp"),
    "jump": Run("jump"),
    "causal": Run("causal"),
    "causal-256": Run("narrow"),
    "lookup": Run("lookup"),
    "skip": Run("skip"),
}
PARTS = ("collect", "train", "cost", "accept", "parity", "speed", "table")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(str(__doc__), "runs/study", PARTS)
    parser.add_argument("--families", help=f"some of {','.join(RUNS)}; default: all")
    args = parser.parse_args(argv)
    study = Study(args, RUNS, Console())
    names = chosen(study, args.families)
    if "collect" in args.only:
        study.collect()
    if "train" in args.only:
        train_all(study, names)
    measure_all(study, names, args.only)
    if "speed" in args.only:
        time_all(study, names)
    if "table" in args.only:
        tell(study)


def chosen(study: Study, asked: str | None) -> list[str]:
    """The runs that are asked for and possible; families without a run are told of."""
    names = list(RUNS) if asked is None else [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in RUNS:
            raise UserError(f"there is no run '{name}'{did_you_mean(name, RUNS)}")
    found = study.possible(names)
    seen = {study.recipe(name).drafter["family"] for name in study.possible(list(RUNS))}
    for family in sorted(set(trained_families()) - seen):
        study.console.print(f"family '{family}' has no run here", style="yellow")
    return found


def tell(study: Study) -> None:
    """Print the tables of all runs that are possible, and save them."""
    rows = [row_of(study, name) for name in study.possible(list(RUNS))]
    save(study, "families", rows)
    print(summary_table(rows), training_table(rows), sep="\n\n")
    for law in LAWS:
        print("", domain_table(rows, law.label), sep="\n")


if __name__ == "__main__":
    main()
