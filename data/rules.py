"""What a request asks of its tokens beyond the serving law: penalties, banned words, a grammar.

Rules come before the law: logits -> `Processor` -> `warp.log_probs`. They look at the tokens so
far, so within a drafted block each position has its own: target and draft logits go through the
same processor, with the history that ends in the draft tokens before that position. Everything
that transformers has is transformers' own, in the order of `generate`.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ..configs.errors import UserError

_GRAMMARS = ("json_schema", "regex", "lark")
_LIMIT = 2.0  # of frequency and presence penalties, in the OpenAI API and in vLLM

Step = Callable[[Any, Any], Tensor]
"""(ids [1, n], logits [1, V]) -> logits [1, V], as transformers' processors."""


@dataclass(frozen=True)
class Rules:
    """What changes the logits of a request. Two are equal exactly if they ask the same.

    Raises `UserError` for a value out of range, and for more than one grammar.
    """

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token of prompt or reply."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token stands in the reply (OpenAI API, vLLM)."""
    presence_penalty: float = 0.0
    """Subtracted if the token stands in the reply (OpenAI API, vLLM)."""
    no_repeat_ngram: int = 0
    """No n-gram of this length occurs twice in prompt and reply; 0 allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the reply may not complete."""
    logit_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    """(token sequence, bias): added to the last token's logit after the others; -inf bans it."""
    min_new_tokens: int = 0
    """The reply does not end before it has so many tokens."""
    json_schema: str | None = None
    """JSON text of a schema that the reply follows."""
    regex: str | None = None
    """Regular expression (Rust's syntax) that the whole reply matches."""
    lark: str | None = None
    """Grammar in llguidance's Lark dialect that the reply follows."""

    def __post_init__(self) -> None:
        if not 0.0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"repetition_penalty is {self.repetition_penalty}, but must be a number above 0 "
                "(1 is off)"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if not -_LIMIT <= value <= _LIMIT:
                raise UserError(f"{name} is {value}, but must be between -2 and 2 (0 is off)")
        for name in ("no_repeat_ngram", "min_new_tokens"):
            value = getattr(self, name)
            if not (0 <= value < math.inf and value == int(value)):
                raise UserError(f"{name} is {value}, but must be a whole number from 0 (off) up")
        words = tuple(_sequence("bad_words", word) for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        self._check_grammar()

    def _check_grammar(self) -> None:
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are both set, but a reply follows one grammar")
        if self.json_schema is not None:
            try:
                schema = json.loads(self.json_schema)
            except (TypeError, ValueError) as error:
                raise UserError(f"json_schema must be JSON text, but: {error}") from error
            if not isinstance(schema, dict):
                raise UserError(f"json_schema must be a JSON object, not {self.json_schema[:40]!r}")

    @property
    def any(self) -> bool:
        """Whether anything changes."""
        return self != Rules()

    @property
    def grammar(self) -> str | None:
        """Which grammar is set: "json_schema", "regex", "lark" or None."""
        return next((name for name in _GRAMMARS if getattr(self, name) is not None), None)


def _sequence(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    whole = not isinstance(ids, int | str) and all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids
    )
    if not whole or not ids:
        raise UserError(f"{name} has {ids!r}, but must list sequences of one or more token ids")
    return tuple(ids)


def _biases(
    pairs: Sequence[tuple[Sequence[int], float]],
) -> tuple[tuple[tuple[int, ...], float], ...]:
    """The pairs as tuples, without biases of 0."""
    biases: dict[tuple[int, ...], float] = {}
    for pair in pairs:
        if isinstance(pair, int | str) or len(pair) != 2:
            raise UserError(f"logit_bias has {pair!r}, but must list pairs (token ids, bias)")
        ids = _sequence("logit_bias", pair[0])
        if not isinstance(pair[1], int | float) or not -math.inf <= pair[1] < math.inf:
            raise UserError(
                f"logit_bias of {list(ids)} is {pair[1]!r}, but must be a number or -inf"
            )
        if ids in biases:
            raise UserError(f"logit_bias names the sequence {list(ids)} twice; give it one bias")
        biases[ids] = float(pair[1])
    return tuple((ids, bias) for ids, bias in biases.items() if bias)


class Processor:
    """The rules of one request, as a pure function of (history, logits).

    Any order of histories, extended, rolled back or branched, gives what a fresh one would give.

    Where the rules leave no token (a complete grammar, one that a token has left, tokens past an
    end token under a grammar, rules that contradict each other) only the end tokens remain, at the
    logits that came in: the reply is over. Where there is no end token either, the logits stay as
    they came in, so that the law downstream is finite.

    Args:
        prompt_len: tokens of the history that are the prompt.
        eos_ids: tokens that end the reply.
        tokenizer: of the target; read only for a grammar, which needs a fast one.
        vocab_size: V of the logits, that of the target.
    Raises:
        UserError: an id beyond the vocabulary, an end token as bad word, a grammar that cannot be
            read, or llguidance missing for one.
    """

    def __init__(
        self,
        rules: Rules,
        prompt_len: int,
        eos_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
    ) -> None:
        _check_ids(rules, eos_ids, vocab_size)
        self.rules = rules
        self.prompt_len = prompt_len
        self.vocab_size = vocab_size
        self.eos_ids = [i for i in eos_ids if i < vocab_size]
        self._grammar = Grammar(rules, self.eos_ids, tokenizer) if rules.grammar else None
        self._steps: dict[torch.device, list[Step]] = {}

    def __call__(self, history: Sequence[int], logits: Tensor) -> Tensor:
        """Logits `[V]` after `history` (prompt, reply so far, draft tokens) -> new ones `[V]`."""
        if logits.shape != (self.vocab_size,) or len(history) < self.prompt_len:
            raise ValueError(
                f"need logits [{self.vocab_size}] after at least {self.prompt_len} tokens, "
                f"not {list(logits.shape)} after {len(history)}"
            )
        device = logits.device
        if device not in self._steps:  # transformers' steps keep tensors on the device
            self._steps[device] = _steps(self.rules, self.prompt_len, self.eos_ids, device)
        scores = logits[None].clone()  # [1, V], as some steps return what they were given
        if self._steps[device]:
            ids = torch.tensor([list(history)], dtype=torch.long, device=device)  # [1, n]
            for step in self._steps[device]:
                scores = step(ids, scores)
        if self._grammar is not None:
            allowed = self._grammar.allowed(history[self.prompt_len :], self.vocab_size)
            scores = scores.masked_fill(~allowed.to(device), -math.inf)
        if (scores > -math.inf).any():
            return scores[0]
        return self._over(logits)

    def _over(self, logits: Tensor) -> Tensor:
        """What remains where no token is allowed: `[V] -> [V]`."""
        ends = torch.full_like(logits, -math.inf)
        ends[self.eos_ids] = logits[self.eos_ids]
        # Draft logits may lack the end tokens: a reduced vocabulary has -inf there.
        return ends if (ends > -math.inf).any() else logits.clone()


def _check_ids(rules: Rules, eos_ids: Sequence[int], vocab_size: int) -> None:
    biased = tuple(ids for ids, _ in rules.logit_bias)
    for name, sequences in (("bad_words", rules.bad_words), ("logit_bias", biased)):
        beyond = [i for ids in sequences for i in ids if i >= vocab_size]
        if beyond:
            raise UserError(
                f"{name} names token {beyond[0]}, but the target's ids are 0 to {vocab_size - 1}"
            )
    for end in eos_ids:
        if (end,) in rules.bad_words:  # transformers would drop it without a word
            raise UserError(
                f"bad_words has the end token {end}; to delay the end set min_new_tokens"
            )


def _steps(rules: Rules, prompt_len: int, eos_ids: list[int], device: torch.device) -> list[Step]:
    """In the order of `generate`; counted penalties behind the repetition penalty, as in vLLM."""
    steps: list[Step] = []
    if rules.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[list(i), b] for i, b in rules.logit_bias]))
    if rules.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(float(rules.repetition_penalty)))
    if rules.frequency_penalty or rules.presence_penalty:
        steps.append(functools.partial(_count_penalties, rules, prompt_len))
    if rules.no_repeat_ngram:
        steps.append(NoRepeatNGramLogitsProcessor(int(rules.no_repeat_ngram)))
    if rules.bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in rules.bad_words]))
    if rules.min_new_tokens and eos_ids:
        least = int(rules.min_new_tokens)
        steps.append(
            MinNewTokensLengthLogitsProcessor(prompt_len, least, eos_ids, device=str(device))
        )
    return steps


def _count_penalties(rules: Rules, prompt_len: int, ids: Tensor, scores: Tensor) -> Tensor:
    """Frequency and presence penalty over the reply: ids `[1, n]`, `[1, V] -> [1, V]`."""
    counts = ids[0, prompt_len:].bincount(minlength=scores.shape[1])  # [V]
    scores = scores - rules.frequency_penalty * counts
    return scores - rules.presence_penalty * (counts > 0)


class Grammar:
    """llguidance's matcher, brought to any reply by rolling back to what it shares with the last.

    Raises `UserError` if llguidance is missing or refuses tokenizer or grammar.
    """

    def __init__(
        self, rules: Rules, eos_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        llguidance = _llguidance()
        assert rules.grammar is not None
        text = getattr(rules, rules.grammar)
        compiled = getattr(llguidance.LLMatcher, f"grammar_from_{rules.grammar}")(text)
        self.eos_ids = list(eos_ids)
        self._matcher = llguidance.LLMatcher(_ll_tokenizer(tokenizer), compiled, log_level=0)
        self._consumed: list[int] = []
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()[0]
            raise UserError(f"{rules.grammar} cannot be read: {reason}")

    def allowed(self, reply: Sequence[int], vocab_size: int) -> Tensor:
        """Which tokens may follow `reply`: bool `[V]`, on the CPU.

        None may, where the reply has left the grammar or has an end token.
        """
        if not self._reach(reply):
            return torch.zeros(vocab_size, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.zeros(vocab_size, dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        mask[: len(known)] = known
        if self._matcher.is_accepting():
            mask[self.eos_ids] = True  # llguidance knows one end token only
        return torch.from_numpy(mask)

    def _reach(self, reply: Sequence[int]) -> bool:
        """Bring the matcher to the end of `reply`; false if the grammar does not get there."""
        if any(end in reply for end in self.eos_ids):
            return False
        shared = 0
        for ours, theirs in zip(self._consumed, reply, strict=False):
            if ours != theirs:
                break
            shared += 1
        self._matcher.rollback(len(self._consumed) - shared)
        rest = list(reply[shared:])
        count = self._matcher.try_consume_tokens(rest)
        self._check()
        self._consumed = [*reply[: shared + count]]
        return count == len(rest)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"the grammar failed: {self._matcher.get_error().strip()}")


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise UserError(
            "a grammar (json_schema, regex, lark) needs llguidance; pip install draftsmith[grammar]"
        ) from error
    return llguidance


@functools.lru_cache(maxsize=2)  # building its trie of the vocabulary takes a while
def _ll_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    try:
        return _llguidance().hf.from_tokenizer(tokenizer)
    except (ValueError, TypeError) as error:
        raise UserError(f"a grammar cannot use this tokenizer: {error}") from error
