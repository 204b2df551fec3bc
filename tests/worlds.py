"""A small recipe with its records and a drafter on disk, for tests of the evaluation."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.configs.recipe import LawSection, Recipe
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.drafters.base import Drafter
from draftsmith.eval.evaluate import Measured, evaluate

LIMIT = 14
GAMMA = 2
LAWS = (LawSection(0.0), LawSection(1.0), LawSection(0.7, top_k=8))


@dataclass(frozen=True)
class World:
    """A recipe, its records, and a drafter on disk."""

    recipe: Recipe
    target: Target
    store: RecordStore
    drafter: Drafter
    drafter_folder: Path

    def evaluate(
        self, folder: Path, serving: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The report, with changes to the recipe's serving and, by name, to its eval section."""
        return self.run(folder, serving, **options).report

    def run(self, folder: Path, serving: dict[str, Any] | None = None, **options: Any) -> Measured:
        """The report with all that stands beside it."""
        served = replace(self.recipe.serving, **(serving or {}))
        measured = replace(self.recipe.eval, **options)
        recipe = replace(self.recipe, eval=measured, serving=served)
        console = Console(file=io.StringIO())
        return evaluate(
            recipe, self.target, self.drafter, self.drafter_folder, self.store, folder, console
        )
