"""`draftsmith`: one command a stage, and `demo` for all of them."""

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..configs.errors import NotSent, Unfinished, UserError
from ..configs.load import load_recipe
from ..configs.recipe import Recipe

if TYPE_CHECKING:  # torch and transformers load when a command runs, not for --help
    from ..data.store import RecordStore
    from .pipeline import Run

_VERIFY = """Decode every branch of chance on tiny models, test the random streams, plant faults,
and compare greedy replies of the recipe's target with transformers' generate. Exits with 1 if
anything fails."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 1 if what it checks failed, 2 for input that cannot be used,
    3 if a time limit came first, 4 if all is done but sending it, 130 if it was stopped."""
    args = _arguments(argv)
    try:
        return int(args.run(args) or 0)
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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; argparse alone takes no override that stands behind an option."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong or (rest and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftsmith", description="Train and measure drafters for speculative decoding."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add(commands, "demo", "collect, train, evaluate and publish on the embedded target", _demo)
    look = commands.add_parser("inspect", help="what becomes of rows, and what is supervised")
    look.add_argument("what", metavar="recipe|file", help="a recipe, or a file of rows")
    look.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    look.add_argument("--show", type=int, default=3, metavar="N", help="rows to show in full")
    look.set_defaults(run=_inspect)
    sizes = _add(commands, "size", "what drafters cost here, and how good they must be", _size)
    sizes.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="family=NAME,OPTION=VALUE",
        help="compare with this drafter instead of others of the family; may be repeated",
    )
    sizes.add_argument("--all", action="store_true", help="every family as it is by default, too")
    sizes.add_argument(
        "--most",
        type=int,
        default=8,
        metavar="N",
        help="longest draft that is thought of; default: %(default)s",
    )
    sizes.add_argument(
        "--turns", type=int, default=5, metavar="N", help="measurements; default: %(default)s"
    )
    sizes.add_argument("--out", type=Path, metavar="FILE", help="write what is found as JSON")
    gather = _add(commands, "collect", "let the target answer a recipe's prompts", _collect)
    gather.add_argument(
        "--deadline", type=_seconds, metavar="TIME", help="stop in time, such as 90s, 45m or 8h"
    )
    train = _add(commands, "train", "train a drafter on collected records", _train)
    train.add_argument("--records", help="a record folder or URL; default: collect first")
    train.add_argument(
        "--dry-run", action="store_true", help="say what it takes and whether it can work, and stop"
    )
    measure = _add(commands, "eval", "measure a drafter on held-out prompts", _eval)
    measure.add_argument("--drafter", type=Path, help="a drafter folder; default: train first")
    measure.add_argument("--records", help="a record folder or URL; default: collect first")
    measure.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="[NAME=]SOURCE",
        help="measure on these prompts instead of the recipe's domains; may be repeated",
    )
    measure.add_argument("--max-rows", type=int, help="at most this many prompts per source")
    compare = _add(commands, "parity", "check that what was trained is what is served", _parity)
    compare.add_argument("--drafter", type=Path, help="a drafter folder; default: train first")
    compare.add_argument("--records", help="a record folder or URL; default: collect first")
    compare.add_argument(
        "--rows",
        type=int,
        default=20,
        metavar="N",
        help="replies of each law; default: %(default)s",
    )
    compare.add_argument("--out", type=Path, metavar="FILE", help="write what is found as JSON")
    serve = _add(commands, "serve-check", "measure a drafter in a real engine", _serve_check)
    _serve_options(serve)
    for command in (train, measure, compare, serve):
        command.add_argument(
            "--accept-records", action="store_true", help="take records of another target, too"
        )
    publish = _add(commands, "publish", "write the folder engines load, with its card", _publish)
    publish.add_argument("--drafter", type=Path, required=True, help="a drafter folder")
    publish.add_argument("--report", type=Path, required=True, help="its evaluation's folder")
    publish.add_argument(
        "--to", nargs=2, metavar=("hub", "OWNER/NAME"), help="send it there once it is written"
    )
    push = commands.add_parser("push", help="send a published folder, or records, to the Hub")
    push.add_argument("folder", type=Path, help="as `publish` or `collect` wrote it")
    push.add_argument("name", metavar="OWNER/NAME", help="the repository, made if there is none")
    push.set_defaults(run=_push)
    for command in (publish, push):
        command.add_argument("--revision", metavar="BRANCH", help="a branch, made if there is none")
        command.add_argument(
            "--public", action="store_true", help="open to all; without it, private"
        )
    verify = commands.add_parser(
        "verify", help="prove that decoding is lossless", description=_VERIFY
    )
    verify.add_argument("recipe", nargs="?", default="demo", help="its target is decoded, too")
    verify.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    verify.add_argument("--drafter", type=Path, help="a drafter folder; default: an untrained one")
    verify.add_argument(
        "--prompts-per-domain", type=int, default=2, metavar="N", help="default: %(default)s"
    )
    verify.add_argument(
        "--all",
        action="store_true",
        help="every combination of options on the tiny models: about 20 minutes",
    )
    verify.add_argument("--out", type=Path, metavar="FILE", help="write the verdict as JSON")
    verify.set_defaults(run=_verify)
    doctor = commands.add_parser("doctor", help="versions, devices, and what would not work")
    doctor.set_defaults(run=_doctor)
    return parser


def _serve_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--engine", choices=("vllm", "sglang", "llama.cpp"), required=True)
    serve.add_argument("--drafter", type=Path, required=True, help="the folder to serve")
    serve.add_argument("--records", help="a record folder or URL; default: collect first")
    serve.add_argument("--report", type=Path, help="its evaluation's folder; default: evaluate")
    serve.add_argument("--python", help="of the engine's environment; default: see the README")
    serve.add_argument(
        "--drafts",
        choices=("greedy", "sampled"),
        default="greedy",
        help="the most probable tokens, or drawn ones (vLLM); default: %(default)s",
    )
    serve.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="of each domain; default: %(default)s"
    )
    serve.add_argument(
        "--concurrency",
        type=int,
        nargs="*",
        default=[1, 4],
        metavar="N",
        help="requests at a time, or none to measure no speed; default: 1 4",
    )
    serve.add_argument(
        "--limit",
        type=_seconds,
        default=3600.0,
        metavar="TIME",
        help="ends each server after so long; default: 1h",
    )


def _add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str,
         run: object) -> argparse.ArgumentParser:  # fmt: skip
    command = commands.add_parser(name, help=what, description=what)
    if name != "demo":
        command.add_argument("recipe", help="a YAML recipe, or the name of a shipped one")
    command.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes to the recipe"
    )
    command.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    command.set_defaults(run=run)
    return command


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

    return run.collect(drafter) if args.records is None else RecordStore.open(args.records)


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


def _seconds(text: str) -> float:
    """A span of time in seconds, minutes or hours."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no span of time such as 90s, 45m or 8h")
    return value


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
    report = args.report or run.evaluate(store, args.drafter)
    asked = Asked(
        args.engine, args.python, args.drafts == "sampled", args.prompts,
        tuple(sorted(set(args.concurrency))), args.limit,
    )  # fmt: skip
    return int(not check_engine(run, store, args.drafter, report, asked))


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
