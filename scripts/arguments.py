"""The command line: what can be asked for, and how."""

import argparse
from collections.abc import Sequence
from pathlib import Path

_VERIFY = """Decode every branch of chance on tiny models, test the random streams, plant faults,
and compare greedy replies of the recipe's target with transformers' generate. Exits with 1 if
anything fails."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; argparse alone takes no override that stands behind an option."""
    parser = command_line()
    args, rest = parser.parse_known_args(argv)
    words = [word for word in rest if not word.startswith("-") and "=" not in word]
    if len(words) == 1 and args.command in ("verify", "preflight"):  # nor an optional recipe
        args.recipe = words[0]
        rest.remove(words[0])
    wrong = [word for word in rest if word.startswith("-") or "=" not in word]
    if wrong or (rest and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if rest:
        args.overrides += rest
    return args


def command_line() -> argparse.ArgumentParser:
    """Every command with its options; which one was given is `command`."""
    parser = argparse.ArgumentParser(
        prog="draftsmith", description="Train and measure drafters for speculative decoding."
    )
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    _add(commands, "demo", "collect, train, evaluate and publish on the embedded target")
    look = commands.add_parser("inspect", help="what becomes of rows, and what is supervised")
    look.add_argument("what", metavar="recipe|file", help="a recipe, or a file of rows")
    look.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    look.add_argument("--show", type=int, default=3, metavar="N", help="rows to show in full")
    sizes = _add(commands, "size", "what drafters cost here, and how good they must be")
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
    gather = _add(commands, "collect", "let the target answer a recipe's prompts")
    gather.add_argument(
        "--deadline", type=_seconds, metavar="TIME", help="stop in time, such as 90s, 45m or 8h"
    )
    train = _add(commands, "train", "train a drafter on collected records")
    train.add_argument("--records", help="a record folder or URL; default: collect first")
    train.add_argument(
        "--dry-run", action="store_true", help="say what it takes and whether it can work, and stop"
    )
    measure = _add(commands, "eval", "measure a drafter on held-out prompts")
    measure.add_argument("--drafter", type=Path, help="a drafter folder; default: train first")
    measure.add_argument("--records", help="a record folder or URL; default: collect first")
    _prompt_options(measure)
    beside = commands.add_parser("compare", help="evaluations side by side, paired by prompt")
    beside.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of evaluations; all with the first"
    )
    beside.add_argument("--out", type=Path, metavar="FILE", help="write what is found as JSON")
    drift = _add(commands, "drift", "what a drafter loses with a changed target (target.*=...)")
    drift.add_argument("--drafter", type=Path, required=True, help="a drafter folder")
    drift.add_argument(
        "--report", type=Path, required=True, help="its evaluation's folder, with the target before"
    )
    _prompt_options(drift)
    drift.add_argument("--out", type=Path, metavar="FILE", help="write what is found as JSON")
    compare = _add(commands, "parity", "check that what was trained is what is served")
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
    serve = _add(commands, "serve-check", "measure a drafter in a real engine")
    _serve_options(serve)
    for command in (train, measure, compare, serve):
        command.add_argument(
            "--accept-records", action="store_true", help="take records of another target, too"
        )
    contest = commands.add_parser("bench", help="measure drafters side by side")
    contest.add_argument("spec", metavar="SPEC.yaml", help="the benchmark's specification")
    contest.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    contest.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    contest.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    _simulate_options(commands.add_parser("simulate", help="what a rate of requests would meet"))
    publish = _add(commands, "publish", "write the folder engines load, with its card")
    publish.add_argument("--drafter", type=Path, required=True, help="a drafter folder")
    publish.add_argument("--report", type=Path, required=True, help="its evaluation's folder")
    publish.add_argument(
        "--to", nargs=2, metavar=("hub", "OWNER/NAME"), help="send it there once it is written"
    )
    _preflight_options(commands.add_parser("preflight", help="would engines serve a folder?"))
    push = commands.add_parser("push", help="send a published folder, or records, to the Hub")
    push.add_argument("folder", type=Path, help="as `publish` or `collect` wrote it")
    push.add_argument("name", metavar="OWNER/NAME", help="the repository, made if there is none")
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
    commands.add_parser("doctor", help="versions, devices, and what would not work")
    return parser


def _simulate_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("folder", type=Path, help="of an evaluation with timings")
    plan.add_argument(
        "--rate", type=float, nargs="+", required=True, metavar="R", help="requests a second"
    )
    plan.add_argument("--batch", type=int, metavar="N", help="at a time; default: most measured")
    plan.add_argument("--memory", metavar="SIZE", help="for weights and caches, such as 16GiB")
    for name in ("domain", "law"):
        plan.add_argument(
            f"--{name}", action="append", default=[], help="default: all; may be repeated"
        )
    plan.add_argument(
        "--tokens", type=int, nargs=2, metavar=("PROMPT", "REPLY"), help="instead of measured ones"
    )
    plan.add_argument("--draft", type=int, metavar="N", help="tokens of a draft; default: served")
    plan.add_argument("--costs", type=Path, metavar="FILE", help="another machine, as in --out")
    plan.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes, such as seconds=0.01"
    )
    plan.add_argument(
        "--requests", type=int, default=1000, metavar="N", help="of each run; default: %(default)s"
    )
    plan.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write what is found as JSON")


def _preflight_options(check: argparse.ArgumentParser) -> None:
    check.add_argument("folder", type=Path, help="as `publish` wrote it, or others published it")
    check.add_argument("recipe", nargs="?", default="demo", help="its target; default: %(default)s")
    check.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to it")
    check.add_argument(
        "--engine",
        action="append",
        default=[],
        choices=("vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"),
        help="may be repeated; default: all that read the layout",
    )
    check.add_argument("--drafter", type=Path, help="what should be served; default: the folder")
    check.add_argument("--records", help="a record folder or URL to measure acceptance on")
    check.add_argument(
        "--rows",
        type=int,
        default=20,
        metavar="N",
        help="replies of each domain and law; default: %(default)s",
    )
    check.add_argument(
        "--accept-records", action="store_true", help="take records of another target, too"
    )
    check.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    check.add_argument("--out", type=Path, metavar="FILE", help="write what is found as JSON")


def _prompt_options(measure: argparse.ArgumentParser) -> None:
    measure.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="[NAME=]SOURCE",
        help="measure on these prompts instead of the recipe's domains; may be repeated",
    )
    measure.add_argument("--max-rows", type=int, help="at most this many prompts per source")


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


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=what, description=what)
    if name != "demo":
        command.add_argument("recipe", help="a YAML recipe, or the name of a shipped one")
    command.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="changes to the recipe"
    )
    command.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    return command


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
