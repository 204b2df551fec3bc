"""The comparison of families on a tiny target: every part, what is repeated, what is saved."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.configs.errors import UserError
from draftsmith.data import linear
from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.drafters.eagle3_config import Eagle3Config
from draftsmith.drafters.registry import FAMILIES, family_config
from draftsmith.drafters.skip import SkipConfig, SkipDrafter
from draftsmith.eval.speed import Cost
from draftsmith.scripts import results, study, study_families, study_heads, study_training
from draftsmith.scripts.study import Run, Study, collection_recipe, parser_of
from draftsmith.scripts.study_measure import as_costs, best_lengths, cost_of, weights_read
from draftsmith.scripts.study_tables import fastest, summary_table, threads

TRAINING = ("train.unroll=2", "train.tokens_per_batch=30", "train.warmup_steps=1")
RUNS = {
    "eagle3": Run("demo", ("drafter.draft_vocab_size=120", *TRAINING)),
    "skip": Run("skip"),
    "nothing": Run("no-such-recipe"),
}
SMALL = [
    *("--demo-rows", "2", "--train-rows", "2", "--heldout-rows", "1", "--max-new-tokens", "6"),
    *("--taps", "3", "--threads", "1", "--seconds", "0.3", "--lengths", "1", "2"),
    *("--timed", "1", "--timing-tokens", "8", "--calibration", "2"),
]


def write_prompts(folder: Path) -> Path:
    """Files named and laid out as the shared ones; three tasks are to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {
        "gsm8k_train": [{"question": f"Add {i}.", "answer": "1"} for i in range(4)],
        "gsm8k_test": [{"question": f"Take {i} away.", "answer": "1"} for i in range(3)],
        "mbpp": [{"task_id": i, "text": f"Code {i}.", "code": "a"} for i in range(1, 604)],
        "humaneval": [{"task_id": f"H/{i}", "prompt": f"def f{i}():"} for i in range(3)],
        "self_instruct": [{"instruction": f"Say {i}.", "input": ""} for i in range(4)],
        "spec_bench": [
            {"question_id": i, "category": "qa", "turns": [f"Ask {i}?", "And?"]} for i in range(3)
        ],
    }
    for name, own in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in own)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Callable[..., Path]
) -> dict[str, Any]:
    """A whole study, its command line, and what it saved."""
    folder = tmp_path_factory.mktemp("study")
    prompts = write_prompts(folder / "prompts")
    target = target_folder(max_position_embeddings=2048)
    argv = [*SMALL, "--runs", str(folder / "runs"), "--prompts", str(prompts)]
    argv += ["--target", str(target)]
    with pytest.MonkeyPatch.context() as patch:
        _small(patch, folder)
        study_families.main(argv)
    saved = json.loads((folder / "families.json").read_text(encoding="utf-8"))
    return {"argv": argv, "folder": folder, "saved": saved, "target": str(target)}


def _small(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(study_families, "RUNS", RUNS)
    patch.setattr(study_training, "TRIAL", 4)
    patch.setattr(study_training, "WARM_UP", 1)
    patch.setattr(results, "FOLDER", folder)


@pytest.mark.usefixtures("one_thread")
def test_a_study_measures_every_part_of_every_run(done: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in done["saved"]["rows"]}
    assert list(rows) == ["eagle3", "skip"], "what has no recipe is left out"
    trained = rows["eagle3"]["train"]
    assert trained["steps"] > 0 and trained["flops"] > 0
    assert trained["tokens_per_s"] == pytest.approx(trained["tokens"] / trained["seconds"], rel=0.2)
    assert rows["skip"]["train"] is None
    for row in rows.values():
        assert row["cost"]["c"] > 0 and row["cost"]["weights_read"] > 0
        for law in ("T=0", "T=1"):
            cells = row["accept"][law]
            assert {"gsm8k", "humaneval", "mbpp", "spec_bench", "all"} <= cells.keys()
            assert cells["all"]["tokens"] == sum(
                c["tokens"] for d, c in cells.items() if d != "all"
            )
            found = row["speed"][law]
            assert found["num_draft_tokens"] == row["best"][law] in (1, 2)
            assert found["measured"]["low"] <= found["measured"]["value"] and found["predicted"] > 0
    assert done["saved"]["fastest"]["both"] in rows
    assert done["saved"]["threads"] == [1] and rows["skip"]["cost"]["threads"] == 1


def test_results_carry_ids_and_hashes_and_no_text(done: dict[str, Any]) -> None:
    collection = done["saved"]["collection"]
    assert len(collection["prompt_files"]["mbpp.jsonl"]) == 64
    assert collection["training_prompts"]["mbpp_train"] == 2
    assert set(collection["held_out_prompts"]) >= {"gsm8k", "humaneval", "mbpp", "spec_bench"}
    assert not set(collection["training_prompts"]) & {"gsm8k", "humaneval", "mbpp", "spec_bench"}
    text = json.dumps(done["saved"])
    assert str(done["folder"]) not in text and "Ask 1" not in text and "Code" not in text


@pytest.mark.usefixtures("one_thread")
def test_a_study_that_is_done_repeats_nothing(
    done: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _small(monkeypatch, done["folder"])
    for name in ("trained", "cost", "accepted", "timed"):
        monkeypatch.delattr(f"draftsmith.scripts.study_tables.{name}")
        monkeypatch.setattr(f"draftsmith.scripts.study_tables.{name}", _never, raising=False)
    study_families.main([*done["argv"], "--only", "train", "cost", "accept", "speed", "table"])
    assert "| eagle3 |" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="again"):
        study_families.main([*done["argv"], "--lengths", "1", "--only", "accept"])


def _never(*args: Any) -> dict[str, Any]:
    raise AssertionError("measured again")


@pytest.mark.usefixtures("one_thread")
def test_heads_of_both_kinds_are_bound_and_compared(
    done: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _small(monkeypatch, done["folder"])
    changed = {
        name: Run("demo", (*run.changes, *TRAINING))
        for name, run in study_heads.runs_of([120], [8]).items()
    }
    monkeypatch.setattr(study_heads, "runs_of", lambda sizes, ranks: changed)
    study_heads.main(done["argv"])
    saved = json.loads((done["folder"] / "heads.json").read_text(encoding="utf-8"))
    reduced, low_rank = saved["rows"]
    for law in ("T=0", "T=1"):
        assert reduced["bounds"][law]["support"] == pytest.approx(
            reduced["accept"][law]["all"]["captured_mass"], abs=2e-4
        )
        assert low_rank["bounds"][law]["support"] == 1.0
        assert 0.1 < low_rank["bounds"][law]["untrained"] < 0.999
    assert reduced["speed"] is not None and low_rank["speed"] is not None
    own = Study(_args(*done["argv"]), changed, Console(quiet=True))
    whole = study_heads.pooled(own, study_heads.cut_down(own, own.target.hidden_size))
    assert whole == {"T=0": 1.0, "T=1": 1.0}, "of the target's own width"


# ---- parts by themselves


def test_every_family_has_a_run_and_every_run_a_family() -> None:
    own = Study(_args(), study_families.RUNS, Console(quiet=True))
    names = own.possible(list(study_families.RUNS))
    assert names == list(study_families.RUNS)
    assert {own.recipe(n).drafter["family"] for n in names} == set(FAMILIES)


def test_heads_are_runs_of_one_recipe() -> None:
    own = Study(_args(), study_heads.runs_of([2048], [64]), Console(quiet=True))
    assert list(own.runs) == ["draft_vocab_size-2048", "head_rank-64"]
    for name in own.runs:
        family_config(own.recipe(name).drafter, name)


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run 'eagle'.*eagle3"):
        study_families.main(["--families", "eagle", "--only", "table", "--runs", str(tmp_path)])


def test_what_is_evaluated_on_is_never_trained_on() -> None:
    recipe = collection_recipe(_args("--prompts", "p"))
    lines = {d.name: d for d in recipe.domains}
    assert lines["mbpp"].holdout == 1.0 and lines["mbpp"].last_line == 510
    assert lines["mbpp_train"].holdout == 0.0 and lines["mbpp_train"].first_line == 601
    assert recipe.collect.temperatures == (0.0, 1.0)
    assert {law.temperature for law in recipe.serving.laws} == {0.0, 1.0}


def _args(*argv: str) -> Namespace:
    return parser_of("", "runs", study_families.PARTS).parse_args(list(argv))


@pytest.mark.parametrize("form", [None, *linear.FORMS])
def test_a_step_reads_the_weights_that_it_multiplies(
    load_tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, form: str | None
) -> None:
    """In whichever form its layers multiply: some read a copy of their weights."""

    def served(drafter: Any) -> Any:
        if form is not None:
            linear.speed_up_few_rows(drafter, tiny_target.model)
        return drafter

    monkeypatch.setattr(
        linear, "measured_forms", lambda *size: [(form, rows) for rows in linear.COUNTS]
    )
    tiny_target = load_tiny()
    request = Request("p", "a", "heldout", (5, 6, 7, 8), Law(0.0), 0)
    config = Eagle3Config(draft_vocab_size=100)
    drafter: Any = Eagle3Drafter.from_target(tiny_target, config, torch.arange(100)).eval()
    first, later = weights_read(tiny_target, served(drafter), request)
    matrices = sum(
        p.numel()
        for name, p in drafter.named_parameters()
        if p.dim() == 2 and not name.startswith("embed_tokens")
    )
    assert (first, later) == (matrices, matrices - drafter.fc.weight.numel())
    skip: Any = SkipDrafter.from_target(tiny_target, SkipConfig(layers=(0, 3)))
    layer = sum(p.numel() for p in tiny_target.layers[0].parameters() if p.dim() == 2)
    head = tiny_target.head.weight.numel()
    assert weights_read(tiny_target, served(skip), request)[1] == 2 * layer + head
    ids = torch.arange(100)
    lm = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), ids).eval()
    assert weights_read(tiny_target, served(lm), request) == (2 * layer + 100 * 32,) * 2


def test_the_best_length_is_that_of_the_highest_predicted_speedup() -> None:
    costs = as_costs(Cost(0.01, {1: 1.0, 2: 1.0, 3: 1.0}, 0.4, 0.1, 0.0, 0.0))
    assert cost_of(costs) == Cost(0.01, {1: 1.0, 2: 1.0, 3: 1.0}, 0.4, 0.1, 0.0, 0.0)
    likely = {"survival": {"1": [0.9], "2": [0.9, 0.8]}}
    unlikely = {"survival": {"1": [0.5], "2": [0.5, 0.1]}}
    found = best_lengths(costs, {"T=0": {"all": likely}, "T=1": {"all": unlikely}})
    assert found == {"T=0": 2, "T=1": 1}


def test_the_fastest_is_told_by_law_and_over_both() -> None:
    rows = [
        {"name": name, "speed": {law: {"measured": {"value": s}} for law, s in speeds.items()}}
        for name, speeds in {
            "a": {"T=0": 1.4, "T=1": 1.0},
            "b": {"T=0": 1.2, "T=1": 1.3},
        }.items()
    ]
    assert fastest([*rows, {"name": "c", "speed": None}]) == {"T=0": "a", "T=1": "b", "both": "b"}
    assert fastest([{"name": "c", "speed": None}]) == {}


def test_threads_are_those_that_parts_were_measured_with() -> None:
    """Parts that were measured before they told of it count as asked for."""
    rows = [
        {"cost": {"threads": 2}, "speed": None},
        {"cost": {}, "speed": {"T=0": {"threads": 1}, "T=1": {}}},
        {"cost": None, "speed": None},
    ]
    assert threads(rows, 4) == [1, 2, 4]


def test_what_is_not_measured_stands_in_the_table_as_a_dash() -> None:
    row = {"name": "mlp", "train": None, "cost": None, "accept": None, "speed": None}
    assert summary_table([row]).splitlines()[-1] == f"| mlp | {' | '.join(['–'] * 11)} |"


def test_taps_are_those_of_all_runs_and_what_is_asked(tiny_target: Target) -> None:
    own = Study(_args("--taps", "0", "9"), RUNS, Console(quiet=True))
    own.__dict__["target"] = tiny_target
    assert own.taps() == (0, 1, 2), "of a target of four layers; there is no ninth state"
    assert tuple(sorted(study.TAPS)) == study.TAPS
