"""Greedy streams on a real target against transformers' own `generate`, token by token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from ..data.gather import Request
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from .decode import DecodeSettings, decode
from .lossless import greedy_equality
from .rows import Output
from .tree import TreeShape

_WIDTH = 3  # of the trees at each depth


@dataclass(frozen=True)
class Reference:
    """What `generate` says, by prompt id."""

    ids: dict[str, list[int]]
    """Greedy replies, an end token included."""
    margins: dict[str, list[float]]
    """By how much the best logit exceeded the second at each token."""


@torch.inference_mode()
def references(target: Target, requests: Sequence[Request], tokens: int) -> Reference:
    """Greedy replies of at most `tokens` tokens, one prompt at a time.

    Only transformers' code runs if nothing in the model was replaced before (`load_target` with
    `few_rows=False`). What the checkpoint's own settings would change (penalties, sampling) is off.
    """
    model: Any = target.model
    own, model.generation_config = model.generation_config, GenerationConfig()
    found = Reference({}, {})
    try:
        for request in requests:
            ids = torch.tensor([request.ids], device=target.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(target.eos_ids) or None,
                pad_token_id=next(iter(target.eos_ids), 0),
                return_dict_in_generate=True,
                output_logits=True,
            )
            top = torch.cat(out.logits).topk(2).values  # [n, 2]
            found.ids[request.prompt_id] = out.sequences[0, ids.shape[1] :].tolist()
            found.margins[request.prompt_id] = (top[:, 0] - top[:, 1]).tolist()
    finally:
        model.generation_config = own
    return found


def ways(tokens: int, num_draft_tokens: int) -> dict[str, DecodeSettings]:
    """What is compared, by name: replies of `tokens`, chains and trees of `num_draft_tokens`."""
    shape = TreeShape(_WIDTH, num_draft_tokens, 2 * _WIDTH * num_draft_tokens)
    return {
        "plain": DecodeSettings(tokens, 0),
        "chain": DecodeSettings(tokens, num_draft_tokens),
        "tree": DecodeSettings(tokens, num_draft_tokens, tree=shape),
    }


def compared(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    reference: Reference,
    settings: Mapping[str, DecodeSettings],
    batch: int,
    near_tie: float,
) -> Iterator[dict[str, Any]]:
    """`greedy_equality` of every way, one prompt at a time and up to `batch` at once, ragged.

    With it what was drafted and accepted: without accepted tokens little was put to the test.
    """
    greedy = [replace(request, law=Law(0.0)) for request in requests]
    for name, how in settings.items():
        for rows in dict.fromkeys((1, min(batch, len(greedy)))):
            outputs: list[Output] = []
            for start in range(0, len(greedy), rows):
                outputs += decode(target, greedy[start : start + rows], how, drafter)
            said = {r.prompt_id: o.ids for r, o in zip(greedy, outputs, strict=True)}
            rounds = [r for o in outputs for r in o.rounds]
            yield {
                "way": name,
                "rows": rows,
                "drafted": sum(d for d, _ in rounds),
                "accepted": sum(a for _, a in rounds),
                **greedy_equality(said, reference.ids, reference.margins, near_tie),
            }
