"""Tiny targets without a folder, drafters that follow a script, drafters that are watched."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from draftsmith.data.gather import Request
from draftsmith.data.rules import Processor, Rules
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalDrafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter

Words = tuple[int, ...]


def ask(ids: Sequence[int], law: Law = Law(0.0), seed: int = 0, **more: Any) -> Request:  # noqa: B008
    return Request(f"p{seed}", "x", "heldout", tuple(ids), law, seed, **more)


def numbers(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the words "0" to f"{size - 1}"."""
    words = {f"{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0"))
    )


def new_target(
    config: PreTrainedConfig,
    seed: int = 3,
    words: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Target:
    """A random model with noise on every vector; knows `words` tokens, or one for each row."""
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    size = words or int(config.vocab_size)
    return Target(model, numbers(size), {"name": "tiny"}, (), size)


def tiny_llama(size: int, **changes: Any) -> LlamaConfig:
    """Two layers over `size` tokens; far from uniform, so that greedy choices are no near-ties."""
    config: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**config, **changes})


def copy_of(target: Target, noise: float = 0.0) -> CausalDrafter:
    """The target as its own draft LM, every weight off by some noise."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return CausalDrafter(model, None).eval()


def head_of(target: Target) -> Eagle3Drafter:
    """An untrained head that proposes every token."""
    ids = torch.arange(target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        config = Eagle3Config(draft_vocab_size=len(ids))
        return Eagle3Drafter.from_target(target, config, ids).to(target.dtype).eval()


@torch.no_grad()
def choices(target: Target, request: Request, reply: Sequence[int]) -> list[int]:
    """The token that the target's one uncached pass prefers at each place of a reply.

    A reply is greedy exactly if it is these. The request's rules are applied.
    """
    history = [*request.ids, *reply]
    logits = target.model(input_ids=torch.tensor([history[:-1]]), use_cache=False).logits[0]
    logits = logits[len(request.ids) - 1 :, : target.vocab_size]  # [R, V]
    if request.rules != Rules():
        rules = Processor(
            request.rules, len(request.ids), target.eos_ids, target.tokenizer, target.vocab_size
        )
        ends = range(len(request.ids), len(history))
        logits = torch.stack([rules(history[:n], row) for n, row in zip(ends, logits, strict=True)])
    best: list[int] = logits.argmax(-1).tolist()
    return best


@dataclass
class Texts:
    """What a drafter has been told: each row's committed text, and the paths to what was fed."""

    rows: list[Words] = field(default_factory=list)
    paths: list[list[Words]] = field(default_factory=list)

    def prefill(self, ids: Tensor, lengths: Sequence[int]) -> None:
        self.rows = [tuple(row[:n]) for row, n in zip(ids.tolist(), lengths, strict=True)]

    def commit(self, tokens: Tensor, counts: Sequence[int]) -> None:
        new = [tuple(row[:n]) for row, n in zip(tokens.tolist(), counts, strict=True)]
        self.rows = [old + more for old, more in zip(self.rows, new, strict=True)]

    def begin(self) -> None:
        self.paths = [[] for _ in self.rows]

    def extend(self, tokens: Tensor, parents: Tensor | None) -> list[list[Words]]:
        """Paths to the tokens fed now, by row."""
        fed = len(self.paths[0])
        if parents is None:
            parents = torch.full_like(tokens, fed - 1)
        for known, ids, above in zip(self.paths, tokens.tolist(), parents.tolist(), strict=True):
            known += [(*(known[a] if a >= 0 else ()), t) for a, t in zip(above, ids, strict=True)]
        return [known[fed:] for known in self.paths]

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[r] for r in rows]


class Scripted:
    """Proposes by `say(text, drafted so far) -> logits [V]`; all -inf has nothing to propose."""

    family, taps, one_pass, draft_ids, max_positions = "scripted", (), True, None, None
    max_draft_tokens: int | None = None

    def __init__(self, say: Callable[[Words, Words], Tensor], may_abstain: bool = False):
        self.say, self.may_abstain = say, may_abstain

    def start(self, rows: int, capacity: int) -> Texts:
        return Texts()

    def prefill(self, state: Texts, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        state.prefill(ids, lengths)

    def commit(
        self, state: Texts, tokens: Tensor, counts: Sequence[int], *rest: Tensor | None
    ) -> None:
        state.commit(tokens, counts)

    def first(self, state: Texts) -> Tensor:
        state.begin()
        return torch.stack([self.say(text, ()) for text in state.rows])

    def extend(self, state: Texts, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        paths = zip(state.rows, state.extend(tokens, parents), strict=True)
        return torch.stack([torch.stack([self.say(text, x) for x in new]) for text, new in paths])


@dataclass
class _Seen:
    """The watched drafter's own state, and what it has been told."""

    inner: Any
    texts: Texts

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)
        self.texts.select(rows)


class Watched:
    """A drafter that keeps (committed text, drafted path, logits) of all that it was asked."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.said: list[tuple[Words, Words, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def start(self, rows: int, capacity: int) -> _Seen:
        return _Seen(self.drafter.start(rows, capacity), Texts())

    def prefill(self, state: _Seen, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        self.drafter.prefill(state.inner, ids, lengths, taps)
        state.texts.prefill(ids, lengths)

    def commit(
        self, state: _Seen, tokens: Tensor, counts: Sequence[int], *rest: Tensor | None
    ) -> None:
        self.drafter.commit(state.inner, tokens, counts, *rest)  # type: ignore[arg-type]
        state.texts.commit(tokens, counts)

    def first(self, state: _Seen) -> Tensor:
        logits = self.drafter.first(state.inner)
        state.texts.begin()
        self.said += [(text, (), row) for text, row in zip(state.texts.rows, logits, strict=True)]
        return logits

    def extend(self, state: _Seen, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        logits = self.drafter.extend(state.inner, tokens, parents)
        paths = zip(state.texts.rows, state.texts.extend(tokens, parents), logits, strict=True)
        for text, new, rows in paths:
            self.said += [(text, path, row) for path, row in zip(new, rows, strict=True)]
        return logits
