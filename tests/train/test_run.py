"""What a run's options do, and that each of them goes on after a stop as if there had been none."""

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import crash_after, largest_difference, log_of
from rich.console import Console
from torch import Tensor, nn

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import Recipe
from draftsmith.configs.training import OnPolicySection
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train import judge
from draftsmith.train.batches import Plan
from draftsmith.train.corpus import Data
from draftsmith.train.distributed import target_use
from draftsmith.train.fingerprints import check_frozen, check_trained, fingerprints, together
from draftsmith.train.loop import train
from draftsmith.train.step import Scorer

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"domain_weights": {"a": 3.0}},
    "reweight": {"reweight": 1.0, "eval_every": 2},
    "drafted": {"on_policy": OnPolicySection(drafted=0.5, every=3, max_new_tokens=8)},
    "resampled": {"on_policy": OnPolicySection(resampled=0.4, every=3, max_new_tokens=8)},
    "packing": {"packing": True},
    "checkpointing": {"gradient_checkpointing": True},
    "one domain": {"domains": ("b",)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_a_stopped_run_ends_where_one_in_one_piece_does(
    family: str,
    name: str,
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe(family, steps=9, accumulation=2, save_every=4, **OPTIONS[name])
    straight = fit(recipe, tmp_path / "straight")
    with monkeypatch.context() as patch:
        crash_after(patch, 7)
        with pytest.raises(RuntimeError, match="power cut"):
            fit(recipe, tmp_path / "cut")
    assert largest_difference(fit(recipe, tmp_path / "cut"), straight) == 0.0
    for kind in ("train", "heldout"):
        assert log_of(tmp_path / "cut", kind) == log_of(tmp_path / "straight", kind)


@pytest.mark.parametrize("option", ["packing", "gradient_checkpointing"])
@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_what_only_saves_room_changes_no_loss(
    family: str,
    option: str,
    fit: Trainer,
    make_recipe: RecipeFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Plan.epoch  # packed or not, on the same batches
    monkeypatch.setattr(Plan, "epoch", lambda self, n: kept(replace(self, grouped=True), n))
    plain = fit(make_recipe(family, steps=4, tokens_per_batch=80), tmp_path / "plain")
    lean = make_recipe(family, steps=4, tokens_per_batch=80, **{option: True})
    found = fit(lean, tmp_path / "lean")
    losses = [[r["loss"] for r in log_of(tmp_path / n, "train")] for n in ("plain", "lean")]
    exact = option == "gradient_checkpointing"
    assert losses[1] == (losses[0] if exact else pytest.approx(losses[0], rel=1e-5))
    if exact:
        assert largest_difference(found, plain) == 0.0


# ---- what is trained on


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The domain of every record that a batch was made of."""
    seen: list[str] = []
    load = Data.load

    def noted(self: Data, indices: Any, renewed: Any = None) -> Any:
        seen.extend(self.training.rows[i].domain for i in indices)
        return load(self, indices, renewed)

    monkeypatch.setattr(Data, "load", noted)
    return seen


def test_a_domain_of_double_weight_is_seen_twice_as_often(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, loaded: list[str]
) -> None:
    fit(make_recipe(steps=None, epochs=20.0, eval_every=1000), tmp_path / "even")
    even = Counter(loaded)
    loaded.clear()
    weighted = make_recipe(
        steps=None, epochs=20.0, eval_every=1000, domain_weights={"a": 2.0, "b": 1.0}
    )
    fit(weighted, tmp_path / "weighted")
    drawn = Counter(loaded)
    assert (drawn["a"] / even["a"]) / (drawn["b"] / even["b"]) == pytest.approx(2.0, rel=0.15)
    assert sum(drawn.values()) == pytest.approx(sum(even.values()), rel=0.2)


def test_training_may_keep_to_one_domain(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, loaded: list[str]
) -> None:
    fit(make_recipe(domains=("b",)), run_folder)
    assert set(loaded) == {"b"}
    (row, *_) = log_of(run_folder, "heldout")
    assert "overlap/b" in row and "overlap/a" not in row


@pytest.mark.parametrize("option", [{"domains": ("bb",)}, {"domain_weights": {"bb": 2.0}}])
def test_an_unknown_domain_is_named(
    option: dict[str, Any], fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    with pytest.raises(UserError, match=r"'bb'.*records of a, b.*did you mean 'b'"):
        fit(make_recipe(**option), run_folder)


def test_reweighting_sees_the_domain_behind_more_often(
    fit: Trainer,
    make_recipe: RecipeFactory,
    run_folder: Path,
    loaded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Domain b gains a tenth of what a does, so it comes four times as often, the most there is."""
    figures = {
        "tokens_per_round": 1.5, "overlap_step_1": 0.5,
        "tokens_per_round/a": 1.5, "tokens_per_round/b": 1.05,
    }  # fmt: skip
    monkeypatch.setattr(judge, "held_out_figures", lambda *args: dict(figures))
    fit(make_recipe(steps=60, reweight=1.0, eval_every=10, save_every=100), run_folder)
    before, after = Counter(loaded[:30]), Counter(loaded[-120:])
    assert after["b"] / max(1, after["a"]) > 2 * before["b"] / max(1, before["a"])


def test_records_made_on_the_way_stand_in_for_others(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    policy = OnPolicySection(drafted=0.5, every=4, max_new_tokens=8)
    fit(make_recipe(steps=12, on_policy=policy), run_folder)
    kept = [path.name for path in run_folder.glob("renewed-*")]
    assert kept == ["renewed-000002"], "of which the kept checkpoints were trained on"
    made = list(RecordStore.open(run_folder / "renewed-000002").records())
    assert made and {r.origin for r in made} == {"drafted"}
    plain = run_folder.with_name("plain")
    fit(make_recipe(steps=12), plain)
    losses = [[r["loss"] for r in log_of(f, "train")] for f in (run_folder, plain)]
    assert losses[0][:4] == losses[1][:4] and losses[0][4:] != losses[1][4:]


# ---- the target


def test_where_records_hold_its_states_the_target_is_not_run(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, tiny_target: Target
) -> None:
    recipe, calls = make_recipe(steps=3), []
    kept = tiny_target.layers[0].register_forward_hook(lambda *args: calls.append(1))
    absent = fit(recipe, tmp_path / "absent")
    kept.remove()
    assert calls == []
    whole = replace(recipe, train=replace(recipe.train, target="replicated"))
    assert largest_difference(absent, fit(whole, tmp_path / "whole")) == 0.0


@pytest.mark.parametrize(
    ("options", "distributions", "message"),
    [
        ({"target": "absent"}, "none", "absent .* records without states needs the whole"),
        (
            {"target": "absent", "on_policy": OnPolicySection(drafted=0.1)},
            "hidden",
            "absent .* train.on_policy needs the whole",
        ),
        ({"target": "sharded", "samples": 2}, "hidden", "sharded .* train.samples runs it in one"),
    ],
)
def test_a_target_that_cannot_do_what_is_asked_is_refused(
    options: dict[str, Any], distributions: str, message: str, make_recipe: RecipeFactory,
    store: RecordStore,
) -> None:  # fmt: skip
    kept = {**store.settings, "distributions": distributions}
    other: Any = type("Store", (), {"settings": kept})
    with pytest.raises(UserError, match=message):
        target_use(make_recipe(**options), other)


def test_the_target_is_whole_where_something_needs_it(
    make_recipe: RecipeFactory, store: RecordStore
) -> None:
    assert target_use(make_recipe(), store) == "absent"
    assert target_use(make_recipe(samples=1), store) == "replicated"
    assert target_use(make_recipe(target="sharded"), store) == "sharded"
    jump = replace(make_recipe(), drafter={"family": "jump"})
    assert target_use(jump, store) == "replicated"
    for use in ("sharded", "absent"):
        kept = replace(jump, train=replace(jump.train, target=use))
        with pytest.raises(UserError, match=f"'jump' runs the target's own layers.*{use}"):
            target_use(kept, store)


# ---- what is kept and told


@pytest.mark.parametrize(("result", "steps"), [(None, 12), ("last", 12), ("best", 4)])
def test_the_drafter_is_the_last_or_the_best(
    result: Any,
    steps: int,
    fit: Trainer,
    make_recipe: RecipeFactory,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taus = iter([1.5, 1.4, 1.45])
    monkeypatch.setattr(
        judge, "held_out_figures",
        lambda *args: {"tokens_per_round": next(taus), "overlap_step_1": 0.5},
    )  # fmt: skip
    fit(make_recipe(result=result), run_folder)
    for name, found in (("drafter", steps), ("best", 4)):
        own = json.loads((run_folder / name / "draftsmith.json").read_text(encoding="utf-8"))
        assert own["trained"]["steps"] == found, name


def test_evaluations_tell_the_weights_they_are_of(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(make_recipe(), run_folder)
    hashes = [row["weights"] for row in log_of(run_folder, "heldout")]
    assert len(set(hashes)) == len(hashes) == 3
    monkeypatch.setattr(judge, "together", lambda prints: "the same")
    with pytest.raises(UserError, match="weights evaluated at step 8 are those of the evaluation"):
        fit(make_recipe(), run_folder.with_name("stuck"))


def test_the_first_batch_can_be_read(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    fit(make_recipe(steps=2), run_folder)
    text = (run_folder / "first_batch.txt").read_text(encoding="utf-8")
    assert text.count("⟦") == text.count("⟧") == text.count("supervised") > 0


def test_samples_are_decoded_at_each_evaluation(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    asked: list[int] = []

    def decode(drafter: Any, records: Any) -> list[dict[str, Any]]:
        asked.append(len(records))
        assert not drafter.training
        return [{"prompt_id": r.prompt_id, "text": "x"} for r in records]

    quiet = Console(file=io.StringIO())
    train(make_recipe(samples=2), tiny_target, store, run_folder, quiet, decode=decode)
    text = (run_folder / "samples.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert asked == [2, 2, 2] and [r["step"] for r in rows] == [4, 4, 8, 8, 12, 12]


def test_rows_of_a_loss_that_is_not_finite_are_kept(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, count = Data.load, 0

    def spoilt(self: Data, indices: Any, renewed: Any = None) -> Any:
        nonlocal count
        batch, count = load(self, indices, renewed), count + 1
        return batch if count < 7 else replace(batch, taps=batch.taps * float("nan"))

    monkeypatch.setattr(Data, "load", spoilt)
    with pytest.raises(UserError, match=r"loss is nan at step 7; its rows are in .*fault-step-7"):
        fit(make_recipe(), run_folder)
    told = json.loads((run_folder / "fault-step-7" / "rows.json").read_text(encoding="utf-8"))
    assert told["batches"][0]["rows"][0]["prompt"]
    assert not (run_folder / "drafter").exists()


# ---- what must and must not change


def test_fingerprints_name_what_did_not_change_and_what_did() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    layer[1].requires_grad_(False)
    trained, frozen = fingerprints(layer, True), fingerprints(layer, False)
    assert trained.keys() == {"0.weight", "0.bias"} and frozen.keys() == {"1.weight", "1.bias"}
    with torch.no_grad():
        layer[0].weight += 1
    changed = fingerprints(layer, True)
    assert together(changed) != together(trained)
    with pytest.raises(UserError, match=r"left 1 of 2 tensors as they were \(0\.bias\)"):
        check_trained(trained, changed)
    check_frozen(frozen, fingerprints(layer, False))
    with torch.no_grad():
        layer[1].bias += 1
    with pytest.raises(UserError, match=r"changed frozen tensors: 1\.bias"):
        check_frozen(frozen, fingerprints(layer, False))


def test_a_tensor_that_no_loss_reaches_stops_the_run(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = judge.fingerprints

    def and_idle(module: Any, trained: bool) -> dict[str, str]:
        return build(module, trained) | ({"idle": "0"} if trained else {})

    monkeypatch.setattr(judge, "fingerprints", and_idle)
    with pytest.raises(UserError, match=r"training left 1 of \d+ tensors as they were \(idle\)"):
        fit(make_recipe(), run_folder)
    assert not (run_folder / "drafter").exists()


def test_dropout_follows_from_the_number_of_a_batch(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from how batches are dealt out to steps; and no two batches drop the same."""
    read, seeds = Scorer.forward, []

    def noted(self: Scorer, *args: Any, **options: Any) -> Any:
        seeds.append(torch.initial_seed())
        return read(self, *args, **options)

    monkeypatch.setattr(Scorer, "forward", noted)
    fit(make_recipe(steps=6, accumulation=1), tmp_path / "one")
    alone, seeds[:] = list(seeds), []
    fit(make_recipe(steps=3, accumulation=2), tmp_path / "two")
    assert seeds == alone and len(set(alone)) == 6
