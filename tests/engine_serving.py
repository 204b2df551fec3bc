"""Drafters of the embedded target, trained here, and what engines should count with them."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_counts import Counted, counted
from rich.console import Console

from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import LawSection, ServingSection, TargetSection
from draftsmith.data.collection import collect
from draftsmith.data.gather import GatherSettings, answer, request_of
from draftsmith.data.records import Record
from draftsmith.data.target import Target, target_info
from draftsmith.data.warp import Law
from draftsmith.data.work import Work
from draftsmith.drafters.about import about
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.layouts import layout_of
from draftsmith.eval.cells import Cell
from draftsmith.eval.engines.engine import Engine, Serving
from draftsmith.eval.engines.expected import foretold, log_probs
from draftsmith.eval.engines.measure import Plan, measure
from draftsmith.scripts.pipeline import Run, prepare_recipe
from draftsmith.train.loop import train
from draftsmith.train.score import score

TOKENS = 20
GAMMA = 3
CHANGES = [
    "domains.0.max_rows=12",
    "domains.0.holdout=0.0",
    f"collect.max_new_tokens={TOKENS}",
    "collect.temperatures=[0.0]",
    "train.steps=24",
    "train.warmup_steps=5",
    "train.lr=3e-3",
    "train.tokens_per_batch=300",
    "train.unroll=3",
    "train.eval_every=24",
    "train.save_every=24",
]
DRAFTERS = {
    "eagle3": ["drafter.draft_vocab_size=1024"],
    "causal": ["drafter={family: causal, layers: [0, 1, 2, 29]}"],
    "dflash": ["drafter={family: dflash}"],
    "medusa": ["drafter={family: medusa, draft_vocab_size: 1024, shared_head: true}"],
}


@dataclass(frozen=True)
class Trained:
    """A drafter that overfits the greedy replies to a few prompts."""

    target: Target
    drafter: Drafter
    folder: Path
    records: list[Record]
    """Of those prompts: the greedy replies it was trained on, and others drawn at T = 1."""

    def cell(self, law: Law) -> Cell:
        records = [r for r in self.records if r.law == law and len(r.reply) > 1]
        return Cell("chat", law, records)

    def counted(self) -> list[Counted]:
        """What our own decoding does at T = 0."""
        requests = [request_of(r) for r in self.cell(Law(0.0)).records]
        return counted(self.target, self.drafter, requests, TOKENS, GAMMA)


def train_drafter(family: str, target: Target, folder: Path) -> Trained:
    recipe, quiet = load_recipe("demo", [*CHANGES, *DRAFTERS[family]]), Console(quiet=True)
    serving = ServingSection((LawSection(0.0), LawSection(1.0)), num_draft_tokens=GAMMA)
    recipe = replace(recipe, domains=recipe.domains[:1], serving=serving)
    taps = Run(recipe, folder, quiet, _target=target).taps()
    prepared = prepare_recipe(recipe, target, quiet)
    store = collect(Work(recipe, target, taps, prepared, folder / "records", quiet))
    saved = train(recipe, target, store, folder / "run", quiet)
    greedy = list(store.records())
    drawn = [replace(request_of(r), law=Law(1.0), seed=i) for i, r in enumerate(greedy)]
    settings = GatherSettings(TOKENS, len(drawn), taps, keep="hidden")
    records = greedy + answer(target, drawn, settings)
    return Trained(target, load_drafter(saved, target), saved, records)


def serve(
    engine: Engine, python: str, made: Trained, laws: list[Law], sampled: bool, work: Path
) -> dict[Law, dict[str, Any]]:
    """What the engine did under each law, beside what was expected."""
    cells = [made.cell(law) for law in laws]
    expected = [
        foretold(
            score(made.target, made.drafter, c.records, c.law, GAMMA, TOKENS,
                  Law(c.law.temperature) if sampled else Law(0.0)),
            GAMMA, engine.overruns,
        )
        for c in cells
    ]  # fmt: skip
    judge = partial(log_probs, made.target)
    layout = layout_of(made.folder, about(made.folder))
    target = target_info(TargetSection(device="cpu"))
    serving = Serving(
        target=target.place, drafter=made.folder, layout=layout,
        reduced=made.drafter.draft_ids is not None, num_draft_tokens=GAMMA, sampled=sampled,
        dtype="float32", cpu=True, context=512, rows=2, work=work, limit=1200.0, python=python,
    )  # fmt: skip
    found = measure(engine, serving, target, Plan(cells, TOKENS, (), 200), expected, judge, print)
    return dict(zip(laws, found["cells"], strict=True))


def check_greedy(row: dict[str, Any], made: Trained, overruns: bool) -> None:
    """Replies are the target's; rounds and positions are those of our decoding, but for ties."""
    own = made.counted()
    assert row["same_replies"] >= row["replies"] - 1, row
    assert row["deviations"] == [], row["deviations"]
    assert row["rounds"] == pytest.approx(sum(len(o.rounds) for o in own), abs=2)
    if overruns and row["same_replies"] == row["replies"]:
        reached = [sum(a > k for o in own for _, a in o.rounds) for k in range(GAMMA)]
        found = [place["accepted"] for place in row["positions"]]
        assert found == pytest.approx(reached, abs=1), "a near-tie of the draft at most"
    assert row["accepted"] >= 8, "the drafter is accepted at all"
