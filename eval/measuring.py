"""The long parts of an evaluation, run or recalled: a kill costs the part it hit, and no other."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from ..configs.recipe import EvalSection, LawSection, Recipe
from ..data.files import write_json
from ..data.gather import Request, request_of
from ..data.records import Record
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from ..train.score import Conversation, Drafting, score
from .batches import AtBatch, grouped, measure_batch
from .cells import Cell
from .decode import DecodeSettings, decode
from .estimate import estimate
from .gamma import AnyPolicy, as_mapping, make_policy
from .intervals import Interval
from .parity import parity
from .rows import Output
from .serving import CALIBRATED, policy_of, settings
from .speed import (
    Calibration,
    Cost,
    TreeCost,
    calibrate,
    long_enough,
    measure_rows,
    measure_tree,
)
from .timing import Timing, generate_ratio, time_cell


@dataclass(frozen=True)
class Speeds:
    """Everything that was timed, all in turns with each other.

    timings: by cell; costs: of chains, and trees: of the recipe's tree if it drafts one, by law;
    generate: our plain loop against transformers' `generate`; context: tokens before the passes
    whose costs are compared.
    """

    timings: dict[str, Timing]
    costs: dict[str, Cost]
    trees: dict[str, TreeCost]
    generate: Interval
    context: int


class Measuring:
    """Runs or recalls the parts of one evaluation, each a JSON file in its folder."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        drafter: Drafter,
        folder: Path,
        console: Console,
        limit: int,
    ):
        self.recipe, self.target, self.drafter = recipe, target, drafter
        self.folder, self.console, self.limit = folder, console, limit
        self.policies: dict[Law, AnyPolicy] = {}

    def _part(self, name: str, make: Callable[[], Any]) -> Any:
        path = self.folder / "parts" / f"{name.replace('/', '_')}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        made = make()
        write_json(path, made)
        return json.loads(path.read_text(encoding="utf-8"))

    def possible(self, lengths: Sequence[int]) -> list[int]:
        """Those of the draft lengths that the drafter was made for."""
        most = self.drafter.max_draft_tokens
        return [length for length in lengths if most is None or length <= most]

    # ---- engine-free

    def scores(self, cell: Cell, steps: int) -> list[Conversation]:
        """Of the cell's replies that can be drafted, in their order."""
        self.console.print(f"estimate  {cell.name}")
        return self._score(cell, steps, self.recipe.serving.drafting)

    def _score(self, cell: Cell, steps: int, drafting: Drafting) -> list[Conversation]:
        return score(self.target, self.drafter, cell.records, cell.law, steps, self.limit, drafting)

    def servings(self, cell: Cell, scores: list[Conversation]) -> dict[str, Any]:
        """Expected τ of chains for every way of drawing and verifying; they differ above T = 0."""
        if cell.law.temperature == 0:
            return {}
        gamma, own = self.recipe.serving.num_draft_tokens, self.recipe.serving.drafting
        found = {}
        ways: tuple[tuple[Drafting, str], ...]
        ways = (("sampled", "token"), ("sampled", "block"), ("greedy", "token"))
        for drafting, rule in ways:
            used = scores if drafting == own else self._score(cell, gamma, drafting)
            name = f"{drafting}, {rule}" if drafting == "sampled" else drafting
            tau = estimate(used, gamma, rule, self.recipe.eval.bootstrap).tokens_per_round
            found[name] = tau.to_dict()
        return found

    def parity(self, cells: Sequence[Cell]) -> dict[str, Any] | None:
        """Whether what was trained is what decodes, on replies spread over the domains."""
        count = self.recipe.eval.parity_replies
        return self._part("parity", partial(self._parity, cells)) if count else None

    def _parity(self, cells: Sequence[Cell]) -> dict[str, Any]:
        self.console.print("parity")
        chosen = []
        for law in dict.fromkeys(c.law for c in cells):
            own = [r for c in cells if c.law == law for r in c.records if len(r.reply) > 1]
            step = max(1, len(own) // self.recipe.eval.parity_replies)
            chosen += own[::step][: self.recipe.eval.parity_replies]
        # So few replies tell nothing in the mean; τ of whole cells, estimated and decoded, does.
        exact = replace(self.recipe.serving, laws=(LawSection(0.0),))
        found = parity(self.target, self.drafter, chosen, exact, self.limit)
        return {"replies": len(chosen), "checked": found.checked, **found.to_dict()}

    # ---- decoding

    def _settings(self, tokens: int, law: Law) -> DecodeSettings:
        return replace(settings(self.recipe.serving, tokens), policy=self.policies.get(law))

    def set_policies(
        self, cells: Sequence[Cell], calibration: Sequence[Request], lengths: Sequence[int]
    ) -> None:
        """What ends drafts under each law; a calibrated policy is kept, as timings are not."""
        if self.recipe.serving.policy is None:
            return
        for law in dict.fromkeys(c.law for c in cells):
            made = self._part(
                f"policy-{law.label}", partial(self._policy, calibration, law, lengths)
            )
            self.policies[law] = make_policy(made, str(self.folder / "parts"))

    def _policy(
        self, calibration: Sequence[Request], law: Law, lengths: Sequence[int]
    ) -> dict[str, Any]:
        cost = None
        if (self.recipe.serving.policy or {}).get("name") == CALIBRATED:
            self.console.print(f"calibrate policy {law.label}")
            rows = measure_rows(self.target, self._context(calibration), _passes(lengths))
            cost = calibrate(self.target, self.drafter, calibration, law, rows, self._chain())
        found = policy_of(self.recipe, self.target, self.drafter, calibration, law, cost)
        return as_mapping(found)

    def policy_names(self) -> dict[str, Any] | None:
        """Each law's policy, with the figures it was given or calibrated to."""
        found = {law.label: as_mapping(p) for law, p in self.policies.items()}
        return found or None

    def outputs(self, cells: Sequence[Cell]) -> dict[str, Output]:
        """Speculative outputs of all held-out requests by record key, decoded in batches."""
        found: dict[str, Output] = {}
        size = self.recipe.eval.decode_batch
        for law in dict.fromkeys(c.law for c in cells):
            records = [r for c in cells if c.law == law for r in c.records]
            records.sort(key=lambda r: (len(r.ids), r.key))
            for start in range(0, len(records), size):
                part = records[start : start + size]
                self.console.print(f"decode    {law.label}: {start} of {len(records)} prompts")
                name = f"decode-{law.label}-{start:04d}"
                rows = self._part(name, partial(self._decode, part))
                found |= {key: Output(**fields) for key, fields in rows.items()}
        return found

    def _decode(self, records: Sequence[Record]) -> dict[str, Any]:
        requests = [request_of(r) for r in records]
        how = self._settings(self.limit, records[0].law)
        outputs = decode(self.target, requests, how, self.drafter)
        return {r.key: o.__dict__ for r, o in zip(records, outputs, strict=True)}

    # ---- time

    def speeds(
        self, cells: Sequence[Cell], calibration: Sequence[Request], lengths: Sequence[int]
    ) -> Speeds | None:
        """Timings of every cell, and costs calibrated in turns with them; None if none is asked."""
        section = self.recipe.eval
        if section.timing_prompts == 0:
            return None
        generate = generate_ratio(self.target, calibration, section.timing_tokens)
        context, how = self._context(calibration), self._chain()
        laws = list(dict.fromkeys(c.law for c in cells))
        chains = {law: self._calibrating(law, how, calibration) for law in laws}
        drafted = laws if self.recipe.serving.tree is not None else []
        trees = {law: self._calibrating(law, self._tree(), calibration) for law in drafted}
        timings, rows, nodes = {}, [], []
        for cell in cells:
            self.console.print(f"time      {cell.name}")
            rows.append(measure_rows(self.target, context, _passes(lengths)))
            if trees:
                nodes.append(measure_tree(self.target, context, self._tree().nodes))
            turns = [group[cell.law] for group in (chains, trees) if group]
            timings[cell.name] = time_cell(
                self.target, self.drafter, [request_of(r) for r in timed(cell, section)],
                self._settings(section.timing_tokens, cell.law),
                self.possible(section.timed_lengths),
                partial(_take_turns, turns),
            )  # fmt: skip
        passes = {n: median(found[n] for found in rows) for n in rows[0]}
        return Speeds(
            timings,
            {law.label: turn.calibration.cost(passes) for law, turn in chains.items()},
            {law.label: turn.calibration.tree_cost(median(nodes)) for law, turn in trees.items()},
            generate,
            context,
        )

    def at_batches(
        self,
        cells: Sequence[Cell],
        calibration: Sequence[Request],
        lengths: Sequence[int],
        speeds: Speeds,
    ) -> dict[str, list[AtBatch]]:
        """By law, costs and speed of chains of the served length at every batch size asked for.

        Trees and policies are measured one conversation at a time alone.
        """
        section, served = self.recipe.eval, self.recipe.serving
        how = replace(settings(served, section.timing_tokens), tree=None)
        fixed = served.tree is None and served.policy is None
        found: dict[str, list[AtBatch]] = {}
        for law in dict.fromkeys(c.law for c in cells):
            own = [c for c in cells if c.law == law]
            single = {c.domain: speeds.timings[c.name] for c in own if fixed}
            found[law.label] = [AtBatch(1, speeds.costs[law.label], single)]
            for batch in sorted(set(section.batch_sizes) - {1}):
                self.console.print(f"time      {law.label}, {batch} together")
                groups = {
                    c.domain: grouped(
                        [request_of(r) for r in ranked(c, section)], batch, section.timing_prompts
                    )
                    for c in own
                }
                found[law.label].append(
                    measure_batch(
                        self.target, self.drafter, law, groups, calibration, _passes(lengths),
                        speeds.context, how, batch,
                    )
                )  # fmt: skip
        return found

    def _chain(self) -> DecodeSettings:
        """Of what calibrates the costs of chains."""
        return long_enough(replace(self._tree(), tree=None), self.drafter)

    def _tree(self) -> DecodeSettings:
        return settings(self.recipe.serving, self.recipe.eval.timing_tokens // 2)

    def _calibrating(
        self, law: Law, how: DecodeSettings, requests: Sequence[Request]
    ) -> "_Calibrating":
        return _Calibrating(Calibration(self.target, self.drafter, law, how), requests)

    def _context(self, calibration: Sequence[Request]) -> int:
        return len(calibration[0].ids) + self.recipe.eval.timing_tokens // 2


class _Calibrating:
    """A calibration that goes round its prompts, one at each turn, the first not counted."""

    def __init__(self, calibration: Calibration, requests: Sequence[Request]):
        self.calibration = calibration
        calibration.run(requests[0], counted=False)
        self._requests = cycle(requests)

    def next(self) -> None:
        self.calibration.run(next(self._requests))


def _take_turns(turns: Sequence[_Calibrating]) -> None:
    for turn in turns:
        turn.next()


def _passes(lengths: Sequence[int]) -> range:
    """Rows of the target passes that these drafts lead to."""
    return range(1, max(lengths) + 2)


def timed(cell: Cell, section: EvalSection) -> list[Record]:
    """The prompts to time, one at a time: the first ones of `ranked`."""
    return ranked(cell, section)[: section.timing_prompts]


def ranked(cell: Cell, section: EvalSection) -> list[Record]:
    """First those whose reply is long enough to be timed, in the order of their ids.

    Ids are hashes, so the choice favours no kind of prompt (the longest replies tend to be loops,
    which are easy to draft).
    """
    enough = section.timing_tokens
    return sorted(cell.records, key=lambda r: (-min(len(r.reply), enough), r.key))
