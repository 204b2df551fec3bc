"""What is kept of each held-out reply: a line of counts and hashes; of a few, the reply itself."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs.recipe import Recipe
from ..train.score import expected
from .cells import Cell, Found
from .heatmap import heatmap
from .measuring import timed
from .request_rows import Expected, Overlap, RequestRow, Timed
from .rows import Output


def request_rows(recipe: Recipe, found: Found) -> list[RequestRow]:
    """The cell's decoded replies. One of a single token was never drafted and expects nothing."""
    overlaps, hoped, laps = _overlaps(found), _expected(recipe, found), _laps(recipe, found)
    rows = []
    for record, output in found.decoded:
        rows.append(
            RequestRow(
                domain=record.domain,
                law=record.law.label,
                prompt_id=record.prompt_id,
                turn=record.turn,
                key=record.key,
                seed=record.seed,
                prompt_tokens=record.prompt_len,
                prompt_sha256=_sha256(record.ids[: record.prompt_len].tolist()),
                tokens=len(output.ids),
                finish=output.finish,
                output_sha256=_sha256(output.ids),
                rounds=tuple((drafted, accepted) for drafted, accepted in output.rounds),
                overlap=overlaps.get(record.key, Overlap(0.0, 0)),
                expected=hoped.get(record.key),
                timing=laps.get(record.key),
            )
        )
    return rows


def shown_replies(
    cell: Cell, outputs: Mapping[str, Output], count: int, tokenizer: Any
) -> list[dict[str, Any]]:
    """Some decoded replies of a cell, each token with where it came from, as `heatmap` tells.

    Those that were drafted at all, in the order of their keys, which are hashes: no kind of prompt
    is favoured.
    """
    found = sorted((r for r in cell.records if r.key in outputs), key=lambda r: r.key)
    longer = [r for r in found if len(outputs[r.key].rounds) > 0]
    return [
        {
            "domain": cell.domain,
            "law": cell.law.label,
            "prompt_id": record.prompt_id,
            "pieces": heatmap(outputs[record.key].ids, outputs[record.key].rounds, tokenizer),
        }
        for record in longer[:count]
    ]


def _sha256(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def _scored(found: Found) -> list[str]:
    """Keys of the records that the cell's scores are of, in their order."""
    return [r.key for r in found.cell.records if len(r.reply) > 1]


def _overlaps(found: Found) -> dict[str, Overlap]:
    pairs = zip(_scored(found), found.scores, strict=True)
    return {key: Overlap(*conversation.overlap[0]) for key, conversation in pairs}


def _expected(recipe: Recipe, found: Found) -> dict[str, Expected]:
    served = recipe.serving
    if served.policy is not None or served.tree is not None:
        return {}
    course = expected(found.scores, served.num_draft_tokens, served.verifier)
    figures = zip(_scored(found), course.tokens.tolist(), course.rounds.tolist(), strict=True)
    return {key: Expected(tokens, rounds) for key, tokens, rounds in figures}


def _laps(recipe: Recipe, found: Found) -> dict[str, Timed]:
    if found.timing is None:
        return {}
    plain, fast = (found.timing.laps[g] for g in (0, recipe.serving.num_draft_tokens))
    trios = zip(timed(found.cell, recipe.eval), plain, fast, strict=True)
    return {r.key: Timed(p.decode, p.tokens, f.decode, f.tokens) for r, p, f in trios}
