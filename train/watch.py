"""What training's own figures say is wrong, in sentences, and the pull toward weak domains."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..configs.training import TrainSection
from .validate import TAU

_LINES = 3  # train lines that are judged together
_COLLAPSED = 0.5  # overlap against its best
_RISEN = 1.2  # loss against its start
_VANISHED = 1e-3  # gradient norm against train.clip
_PLATEAU = 5  # evaluations
_GAIN = 0.005  # share of the expected gain by which tokens per round count as better
_FALL = 0.1  # share of its best that a domain's overlap has lost

Figures = Mapping[str, Any]


@dataclass
class _Domain:
    """A domain's highest held-out overlap, when it was, and the mean of the others at that time."""

    best: float
    step: int
    others: float


@dataclass
class _Seen:
    start: list[float] | None = None
    """Loss and overlap of the first train line."""
    recent: list[list[float]] = field(default_factory=list)
    """Loss, overlap and gradient norm of the last ones."""
    overlap: float = 0.0
    """Best mean overlap of `_LINES` lines."""
    tau: float | None = None
    tau_step: int = 0
    """The evaluation that was better than those before it."""
    since: int = 0
    """Evaluations since then."""
    domains: dict[str, _Domain] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


class Watch:
    """Reads train lines and held-out figures as they come; says each thing once."""

    def __init__(self, section: TrainSection, state: Mapping[str, Any]):
        """Begin anew with an empty `state`, or go on from what `state()` gave a checkpoint."""
        self._section, self._seen = section, _Seen(**state)
        domains = state.get("domains", {}).items()
        self._seen.domains = {name: _Domain(**known) for name, known in domains}

    def state(self) -> dict[str, Any]:
        return asdict(self._seen)

    def restart(self) -> None:
        """Something else is trained on: train lines so far are no measure of those to come."""
        self._seen.start, self._seen.recent, self._seen.overlap = None, [], 0.0

    def train(self, step: int, line: Figures) -> list[str]:
        """A sentence if the learning rate is too high."""
        seen = self._seen
        loss, overlap, norm = line["loss"], line["overlap"], line["gradient_norm"]
        if seen.start is None:
            seen.start = [loss, overlap]
        seen.recent = [*seen.recent, [loss, overlap, norm]][-_LINES:]
        if len(seen.recent) < _LINES or "lr" in seen.said:
            return []
        why = self._too_high(seen.start)
        if not why:
            return []
        seen.said.append("lr")
        lr = self._section.lr
        return [f"train.lr {lr:g} is too high: by step {step} {why}; try {lower_rate(lr):g}"]

    def _too_high(self, start: Sequence[float]) -> str:
        """What shows it, if anything does.

        A gradient norm above the clip alone says nothing: good runs are clipped at every step.
        """
        seen, clip = self._seen, self._section.clip
        loss, overlap = (sum(line[i] for line in seen.recent) / _LINES for i in (0, 1))
        norms = [line[2] for line in seen.recent]
        seen.overlap = max(seen.overlap, overlap)
        if overlap < _COLLAPSED * seen.overlap:
            return f"overlap on training batches fell from {seen.overlap:.3f} to {overlap:.3f}"
        if loss > start[0] + (_RISEN - 1) * abs(start[0]) and min(norms) > clip:
            return f"the loss rose from {start[0]:.3g} to {loss:.3g} under clipped gradients"
        if overlap <= start[1] and max(norms) < _VANISHED * clip:
            return f"the gradient vanished (norm {norms[-1]:.1g}) at an overlap of {overlap:.3f}"
        return ""

    def heldout(self, step: int, figures: Figures) -> list[str]:
        """Sentences on a plateau and on domains that fall while others rise."""
        if TAU not in figures:
            return []
        return [*self._plateau(step, figures[TAU]), *self._falling(step, figures)]

    def _plateau(self, step: int, tau: float) -> list[str]:
        seen = self._seen
        if seen.tau is None or tau - seen.tau > _GAIN * (seen.tau - 1):
            seen.tau, seen.tau_step, seen.since = tau, step, 0
            return []
        seen.since += 1
        if seen.since != _PLATEAU:
            return []
        return [
            f"a plateau: held-out tokens per round have not risen in {_PLATEAU} evaluations "
            f"({tau:.3f} at step {step}, {seen.tau:.3f} at step {seen.tau_step})"
        ]

    def _falling(self, step: int, figures: Figures) -> list[str]:
        overlap = by_domain(figures, "overlap")
        if len(overlap) < 2:
            return []
        sentences = []
        for name, now in overlap.items():
            others = (sum(overlap.values()) - now) / (len(overlap) - 1)
            known = self._seen.domains.get(name)
            if known is None or now > known.best:
                self._seen.domains[name] = _Domain(now, step, others)
                continue
            fallen = now < (1 - _FALL) * known.best and others > known.others
            if fallen and name not in self._seen.said:
                self._seen.said.append(name)
                sentences.append(
                    f"domain {name} falls while the others rise: its held-out overlap is "
                    f"{now:.3f} at step {step} and was {known.best:.3f} at step {known.step}, "
                    f"theirs went from {known.others:.3f} to {others:.3f}; raise "
                    f"train.domain_weights.{name} or train.reweight"
                )
        return sentences


def by_domain(figures: Figures, name: str) -> dict[str, float]:
    """The held-out figure `name` of each domain that has it."""
    begin = f"{name}/"
    return {key.removeprefix(begin): v for key, v in figures.items() if key.startswith(begin)}


def lower_rate(lr: float) -> float:
    """A learning rate to try where `lr` was too high."""
    return min(lr / 10, TrainSection.lr)


def domain_weights(figures: Figures, base: Mapping[str, float], pull: float) -> dict[str, float]:
    """Sampling weights of the domains in `base`, drawn toward the lowest expected gains τ - 1.

    A weight is the one in `base` times (mean gain / own gain) ^ `pull`, a factor from 1/4 to 4, and
    1 for a domain without held-out figures; all are scaled to 1 on average.
    """
    gains = {name: tau - 1 for name, tau in by_domain(figures, TAU).items() if name in base}
    mean = sum(gains.values()) / max(1, len(gains))
    weights = {
        name: weight * _factor(gains.get(name, mean), mean, pull) for name, weight in base.items()
    }
    scale = len(weights) / sum(weights.values())
    return {name: weight * scale for name, weight in weights.items()}


def _factor(gain: float, mean: float, pull: float) -> float:
    if mean <= 0:  # nothing is accepted anywhere
        return 1.0
    return min(4.0, max(0.25, (mean / max(gain, 1e-9)) ** pull))
