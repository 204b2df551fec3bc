"""Rounds as teacher forcing foretells them, beside those that are decoded.

At T = 0 each is known exactly from where it begins, at T > 0 in the mean.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.gather import GatherSettings, answer, request_of
from ..data.records import Record
from ..data.warp import Law
from ..train.score import Conversation, Expected, expected, score
from .intervals import ratio_interval, standard_errors_apart
from .lossless import greedy_equality
from .replay import Forced, Place
from .rows import Output
from .sides import TOGETHER, Part, Sides, part_of

GREEDY = Law(0.0)

Table = dict[str, NDArray[np.float64]]
"""By name what a figure is the ratio of, for each conversation: `[n, 2]`, numerators first."""

_APART = 0.2  # teacher-forced agreement and acceptance that far apart are worth a warning
_ENOUGH = 30  # rounds behind such a warning
_RESAMPLES = 1000
_PROMPTS = 8  # of fewer, small counts alone may lie any number of their standard errors apart


# ---- T = 0: every round


def greedy_replies(sides: Sides, fresh: Sequence[Record]) -> list[Record]:
    """The target's greedy replies with something to draft: those at hand, or made now."""
    found = [r for r in fresh if r.drawn_from(GREEDY)]
    if not found:
        asked = {r.name: replace(request_of(r), law=GREEDY) for r in fresh}
        how = GatherSettings(sides.limit, TOGETHER, sides.trained.taps, keep="hidden")
        found = answer(sides.target, list(asked.values()), how)
    return [r for r in found if len(r.reply) > 1]


def rounds(sides: Sides, records: Sequence[Record]) -> tuple[Part, dict[str, float], list[str]]:
    """Each round of greedy decoding as foretold from where it begins; figures and warnings."""
    name = f"rounds at {GREEDY.label}"
    if not records:
        return Part(name, "not checked", ("no greedy reply has a second token",)), {}, []
    scores = score(sides.target, sides.trained, records, GREEDY, sides.gamma, sides.limit)
    outputs = sides.decode(records)
    faults, ties = _texts(sides, records, outputs)
    for record, conversation, output in zip(records, scores, outputs, strict=True):
        wrong, close = _row(sides, record, conversation, output)
        faults += wrong
        ties += close
    course = expected(scores, sides.gamma, "token")
    every = [r for o in outputs for r in o.rounds]
    first = [accepted > 0 for drafted, accepted in every if drafted]
    figures = {
        "agreement": sum(c.overlap[0][0] for c in scores) / sum(c.tokens for c in scores),
        "first_accepted": sum(first) / max(1, len(first)),
        "expected_tokens_per_round": course.tokens_per_round,
        "tokens_per_round": sum(len(o.ids) - 1 for o in outputs) / max(1, len(every)),
    }
    found = (
        f"{len(records)} replies take {len(every)} rounds, {float(course.rounds.sum()):g} expected;"
        " tokens per round {tokens_per_round:.4f}, {expected_tokens_per_round:.4f} expected; "
        "teacher-forced top-1 agreement {agreement:.3f}, first drafted token accepted "
        "{first_accepted:.3f}".format(**figures)
    )
    part = part_of(name, faults, found, ties, checked=len(first) > 0)
    return part, figures, _warnings(figures, len(first))


def _warnings(figures: dict[str, float], count: int) -> list[str]:
    """Signs of a mismatch for the eye, from teacher forcing and decoding side by side."""
    agreement, first = figures["agreement"], figures["first_accepted"]
    if count and first == 0:
        return [
            f"acceptance is exactly 0 in {count} rounds, while {agreement:.0%} of the tokens are "
            "guessed right with teacher forcing; are these the weights that were trained?"
        ]
    if count >= _ENOUGH and abs(agreement - first) > _APART:
        return [
            f"teacher-forced top-1 agreement is {agreement:.2f}, and the first drafted token is "
            f"accepted in {first:.2f} of {count} rounds"
        ]
    return []


def _margin(logits: Tensor) -> Tensor:
    """By how much the best exceeds the second, in units of the best: `[n, V] -> [n]`."""
    best, second = logits.topk(2).values.unbind(-1)  # [n]
    return (best - second) / best.abs().clamp_min(1.0)


@torch.inference_mode()
def _texts(
    sides: Sides, records: Sequence[Record], outputs: Sequence[Output]
) -> tuple[list[str], list[str]]:
    """(faults, near-ties) of decoded replies that are not the records' own."""
    ours = {r.key: o.ids for r, o in zip(records, outputs, strict=True)}
    theirs = {r.key: r.reply.tolist() for r in records}
    margins: dict[str, list[float]] = {}
    for record in records:
        if ours[record.key] != theirs[record.key]:
            assert record.states is not None
            hidden = record.states.hidden.to(sides.target.device)
            margins[record.key] = _margin(sides.target.logits(hidden)).tolist()
    found: dict[str, Any] = greedy_equality(ours, theirs, margins, 2 * sides.tolerance)
    faults, ties = (
        [
            f"record {e['prompt_id']}: the decoded reply leaves the target's own at token "
            f"{e['position']}{note}"
            for e in found[kind]
        ]
        for kind, note in (("different", ""), ("near_ties", ", a near-tie of its two best"))
    )
    return faults, ties


def _row(
    sides: Sides, record: Record, conversation: Conversation, output: Output
) -> tuple[list[str], list[str]]:
    """(faults, near-ties) of one reply's rounds, as far as its text is the record's."""
    faults: list[str] = []
    ties: list[str] = []
    pairs = list(zip(output.ids, record.reply.tolist(), strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    start, forced = 0, None
    for number, (drafted, accepted) in enumerate(output.rounds, start=1):
        if start + accepted + 1 > same or start >= conversation.tokens:
            break
        room = _room(sides, record, start)
        guesses = conversation.log_ratio[start, : min(room, conversation.tokens - start)]
        wanted = int((guesses > -torch.inf).long().cumprod(0).sum())
        where = f"record {record.key}, round {number}"
        if drafted > room or (drafted < room and not sides.served.may_abstain):
            faults.append(f"{where}: {drafted} tokens are drafted, where {room} have room")
        elif accepted != wanted:
            place = Place(start, min(accepted, wanted))
            forced = forced or Forced(sides.target, sides.trained, [record], sides.gamma)
            close = "" if sides.served.may_abstain else _close(sides, forced, place)
            (ties if close else faults).append(
                f"{where}, position {place.k + 1}: training foretells {wanted} of {drafted} "
                f"accepted, decoding accepts {accepted}{close}"
            )
        start += accepted + 1
    return faults, ties


def _room(sides: Sides, record: Record, start: int) -> int:
    """Tokens that decoding drafts in a round that begins `start` tokens behind the first."""
    prompt, whole = record.prompt_len, sides.target.max_positions
    budget = sides.limit if whole is None else min(sides.limit, whole - prompt)
    known = sides.served.max_positions
    context = sides.gamma if known is None else known - prompt - 1 - start
    return max(0, min(sides.gamma, budget - 2 - start, context))


def _close(sides: Sides, forced: Forced, place: Place) -> str:
    """What to say of a guess that rounding alone may turn; nothing of any other."""
    margin = float(_margin(forced.logits(0, [place]))[0])
    return f", a near-tie of the draft's ({margin:.1e})" if margin <= 2 * sides.tolerance else ""


# ---- T > 0: in the mean


def mean(sides: Sides, law: Law, fresh: Sequence[Record]) -> tuple[Part, dict[str, float]]:
    """Expected and decoded τ and S_k over the same held-out prompts, and as figures.

    Text that the drafter learnt by heart flatters it: decoding draws other text than that.
    """
    name, serving = f"rounds at {law.label}", sides.serving
    records = [r for r in fresh if r.drawn_from(law) and r.split == "heldout"]
    scores = score(
        sides.target, sides.trained, records, law, sides.gamma, sides.limit, serving.drafting
    )  # fmt: skip
    if len({c.prompt_id for c in scores}) < 2:
        return Part(
            name, "not checked", ("it takes held-out replies of this law to two prompts",)
        ), {}
    course = expected(scores, sides.gamma, serving.verifier)
    outputs = sides.decode(records)
    whose = ([c.prompt_id for c in scores], [r.prompt_id for r in records])
    figures: dict[str, float] = {}
    faults, told = [], []
    abstains = sides.served.may_abstain
    counted = _counted(outputs, sides.gamma, abstains)
    for what, mine in _foretold(course, abstains).items():
        theirs = counted[what]
        if not (mine[:, 1].sum() > 0 and theirs[:, 1].sum() > 0):
            continue
        value = float(mine[:, 0].sum() / mine[:, 1].sum())
        decoded = ratio_interval(theirs[:, 0], theirs[:, 1], _RESAMPLES, whose[1])
        apart, most = standard_errors_apart(mine, theirs, whose)
        low, high = decoded.low or 0.0, decoded.high or 0.0
        told.append(f"{what} {value:.3f} expected, {decoded.value:.3f} [{low:.3f}, {high:.3f}]")
        if apart > most:
            faults.append(f"{told[-1]}: {apart:.1f} standard errors apart, {most:.1f} at most")
        figures[f"{what} expected, {law.label}"] = value
        figures[f"{what} decoded, {law.label}"] = decoded.value
    if len(set(whose[0])) < _PROMPTS:
        few = f"fewer than {_PROMPTS} prompts cannot tell chance from a fault"
        return Part(name, "not checked", ("; ".join(told), few)), figures
    drafted = any(d for o in outputs for d, _ in o.rounds)
    return part_of(name, faults, "; ".join(told), checked=drafted), figures


def _foretold(course: Expected, abstains: bool) -> Table:
    """What each figure is the ratio of. The estimator does not know which rounds draft nothing, so
    of a drafter that `abstains` positions are counted in all rounds."""
    pairs = {"tokens per round": (course.tokens, course.rounds)}
    for k in range(course.attempts.shape[1]):
        below = course.rounds if abstains else course.attempts[:, k]
        pairs[_position(k, abstains)] = (course.accepted[:, k], below)
    return {name: torch.stack(pair, 1).double().numpy() for name, pair in pairs.items()}


def _counted(outputs: Sequence[Output], gamma: int, abstains: bool) -> Table:
    """The same as counted in decoding."""
    found = {"tokens per round": [[len(o.ids) - 1.0, len(o.rounds)] for o in outputs]}
    for k in range(gamma):
        found[_position(k, abstains)] = [
            [sum(a > k for _, a in o.rounds), sum(abstains or d > k for d, _ in o.rounds)]
            for o in outputs
        ]
    return {name: np.array(rows, np.float64) for name, rows in found.items()}


def _position(k: int, abstains: bool) -> str:
    return f"S_{k + 1} of all rounds" if abstains else f"S_{k + 1}"
