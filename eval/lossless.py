"""Proofs that decoding keeps the target's law: exact enumeration, chi-square, greedy equality.

The exact part walks every branch of chance, of an acceptance rule or of the whole decode loop, the
very functions used in decoding, on a tiny vocabulary. Nothing about their formulas is assumed.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chisquare
from torch import Tensor

from ..data.gather import Request
from ..data.rules import Processor
from ..data.target import Target
from ..data.warp import log_probs
from ..drafters.base import Drafter
from .branches import branches
from .decode import DecodeSettings, decode
from .verify import Rule

Tokens = tuple[int, ...]


def outcome_law(rule: Rule, draft: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor) -> Tensor:
    """P(accepted = a, next = v) of one round for given drafts, `[N, γ+1, V]` float64.

    `draft` [N, γ], `log_q` [N, γ, V], `log_p` [N, γ+1, V], `drafted` [N].
    """
    count, gamma = draft.shape
    law = torch.zeros(count, gamma + 1, log_p.shape[-1], dtype=torch.float64)
    every = branches(count, lambda draws, n: rule(draft[n], log_q[n], log_p[n], drafted[n], draws))
    for (accepted, following), case, chance in every:
        law.index_put_((case, accepted, following), chance, accumulate=True)
    return law


@dataclass(frozen=True)
class DecodingLaw:
    """What speculative decoding does, exactly."""

    outputs: dict[Tokens, float]
    """Probability of each finished output."""
    rounds: float
    """Expected number of rounds."""
    attempts: tuple[float, ...]
    """Expected number of rounds that drafted at least k = 1..γ tokens."""
    accepted: tuple[float, ...]
    """Expected number of rounds that kept at least k = 1..γ of them in the output."""


def target_law(
    p: Callable[[Tokens], Tensor], max_tokens: int, eos: Sequence[int] = ()
) -> dict[Tokens, float]:
    """Law of the outputs of plain sampling, ending at any of `eos`; `p(history)` is [V]."""
    done: dict[Tokens, float] = {}
    open_: dict[Tokens, float] = {(): 1.0}
    for _ in range(max_tokens):
        grown = {
            (*prefix, token): mass * float(chance)
            for prefix, mass in open_.items()
            for token, chance in enumerate(p(prefix))
            if chance > 0
        }
        done |= {x: mass for x, mass in grown.items() if x[-1] in eos}
        open_ = {x: mass for x, mass in grown.items() if x[-1] not in eos}
    return done | open_


def decoding_law(
    p: Callable[[Tokens], Tensor],
    q: Callable[[Tokens, Tokens], Tensor],
    rule: Rule,
    *,
    num_draft_tokens: int,
    max_tokens: int,
    eos: Sequence[int] = (),
    submitted: Callable[[Tokens, Tokens], int] | None = None,
) -> DecodingLaw:
    """Enumerate speculative decoding over every draft and every outcome of `rule`.

    `p(history)` and `q(prefix, drafted so far)` are laws [V] in float64; both must answer for
    histories beyond an end token, which drafts run into. `submitted(prefix, draft)` says how much
    of a draft is handed in (an adaptive length); default all. Rounds near `max_tokens` draft at
    most one token less than the budget has left.
    """
    size = len(p(()))
    rows: list[tuple[Tokens, Tokens]] = []  # (prefix, draft)
    ordinary = [token for token in range(size) if token not in eos]
    for length in range(max_tokens):
        room = min(num_draft_tokens, max_tokens - length - 1)
        for prefix in itertools.product(ordinary, repeat=length):
            rows += [(prefix, draft) for draft in itertools.product(range(size), repeat=room)]

    chance = torch.ones(len(rows), dtype=torch.float64)
    draft_ids = torch.zeros(len(rows), num_draft_tokens, dtype=torch.long)
    q_rows = torch.full((len(rows), num_draft_tokens, size), 1.0 / size, dtype=torch.float64)
    p_rows = torch.full((len(rows), num_draft_tokens + 1, size), 1.0 / size, dtype=torch.float64)
    drafted = torch.zeros(len(rows), dtype=torch.long)
    for n, (prefix, draft) in enumerate(rows):
        for i in range(len(draft) + 1):
            p_rows[n, i] = p(prefix + draft[:i])
        for i, token in enumerate(draft):
            q_rows[n, i] = q(prefix, draft[:i])
            chance[n] *= q_rows[n, i, token]
            draft_ids[n, i] = token
        drafted[n] = len(draft) if submitted is None else submitted(prefix, draft)
    outcomes = outcome_law(rule, draft_ids, q_rows.log(), p_rows.log(), drafted)
    return _propagate(rows, chance, drafted.tolist(), outcomes, max_tokens, eos)


def _propagate(
    rows: Sequence[tuple[Tokens, Tokens]],
    chance: Tensor,
    drafted: Sequence[int],
    outcomes: Tensor,
    max_tokens: int,
    eos: Sequence[int],
) -> DecodingLaw:
    """Chain rounds: rows come by growing prefix, so a prefix's mass is complete when reached."""
    gamma = outcomes.shape[1] - 1
    mass: dict[Tokens, float] = {(): 1.0}
    rounds, attempts, kept = 0.0, [0.0] * gamma, [0.0] * gamma
    for n, (prefix, draft) in enumerate(rows):
        reached = mass.get(prefix, 0.0) * float(chance[n])
        if reached == 0:
            continue
        rounds += reached
        for k in range(drafted[n]):
            attempts[k] += reached
        for a, token in outcomes[n].nonzero().tolist():
            weight = reached * float(outcomes[n, a, token])
            emitted = (*draft[:a], token)
            stop = next((i for i, t in enumerate(emitted) if t in eos), len(emitted))
            emitted = emitted[: stop + 1]
            for k in range(min(a, len(emitted))):
                kept[k] += weight
            mass[prefix + emitted] = mass.get(prefix + emitted, 0.0) + weight
    outputs = {x: w for x, w in mass.items() if x and (len(x) == max_tokens or x[-1] in eos)}
    return DecodingLaw(outputs, rounds, tuple(attempts), tuple(kept))


def loop_law(
    target: Target,
    requests: Sequence[Request],
    settings: DecodeSettings,
    drafter: Drafter | None,
    rows: int = 4096,
) -> list[DecodingLaw]:
    """What the decode loop itself does with each request: every branch of chance, played.

    Up to `rows` branches, of all the requests, share a batch, so rows finish at different times
    and lie beside rows of other requests. The first token, which comes from prefill, is in the
    outputs, but is no round.
    """
    gamma = settings.num_draft_tokens
    mass: list[dict[Tokens, float]] = [{} for _ in requests]
    sums = torch.zeros(len(requests), 1 + 2 * gamma, dtype=torch.float64)
    every = branches(
        len(requests),
        lambda draws, case: decode(
            target, [requests[c] for c in case.tolist()], settings, drafter, draws=draws
        ),
        rows,
    )
    for outputs, case, chance in every:
        for out, c, weight in zip(outputs, case.tolist(), chance.tolist(), strict=True):
            ids = tuple(out.ids)
            mass[c][ids] = mass[c].get(ids, 0.0) + weight
            sums[c, 0] += weight * len(out.rounds)
            for drafted, accepted in out.rounds:
                sums[c, 1 : 1 + drafted] += weight
                sums[c, 1 + gamma : 1 + gamma + accepted] += weight
    return [
        DecodingLaw(m, s[0], tuple(s[1 : 1 + gamma]), tuple(s[1 + gamma :]))
        for m, s in zip(mass, sums.tolist(), strict=True)
    ]


@torch.inference_mode()
def plain_law(target: Target, request: Request, max_tokens: int) -> dict[Tokens, float]:
    """Law of the target's own outputs, from its teacher-forced logits alone."""
    model = target.model
    rules = Processor(
        request.rules, len(request.ids), target.eos_ids, target.tokenizer, target.vocab_size
    )

    def p(history: Tokens) -> Tensor:
        ids = [*request.ids, *history]
        out = model(input_ids=torch.tensor([ids], device=target.device), use_cache=False)
        logits = rules(ids, out.logits[0, -1, : target.vocab_size])
        return log_probs(logits, request.law).double().exp()

    return target_law(p, max_tokens, target.eos_ids)


def total_variation(a: Mapping[Tokens, float], b: Mapping[Tokens, float]) -> float:
    """½ Σ |a - b| over the outputs of either law."""
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())


def chi_square(counts: Tensor, p: Tensor, least: float = 5.0) -> float:
    """p-value of the counts [V] under the law p [V]; 0 if a token of probability 0 was seen.

    Tokens with fewer than `least` expected draws are pooled into one bin.
    """
    counts, p = counts.double(), p.double()
    if bool((counts[p == 0] > 0).any()):
        return 0.0
    expected = p / p.sum() * counts.sum()
    rare = expected < least
    bins = [torch.stack([x[rare].sum()]) if bool(rare.any()) else x[:0] for x in (counts, expected)]
    observed, wanted = torch.cat([counts[~rare], bins[0]]), torch.cat([expected[~rare], bins[1]])
    filled = wanted > 0
    return float(chisquare(observed[filled].numpy(), wanted[filled].numpy()).pvalue)


def greedy_equality(
    outputs: Mapping[str, Sequence[int]],
    references: Mapping[str, Sequence[int]],
    margins: Mapping[str, Sequence[float]],
    near_tie: float,
) -> dict[str, object]:
    """The report's "lossless" section: speculative against plain greedy token streams.

    All three are keyed by prompt id; `margins` holds the target's top-2 logit margin at each
    reference position. Streams are compared up to their first difference, because beyond it they
    continue different texts; it is a near-tie if the margin there is at most `near_tie`. An output
    that runs on beyond the reference's end has no margin there (None), and differs. ValueError if
    the prompts are not the same.
    """
    if outputs.keys() != references.keys():
        raise ValueError("outputs and references must be of the same prompts")
    found: dict[str, list[dict[str, object]]] = {"near_ties": [], "different": []}
    for prompt_id, reference in references.items():
        ours, theirs = list(outputs[prompt_id]), list(reference)
        if ours == theirs:
            continue
        pairs = zip(ours, theirs, strict=False)
        same = min(len(ours), len(theirs))
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), same)
        known = position < len(margins[prompt_id])
        margin = float(margins[prompt_id][position]) if known else None
        tie = margin is not None and margin <= near_tie and position < same
        entry = {"prompt_id": prompt_id, "position": position, "margin": margin}
        found["near_ties" if tie else "different"].append(entry)
    verdict = "equal except near-ties" if found["near_ties"] else "equal"
    if found["different"]:
        verdict = "different"
    if not references:
        verdict = "not checked"
    return {"verdict": verdict, "prompts": len(references), **found}
