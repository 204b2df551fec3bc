"""What training shows on its way: held-out prompts, decoded with the drafter as it stands."""

from collections.abc import Callable, Sequence
from typing import Any

from ..configs.recipe import Recipe
from ..data.gather import request_of
from ..data.records import Record
from ..data.target import Target
from ..drafters.base import Drafter
from ..eval.decode import decode
from ..eval.serving import settings


def sampler(
    recipe: Recipe, target: Target
) -> Callable[[Drafter, Sequence[Record]], list[dict[str, Any]]]:
    """A function that answers the prompts of records as they will be served, with a drafter."""
    how = settings(recipe.serving, recipe.collect.max_new_tokens)

    def run(drafter: Drafter, records: Sequence[Record]) -> list[dict[str, Any]]:
        requests = [request_of(record) for record in records]
        outputs = decode(target, requests, how, drafter)
        return [
            {
                "prompt_id": record.prompt_id,
                "domain": record.domain,
                "text": target.tokenizer.decode(output.ids),
                "tokens_per_round": (len(output.ids) - 1) / max(1, len(output.rounds)),
            }
            for record, output in zip(records, outputs, strict=True)
        ]

    return run
