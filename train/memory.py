"""What training takes of a device's memory, from shapes: exact but for a batch's activations."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..configs.training import TrainSection
from ..data.target import Target
from ..drafters.base import Drafter
from ..drafters.dflash_layer import PLACES
from ..drafters.distribution import DraftVocabularyP
from .chunks import rows_of_a_block
from .distributed import TargetUse

_ALIVE = 16  # blocks of [tokens, V] at a time
_MOMENT = {"adamw": 4.0, "adamw_8bit": 1.02}  # bytes of each of a weight's two moments
_UNEVEN = 1.1  # packed rows hold replies of about the same length together
_IN_LOW_PRECISION = 0.75  # of activations: norms keep what they read in float32


@dataclass(frozen=True)
class Extents:
    """A batch as a device lays it out: rows of `width` tokens, one conversation each or packed.

    late: tokens of all rows that unrolled steps after the first compute; rounds: places of all rows
    for tokens that a round begins behind; scored: tokens that each step predicts.
    """

    rows: int
    width: int
    packed: bool
    late: float
    rounds: float
    scored: tuple[int, ...]


def extents(lengths: Sequence[int], prompts: Sequence[int], steps: int, packed: bool) -> Extents:
    """Of conversations of these lengths and prompts, padded or packed into rows of the longest."""
    scored = tuple(
        sum(max(0, n - p - 1 - k) for n, p in zip(lengths, prompts, strict=True))
        for k in range(steps)
    )
    width = max(lengths)
    if packed:
        late = _UNEVEN * (sum(lengths) - sum(prompts))
        return Extents(-(-sum(lengths) // width), width, True, late, late, scored)
    rows = len(lengths)
    longest = max(n - p - 1 for n, p in zip(lengths, prompts, strict=True))
    late = rows * (width - min(prompts))
    return Extents(rows, width, False, late, rows * max(1, longest), scored)


def weights(drafter: Drafter) -> tuple[int, int]:
    """A drafter's parameters: those that are trained, and frozen ones."""
    assert isinstance(drafter, nn.Module)
    trained = sum(p.numel() for p in drafter.trainable())
    return trained, sum(p.numel() for p in drafter.parameters()) - trained


def memory(
    drafter: Drafter,
    target: Target,
    use: TargetUse,
    section: TrainSection,
    batch: Extents,
    p: DraftVocabularyP,
    low_precision: bool,
    world: int,
) -> dict[str, float]:
    """Bytes on each of `world` devices, by what takes them."""
    trained, frozen = weights(drafter)
    parts = _split(world)
    found = {
        "weights": 4.0 * (trained + frozen) / parts["weights"],
        "gradients": 4.0 * trained / parts["gradients"],
        "optimiser": 2 * _MOMENT[section.optimizer] * trained / parts["optimiser"],
        "moving average": 4.0 * (trained + frozen) if section.ema else 0.0,
        "target": _target_bytes(target, use, world),
        "activations": activations(drafter, batch, section.gradient_checkpointing)
        * (_IN_LOW_PRECISION if low_precision else 1.0),
        "head": _head_bytes(drafter, batch, p),
    }
    if world > 1 and parts["gradients"] == 1:
        found["gradients"] *= 2  # what is sent lies in buckets
    if low_precision:
        found["weights"] *= 1.5
    return {name: size for name, size in found.items() if size}


def _split(world: int) -> dict[str, int]:
    """Among how many processes each part is spread, as `accelerate launch` was told."""
    stage = 0
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        stage = 3
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    least = {"optimiser": 1, "gradients": 2, "weights": 3}
    return {part: world if stage >= needed else 1 for part, needed in least.items()}


def _target_bytes(target: Target, use: TargetUse, world: int) -> float:
    every = {id(t): t.numel() * t.element_size() for t in target.model.parameters()}
    if use == "replicated":
        return float(sum(every.values()))
    outside = {id(t) for t in target.headonly().model.parameters()}
    whole = sum(size for key, size in every.items() if key in outside)
    return whole + ((sum(every.values()) - whole) / world if use == "sharded" else 0.0)


def _head_bytes(drafter: Drafter, batch: Extents, p: DraftVocabularyP) -> float:
    """Blocks of logits and probabilities, and the rows of the target's head that p is formed by."""
    size = drafter.head_rows()[0].shape[0]
    widest = max(size, p.width)
    rows = min(rows_of_a_block(widest), batch.scored[0])
    own = p.target.head.weight
    gathered = size * own.shape[1] * own.element_size() if p.width == size else 0
    return _ALIVE * 4.0 * rows * widest + gathered


def activations(drafter: Drafter, batch: Extents, again: bool) -> float:
    """Bytes in float32 that a batch takes on its way forward and back.

    again: whether the inside of layers is computed again.
    """
    kept, inside = saved(drafter, batch, again)
    width = drafter.head_rows()[0].shape[1]
    given = width * (batch.rows * batch.width + 2 * sum(batch.scored))  # embeddings, head inputs
    gradients = max(inside) / 2
    return 4.0 * (kept + (max(inside) if again else sum(inside)) + given + gradients)


def saved(drafter: Drafter, batch: Extents, again: bool) -> tuple[float, list[float]]:
    """Numbers that autograd saves in any case, and those inside of each layer.

    An unrolled step counts as a layer. Norms keep what they read and what they scale, products what
    they read, attention its queries, keys, values, mask and result.
    """
    return _SAVED[drafter.family](drafter, batch, again)


def _of_head(drafter: Any, batch: Extents, again: bool) -> tuple[float, list[float]]:
    config, attention = drafter.config, drafter.midlayer.self_attn
    h, i = config.hidden_size, config.intermediate_size
    q, kv = attention.heads * attention.d, 2 * attention.kv_heads * attention.d
    read, late, count = batch.rows * (batch.width - 1), batch.late, len(drafter.layers)
    kept, inside = 1.0 * read * drafter.fc.in_features, []
    each = 2 * h if drafter.head_down is None else 3 * h
    for k, scored in enumerate(batch.scored):
        pairs, seen = late if k else read, read + k * late
        given = count * kv if again and k + 1 < len(batch.scored) else 0  # to later steps
        kept += pairs * (h + given) + scored * each
        step = pairs * h  # the embedding's, which only the first layer reads
        for layer in range(count):
            out = late if layer + 1 == count else pairs
            mask = out * seen / batch.rows / (1 if batch.packed else batch.rows)
            step += pairs * (3 * h + q) + seen * kv + mask + out * (q + 3 * h + 4 * i)
        inside.append(step)
    return kept, inside


def _of_text(drafter: Any, batch: Extents, again: bool) -> tuple[float, list[float]]:
    text = drafter.body.config.get_text_config(decoder=True)
    h, count = text.hidden_size, text.num_hidden_layers
    i = getattr(text, "intermediate_size", None) or 4 * h
    d = getattr(text, "head_dim", None) or h // text.num_attention_heads
    q = text.num_attention_heads * d
    kv = 2 * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * d
    read = batch.rows * (batch.width - 1)
    layer = read * (7 * h + 2 * q + kv + 4 * i)
    if drafter.body.config._attn_implementation == "eager":
        layer += 3 * text.num_attention_heads * read * batch.width
    return read * (2 + (count if again else 0)) * h, [layer] * count


def _of_medusa(drafter: Any, batch: Extents, again: bool) -> tuple[float, list[float]]:
    layers = drafter.options["num_layers"]
    inside = [(2.0 * layers - 1) * drafter.width * scored for scored in batch.scored]
    return 1.0 * drafter.width * sum(batch.scored), inside


def _of_mlp(drafter: Any, batch: Extents, again: bool) -> tuple[float, list[float]]:
    rounds, later = batch.scored[0], len(batch.scored) - 1
    kept = rounds * (drafter.width + later * drafter.inner_dim)
    return 1.0 * kept, [3.0 * rounds * drafter.inner_dim] * (later + 1)


def _of_jump(drafter: Any, batch: Extents, again: bool) -> tuple[float, list[float]]:
    span = drafter.span
    h, text = span.target.hidden_size, span.target.text_config
    d = getattr(text, "head_dim", None) or h // text.num_attention_heads
    q = text.num_attention_heads * d
    kv = 2 * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * d
    i = getattr(text, "intermediate_size", None) or 4 * h
    read, late, count = batch.rows * (batch.width - 1), batch.late, len(span.layers)
    kept, inside = 2.0 * h * sum(batch.scored), []
    if again:  # what each step is given: states, and keys and values of those before
        kept += late * h if batch.packed else read * 2 * h  # copied there, a view of taps here
        kept += read * kv * count + (len(batch.scored) - 1) * late * (h + kv * count)
    predictor = 4 * h + len(drafter.blocks) * (3 * h + 4 * drafter.hidden)
    for k in range(len(batch.scored)):
        seen = read + (k + 1) * late
        mask = late * seen / batch.rows / (1 if batch.packed else batch.rows)
        layer = late * (2 * h + 3 * i + 2 * q) + seen * 2 * q + mask  # weights are frozen
        inside.append(late * (predictor + (h if k else 0)) + count * layer)
    return kept, inside


def _of_block(drafter: Any, batch: Extents, again: bool) -> tuple[float, list[float]]:
    config, attention, size = drafter.config, drafter.layers[0].self_attn, drafter.block_size
    h, d, i = config.hidden_size, attention.d, config.intermediate_size
    q, kv = attention.q_proj.out_features, 2 * attention.k_proj.out_features
    read, places = batch.rows * (batch.width - 1), batch.rounds * size
    together = max(1, PLACES // size) * size
    groups = max(1.0, places / batch.rows / together)
    together = min(together, places / batch.rows)
    keys = groups * read * kv + places * kv
    mask = places * (read / batch.rows + together)
    layer = places * (6 * h + 4 * q + kv + 4 * i) + read * kv + keys + mask
    corrected = 0 if drafter.correction is None else 7.5 * h
    kept = read * (len(drafter.taps) + 3) * h + sum(batch.scored) * (2 * h + corrected)
    kept += len(drafter.layers) * places * h if again else 2 * d * (read + places)
    return kept, [layer] * len(drafter.layers)


_SAVED: dict[str, Callable[[Any, Extents, bool], tuple[float, list[float]]]] = {
    "eagle3": _of_head,
    "causal": _of_text,
    "dflash": _of_block,
    "jump": _of_jump,
    "medusa": _of_medusa,
    "mlp": _of_mlp,
}
"""By family, what `saved` tells."""
