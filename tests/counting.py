"""A target that counts, drafters that follow a table, and small worlds of them, known by hand.

Behind token t the target says t + 1, so that a reply is where it begins and where it ends. A
script lists how many drafted tokens each round of a reply accepts, which fixes all of its rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, Words, new_target, tiny_llama
from torch import Tensor
from worlds import World

from draftsmith.configs.collection import CollectSection
from draftsmith.configs.recipe import EvalSection, LawSection, Recipe, ServingSection
from draftsmith.data.collection import collect_settings
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter, Step, TrainBatch
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.lookup import NOTHING, LookupConfig, LookupDrafter

_KNOWN: dict[str, Any] = {
    **{"name": "counting", "revision": None, "quantisation": None, "dtype": "float32"},
    **{"parameters": 1, "weights": "c0", "tokenizer": "c1", "rules": "c2", "template": "c3"},
}


def counting_target(size: int, ends: Sequence[int] = ()) -> Target:
    """Says t + 1 behind token t of `size`, whatever came before it; `ends` end its replies."""
    config = tiny_llama(
        size, hidden_size=64, num_hidden_layers=1, max_position_embeddings=1024,
        tie_word_embeddings=False,
    )  # fmt: skip
    target = new_target(config)
    layer: Any = target.layers[0]
    generator = torch.Generator().manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(size, 64, generator=generator), dim=-1)
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        target.model.model.norm.weight.fill_(1.0)
        target.embedding.copy_(codes)
        target.head.weight.copy_(5.0 * codes.roll(1, 0))
    target.provenance = {**_KNOWN, "vocab_size": size}
    target.eos_ids = tuple(ends)
    return target


class Table(Scripted, LookupDrafter):  # type: ignore[misc]
    """Proposes `table[t]` behind token t, and nothing behind a token that is not in the table.

    Behind those in `unsure` its softmax gives the proposal little; elsewhere all.
    """

    def __init__(self, size: int, table: Mapping[int, int], unsure: Sequence[int] = ()):
        LookupDrafter.__init__(self, LookupConfig(), size)
        Scripted.__init__(self, self._say, may_abstain=True)
        self.table, self.unsure = dict(table), frozenset(unsure)

    def _say(self, text: Words, drafted: Words) -> Tensor:
        last = (*text, *drafted)[-1]
        logits = torch.full((len(self.every),), 0.0 if last in self.unsure else -torch.inf)
        if last in self.table:
            logits[self.table[last]] = 1.0
        return logits

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        proposed, token = [], []
        rows = batch.ids.tolist()
        each = (batch.row, batch.begin, batch.lengths, batch.prompt_lens, batch.first)
        for row, begin, length, prompt, first in zip(*(t.tolist() for t in each), strict=True):
            own = rows[row][begin : begin + length]
            for place, (before, _) in enumerate(pairwise(own), start=1):
                if place > prompt:
                    proposed.append(self.table.get(before, NOTHING))
                    token.append(first + place - prompt)
        return [Step(torch.tensor(proposed, dtype=torch.float64)[:, None], torch.tensor(token))]


@dataclass(frozen=True)
class Scripts:
    """Replies laid out one behind the other in a vocabulary, by the rounds that they take."""

    gamma: int
    starts: list[int] = field(default_factory=list)
    """Each reply's prompt, of one token."""
    ends: list[int] = field(default_factory=list)
    """Each reply's last token, which ends it."""
    wrong: set[int] = field(default_factory=set)
    """Tokens that the drafter does not see coming."""

    def add(self, accepted: Sequence[int]) -> None:
        """A reply whose rounds accept these numbers of drafted tokens: Σ (a + 1) behind its first
        one."""
        self.starts.append(self.size - 1)
        last = self.size
        for count in accepted:
            last += count + 1
            if count < self.gamma:
                self.wrong.add(last)
        self.ends.append(last)

    @property
    def size(self) -> int:
        """Tokens so far, one further one included that begins the next reply."""
        return self.ends[-1] + 2 if self.ends else 1

    def table(self, size: int) -> dict[int, int]:
        """What the drafter proposes: the next token, or the last of `size` where it is wrong,
        behind which it proposes the same again."""
        return {t: t + 1 if t + 1 not in self.wrong else size - 1 for t in range(size - 1)} | {
            size - 1: size - 1
        }


def counting_world(
    folder: Path,
    prompts: Mapping[str, Sequence[int]],
    target: Target,
    drafter: Drafter,
    limit: int,
    **serving: Any,
) -> World:
    """Prompts of one token each, by domain, answered at T = 0 in up to `limit` tokens."""
    recipe = Recipe(
        name="counting",
        serving=ServingSection((LawSection(0.0),), **serving),
        collect=CollectSection(temperatures=(0.0,), max_new_tokens=limit),
        eval=EvalSection(
            sweep=(1, 2), decode_batch=8, timing_prompts=0, timing_tokens=20, bootstrap=100,
            calibration_prompts=2, parity_replies=0,
        ),
    )  # fmt: skip
    requests = [
        Request(f"p{first}", domain, "heldout", (first,), Law(0.0), first)
        for domain, firsts in prompts.items()
        for first in firsts
    ]
    store = RecordStore.create(folder / "records", collect_settings(recipe, target, ()))
    store.add("all", answer(target, requests, GatherSettings(limit, 16, (), keep="hidden")))
    nothing = LookupDrafter(LookupConfig(), target.vocab_size)  # a folder to take the hash of
    saved = save_drafter(nothing, folder / "drafter", target, {})
    return World(recipe, target, store.finish({}), drafter, saved)


def scripted_world(
    folder: Path, gamma: int, scripts: Mapping[str, Sequence[Sequence[int]]]
) -> World:
    """By domain the scripts of its replies, drafted `gamma` tokens at a time, none cut short."""
    laid, prompts = Scripts(gamma), {}
    for domain, replies in scripts.items():
        begun = len(laid.starts)
        for accepted in replies:
            laid.add(accepted)
        prompts[domain] = laid.starts[begun:]
    size = laid.size + gamma + 2
    longest = max(end - start for start, end in zip(laid.starts, laid.ends, strict=True))
    target = counting_target(size, laid.ends)
    drafter: Any = Table(size, laid.table(size))
    limit = longest + gamma + 1
    return counting_world(folder, prompts, target, drafter, limit, num_draft_tokens=gamma)


@dataclass
class Ticks:
    """A clock that stands still but for what is said to take time, in place of the machine's."""

    time: float = 0.0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for module in ("draft", "decode", "timing", "speed"):
            patch.setattr(f"draftsmith.eval.{module}.now", lambda device: self.time)

    def charge_target(self, target: Target, step: float, further: float) -> None:
        """A pass takes `step`, and `further` for each token a row beyond the first."""

        def hook(module: Any, args: Any) -> None:
            self.time += step + further * (args[0].shape[1] - 1)

        target.layers[0].register_forward_pre_hook(hook)

    def charge_drafter(self, drafter: Any, step: float) -> None:
        """A draft step takes `step`."""
        for name in ("first", "extend"):
            setattr(drafter, name, self._taking(getattr(drafter, name), step))

    def _taking(self, call: Callable[..., Tensor], step: float) -> Callable[..., Tensor]:
        def timed(*args: Any) -> Tensor:
            self.time += step
            return call(*args)

        return timed
