"""`draftsmith`: one command a stage, and `demo` for all of them."""

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..configs.errors import NotSent, Unfinished, UserError
from ..configs.load import load_recipe
from ..configs.recipe import Recipe
from .arguments import arguments

if TYPE_CHECKING:  # torch and transformers load when a command runs, not for --help
    from ..data.store import RecordStore
    from .pipeline import Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 1 if what it checks failed, 2 for input that cannot be used,
    3 if a time limit came first, 4 if all is done but sending it, 130 if it was stopped."""
    args = arguments(argv)
    try:
        return int(COMMANDS[args.command](args) or 0)
    except Unfinished as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return 3
    except NotSent as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return 4
    except UserError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "draftsmith: stopped; what is finished is kept, the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    except Exception as error:
        if not _disk_is_full(error):
            raise
        place = getattr(error, "filename", None) or "while writing"
        print(
            f"draftsmith: no space left on the disk ({place}); free some and run the same command "
            "again",
            file=sys.stderr,
        )
        return 2


def _disk_is_full(error: Exception) -> bool:
    """Whether a write failed for lack of space; safetensors tells its number in words only."""
    number = getattr(error, "errno", None)
    return number == errno.ENOSPC or f"(os error {errno.ENOSPC})" in str(error)


def _recipe(args: argparse.Namespace) -> Recipe:
    from .pipeline import check_recipe

    recipe = load_recipe(getattr(args, "recipe", "demo"), args.overrides)
    check_recipe(recipe)
    return recipe


def _run(recipe: Recipe, runs: Path) -> "Run":
    from .pipeline import Run

    return Run(recipe, runs / recipe.name, Console(markup=False))  # paths may look like markup


def _store(args: argparse.Namespace, run: "Run", drafter: Path | None = None) -> "RecordStore":
    """The records named on the command line, or the recipe's own."""
    from ..data.store import RecordStore

    if args.records is not None:
        return RecordStore.open(args.records)
    return run.collect() if drafter is None else run.collect(drafter)


def _demo(args: argparse.Namespace) -> None:
    from ..eval.report import print_report, read_report

    run = _run(_recipe(args), args.runs)
    store = run.collect()
    drafter = run.untrained() or run.train(store)
    report = run.evaluate(store, drafter)
    run.publish(drafter, report)
    print_report(read_report(report / "report.json"), run.console)
    for entry in run.stages():
        run.console.print(f"{entry['stage']:<10} {entry['seconds']:7.1f} s")
    run.console.print(f"report: {report / 'report.html'}")


def _inspect(args: argparse.Namespace) -> int:
    from .inspection import inspection

    return inspection(args.what, args.overrides, args.show, Console(markup=False))


def _size(args: argparse.Namespace) -> None:
    from .sizing import size

    for name in ("most", "turns"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, must be 1 or more")
    run = _run(_recipe(args), args.runs)
    size(run, args.candidate, args.all, args.most, args.turns, args.out)


def _collect(args: argparse.Namespace) -> None:
    run = _run(_recipe(args), args.runs)
    run.deadline = args.deadline
    run.console.print(f"records: {run.collect().folder}")


def _train(args: argparse.Namespace) -> None:
    run = _run(_recipe(args), args.runs)
    run.accept = args.accept_records
    if args.dry_run:
        from .planning import plan_training

        plan_training(run, args.records)
        return
    run.console.print(f"drafter: {run.untrained() or run.train(_store(args, run))}")


def _eval(args: argparse.Namespace) -> None:
    from ..eval.report import print_report, read_report
    from .pipeline import with_prompts

    recipe = _recipe(args)
    if args.prompts:
        recipe = with_prompts(recipe, args.prompts, args.max_rows)
    run = _run(recipe, args.runs)
    run.accept = args.accept_records
    drafter = args.drafter or run.untrained()
    if args.prompts and drafter is None:
        raise UserError("--prompts measures a trained drafter: name its folder with --drafter")
    store = _store(args, run, drafter)
    drafter = drafter or run.train(store)
    report = run.evaluate(store, drafter)
    print_report(read_report(report / "report.json"), run.console)
    run.console.print(f"report: {report / 'report.html'}")


def _bench(args: argparse.Namespace) -> None:
    from ..configs.load import load_benchmark
    from .benchmark import bench

    spec = load_benchmark(args.spec, args.overrides)
    bench(spec, args.runs, Console(markup=False), args.out)


def _compare(args: argparse.Namespace) -> None:
    from .compare import compare_folders

    compare_folders(args.folders, args.out, Console(markup=False))


def _drift(args: argparse.Namespace) -> None:
    from .drift import measure_drift
    from .pipeline import with_prompts

    recipe = _recipe(args)
    was = [change for change in args.overrides if not change.startswith("target")]
    before = load_recipe(args.recipe, was)
    if args.prompts:
        recipe = with_prompts(recipe, args.prompts, args.max_rows)
    measure_drift(_run(recipe, args.runs), before, args.drafter, args.report, args.out)


def _parity(args: argparse.Namespace) -> int:
    from .parity import check_parity

    if args.rows < 2:
        raise UserError(f"--rows is {args.rows}, must be 2 or more")
    run = _run(_recipe(args), args.runs)
    run.accept = args.accept_records
    drafter = args.drafter or run.untrained()
    store = _store(args, run, drafter)
    return int(not check_parity(run, store, drafter or run.train(store), args.rows, args.out))


def _serve_check(args: argparse.Namespace) -> int:
    from .engines import Asked, check_engine

    counts = {"prompts": [args.prompts], "concurrency": args.concurrency}
    for name, least in ((name, min(given, default=1)) for name, given in counts.items()):
        if least < 1:
            raise UserError(f"--{name} is {least}, must be 1 or more")
    run = _run(_recipe(args), args.runs)
    run.accept = args.accept_records
    store = _store(args, run, args.drafter)
    asked = Asked(
        args.engine, args.python, args.drafts == "sampled", args.prompts,
        tuple(sorted(set(args.concurrency))), args.limit,
    )  # fmt: skip
    return int(not check_engine(run, store, args.drafter, args.report, asked))


def _simulate(args: argparse.Namespace) -> None:
    from .simulate import Asked, bytes_of, simulate

    memory = None if args.memory is None else bytes_of(args.memory)
    tokens = None if args.tokens is None else (args.tokens[0], args.tokens[1])
    asked = Asked(
        tuple(args.rate), args.batch, memory, tuple(args.domain), tuple(args.law), tokens,
        args.draft, args.costs, tuple(args.set), args.requests, args.seed,
    )  # fmt: skip
    simulate(args.folder, asked, args.out, Console(markup=False))


def _preflight(args: argparse.Namespace) -> int:
    from ..data.store import RecordStore
    from .preflight import Asked, check_folder

    if args.rows < 1:
        raise UserError(f"--rows is {args.rows}, must be 1 or more")
    run = _run(_recipe(args), args.runs)
    run.accept = args.accept_records
    store = None if args.records is None else RecordStore.open(args.records)
    asked = Asked(args.folder, args.engine, args.drafter, args.rows, args.out)
    return int(not check_folder(run, store, asked))


def _publish(args: argparse.Namespace) -> None:
    from .hub import check_place, push

    check_place(args.to, args.revision, args.public)
    run = _run(_recipe(args), args.runs)
    folder = run.publish(args.drafter, args.report)
    if args.to is not None:
        push(folder, args.to[1], args.revision, args.public, run.console)


def _push(args: argparse.Namespace) -> None:
    from .hub import push

    push(args.folder, args.name, args.revision, args.public, Console(markup=False))


def _verify(args: argparse.Namespace) -> int:
    from .verify import verify

    recipe, count = _recipe(args), args.prompts_per_domain
    return int(not verify(recipe, args.drafter, count, args.all, args.out, Console()))


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import diagnose

    return diagnose(Console())


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "demo": _demo,
    "inspect": _inspect,
    "size": _size,
    "collect": _collect,
    "train": _train,
    "eval": _eval,
    "compare": _compare,
    "drift": _drift,
    "bench": _bench,
    "parity": _parity,
    "serve-check": _serve_check,
    "simulate": _simulate,
    "preflight": _preflight,
    "publish": _publish,
    "push": _push,
    "verify": _verify,
    "doctor": _doctor,
}
"""What runs each command of the command line."""
