"""Measuring the drafters of a study: what steps cost, what is accepted, how fast decoding is."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from draftsmith.configs.recipe import ServingSection
from draftsmith.data.gather import Request, request_of
from draftsmith.data.linear import FewRowsLinear
from draftsmith.data.records import held_out
from draftsmith.data.shards import RowInfo
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import records_with_states
from draftsmith.eval.decode import DecodeSettings
from draftsmith.eval.estimate import captured_mass, estimate, overlap_interval
from draftsmith.eval.parity import parity
from draftsmith.eval.sizing import Products, step_cost
from draftsmith.eval.speed import Calibration, Cost, limit_of, measure_rows
from draftsmith.scripts.bench_timing import (
    calibration_loop,
    in_turns,
    interleaved,
    our_loop,
    per_round,
    rate,
    ratio,
    rounded,
)
from draftsmith.scripts.study import LAWS, Study
from draftsmith.train.score import Conversation, score

VERIFIER: Literal["block"] = "block"
RESAMPLES = 2000
ALL = "all"
"""The row of all domains together."""


# ---- cost


def cost(study: Study, name: str) -> dict[str, Any]:
    """What draft steps cost beside target passes, batch 1, and the weights they multiply by.

    c_first, c: the first and a later step in passes of the target over one row; floor: matrix
    products and attention of a step alone; outside: the rest of it; v: passes over n rows in
    rounds, from one row on; o, o_plain: what is outside of models in a round and a plain step;
    context: tokens that stood before; threads: those that computed.
    """
    drafter = study.drafter(name)
    lengths = possible(study, drafter)
    calibrating = _calibrating(study)
    context = _context(study, calibrating)
    rows = measure_rows(study.target, context, range(1, max(lengths) + 2))
    gamma = min(3, max(lengths))
    found = step_cost(study.target, drafter, rows, num_draft_tokens=gamma, context=context)
    first, later = weights_read(study.target, drafter, calibrating[0])
    return {
        **as_costs(found.cost),
        "floor_first": found.floor_first,
        "floor": found.floor,
        "outside_first": found.outside_first,
        "outside": found.outside,
        "weights_read_first": first,
        "weights_read": later,
        "context": context,
        "threads": torch.get_num_threads(),
    }


def as_costs(cost: Cost) -> dict[str, Any]:
    """For JSON: v as a list from one row on."""
    kept = {k: getattr(cost, k) for k in ("seconds", "c_first", "c", "o", "o_plain")}
    return kept | {"v": [cost.v[n] for n in sorted(cost.v)]}


def cost_of(found: dict[str, Any]) -> Cost:
    """The reverse of `as_costs`."""
    kept = {k: found[k] for k in ("seconds", "c_first", "c", "o", "o_plain")}
    return Cost(v=dict(enumerate(found["v"], start=1)), **kept)


def possible(study: Study, drafter: Drafter) -> list[int]:
    """The study's draft lengths that the drafter was made for."""
    return sorted({limit_of(drafter, n) for n in study.args.lengths})


@torch.inference_mode()
def weights_read(target: Target, drafter: Drafter, request: Request) -> tuple[int, int]:
    """Distinct weights that a first and a later draft step multiply by, the target's included."""
    ids = torch.tensor([request.ids], device=target.device)  # [1, n+1]
    known, last = ids[:, :-1], ids[:, -1:]
    cache = target.new_cache(1, ids.shape[1])
    taps = target.forward(known, cache, drafter.taps).taps  # [1, n, L*h]
    state = drafter.start(1, ids.shape[1] + 4)
    drafter.prefill(state, known, [known.shape[1]], taps)
    drafter.commit(state, last, [1], taps[:, -1:])
    modules = [m for m in (drafter, target.model) if isinstance(m, nn.Module)]
    rows, _ = drafter.head_rows()  # which may be gathered ones, and no parameter
    weights = [*(p for m in modules for p in m.parameters()), rows]
    layers = [part for m in modules for part in m.modules() if isinstance(part, FewRowsLinear)]
    packed = {id(t): x.weight for x in layers for t in x.packed.values() if t is not None}
    with Products() as first:
        drafter.first(state)
    with Products() as later:
        drafter.extend(state, last, None)
    return _read(first, weights, packed), _read(later, weights, packed)


def _read(products: Products, weights: Sequence[Tensor], packed: Mapping[int, Tensor]) -> int:
    """How many of the weights' numbers are multiplied by; `packed` are copies of some, by `id`."""
    known = {w.untyped_storage().data_ptr() for w in weights}
    read: dict[tuple[int, int], int] = {}
    for _, args, options in products.calls:
        for leaf in tree_leaves((args, options)):
            weight = packed.get(id(leaf), leaf)
            if _is_matrix(weight) and weight.untyped_storage().data_ptr() in known:
                read[weight.data_ptr(), weight.numel()] = weight.numel()
    return sum(read.values())


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dim() > 1


# ---- acceptance


def accepted(study: Study, name: str) -> dict[str, Any]:
    """α, S_k and τ of every draft length on the held-out replies, by law and domain.

    Expected over all drafts along the target's own replies, with intervals over conversations.
    """
    drafter = study.drafter(name)
    records = records_with_states(study.store, study.target, drafter.taps, "heldout")
    lengths = possible(study, drafter)
    limit = int(study.store.settings["max_new_tokens"])
    names = sorted({r.domain for r in records})
    found: dict[str, Any] = {}
    for law in LAWS:
        own = [r for d in names for r in held_out(records, law, d) if len(r.reply) > 1]
        scores = score(study.target, drafter, own, law, max(lengths), limit)
        table = {d: [s for s in scores if s.domain == d] for d in names} | {ALL: scores}
        found[law.label] = {d: _cell(part, lengths) for d, part in table.items() if part}
    return dict(rounded(found, 4))


def served_as_trained(study: Study, name: str) -> dict[str, Any]:
    """Parity of the saved drafter on held-out replies, spread over the domains."""
    drafter = study.drafter(name)
    records = records_with_states(study.store, study.target, drafter.taps, "heldout")
    chosen = []
    for law in LAWS:
        own = sorted((r for r in records if r.drawn_from(law)), key=lambda r: r.key)
        chosen += own[:: max(1, len(own) // study.args.parity)][: study.args.parity]
    lengths = possible(study, drafter)
    serving = ServingSection(num_draft_tokens=min(3, max(lengths)), verifier=VERIFIER)
    limit = int(study.store.settings["max_new_tokens"])
    found = parity(study.target, drafter, chosen, serving, limit)
    parts = {p.name: {"verdict": p.verdict, "found": p.lines[-1]} for p in found.parts}
    return {"holds": found.ok, "replies": len(chosen), "parts": parts, "warnings": found.warnings}


def _cell(scores: Sequence[Conversation], lengths: Sequence[int]) -> dict[str, Any]:
    by_length = {n: estimate(scores, n, VERIFIER, RESAMPLES) for n in lengths}
    return {
        "replies": len(scores),
        "tokens": sum(s.tokens for s in scores),
        "overlap": overlap_interval(scores, RESAMPLES),
        "captured_mass": captured_mass(scores),
        "tokens_per_round": {str(n): e.tokens_per_round for n, e in by_length.items()},
        "survival": {str(n): [s.value for s in e.survival] for n, e in by_length.items()},
    }


def predictions(costs: Cost, cell: dict[str, Any]) -> dict[int, float]:
    """Speedup by draft length, from costs and the S_k of one cell of `accepted`."""
    return {int(n): costs.speedup(survival) for n, survival in cell["survival"].items()}


def best_lengths(costs: dict[str, Any], acceptance: dict[str, Any]) -> dict[str, int]:
    """By law, the draft length of highest predicted speedup over all domains together."""
    found = {}
    for law, cells in acceptance.items():
        speedups = predictions(cost_of(costs), cells[ALL])
        found[law] = max(speedups, key=lambda n: speedups[n])
    return found


# ---- speed


def timed(study: Study, name: str, lengths: dict[str, int]) -> dict[str, Any]:
    """Measured speedup over plain decoding, batch 1, at each law's draft length.

    Plain and speculative decoding and the calibration take turns, prompt by prompt. predicted:
    from the costs that were calibrated meanwhile and the S_k expected on all held-out replies;
    threads: those that computed.
    """
    drafter = study.drafter(name)
    acceptance = study.known(name, "accept", accept_settings(study))
    assert acceptance is not None
    calibrating = _calibrating(study)
    found = {}
    for law in LAWS:
        gamma = lengths[law.label]
        how = DecodeSettings(study.args.timing_tokens, gamma, VERIFIER)
        calibration = Calibration(study.target, drafter, law, how)
        loops = {
            "plain": our_loop(study.target, DecodeSettings(1, 0), None, prefill=False),
            "drafting": our_loop(study.target, how, drafter, prefill=False),
            "calibrating": calibration_loop(calibration, calibrating),
        }
        work = [[request] for request in _timed_requests(study, law)]
        samples = interleaved(loops, work, study.args.timing_tokens)
        rows = measure_rows(study.target, _context(study, calibrating), range(1, gamma + 2))
        costs = calibration.cost(rows)
        found[law.label] = {
            "num_draft_tokens": gamma,
            "prompts": len(work),
            "threads": torch.get_num_threads(),
            "measured": ratio(samples["plain"], samples["drafting"]),
            "predicted": costs.speedup(acceptance[law.label][ALL]["survival"][str(gamma)]),
            "plain_tokens_per_s": rate(samples["plain"]),
            "tokens_per_round": per_round(samples["drafting"]),
            "cost": as_costs(costs),
        }
    return dict(rounded(found, 4))


def _timed_requests(study: Study, law: Law) -> list[Request]:
    """So many of each domain: first those whose reply is long enough, by their ids (hashes)."""
    enough = study.args.timing_tokens
    rows = [r for r in study.store.index() if r.split == "heldout" and r.drawn_from(law)]
    rows = [r for r in rows if r.turn == 0 and len(r.reply) > 1]
    rows.sort(key=lambda r: (-min(len(r.reply), enough), r.key))
    return _requests(study, rows, study.args.timed)


def _calibrating(study: Study) -> list[Request]:
    """Training prompts, about as many of each domain."""
    rows = [r for r in study.store.index() if r.split == "train" and r.drawn_from(LAWS[0])]
    rows = sorted((r for r in rows if r.turn == 0), key=lambda r: r.key)
    each = -(-study.args.calibration // len({r.domain for r in rows}))
    return _requests(study, rows, each)[: study.args.calibration]


def _requests(study: Study, rows: Sequence[RowInfo], each: int) -> list[Request]:
    """What was asked in the first `each` rows of every domain; domains take turns."""
    names = sorted({r.domain for r in rows})
    chosen = [r for d in names for r in [r for r in rows if r.domain == d][:each]]
    return in_turns([request_of(r) for r in study.store.read(chosen)], sort=False)


def _context(study: Study, calibrating: Sequence[Request]) -> int:
    return len(calibrating[0].ids) + int(study.args.timing_tokens) // 2


# ---- what parts depend on, beside the run


def cost_settings(study: Study) -> dict[str, Any]:
    """What costs depend on."""
    return {"lengths": study.args.lengths, "calibration": study.args.calibration}


def accept_settings(study: Study) -> dict[str, Any]:
    """What figures of acceptance depend on."""
    return {"lengths": study.args.lengths, "verifier": VERIFIER}


def parity_settings(study: Study) -> dict[str, Any]:
    """What parity is looked for on."""
    return {"replies": study.args.parity}


def speed_settings(study: Study) -> dict[str, Any]:
    """What timings depend on."""
    known = ("lengths", "calibration", "timed", "timing_tokens")
    return {key: getattr(study.args, key) for key in known}
