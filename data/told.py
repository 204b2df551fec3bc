"""From what a server tells of a reply to a record: its tokens, how it ended, its distributions."""

import logging
import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ..configs.errors import UserError
from .dialects import Query, Row, Told
from .records import Record, Top
from .warp import Law

LOG = logging.getLogger(__name__)

MASS_ERROR = 1e-3
"""By how much the told probabilities may add to more than 1: servers round, some to bfloat16."""


class Reader:
    """Reads replies for one target."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.tokenizer = tokenizer
        self.added = tokenizer.added_tokens_decoder
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = vocab_size
        self._warned: set[str] = set()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as it is, without a start token."""
        return [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]

    def record(self, query: Query, told: Told, address: str, of_law: bool) -> Record:
        """The record of a reply. of_law: told log-probabilities are of the law's temperature.

        Raises `UserError` for an empty reply, for tokens that the target does not have and for
        numbers that are no log-probabilities.
        """
        request, law = query.request, query.request.law
        reply, finish = self._reply(told, address)
        if len(reply) > query.max_new_tokens:  # as tokenised again it can be longer
            reply, finish = reply[: query.max_new_tokens], "length"
        if not reply or max(reply) >= self.vocab_size:
            raise UserError(
                f"{address} answers prompt {request.prompt_id} with the tokens {reply}, but a "
                f"reply has at least one, and all of them are below {self.vocab_size}"
            )
        top = None
        if query.top:
            width = min(query.top, self.vocab_size)
            temperature = law.temperature if of_law and law.temperature else 1.0
            top = top_of_rows(told.top or [], reply, width, self.vocab_size, law, temperature)
        return Record(
            prompt_id=request.prompt_id,
            domain=request.domain,
            split=request.split,
            law=law,
            seed=request.seed,
            finish=finish,
            ids=torch.tensor([*request.ids, *reply]),
            prompt_len=len(request.ids),
            states=None,
            turn=request.turn,
            top=top,
            exact=told.ids is not None,
        )

    def _reply(self, told: Told, address: str) -> tuple[list[int], str]:
        """Tokens of a reply, with its end token where it ended, and how it finished."""
        stopped = told.finish == "stop"
        ids = told.ids
        if ids is None:
            self._warn(
                f"{address} tells replies as text only: they are tokenised again, and as they need "
                "not be the tokens that were drawn, they count as samples of no law"
            )
            # A reply cut within a character ends in a stand-in that was never said.
            ids = self.encode(told.text if stopped else told.text.rstrip("\ufffd"))
        for place, token in enumerate(ids):
            if token in self.eos_ids:
                return ids[: place + 1], "stop"
        if not stopped:
            return ids, "length"
        last = self.added.get(ids[-1]) if ids else None
        if not self.eos_ids or (last is not None and last.special):
            self._warn(
                f"{address} ends replies at {last or 'tokens of its own'}, which is no end token "
                "of the target: they count as cut by length"
            )
            return ids, "length"
        own = self.tokenizer.eos_token_id
        end = own if own in self.eos_ids else self.eos_ids[0]
        return [*ids, end], "stop"  # some servers keep the end token to themselves

    def _warn(self, text: str) -> None:
        """Say it once."""
        if text not in self._warned:
            self._warned.add(text)
            LOG.warning("%s", text)


def top_of_rows(
    rows: Sequence[Row],
    reply: Sequence[int],
    width: int,
    vocab_size: int,
    law: Law,
    temperature: float,
) -> Top:
    """What was told of the distributions of `reply`, `[R, width]` or narrower if no row has more.

    A position of which nothing was told, as is the end token of some servers, has -1 and -inf.
    Under the greedy law the drawn token comes first, also where another is as probable.
    Raises `UserError` for numbers that cannot be log-probabilities.
    """
    most = max((len(row) for row in rows), default=0)
    pad = [(-1, -math.inf)]
    padded = [[*row, *pad * (most - len(row))] for row in rows[: len(reply)]]
    padded += [pad * most] * (len(reply) - len(padded))
    pairs = torch.tensor(padded, dtype=torch.float64).reshape(len(reply), most, 2)  # [R, W, 2]
    ids, log_probs = pairs[..., 0].long(), pairs[..., 1]  # [R, W] each
    log_probs = log_probs.masked_fill(ids >= vocab_size, -math.inf)
    mass = log_probs.exp().sum(-1)  # [R]
    if not (mass <= 1 + MASS_ERROR).all():
        raise UserError(
            f"a server tells log-probabilities whose mass is {float(mass.max()):.4g}, more than 1; "
            "vLLM needs --logprobs-mode raw_logprobs"
        )
    rank = log_probs
    if law.temperature == 0:
        drawn = ids == torch.tensor(reply)[:, None]  # [R, W]
        rank = log_probs + 1e-6 * drawn
    order = rank.argsort(dim=-1, descending=True, stable=True)[:, :width]  # [R, K]
    best, ids = log_probs.gather(-1, order), ids.gather(-1, order)
    return Top(ids.masked_fill(best == -math.inf, -1).int(), best.float(), temperature)
