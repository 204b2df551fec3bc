"""`draftsmith inspect`: what becomes of a recipe's rows, and what of them is supervised."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..configs.load import load_recipe
from ..configs.recipe import Recipe
from ..data.audit import audit, coloured
from ..data.prepare import Prepared, longest_conversation
from ..data.prompts import Prompt, read_prompts
from ..data.replies import Turn, given_turns
from ..data.target import TargetInfo, target_info
from .pipeline import prepare_recipe

_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt", ".gz", ".bz2", ".xz")
_MODE = "(thinking mode?)"  # what its finding says
_LONG = "too long"  # how reasons of that kind begin


def inspection(what: str, overrides: Sequence[str], shown: int, console: Console) -> int:
    """Tell what is kept, rejected and supervised; 1 if any row is faulty, else 0.

    `what` is a recipe, or a file of rows: its replies are looked at if it has any. Rows left out by
    choice (duplicates, caps, lengths) are no faults.
    """
    recipe = _of_file(what, overrides) if what.endswith(_FILES) else load_recipe(what, overrides)
    info = target_info(recipe.target)
    findings = audit(info.tokenizer, info.eos_ids, recipe.target.template_options)
    for line in findings:
        console.print(Text("note  ", style="yellow").append(line, style="default"))
    prepared = prepare_recipe(recipe, info, console)
    for row in _chosen(prepared, shown):
        _show(prepared.prompt(row), prepared.ids(row), recipe, info, console)
    faults = sum(section["unusable"] for section in prepared.counts["sections"])
    faults -= sum(r["rows"] for r in prepared.counts["reasons"] if r["reason"].startswith(_LONG))
    if faults:
        console.print(f"{faults} rows are faulty", style="red")
    wrong_mode = any(prepared.rows["given"]) and any(_MODE in line for line in findings)
    if wrong_mode:
        console.print("given replies are not what the target would say: see the notes", style="red")
    return int(faults > 0 or wrong_mode)


def _of_file(path: str, overrides: Sequence[str]) -> Recipe:
    """The demo's recipe with this file as its first and only domain; replies it holds are given."""
    recipe = load_recipe("demo", overrides)
    name = Path(path).name.partition(".")[0]
    section = replace(recipe.domains[0], name=name, source=path, holdout=0.0)
    given = replace(recipe.collect, replies="given")
    holds = any(isinstance(row, Prompt) for row in read_prompts(section, given))
    return replace(recipe, domains=(section,), collect=given if holds else recipe.collect)


def _chosen(prepared: Prepared, shown: int) -> list[int]:
    """Places of the rows to show, spread over all of them."""
    step = max(1, len(prepared) // max(1, shown))
    return list(range(0, len(prepared), step))[:shown]


def _show(
    prompt: Prompt, ids: tuple[int, ...], recipe: Recipe, info: TargetInfo, console: Console
) -> None:
    options = recipe.target.template_options
    limit = longest_conversation(info.max_positions, recipe.collect)
    if prompt.given:
        turns = given_turns(info.tokenizer, prompt, info.eos_ids, limit, options)
    else:
        turns = [Turn(0, ids, (), "")]
    for turn in turns:
        tokens, supervised = len(turn.prompt) + len(turn.reply), len(turn.reply)
        told = f"{supervised} supervised" if prompt.given else "then the target's own reply"
        title = f"{prompt.source}:{prompt.line} [{prompt.domain}] {tokens} tokens, {told}"
        console.print(Text(title, style="bold"))
        console.print(coloured(info.tokenizer, turn))
