"""A batch's conversations for people: what of them is supervised, and which made a step fail."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path

from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.audit import coloured
from ..data.files import whole_folder, write_json
from ..data.replies import Turn
from ..drafters.base import TrainBatch


@dataclass(frozen=True)
class _Row:
    """One conversation of a batch; finite: whether the target's states of it are."""

    key: str
    domain: str
    finite: bool
    prompt: tuple[int, ...]
    reply: tuple[int, ...]


def describe_batch(
    batch: TrainBatch, tokenizer: PreTrainedTokenizerBase, domains: Sequence[str]
) -> Text:
    """Key, domain, counts and text of each conversation, its supervised part in ⟦ ⟧.

    A reply's first token is not supervised: it comes from prefill and is never drafted.
    """
    text = Text()
    for row in _rows(batch, domains):
        before, after = (*row.prompt, *row.reply[:1]), row.reply[1:]
        counts = f"{len(before) + len(after)} tokens, {len(after)} supervised"
        text.append(f"{row.key} [{row.domain}] {counts}\n", "bold")
        text.append_text(coloured(tokenizer, Turn(0, before, (), "")))
        text.append("⟦")
        text.append_text(coloured(tokenizer, Turn(0, (), after, "")))
        text.append("⟧\n")
    return text


def save_fault(
    folder: Path,
    step: int,
    batches: Sequence[TrainBatch],
    losses: Sequence[float],
    norm: float | None,
    domains: Sequence[str],
) -> Path:
    """Keep the batches that an optimiser step failed on; returns the folder made in `folder`.

    `losses` are those of the first batches, as many as were reached; `norm` is the gradient's, if
    it came so far. rows.json names the conversations of each batch whose loss is not finite, or of
    all if every loss is; batch-N.safetensors holds such a batch's tensors.
    """
    path = folder / f"fault-step-{step}"
    reached = range(len(losses))
    faulty = [n for n in reached if not isfinite(losses[n])] or reached
    told = []
    with whole_folder(path) as part:
        for n in faulty:
            save_file(_tensors(batches[n]), part / f"batch-{n}.safetensors")
            rows = [asdict(row) for row in _rows(batches[n], domains)]
            told.append({"batch": n, "loss": _number(losses[n]), "rows": rows})
        found = None if norm is None else _number(norm)
        write_json(part / "rows.json", {"step": step, "gradient_norm": found, "batches": told})
    return path


def _rows(batch: TrainBatch, domains: Sequence[str]) -> Iterator[_Row]:
    states = [x for x in (batch.hidden, batch.log_z) if x is not None]
    for c in range(len(batch.lengths)):
        begin, first = int(batch.begin[c]), int(batch.first[c])
        length, prompt_len = int(batch.lengths[c]), int(batch.prompt_lens[c])
        ids = batch.ids[batch.row[c], begin : begin + length].tolist()
        own = [batch.taps[batch.row[c], begin : begin + length - 1]]
        own += [x[first : first + length - prompt_len] for x in states]
        yield _Row(
            key=batch.keys[c] if batch.keys else f"conversation {c}",
            domain=domains[int(batch.domain[first])],
            finite=all(bool(x.isfinite().all()) for x in own),
            prompt=tuple(ids[:prompt_len]),
            reply=tuple(ids[prompt_len:]),
        )


def _tensors(batch: TrainBatch) -> dict[str, Tensor]:
    """A batch's tensors by field, each of its own storage as safetensors needs it."""
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if batch.top is not None:
        found |= {"top.ids": batch.top.ids, "top.log_probs": batch.top.log_probs}
    return {
        name: value.detach().cpu().contiguous().clone()
        for name, value in found.items()
        if isinstance(value, Tensor)
    }


def _number(value: float) -> float | str:
    """JSON has no word for what is not finite."""
    return value if isfinite(value) else str(value)
