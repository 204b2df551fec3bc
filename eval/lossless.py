"""Proofs that decoding keeps the target's law: exact enumeration, chi-square, greedy equality.

The exact part runs an acceptance rule, the very function used in decoding, on a tiny vocabulary.
Its randomness is integrated, not sampled: the places where its outcome changes as a uniform goes
from 0 to 1 are found by bisection to float64 precision, so that probabilities are exact to about
1e-15 and nothing about the rule's formula is assumed.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chisquare
from torch import Tensor

Tokens = tuple[int, ...]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(draft, log_q, log_p, u_accept, u_final, drafted) -> (accepted, next), as `verify.token`."""

BELOW_ONE = 1.0 - 2.0**-53
HALVINGS = 54


def _bisect(shape: torch.Size, is_low: Callable[[Tensor], Tensor]) -> Tensor:
    """Where `is_low(u)` turns from true to false, elementwise; 0 if it never is, 1 if it stays."""
    low = torch.zeros(shape, dtype=torch.float64)
    high = torch.ones(shape, dtype=torch.float64)
    never, always = ~is_low(low), is_low(torch.full_like(high, BELOW_ONE))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = is_low(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.masked_fill(never, 0.0).masked_fill(always, 1.0)


@dataclass(frozen=True)
class _Rounds:
    """N rounds to integrate; calls the rule for any shape of uniforms `[N, ..., γ]`, `[N, ...]`."""

    rule: Rule
    draft: Tensor  # [N, γ]
    log_q: Tensor  # [N, γ, V]
    log_p: Tensor  # [N, γ+1, V]
    drafted: Tensor  # [N]

    def __call__(self, u_accept: Tensor, u_final: Tensor) -> tuple[Tensor, Tensor]:
        shape = u_final.shape
        row = torch.arange(shape[0]).repeat_interleave(u_final[0].numel())  # [N * ...]
        flat = u_accept.reshape(len(row), self.draft.shape[1]), u_final.reshape(-1)
        laws = self.draft[row], self.log_q[row], self.log_p[row]
        accepted, following = self.rule(*laws, *flat, self.drafted[row])
        return accepted.view(shape), following.view(shape)


def _accept_cuts(rounds: _Rounds) -> Tensor:
    """The threshold of each acceptance uniform, `[N, γ]`; 1 where it changes nothing.

    A threshold may show only while others pass or fail, so all corners of the others are tried.
    ValueError if two corners disagree: then the rule is more than one threshold per uniform.
    """
    count, gamma = rounds.draft.shape
    others = list(itertools.product((0.0, BELOW_ONE), repeat=max(gamma - 1, 0)))
    cuts = torch.ones(count, gamma, dtype=torch.float64)
    for i in range(gamma):
        corners = torch.tensor([(*c[:i], 0.0, *c[i:]) for c in others], dtype=torch.float64)
        u_accept = corners.expand(count, -1, -1)  # [N, C, γ]

        def accepted(u: Tensor, i: int = i, u_accept: Tensor = u_accept) -> Tensor:
            moved = u_accept.clone()
            moved[..., i] = u
            return rounds(moved, torch.full_like(u, 0.5))[0]

        zero = torch.zeros(u_accept.shape[:2], dtype=torch.float64)
        at_zero = accepted(zero)  # [N, C]
        shows = at_zero != accepted(zero + BELOW_ONE)
        found = _bisect(zero.shape, lambda u: accepted(u) == at_zero)  # noqa: B023
        if (found.where(shows, -1.0).amax(1) - found.where(shows, 2.0).amin(1)).max() > 1e-9:
            raise ValueError(f"acceptance uniform {i} has no single threshold")
        cuts[:, i] = torch.where(shows.any(1), found.where(shows, -1.0).amax(1), 1.0)
    return cuts


def outcome_law(rule: Rule, draft: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor) -> Tensor:
    """P(accepted = a, next = v) of one round for given drafts, `[N, γ+1, V]` float64.

    `draft` [N, γ], `log_q` [N, γ, V], `log_p` [N, γ+1, V], `drafted` [N]. The rule must compare
    each acceptance uniform with one threshold, and draw the next token by inverse CDF. Both are
    checked at random points; ValueError if they fail.
    """
    rounds = _Rounds(rule, draft, log_q, log_p, drafted)
    gamma, size = draft.shape[1], log_p.shape[-1]
    cuts = _accept_cuts(rounds)
    passes = torch.tensor(list(itertools.product((True, False), repeat=gamma)), dtype=torch.bool)
    passes = passes.view(2**gamma, gamma)  # [C, γ], also for γ = 0
    inside = torch.where(
        passes, cuts[:, None] / 2, (cuts[:, None] + 1).clamp_max(2 * BELOW_ONE) / 2
    )
    volume = torch.where(passes, cuts[:, None], 1 - cuts[:, None]).prod(-1)  # [N, C]
    accepted, _ = rounds(inside, torch.full_like(volume, 0.5))

    spread = inside[:, :, None].expand(-1, -1, size - 1, -1)  # [N, C, V-1, γ]
    bound = torch.arange(size - 1)
    steps = _bisect(spread.shape[:3], lambda u: rounds(spread, u)[1] <= bound)  # [N, C, V-1]
    ends = torch.nn.functional.pad(steps, (1, 0)), torch.nn.functional.pad(steps, (0, 1), value=1.0)
    following = ends[1] - ends[0]  # [N, C, V]
    _spot_check(rounds, cuts, accepted, steps)
    chosen = torch.nn.functional.one_hot(accepted, gamma + 1).double()  # [N, C, γ+1]
    return torch.einsum("nc,nca,ncv->nav", volume, chosen, following)


def _spot_check(rounds: _Rounds, cuts: Tensor, accepted: Tensor, steps: Tensor) -> None:
    """Compare the cells (`cuts` [N, γ], `accepted` [N, C], `steps` [N, C, V-1]) with the rule."""
    generator = torch.Generator().manual_seed(0)
    (count, gamma), points = cuts.shape, 16
    u_accept = torch.rand(count, points, gamma, generator=generator, dtype=torch.float64)
    u_final = torch.rand(count, points, generator=generator, dtype=torch.float64)
    place = 2 ** torch.arange(gamma - 1, -1, -1)  # passes are listed with True first
    cell = ((u_accept >= cuts[:, None]).long() * place).sum(-1)  # [N, points]
    bounds = steps.gather(1, cell[..., None].expand(-1, -1, steps.shape[-1]))
    expected = accepted.gather(1, cell), (u_final[..., None] >= bounds).sum(-1)
    got = rounds(u_accept, u_final)
    if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
        raise ValueError("the rule is not made of one threshold per uniform and an inverse CDF")


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
    p: Callable[[Tokens], Tensor], max_tokens: int, eos: int | None = None
) -> dict[Tokens, float]:
    """Law of the outputs of plain sampling; `p(history)` is [V]."""
    done: dict[Tokens, float] = {}
    open_: dict[Tokens, float] = {(): 1.0}
    for _ in range(max_tokens):
        grown = {
            (*prefix, token): mass * float(chance)
            for prefix, mass in open_.items()
            for token, chance in enumerate(p(prefix))
            if chance > 0
        }
        done |= {x: mass for x, mass in grown.items() if x[-1] == eos}
        open_ = {x: mass for x, mass in grown.items() if x[-1] != eos}
    return done | open_


def decoding_law(
    p: Callable[[Tokens], Tensor],
    q: Callable[[Tokens, Tokens], Tensor],
    rule: Rule,
    *,
    num_draft_tokens: int,
    max_tokens: int,
    eos: int | None = None,
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
    ordinary = [token for token in range(size) if token != eos]
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
    eos: int | None,
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
            if eos in emitted:
                emitted = emitted[: emitted.index(eos) + 1]
            for k in range(min(a, len(emitted))):
                kept[k] += weight
            mass[prefix + emitted] = mass.get(prefix + emitted, 0.0) + weight
    outputs = {x: w for x, w in mass.items() if x and (len(x) == max_tokens or x[-1] == eos)}
    return DecodingLaw(outputs, rounds, tuple(attempts), tuple(kept))


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
