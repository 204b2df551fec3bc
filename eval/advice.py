"""What to do with a report: how much to draft, for which batches it pays, what is worth training.

All from figures of the report, by the formula of `speed.Cost.speedup`. Where an interval does not
decide, the advice says so.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from .machine import entries_of, steps_of
from .sizing import needed
from .speed import Cost
from .tables import interval_text

Report = dict[str, Any]

ALIKE = 0.02
"""Draft lengths whose predicted speed is this close to the best one's are as good as it."""
RAISED = 0.1
"""By how much more overlap domains are compared in what they would gain."""
PAYS, IN_VAIN, OPEN = "pays", "does not pay", "not decided"
SHOULD_PAY, SHOULD_NOT = "should pay", "should not pay"
"""By the prediction alone, whose interval knows nothing of how uncertain costs are."""
_ROUNDS = 50


def advice(report: Report) -> dict[str, Any] | None:
    """Advice by domain, law and batch size; None where no costs were measured.

    rows: of each batch size; limits: by domain and law the batch size at which drafting stops to
    pay; gains: what more overlap would bring, the most first.
    """
    laws = {entry["law"] for entry in report.get("batches") or []}
    cells = [cell for cell in report["cells"] if cell["law"] in laws]
    if not cells:
        return None
    every = [_of_cell(report, cell) for cell in cells]
    gains = [_gain(report, cell, rows[0]) for cell, rows in zip(cells, every, strict=True)]
    return {
        "rows": [row for rows in every for row in rows],
        "limits": [_limit(rows) for rows in every],
        "gains": sorted(gains, key=lambda gain: -gain["gain"]),
    }


def _of_cell(report: Report, cell: Report) -> list[Report]:
    """Rows of one domain under one law, the smallest batch first."""
    sweep = sweep_of(report, cell["domain"], cell["law"])
    return [
        _row(report, cell, sweep, entry, steps_of(entry).cost(entry["seconds"]))
        for entry in entries_of(report, cell["law"])
    ]


def sweep_of(report: Report, domain: str, law: str) -> Report:
    """The report's estimates by draft length, of one domain under one law."""
    return next(s for s in report["sweep"] if (s["domain"], s["law"]) == (domain, law))


def survivals(sweep: Report, cost: Cost) -> dict[int, list[float]]:
    """S_k by draft length, of those whose passes were measured."""
    pairs = zip(sweep["num_draft_tokens"], sweep["survival_estimated"], strict=True)
    return {gamma: list(s) for gamma, s in pairs if gamma + 1 in cost.v}


def _row(report: Report, cell: Report, sweep: Report, entry: Report, cost: Cost) -> Report:
    known = survivals(sweep, cost)
    speeds = {gamma: cost.speedup(s) for gamma, s in known.items()}
    best = max(speeds, key=lambda gamma: (speeds[gamma], -gamma))
    predicted = _interval(sweep, best, speeds[best])
    measured = _measured(sweep, entry, best, cell["domain"])
    verdict = verdict_of(predicted, measured)
    likely = (measured or predicted)["value"] > 1
    drafts = verdict in (PAYS, SHOULD_PAY) or (verdict == OPEN and likely)
    need = needed(cost, 1.0, max(known))
    ceiling = most_adaptive(cost, known[max(known)])
    return {
        "domain": cell["domain"],
        "law": cell["law"],
        "batch": entry["batch"],
        "num_draft_tokens": best if drafts else 0,
        "best": best,
        "alike": [g for g, x in speeds.items() if x >= (1 - ALIKE) * speeds[best]],
        "predicted": predicted,
        "measured": measured,
        "verdict": verdict,
        "overlap": cell["overlap"],
        "break_even": None if need is None else {
            "overlap": need.overlap, "num_draft_tokens": need.num_draft_tokens
        },
        "adaptive_at_most": ceiling,
        "adaptive": _policy(report, cell, entry["batch"]),
    }  # fmt: skip


def verdict_of(predicted: Report, measured: Report | None) -> str:
    """What a measured speedup says, or else the predicted one unless they exclude each other."""
    if measured is not None and _side(measured):
        return PAYS if _side(measured) > 0 else IN_VAIN
    low, high = (None, None) if measured is None else (measured["low"], measured["high"])
    if low is not None and high is not None and not low <= predicted["value"] <= high:
        return OPEN
    return {1: SHOULD_PAY, -1: SHOULD_NOT, 0: OPEN}[_side(predicted)]


def _side(speedup: Report) -> int:
    """On which side of 1 the whole interval lies; 0 where it holds 1, or is not known."""
    low, high = speedup["low"], speedup["high"]
    if low is None or high is None:
        return 0
    return int(low > 1) - int(high < 1)


def _interval(sweep: Report, gamma: int, speedup: float) -> Report:
    """A predicted speedup is as uncertain as the tokens per round that it rests on."""
    tau = sweep["tokens_per_round_estimated"][sweep["num_draft_tokens"].index(gamma)]
    ends = {
        end: None if tau[end] is None else speedup * tau[end] / tau["value"]
        for end in ("low", "high")
    }
    return {"value": speedup, **ends}


def _measured(sweep: Report, entry: Report, gamma: int, domain: str) -> Report | None:
    """What was measured at the draft length and batch size, if anything was."""
    points = [{**d["measured"], "num_draft_tokens": d["num_draft_tokens"]}
              for d in entry["domains"] if d["domain"] == domain and d["measured"]]  # fmt: skip
    if entry["batch"] == 1:
        points += sweep["measured"]
    found = [point for point in points if point["num_draft_tokens"] == gamma]
    return {key: found[0][key] for key in ("value", "low", "high")} if found else None


# ---- policies


def most_adaptive(cost: Cost, survival: Sequence[float]) -> float:
    """A speedup that no policy of up to `len(survival)` tokens a round exceeds.

    It is that of knowing beforehand how many tokens A will be accepted, and drafting whatever then
    is best, one token at least: the largest E[tokens] / E[cost] (Dinkelbach, 1967).
    """
    gamma = len(survival)
    reach = [1.0, *survival, 0.0]
    chance = [a - b for a, b in pairwise(reach)]  # P(A = 0..γ)
    spent = {
        d: cost.c_first + (d - 1) * cost.c + cost.v[d + 1] + cost.o for d in range(1, gamma + 1)
    }
    price = 0.0  # tokens for a unit of cost
    for _ in range(_ROUNDS):
        tokens = paid = 0.0
        for accepted, p in enumerate(chance):
            drafted = range(1, max(1, accepted) + 1)
            best = max(drafted, key=lambda d: min(d, accepted) - price * spent[d])
            tokens += p * (1 + min(best, accepted))
            paid += p * spent[best]
        if tokens / paid <= price * (1 + 1e-12):
            break
        price = tokens / paid
    return price * (1 + cost.o_plain)


def _policy(report: Report, cell: Report, batch: int) -> Report | None:
    """What the policy of this evaluation came to, by the rounds that were decoded with it."""
    policies = report["settings"].get("policy") or {}
    speed = cell.get("speed")
    if batch != 1 or cell["law"] not in policies or not speed:
        return None
    return {
        "name": policies[cell["law"]]["name"],
        "predicted": speed["predicted"],
        "measured": speed["speedup"],
    }


# ---- batches


def _limit(rows: Sequence[Report]) -> Report:
    """The batch size at which the best static draft comes down to plain decoding.

    Interpolated in the logarithm of the batch size, by predicted speedups. None where it pays up to
    the largest batch measured, or, as `at` says, not even at the smallest.
    """
    points = [(row["batch"], row["predicted"]["value"]) for row in rows]
    found = None
    for (a, fast), (b, slow) in pairwise(points):
        if fast > 1 >= slow:
            share = (fast - 1) / (fast - slow)
            found = math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
            break
    return {
        "domain": rows[0]["domain"],
        "law": rows[0]["law"],
        "batch": found,
        "smallest": points[0][0],
        "largest": points[-1][0],
        "pays": points[0][1] > 1,
    }


# ---- training


def raised(survival: Sequence[float], factor: float) -> list[float]:
    """S_k where every token's chance of acceptance, given those before it, is `factor` times it."""
    reach = [1.0, *survival]
    chances = [b / a if a > 0 else 0.0 for a, b in pairwise(reach)]
    return list(accumulate((min(1.0, factor * x) for x in chances), mul))


def _gain(report: Report, cell: Report, row: Report) -> Report:
    """Predicted speedup as it is, and with `RAISED` more overlap, or what its vocabulary allows."""
    entry = entries_of(report, cell["law"])[0]
    cost = steps_of(entry).cost(entry["seconds"])
    known = survivals(sweep_of(report, cell["domain"], cell["law"]), cost)
    overlap, ceiling = cell["overlap"]["value"], cell["captured_mass"]

    def best(to: float) -> float:
        """Of all draft lengths and none, with this overlap."""
        factor = to / overlap if overlap > 0 else 1.0
        return max([1.0, *(cost.speedup(raised(s, factor)) for s in known.values())])

    to = max(overlap, min(overlap + RAISED, ceiling))
    now = max(1.0, row["predicted"]["value"])
    return {
        "domain": cell["domain"],
        "law": cell["law"],
        "overlap": overlap,
        "to": to,
        "now": now,
        "then": best(to),
        "gain": best(to) - now,
        "ceiling": ceiling,
        "at_ceiling": best(max(overlap, ceiling)),
    }


# ---- in words


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Advice in plain words: a line a domain and law, batches, and what is worth training."""
    lines = []
    for limit in found["limits"]:
        own = [
            row for row in found["rows"]
            if (row["domain"], row["law"]) == (limit["domain"], limit["law"])
        ]  # fmt: skip
        lines.append(f"{limit['domain']}, {limit['law']}: {_say(own[0])}; {_say_limit(limit)}.")
    top = found["gains"][0]
    if top["gain"] > 0:
        lines.append(
            f"Most to gain: {top['domain']}, {top['law']}. α of {top['to']:.2f} instead of "
            f"{top['overlap']:.2f} would bring a speedup of {top['then']:.2f} instead of "
            f"{top['now']:.2f}."
        )
    else:
        lines.append(f"No domain would gain by {RAISED} more of α.")
    return lines


def _say(row: Report) -> str:
    told = ", ".join(
        f"{word} {interval_text(row[word], 2)}" for word in ("predicted", "measured") if row[word]
    )
    lengths = f"γ = {row['best']}"
    others = [str(g) for g in row["alike"] if g != row["best"]]
    if others:
        lengths += f" (or {', '.join(others)}, as good)"
    if row["verdict"] == OPEN:
        begin = f"not decided whether drafting pays; if so, with {lengths}"
    elif row["verdict"] in (PAYS, SHOULD_PAY):
        begin = f"draft {lengths}"
    else:
        begin = f"do not draft, the best length is {lengths}"
    need, overlap = row["break_even"], row["overlap"]["value"]
    even = "no α breaks even" if need is None else f"breaks even at α = {need['overlap']:.2f}"
    more = row["adaptive_at_most"] / row["predicted"]["value"] - 1
    policy = (
        f"an adaptive length gains at most {100 * more:.0f} %"
        if more >= ALIKE else "no adaptive length gains anything"
    )  # fmt: skip
    return f"{begin}: speedup {told}; {even}, α is {overlap:.2f}; {policy}"


def _say_limit(limit: Report) -> str:
    if not limit["pays"]:
        return f"it is not predicted to pay at batch {limit['smallest']}"
    if limit["batch"] is None:
        return f"it is predicted to pay up to batch {limit['largest']}, the largest measured"
    return f"it is predicted to stop paying at batch {limit['batch']:.1f}"
