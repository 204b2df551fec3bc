"""What training reads, when it reads it, and what it refuses."""

import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, Recipe, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import check_identity
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.train import run
from draftsmith.train.batches import ahead
from draftsmith.train.checkpoints import checkpoints
from draftsmith.train.corpus import load_data
from draftsmith.train.objective import Objective, bind_objective
from draftsmith.train.run import Run

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


def bound(recipe: Recipe) -> Objective:
    return bind_objective(recipe.objective, recipe.serving)


def test_a_gradient_that_is_not_finite_stops_the_run(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(save_every=2)
    optimise, done = Run._optimise, 0

    def poisoned(self: Any, *args: Any) -> float:
        nonlocal done
        done += 1
        if done == 4:
            next(iter(self.drafter.trainable())).data.fill_(float("nan"))
        return optimise(self, *args)

    monkeypatch.setattr(Run, "_optimise", poisoned)
    with pytest.raises(UserError, match=r"loss is nan at step 4; .*lower train\.lr"):
        fit(recipe, run_folder)
    weights = load_file(checkpoints(run_folder)[-1] / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in weights.values())


# ---- identity


def test_records_of_another_target_are_refused(
    load_tiny: Any, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    other = load_tiny(intermediate_size=40)
    with pytest.raises(UserError, match=r"collected from another target .*: weights '"):
        load_data(make_recipe(), other, store, bound(make_recipe()))


@pytest.mark.parametrize("name", ["weights", "tokenizer", "template", "vocab_size"])
def test_each_difference_of_targets_is_named(
    name: str, tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    was = {**store.settings["target"], "vocab_size": tiny_target.vocab_size, name: "was"}
    other = replace(store, settings={**store.settings, "target": was})
    told = rf"{name} 'was' there and {tiny_target.provenance[name]!r} here[;,]"
    with pytest.raises(UserError, match=told):
        load_data(make_recipe(), tiny_target, other, bound(make_recipe()))
    if name == "vocab_size":  # ids of one are no ids of the other, whatever the user says
        with pytest.raises(UserError, match=told):
            load_data(make_recipe(), tiny_target, other, bound(make_recipe()), accept=True)
        return
    with pytest.warns(UserWarning, match=told.replace("[;,]", "; they are read all the same")):
        check_identity(other, tiny_target, (1, 1, 2), accept=True)


def test_the_same_target_is_no_warning(tiny_target: Target, store: RecordStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_identity(store, tiny_target, (1, 1, 2), accept=True)


# ---- states


def test_heads_are_refused_on_records_of_top_tokens(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    top = replace(store, settings={**store.settings, "distributions": "top", "taps": []})
    with pytest.raises(UserError, match=r"most probable tokens alone, .*layers \[1, 1, 2\]"):
        load_data(make_recipe(), tiny_target, top, bound(make_recipe()))


@pytest.mark.parametrize(
    "objective", [{"loss": "rkl"}, {"loss": "jsd", "beta": 1.0}, {"then": "rkl"}]
)
def test_objectives_that_need_every_token_are_refused_on_records_of_top_tokens(
    objective: dict[str, Any], tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    told = {**store.settings, "distributions": "top", "taps": [], "top": 16}
    recipe = replace(make_recipe("causal"), objective=ObjectiveSection(**objective))
    with pytest.raises(UserError, match=r"needs p of all 400 tokens, .* the 16 most probable"):
        load_data(recipe, tiny_target, replace(store, settings=told), bound(recipe))


def test_records_without_the_layers_are_refused(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    recipe = make_recipe()
    recipe.drafter["taps"] = (0, 1, 2)
    with pytest.raises(UserError, match=r"holds layers \[1, 1, 2\], the drafter reads \[0, 1, 2\]"):
        load_data(recipe, tiny_target, store, bound(recipe))


def test_layers_are_read_in_the_drafters_order(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory, records: list[Record]
) -> None:
    recipe = make_recipe()
    recipe.drafter["taps"] = (2, 1, 1)
    data = load_data(recipe, tiny_target, store, bound(recipe))
    stored = {r.key: r.states for r in records}
    for record in data.training:
        one, other, two = stored[record.key].taps.chunk(3, -1)  # type: ignore[union-attr]
        assert torch.equal(record.states.taps, torch.cat([two, one, other], -1))  # type: ignore[union-attr]


def test_states_that_were_not_kept_are_recomputed(
    tiny_target: Target,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    bare = RecordStore.create(tmp_path, {**store.settings, "distributions": "none", "taps": []})
    bare.add("0", [replace(r, states=None) for r in records])
    kept, redone = (
        load_data(make_recipe(), tiny_target, s, bound(make_recipe()))
        for s in (store, bare.finish({}))
    )
    assert [r.key for r in kept.held_out] == [r.key for r in redone.held_out]
    assert kept.plan() == redone.plan()
    indices = kept.plan().epoch(0)[0]
    pairs = [*zip(kept.held_out, redone.held_out, strict=True)]
    pairs += [*zip(kept.training, redone.training, strict=True)]
    pairs += [*zip(kept.training.read(indices), redone.training.read(indices), strict=True)]
    for a, b in pairs:
        assert a.key == b.key and a.states is not None and b.states is not None
        for name in ("hidden", "log_z", "taps"):
            torch.testing.assert_close(
                getattr(a.states, name), getattr(b.states, name), rtol=1e-4, atol=1e-4
            )


def test_the_draft_vocabulary_is_that_of_the_records_themselves(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory, records: list[Record]
) -> None:
    recipe = make_recipe()
    data = load_data(recipe, tiny_target, store, bound(recipe))
    _, config = family_config(recipe.drafter, "here")
    training = [r for r in records if r.split == "train"]
    drafters = [new_drafter(config, tiny_target, source) for source in (data.training, training)]
    one, other = (d.draft_ids for d in drafters)
    assert one is not None and other is not None and torch.equal(one, other)


# ---- when it is read


def test_training_records_are_read_with_their_batch(
    tiny_target: Target,
    store: RecordStore,
    make_recipe: RecipeFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    whole = RecordStore.read

    def noted(self: RecordStore, rows: Any) -> Any:
        read.extend(row.key for row in rows)
        return whole(self, rows)

    monkeypatch.setattr(RecordStore, "read", noted)
    data = load_data(make_recipe(), tiny_target, store, bound(make_recipe()))
    assert read == [], "held-out ones neither"
    indices = data.plan().epoch(0)[0]
    batch = data.load(indices)
    assert read == [data.training.rows[i].key for i in indices]
    assert len(batch.ids) == len(indices)


def test_b035_a_record_that_went_bad_stops_training_before_it_is_learnt_from(
    fit: Trainer,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    """Not finished, so that no checksum tells of it first."""
    ordered = sorted(records, key=lambda r: (r.split == "train", len(r.reply)))
    other = RecordStore.create(tmp_path / "records", store.settings)
    path = other.add("0", ordered)
    content = bytearray(path.read_bytes())
    content[-4:] = torch.tensor([torch.nan]).numpy().tobytes()  # the last value of the last record
    path.write_bytes(content)
    recipe = make_recipe("causal", steps=60, eval_every=60, save_every=1)
    wrong = re.escape(ordered[-1].key)
    with pytest.raises(UserError, match=rf"shard-0\.safetensors, record {wrong}: '.*not finite"):
        fit(recipe, tmp_path / "run", store=other)
    saved = checkpoints(tmp_path / "run")
    assert saved and all(
        torch.isfinite(t).all() for p in saved for t in load_file(p / "model.safetensors").values()
    )


def test_b034_training_refuses_a_damaged_shard_by_name(
    fit: Trainer,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    other = RecordStore.create(tmp_path / "records", store.settings)
    path = other.add("0", records)
    damaged = other.finish({})
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-0\.safetensors is damaged"):
        fit(make_recipe(steps=5), tmp_path / "run", store=damaged)
    assert checkpoints(tmp_path / "run") == []


# ---- the next batch


def test_ahead_changes_no_order_and_no_item() -> None:
    assert list(ahead(iter(range(100)))) == list(range(100))
    assert list(ahead(iter([]))) == []


def test_ahead_makes_the_next_while_one_is_in_use() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            yield number

    coming = ahead(items())
    assert next(coming) == 0
    for _ in range(1000):
        if made == [0, 1]:
            break
        time.sleep(0.001)
    time.sleep(0.01)
    assert made == [0, 1], "one ahead, no more"


def test_ahead_raises_in_its_turn_what_making_one_raised() -> None:
    def items() -> Iterator[int]:
        yield 0
        yield 1
        raise UserError("the third is damaged")

    coming = ahead(items())
    assert list(islice(coming, 2)) == [0, 1]
    with pytest.raises(UserError, match="third"):
        next(coming)


def test_the_thread_ends_with_its_iterator() -> None:
    def running() -> int:
        return sum(t.name.startswith("batches") for t in threading.enumerate())

    before = running()
    coming = ahead(iter(range(9)))
    assert next(coming) == 0 and running() == before + 1
    coming = ahead(iter(range(9)))  # as the loop does where another plan takes over
    assert next(coming) == 0 and running() == before + 1
    del coming
    assert running() == before


def test_loading_ahead_changes_no_number(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(accumulation=2)
    one = fit(recipe, tmp_path / "ahead")
    monkeypatch.setattr(run, "ahead", lambda batches: batches)
    other = fit(recipe, tmp_path / "plain")
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- splits, laws and objectives


def test_splits_and_laws_go_where_they_belong(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    data = load_data(make_recipe(), tiny_target, store, bound(make_recipe()))
    assert {r.split for r in data.training} == {"train"}
    assert {r.split for r in data.held_out} == {"heldout"}
    assert len(data.training) + len(data.held_out) == 40
    assert data.domains == ("a", "b")


def test_an_unknown_objective_is_refused_before_training(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    recipe = replace(make_recipe(), objective=ObjectiveSection(loss="kld"))
    with pytest.raises(UserError, match="'kld'"):
        fit(recipe, run_folder)
    assert not (run_folder / "metrics.jsonl").exists()


def test_held_out_figures_are_logged_by_domain(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    fit(make_recipe(steps=4), run_folder)
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (row,) = [r for r in map(json.loads, lines) if r["kind"] == "heldout"]
    for name in ("tokens_per_round", "captured_mass", "overlap"):
        assert {f"{name}/a", f"{name}/b"} <= row.keys()
    assert 1.0 < row["tokens_per_round"] <= 3.0, "γ = 2"
    assert row["overlap/a"] <= row["captured_mass/a"] <= 1.0001


def test_held_out_figures_are_of_the_objectives_law_alone(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    """An estimate is valid on samples of its own law; the fixture holds out T = 1 only."""
    served = ServingSection((LawSection(0.7),))
    recipe = replace(make_recipe(), serving=served)
    data = load_data(recipe, tiny_target, store, bound(recipe))
    assert len(data.held_out) == 0 and len(data.training) > 0
    for judged in (
        replace(recipe, train=replace(recipe.train, patience=3)),
        replace(recipe, objective=ObjectiveSection(then="rounds", switch_overlap=0.5)),
    ):
        with pytest.raises(UserError, match=r"no held-out replies under T=0\.7"):
            load_data(judged, tiny_target, store, bound(judged))


def test_given_replies_are_samples_of_no_law(
    tiny_target: Target,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    """They are greedy by name only, and neither judged by nor trained on as such."""
    given = [
        replace(r, law=Law(0.0), origin="given") if r.split == "heldout" or i % 3 else r
        for i, r in enumerate(records)
    ]
    mixed = RecordStore.create(tmp_path, store.settings)
    mixed.add("0", given)
    recipe = replace(make_recipe(), serving=ServingSection((LawSection(0.0),)))
    data = load_data(recipe, tiny_target, mixed, bound(recipe))
    assert len(data.held_out) == 0 and len(data.training) == 30
    needy = replace(recipe, objective=ObjectiveSection(loss="ce"))
    with pytest.raises(UserError, match=r"only valid on replies sampled under T=0"):
        load_data(needy, tiny_target, mixed, bound(needy))


@pytest.mark.parametrize("loss", ["ce", {"fkl": 0.5, "ce": 0.5}])
def test_the_sampled_token_is_only_trained_on_where_it_is_a_sample_of_p(
    loss: Any, tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory
) -> None:
    recipe = replace(make_recipe(), objective=ObjectiveSection(loss=loss))
    data = load_data(recipe, tiny_target, store, bound(recipe))
    used = {data.training[i].law.temperature for batch in data.plan().epoch(0) for i in batch}
    assert used == {1.0}
    assert list(data.lawful) == [r.law.temperature == 1.0 for r in data.training]
