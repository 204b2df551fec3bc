"""The parts of a study one after the other, and the tables made of what is finished."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from draftsmith.configs.errors import UserError
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result
from draftsmith.scripts.study import LAWS, Study
from draftsmith.scripts.study_measure import (
    ALL,
    VERIFIER,
    accept_settings,
    accepted,
    best_lengths,
    cost,
    cost_of,
    cost_settings,
    parity_settings,
    predictions,
    served_as_trained,
    speed_settings,
    timed,
)
from draftsmith.scripts.study_training import trained

NONE = "–"
Row = Mapping[str, Any]


# ---- parts


def train_all(study: Study, names: Sequence[str]) -> None:
    """Train what there is to train, each run for the same time."""
    for name in filter(study.trains, names):
        study.part(name, "train", {}, partial(trained, study, name))


def measure_all(study: Study, names: Sequence[str], only: Sequence[str]) -> None:
    """Costs first, as they need a quiet machine least long, then acceptance."""
    for name in names if "cost" in only else ():
        study.part(name, "cost", cost_settings(study), partial(cost, study, name))
    for name in names if "accept" in only else ():
        study.part(name, "accept", accept_settings(study), partial(accepted, study, name))
    for name in names if "parity" in only else ():
        found = partial(served_as_trained, study, name)
        study.part(name, "parity", parity_settings(study), found)


def time_all(study: Study, names: Sequence[str]) -> None:
    """Time each run at its own best draft lengths. Raises `UserError` where these are not known."""
    for name in names:
        depends = _speed_depends(study, name)
        if depends is None:
            raise UserError(f"'{name}' has no costs or acceptance yet; take --only cost accept")
        study.part(name, "speed", depends, partial(timed, study, name, depends["best"]))


def _speed_depends(study: Study, name: str) -> dict[str, Any] | None:
    costs = study.known(name, "cost", cost_settings(study))
    acceptance = study.known(name, "accept", accept_settings(study))
    if costs is None or acceptance is None:
        return None
    return speed_settings(study) | {"best": best_lengths(costs, acceptance)}


# ---- results


def row_of(study: Study, name: str) -> dict[str, Any]:
    """All parts of a run that are finished; predicted: speedups by law and draft length."""
    run, recipe = study.runs[name], study.recipe(name)
    depends = _speed_depends(study, name)
    row: dict[str, Any] = {
        "name": name,
        "family": recipe.drafter["family"],
        "recipe": run.recipe,
        "changes": list(run.changes),
        "unroll": recipe.train.unroll if study.trains(name) else None,
        "train": study.known(name, "train", {}),
        "cost": study.known(name, "cost", cost_settings(study)),
        "accept": study.known(name, "accept", accept_settings(study)),
        "parity": study.known(name, "parity", parity_settings(study)),
        "speed": None if depends is None else study.known(name, "speed", depends),
    }
    if depends is not None:
        row["best"] = depends["best"]
        row["predicted"] = {
            law: {str(n): round(s, 3) for n, s in predictions(cost_of(row["cost"]), c[ALL]).items()}
            for law, c in row["accept"].items()
        }
    return row


def save(study: Study, name: str, rows: Sequence[Row]) -> None:
    """Write `results/NAME.json`: rows, what they were measured with, and which one was fastest."""
    save_result(name, {
        "target": study.target.provenance["name"],
        "machine": processor(),
        "threads": threads(rows, study.args.threads),
        "training_threads": study.args.train_threads,
        "torch": torch.__version__,
        "seconds_of_training": study.args.seconds,
        "verifier": VERIFIER,
        "timing_tokens": study.args.timing_tokens,
        "intervals": "95 %: α and τ bootstrap over conversations, speedups jackknife over prompts",
        "collection": study.about(),
        "fastest": fastest(rows),
        "rows": list(rows),
    }, quiet=True)  # fmt: skip


def threads(rows: Sequence[Row], unsaid: int) -> list[int]:
    """All numbers of threads that something was timed with; `unsaid` where a part tells of none."""
    parts = [part for row in rows if (part := row["cost"]) is not None]
    parts += [part for row in rows for part in (row["speed"] or {}).values()]
    return sorted({part.get("threads", unsaid) for part in parts})


def fastest(rows: Sequence[Row]) -> dict[str, str | None]:
    """The run of highest measured speedup, by law and in the geometric mean of the laws."""
    timed = [row for row in rows if row["speed"] is not None]
    if not timed:
        return {}

    def speedup(row: Row, laws: Sequence[str]) -> float:
        product = 1.0
        for law in laws:
            product *= float(row["speed"][law]["measured"]["value"])
        return product

    labels = [law.label for law in LAWS]
    found = {law: max(timed, key=partial(speedup, laws=[law]))["name"] for law in labels}
    return found | {"both": max(timed, key=partial(speedup, laws=labels))["name"]}


# ---- tables


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def price_cells(row: Row) -> list[str]:
    """Trained parameters, weights a later step multiplies by, c_first, c, and c's rest."""
    train, costs = row["train"], row["cost"]
    parameters = NONE if train is None else millions(train["trained_parameters"])
    if costs is None:
        return [parameters, *[NONE] * 4]
    return [
        parameters,
        f"{millions(costs['weights_read_first'])} / {millions(costs['weights_read'])}",
        f"{costs['c_first']:.3f}",
        f"{costs['c']:.3f}",
        f"{costs['outside_first']:.3f} / {costs['outside']:.3f}",
    ]


def gain_cells(row: Row, law: str) -> list[str]:
    """α, τ with its draft length, and the speedup measured (its interval) and predicted."""
    if row["accept"] is None:
        return [NONE] * 3
    cell = row["accept"][law][ALL]
    alpha = f"{cell['overlap']['value']:.3f}"
    if "best" not in row:
        return [alpha, NONE, NONE]
    gamma = row["best"][law]
    tau = f"{cell['tokens_per_round'][str(gamma)]['value']:.2f} (γ {gamma})"
    predicted = f"({row['predicted'][law][str(gamma)]:.2f})"
    if row["speed"] is None:
        return [alpha, tau, predicted]
    return [alpha, tau, f"{interval(row['speed'][law]['measured'])} {predicted}"]


def summary_table(rows: Sequence[Row]) -> str:
    """One line a run, over all domains."""
    heads = ["drafter", "trained", "read first / later", "c_first", "c", "outside first / later"]
    for law in LAWS:
        heads += [f"α {law.label}", f"τ {law.label}", f"speedup {law.label} (predicted)"]
    return markdown(heads, [
        [row["name"], *price_cells(row), *(c for law in LAWS for c in gain_cells(row, law.label))]
        for row in rows
    ])  # fmt: skip


def domain_table(rows: Sequence[Row], law: str) -> str:
    """α / τ by domain under one law, each run at its best draft length."""
    measured = [row for row in rows if row["accept"] is not None and "best" in row]
    names = sorted({d for row in measured for d in row["accept"][law]} - {ALL})
    lines = []
    for row in measured:
        gamma, cells = str(row["best"][law]), row["accept"][law]
        pairs = [(cells[d]["overlap"], cells[d]["tokens_per_round"][gamma]) for d in names]
        lines.append([row["name"], *(f"{a['value']:.2f} / {t['value']:.2f}" for a, t in pairs)])
    return markdown([f"α / τ, {law}", *names], lines)


def training_table(rows: Sequence[Row]) -> str:
    """What each run's time came to."""
    lines = []
    for row in rows:
        if (train := row["train"]) is not None:
            lines.append([
                row["name"], f"{train['seconds']:.0f}", str(train["steps"]),
                f"{train['tokens'] / 1e3:.0f} k", f"{train['epochs']:.1f}",
                f"{train['flops'] / 1e12:.1f}",
            ])  # fmt: skip
    return markdown(["drafter", "seconds", "steps", "tokens", "epochs", "TFLOP"], lines)


def millions(count: float) -> str:
    return f"{count / 1e6:.1f} M"


def interval(found: Mapping[str, float | None]) -> str:
    """`1.23 [1.20, 1.26]`, or the value alone where there is too little to tell."""
    value, low, high = found["value"], found["low"], found["high"]
    return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"
