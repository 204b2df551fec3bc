"""Wrong rules that a sceptic would plant, each changing the real loop: enumeration must see them.

A proof that passes everything proves nothing. Each fault is a way in which decoders went wrong, put
where the loop finds its own functions, and names a conformance case in which it shows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..data.cache import SlabCache
from ..data.rules import Rules
from ..data.warp import Law, row_log_probs
from . import decode, draft, tree, verify, verify_tree
from .conformance import Bench, Case
from .draft import Drafted, Proposer
from .draws import Draws
from .rows import Row, apply_rules
from .tree import Tree, grow_sampled
from .verify_tree import Verified

VISIBLE = 0.01
"""Total variation that a fault must have at least to count as caught."""

_PLAIN, _TRUNCATED = Law(1.0), Law(0.7, top_k=2)
_UNLIKELY = math.log(0.4)
_chain = Proposer.chain
_siblings = tree._without_replacement
_keep = SlabCache.keep
_emit = Row.emit
_residual = verify.residual


@dataclass(frozen=True)
class Fault:
    """What is wrong, and where it shows."""

    plant: Callable[[], AbstractContextManager[Any]]
    """The loop is wrong inside of this context."""
    case: Case
    """Decodes exactly without the fault."""


def caught(bench: Bench) -> dict[str, float]:
    """Total variation of each fault's case with the fault planted; below `VISIBLE` it is missed."""
    distances = {}
    for name, fault in PLANTED.items():
        with fault.plant():
            distances[name] = bench.distance(fault.case)
    return distances


# ---- helpers


@dataclass(frozen=True)
class _Through:
    """Chance that is tampered with on its way."""

    draws: Draws
    weights: Callable[[Tensor], Tensor] = lambda weights: weights
    """Of a categorical, `[B, V] -> [B, V]`."""
    coins: Callable[[Tensor], Tensor] = lambda coins: coins
    """What became of coins, `[B, n] -> [B, n]`."""

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        return self.coins(self.draws.bernoulli(p, where))

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        return self.draws.categorical(self.weights(weights), where)

    def select(self, rows: Sequence[int]) -> None:
        self.draws.select(rows)


def _everywhere(draws: Draws, weights: Tensor) -> Tensor:
    return draws.categorical(weights, torch.ones(len(weights), dtype=torch.bool))


def _own(tokens: Tensor, log_q: Tensor) -> Tensor:
    """Each token's log-probability under its law, `[B, n], [B, n, V] -> [B, n]`."""
    return log_q.gather(2, tokens[..., None]).squeeze(2)


def _inside(tokens: Tensor, count: Tensor) -> Tensor:
    """True at the first `count` tokens of each row, `[B, n]`."""
    return torch.arange(tokens.shape[1]) < count[:, None]


# ---- acceptance of chains


def _typical(
    tokens: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Typical acceptance (Medusa, 2024), its threshold fixed: whatever the target finds likely."""
    likely = (_own(tokens, log_p[:, :-1]) > _UNLIKELY) & _inside(tokens, drafted)
    accepted = likely.long().cumprod(1).sum(1)
    return accepted, _everywhere(draws, log_p[torch.arange(len(tokens)), accepted].exp())


def _joint_ratio(
    tokens: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Exact for one token: prefixes pass by their joint ratio, the residual is that of a token."""
    ratio = (_own(tokens, log_p[:, :-1]) - _own(tokens, log_q)).cumsum(1)
    passed = draws.bernoulli(ratio.exp().clamp_max(1.0), _inside(tokens, drafted))
    accepted = pad(passed * torch.arange(1, tokens.shape[1] + 1), (1, 0)).amax(1)
    one = torch.ones(len(tokens), dtype=torch.float64)
    return accepted, verify._next(log_q, log_p, one, accepted, drafted, draws)


def _stops_at_first(
    tokens: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Block verification in which nothing behind the first failure passes."""
    tampered = _Through(draws, coins=lambda passed: passed.long().cumprod(1).bool())
    return verify.block(tokens, log_q, log_p, drafted, tampered)


def _softmaxed(p: Tensor, q: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    return (scale * p - q).clamp_min(0.0).softmax(-1)


def _unchanged(p: Tensor, q: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    return p


# ---- drafting of chains


def _raw_ratio(
    self: Proposer, rows: Any, room: Any, laws: Sequence[Law], policy: Any, draws: Draws
) -> Drafted:
    """Drawn from the truncated law, handed in as drawn from the whole one."""

    def truncated(weights: Tensor) -> Tensor:
        warmed = [replace(law, temperature=1.0) for law in laws]  # the weights already have it
        return row_log_probs(weights.log(), warmed).exp()

    whole = [Law(law.temperature) for law in laws]
    return _chain(self, rows, room, whole, policy, _Through(draws, truncated))


def _claims_sampling(
    self: Proposer, rows: Sequence[Row], room: Any, laws: Any, policy: Any, draws: Draws
) -> Drafted:
    """The most probable token, handed in as drawn from the draft's law."""

    def best(weights: Tensor) -> Tensor:
        return one_hot(weights.argmax(1), weights.shape[1]).to(weights.dtype)

    served = [row.request.law for row in rows]
    return _chain(self, rows, room, served, policy, _Through(draws, best))


def _drops_last(self: Proposer, rows: Any, room: Sequence[int], *others: Any) -> Drafted:
    """The token after which the policy stopped was seen, and is not handed in."""
    drafted = _chain(self, rows, room, *others)
    return replace(drafted, count=drafted.count - (drafted.count < torch.tensor(room)).long())


# ---- trees


def _no_removal(
    tokens: Tensor,
    parents: Tensor,
    log_q: Tensor | None,
    log_p: Tensor,
    size: Tensor,
    draws: Draws,
) -> Verified:
    """Probable children are each tried as q = 1, and p keeps those that were refused."""
    certain = one_hot(tokens, log_p.shape[2]).double().log()
    with patch.object(verify_tree, "residual", _unchanged):
        return verify_tree.tree(tokens, parents, certain, log_p, size, draws)


def _pruned(*grown: Any) -> Tree:
    """Sampled nodes that turned out unlikely are dropped from the tree's end."""
    whole = grow_sampled(*grown)
    assert whole.log_q is not None
    sure = (_own(whole.tokens, whole.log_q) > _UNLIKELY) & _inside(whole.tokens, whole.size)
    return replace(whole, size=(sure * torch.arange(1, sure.shape[1] + 1)).amax(1))


def _shared(log_q: Tensor, *others: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Siblings drawn without replacement, each handed in under the law of the first."""
    for ids, there, _ in _siblings(log_q, *others):
        yield ids, there, log_q


def _first_nodes(self: SlabCache, since: Any, nodes: Tensor, counts: Any) -> None:
    """The target remembers a tree's first nodes, not those on the accepted path."""
    _keep(self, since, torch.arange(nodes.shape[1]).expand_as(nodes), counts)


# ---- the loop


def _neighbours(logits: Tensor, laws: Sequence[Law]) -> Tensor:
    """A round's target laws, `[B, N+1, V]`, one row too far down; those of prefill as they are."""
    log_p = row_log_probs(logits, laws)
    return log_p.roll(1, 0) if log_p.dim() == 3 else log_p


def _forgets_drafts(rows: Any, logits: Tensor, path: Callable[[int, int], Any]) -> Tensor:
    """Rules see what was emitted, not the draft tokens in between."""
    return apply_rules(rows, logits, lambda b, i: None if path(b, i) is None else [])


def _runs_on(self: Row, tokens: Sequence[int]) -> list[int]:
    """An end token ends the reply only where it is the last of its round."""
    ends = self._eos
    self._eos = ends if tokens[-1] in ends else ()
    try:
        return _emit(self, tokens)
    finally:
        self._eos = ends


# ---- by name


def _rule(name: str, wrong: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return partial(patch.dict, decode.RULES, {name: wrong})


def _put(owner: Any, name: str, wrong: Any) -> Callable[[], AbstractContextManager[Any]]:
    return partial(patch.object, owner, name, wrong)


def _case(method: tuple[str, str], law: Law = _PLAIN, **changes: Any) -> Case:
    rest = {"drafting": "sampled", "rules": Rules(), "ends": (), "drafter": "eagle3", "rows": 4096}
    return Case(method, law=law, **{**rest, **changes})


_TOKEN, _BLOCK = ("token", "static"), ("block", "static")
_TREE, _SAMPLED = ("tree", "static"), ("sampled tree", "static")

PLANTED: dict[str, Fault] = {
    "typical acceptance": Fault(_rule("token", _typical), _case(_TOKEN)),
    "prefixes by their joint ratio, residual of a token": Fault(
        _rule("block", _joint_ratio), _case(_BLOCK)
    ),
    "block verification stops at the first failure": Fault(
        _rule("block", _stops_at_first), _case(_BLOCK)
    ),
    "block residual not scaled by the joint ratio": Fault(
        _put(verify, "residual", lambda p, q, scale: _residual(p, q)), _case(_BLOCK)
    ),
    "residual through softmax": Fault(_put(verify, "residual", _softmaxed), _case(_TOKEN)),
    "redraw from p after a rejection": Fault(_put(verify, "residual", _unchanged), _case(_TOKEN)),
    "q from before truncation in the ratio": Fault(
        _put(Proposer, "chain", _raw_ratio), _case(_TOKEN, _TRUNCATED)
    ),
    "greedy drafts handed in as sampled": Fault(
        _put(Proposer, "chain", _claims_sampling), _case(_TOKEN, drafting="greedy")
    ),
    "a policy drops the token it stopped at": Fault(
        _put(Proposer, "chain", _drops_last), _case(("token", "confidence"))
    ),
    "tree children tried as q = 1, refused ones not removed": Fault(
        _put(decode, "verify_tree", _no_removal), _case(_TREE)
    ),
    "sampled tree children pruned by confidence": Fault(
        _put(draft, "grow_sampled", _pruned), _case(_SAMPLED, _TRUNCATED)
    ),
    "siblings under the law of the first": Fault(
        _put(tree, "_without_replacement", _shared), _case(_SAMPLED, _TRUNCATED, drafter="causal")
    ),
    "tree residual through softmax": Fault(
        _put(verify_tree, "residual", _softmaxed), _case(_SAMPLED, _TRUNCATED)
    ),
    "the cache keeps a tree's first nodes": Fault(
        _put(SlabCache, "keep", _first_nodes), _case(_TREE)
    ),
    "laws of another row": Fault(_put(decode, "row_log_probs", _neighbours), _case(_TOKEN)),
    "rules that do not see the draft": Fault(
        _put(decode, "apply_rules", _forgets_drafts),
        _case(_TOKEN, _TRUNCATED, rules=Rules(repetition_penalty=1.5, frequency_penalty=0.4)),
    ),
    "an end token inside of a block does not end": Fault(
        _put(Row, "emit", _runs_on), _case(_TOKEN, ends=(0,))
    ),
}
"""What is planted, by what is wrong with it."""
