"""Train-serve parity: what training measured is what decoding does, on the same rows.

Teacher-forced figures hide a drafter that is served otherwise than it was trained: other layers
read, weights not loaded, a state fed back in another form, another template. Here both sides run on
the same replies and are compared where they must be equal: the target's states, the draft's logits,
and at T = 0 every round. At T > 0 they are equal in the mean.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..configs.recipe import ServingSection
from ..data.records import Record
from ..data.target import Target
from ..data.warp import law_of
from ..drafters.adapters import merged
from ..drafters.base import Drafter
from ..drafters.causal import CausalDrafter
from .courses import greedy_replies, mean, rounds
from .replay import Forced, decoded_logits
from .sides import Part, Sides, gap, part_of

_REPLAYED = 4  # replies along which logits are compared
_LONGEST = 48  # tokens of those replies


@dataclass(frozen=True)
class Parity:
    """All comparisons. `figures` are by name; `warnings` are no failures."""

    parts: tuple[Part, ...]
    warnings: tuple[str, ...]
    figures: dict[str, float]

    @property
    def checked(self) -> bool:
        """Whether anything could be compared."""
        return any(part.verdict != "not checked" for part in self.parts)

    @property
    def ok(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.checked and all(part.verdict != "different" for part in self.parts)

    @property
    def lines(self) -> list[str]:
        """All of it, a line each."""
        told = []
        for part in self.parts:
            told += [f"{part.name}: {part.verdict}", *(f"  {line}" for line in part.lines)]
        return [*told, *(f"warning: {line}" for line in self.warnings)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}


def parity(
    target: Target,
    drafter: Drafter,
    records: Sequence[Record],
    serving: ServingSection,
    limit: int,
    trained: Drafter | None = None,
) -> Parity:
    """Compare `trained` in the training forward with `drafter` in the decoder, drafting chains.

    `trained` is the drafter in memory whose folder `drafter` was loaded from; None takes `drafter`
    on both sides. `records` are any replies, collected with max_new_tokens `limit`; states that
    they hold must be of `trained`'s layers. Rounds are compared on those that are the target's
    greedy ones, or, where there are none, on greedy replies made here to their prompts.
    """
    sides = Sides(target, trained or drafter, drafter, serving, limit)
    with _evaluating(sides.trained, sides.served):
        fresh = sides.recomputed(records)
        parts = [] if trained is None else [_identity(sides)]
        parts += [_states(sides, records, fresh), _logits(sides, fresh)]
        greedy, figures, warnings = rounds(sides, greedy_replies(sides, fresh))
        parts.append(greedy)
        for law in dict.fromkeys(map(law_of, serving.laws)):
            if law.temperature:
                part, found = mean(sides, law, fresh)
                parts.append(part)
                figures |= found
    return Parity(tuple(parts), tuple(warnings), figures)


@contextmanager
def _evaluating(*drafters: Drafter) -> Iterator[None]:
    """Without dropout, and afterwards as before."""
    modules = [m for m in dict.fromkeys(drafters) if isinstance(m, nn.Module)]
    before = [m.training for m in modules]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.train(was)


def _identity(sides: Sides) -> Part:
    """Family, layers, vocabulary and weights of the drafter in memory and of the loaded one."""
    trained, served = sides.trained, sides.served
    faults = []
    if trained.family != served.family:
        faults.append(f"family '{trained.family}' was trained, '{served.family}' is served")
    if trained.taps != served.taps:
        faults.append(f"layers {list(trained.taps)} were trained on, {list(served.taps)} are read")
    one, two = (_drafted(d, sides.target) for d in (trained, served))
    if one != two:
        faults.append("the draft vocabularies are not the same tokens")
    mine, theirs = _weights(trained), _weights(served)
    faults += [
        f"tensor '{name}' was trained, and is not served"
        for name in sorted(mine.keys() - theirs.keys())
    ]
    faults += [
        f"tensor '{name}' is served, and was not trained"
        for name in sorted(theirs.keys() - mine.keys())
    ]
    shared = sorted(mine.keys() & theirs.keys())
    for name in shared:
        exact = theirs[name].is_floating_point()
        apart = gap(mine[name].cpu(), theirs[name].cpu())
        if apart > (torch.finfo(theirs[name].dtype).eps if exact else 0.0):
            faults.append(f"tensor '{name}' differs by {apart:.2g} of its largest value")
    found = f"{len(shared)} tensors of the {served.family} drafter were compared"
    return part_of("drafter", faults, found, checked=len(shared) > 0)


def _drafted(drafter: Drafter, target: Target) -> list[int]:
    """The target ids that a drafter can propose."""
    ids = drafter.draft_ids
    return list(range(target.vocab_size)) if ids is None else ids.tolist()


def _weights(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors under the names that they are served by."""
    assert isinstance(drafter, nn.Module)
    model = getattr(drafter, "model", None)
    if isinstance(model, PeftModel):
        drafter = CausalDrafter(merged(model), drafter.draft_ids)
    return drafter.state_dict()


def _states(sides: Sides, records: Sequence[Record], fresh: Sequence[Record]) -> Part:
    """What the records hold of the target, and what it computes now."""
    name, faults, checked, largest = "states", [], 0, 0.0
    for kept, now in zip(records, fresh, strict=True):
        if kept.states is None or now.states is None:
            continue
        checked += 1
        pairs = {"last layer": (kept.states.hidden, now.states.hidden)}
        if sides.trained.taps:
            what = f"layers {list(sides.trained.taps)}"
            pairs[what] = (kept.states.taps, now.states.taps)
        for what, (stored, mine) in pairs.items():
            apart = gap(stored, mine)
            largest = max(largest, apart)
            if apart > max(sides.tolerance, 2 * torch.finfo(stored.dtype).eps):
                faults.append(
                    f"record {kept.key}: the states of its {what} differ by {apart:.2g} of the "
                    "largest"
                )
    if not checked:
        return Part(name, "not checked", ("the records hold none, they are computed now",))
    found = f"those of {checked} records differ by {largest:.1e} of the largest at most"
    return part_of(name, faults, found)


def _logits(sides: Sides, fresh: Sequence[Record]) -> Part:
    """The draft's logits at the same places, by draft position."""
    usable = [r for r in fresh if len(r.reply) > 1]
    if not usable:
        return Part("logits", "not checked", ("no reply goes on behind its first token",))
    step = max(1, len(usable) // _REPLAYED)
    chosen = sides.recomputed([_cut(r) for r in usable[::step][:_REPLAYED]])
    forced = Forced(sides.target, sides.trained, chosen, sides.gamma)
    faults, count = [], 0
    largest: dict[int, float] = {}
    for row, record in enumerate(chosen):
        seen = decoded_logits(sides.target, sides.served, record, sides.gamma)
        places = sorted(seen)
        if not places:  # so short a reply leaves no room to draft
            continue
        count += len(places)
        for place, mine in zip(places, forced.logits(row, places), strict=True):
            apart = gap(seen[place], mine)
            largest[place.k + 1] = max(largest.get(place.k + 1, 0.0), apart)
            if apart > sides.tolerance:
                faults.append(
                    f"record {record.key}, round begun behind reply token {place.start}, "
                    f"position {place.k + 1}: the draft's logits differ by {apart:.2g} of the "
                    "largest"
                )
    if not count:
        return Part("logits", "not checked", ("no reply leaves room to draft",))
    by = ", ".join(f"{apart:.1e} at position {k}" for k, apart in sorted(largest.items()))
    found = f"those of {count} places differ by at most {by}, of the largest"
    return part_of("logits", faults, found)


def _cut(record: Record) -> Record:
    return replace(record, ids=record.ids[: record.prompt_len + _LONGEST], states=None)
