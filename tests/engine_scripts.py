"""Engines whose every reply is written down beforehand, and what measuring them takes."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_counts import counted
from replayed_engine import key
from worlds import GAMMA, LIMIT, World

from draftsmith.data.gather import request_of
from draftsmith.data.served import Program
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.eval.cells import Cell, cells_of
from draftsmith.eval.engines.engine import Engine, Serving
from draftsmith.eval.engines.expected import Rounds, foretold
from draftsmith.eval.engines.measure import Plan
from draftsmith.train.score import score

REPLAYED = Path(__file__).with_name("replayed_engine.py")
KINDS = {"vllm": "vllm", "llamacpp": "llamacpp", "sglang": None}
"""Kinds of servers, and the prefix of their counters."""


def greedy_cells(world: World) -> list[Cell]:
    """The world's cells at T = 0, of replies that can be drafted."""
    recipe = replace(
        world.recipe, serving=replace(world.recipe.serving, laws=world.recipe.serving.laws[:1])
    )
    cells = cells_of(recipe, list(world.store.records("heldout")))
    return [replace(c, records=[r for r in c.records if len(r.reply) > 1]) for c in cells]


def plan(cells: Sequence[Cell], concurrencies: tuple[int, ...] = (1,)) -> Plan:
    return Plan(cells, LIMIT, concurrencies, 100)


def serving(folder: Path, layout: str, limit: float = 60.0) -> Serving:
    return Serving(
        target="some/target", drafter=folder, layout=layout, reduced=True,
        num_draft_tokens=GAMMA, sampled=False, dtype="float32", cpu=True, context=64, rows=2,
        work=folder, limit=limit, python=sys.executable,
    )  # fmt: skip


def expectations(world: World, cells: Sequence[Cell], overruns: bool = True) -> list[Rounds]:
    return [
        foretold(
            score(world.target, world.drafter, c.records, c.law, GAMMA, LIMIT, Law(0.0)),
            GAMMA,
            overruns,
        )
        for c in cells
    ]


def write_script(
    world: World, cells: Sequence[Cell], drafter: Drafter, kind: str, file: Path, fault: str | None
) -> None:
    """What a right engine would say and count with `drafter` in front of the world's target."""
    replies = {}
    for cell in cells:
        requests = [request_of(r) for r in cell.records]
        outputs = counted(world.target, drafter, requests, LIMIT, GAMMA)
        for request, output in zip(requests, outputs, strict=True):
            rounds = output.rounds
            if kind == "llamacpp":  # it drafts no more than there is room for
                rounds = _within(output.rounds)
            replies[key(request.ids, request.law.temperature)] = {
                "ids": output.ids, "finish": output.finish, "rounds": rounds,
            }  # fmt: skip
    file.write_text(json.dumps({"kind": kind, "replies": replies, "fault": fault}))


def _within(rounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    known, found = 1, []
    for drafted, accepted in rounds:
        room = min(drafted, LIMIT - known - 1)
        found.append((room, min(accepted, room)))
        known += accepted + 1
    return found


def engine(world: World, cells: Sequence[Cell], drafter: Drafter, kind: str, folder: Path,
           fault: str | None = None) -> Engine:  # fmt: skip
    """An engine of that kind, whose plain server is the same without its rounds."""

    def program(serving: Serving) -> Program:
        file = folder / ("plain.json" if serving.drafter is None else "drafted.json")
        write_script(world, cells, drafter, kind, file, fault)
        if serving.drafter is None:
            said = json.loads(file.read_text())
            for reply in said["replies"].values():
                reply["rounds"] = []
            file.write_text(json.dumps(said))
        return serving.program("the engine", [str(REPLAYED), "{port}", str(file)], {})

    return Engine(
        name="Replayed",
        methods={"eagle3": "eagle3", "transformers": "draft_model"},
        program=program,
        counters=KINDS[kind],
        samples=True,
        greedy=frozenset(),
        overruns=kind != "llamacpp",
        version=("/version", "version"),
    )
