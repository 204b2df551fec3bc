"""Conversations of several replies: the target's own words become part of the next prompt."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chat import render_prompt
from .gather import Request
from .plan import Ask
from .prepare import Prepared
from .prompts import Prompt
from .records import Record, request_seed
from .replies import control_tokens
from .warp import Law


@dataclass
class Conversations:
    """First requests, and what follows each reply; a conversation ends where its text runs out.

    limit: most tokens a prompt may have; cut_ends: whether a reply cut by length is the last.
    """

    prepared: Prepared
    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]
    seed: int
    limit: int
    cut_ends: bool
    _open: dict[tuple[str, Law], tuple[Prompt, list[str]]] = field(default_factory=dict)

    def first(self, ask: Ask) -> Request:
        """The request that opens a conversation."""
        self._open[ask.prompt_id, ask.law] = self.prepared.prompt(ask.row), []
        (request,) = opening_requests(self.prepared, [ask])
        return request

    def after(self, record: Record) -> Request | None:
        """The request of the next turn with all replies so far in their places, or None.

        None too where the next prompt would not fit, and where a reply spells a control token,
        which the template would turn into a real one.
        """
        prompt, said = self._open[record.prompt_id, record.law]
        turn = record.turn + 1
        if turn == len(prompt.turns) or (self.cut_ends and record.finish == "length"):
            return None
        said.append(self._text(record))
        if any(token in said[-1] for token in control_tokens(self.tokenizer)):
            return None
        messages = [dict(message) for message in prompt.messages[: prompt.turns[turn]]]
        for place, text in zip(prompt.turns, said, strict=False):
            messages[place]["content"] = text
        ids = tuple(
            render_prompt(self.tokenizer, messages, prompt.kind, prompt.tools, self.options)
        )
        if len(ids) > self.limit:
            return None
        seed = request_seed(self.seed, record.prompt_id, record.law, turn)
        return Request(
            record.prompt_id, record.domain, record.split, ids, record.law, seed, turn=turn
        )

    def _text(self, record: Record) -> str:
        """What was said, without a character that was cut in two."""
        text = self.tokenizer.decode(
            record.reply.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text).rstrip("\ufffd") if record.finish == "length" else str(text)


def opening_requests(prepared: Prepared, asks: Iterable[Ask]) -> list[Request]:
    """The first request of each conversation that the target is to answer, in their order."""
    return [
        Request(a.prompt_id, a.domain, a.split, prepared.ids(a.row), a.law, a.seed)
        for a in asks
        if a.origin == "target"
    ]
