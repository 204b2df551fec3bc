"""W&B gets the page's own figures, as numbers that it can plot."""

from typing import Any

import pytest
import wandb

from draftsmith.eval.page import Table
from draftsmith.eval.tables import detail_tables, summary_tables
from draftsmith.eval.tracked import log_report, plottable


class Run:
    """What was logged."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}

    def log(self, values: dict[str, Any]) -> None:
        self.logged |= values


def test_texts_become_numbers_again() -> None:
    rows = (("chat", "0.5 [0.25–0.75]", "6*", "3.1e-06", "–"), ("2", "–", "31", "-4", "–"))
    table = Table("T", ("domain", "α", "n", "margin", "speed"), rows)
    names, values = plottable(table)
    assert names == ["domain", "α", "α low", "α high", "n", "margin", "speed"]
    assert values == [
        ["chat", 0.5, 0.25, 0.75, 6, 3.1e-06, None],
        ["2", None, None, None, 31, -4, None],
    ]


def test_a_column_with_words_stays_text() -> None:
    table = Table("T", ("domain", "S_1"), (("a", "0.50–0.60"), ("b", "0.50")))
    assert plottable(table) == (["domain", "S_1"], [["a", "0.50–0.60"], ["b", "0.50"]])
    assert plottable(Table("T", ("domain", "n"), ())) == (["domain", "n"], [])


def test_every_table_of_the_page_is_logged(sample: dict[str, Any]) -> None:
    run = Run()
    log_report(sample, run)
    tables = [*summary_tables(sample), *detail_tables(sample)]
    assert len(run.logged) == len(tables)
    assert all(isinstance(table, wandb.Table) for table in run.logged.values())
    acceptance = run.logged["report/acceptance"]
    first = dict(zip(acceptance.columns, acceptance.data[0], strict=True))
    alpha = sample["cells"][0]["overlap"]
    for name, key in (("", "value"), (" low", "low"), (" high", "high")):
        assert first[f"α overlap{name}"] == pytest.approx(alpha[key], abs=5e-4)
    assert first["S_1"] == pytest.approx(
        sample["cells"][0]["acceptance_by_position"][0]["survival"], abs=5e-3
    )
    assert [len(table.data) for table in run.logged.values()] == [len(t.rows) for t in tables]


def test_two_runs_of_an_engine_keep_their_own_tables(sample: dict[str, Any]) -> None:
    engine = {
        "engine": "vllm",
        "method": "eagle3",
        "num_draft_tokens": 2,
        "draft_sampling": "greedy",
    }
    place = {key: {"value": 0.5} for key in ("share", "least", "most")}
    cell = {
        "domain": "chat", "law": "T=0", "prompts": 3, "same_replies": 3, "replies": 3, "rounds": 9,
        "tokens_per_round": {"value": 1.5}, "tokens_per_round_expected": {"value": 1.5},
        "positions": [place, place], "log_prob": None, "speed": [],
    }  # fmt: skip
    sample["engines"] = [{**engine, "cells": [cell]}, {**engine, "cells": [cell]}]
    run = Run()
    log_report(sample, run)
    name = "report/acceptance_in_vllm_eagle3_2_greedy_drafts"
    assert {name, f"{name}_2"} <= run.logged.keys()
