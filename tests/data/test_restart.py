"""A collection that was stopped anywhere, or asks for other prompts, ends as one that was not."""

import io
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from collecting import Answers, World, chat, rows, shards
from filelock import FileLock
from rich.console import Console
from stored import is_finished

from draftsmith.configs.errors import Unfinished, UserError
from draftsmith.configs.recipe import LawSection
from draftsmith.data import collection
from draftsmith.data.collection import collect
from draftsmith.data.plan import PLAN
from draftsmith.data.store import MANIFEST, RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.data.work import Processes


def held(world: World) -> set[str]:
    """Keys of the records on disk, finished or not."""
    folder = world.root / "records"
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return {row.key for row in RecordStore.create(folder, manifest["settings"]).index()}


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_stopped_run_ends_as_one_that_was_not(
    world: World, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    content = [*rows(4), chat("One?", "Two?")]
    world.collect(content, "whole", holdout=0.0)
    expected = shards(world.root / "whole")
    assert len(expected) == 4  # 5 conversations at 2 temperatures, 3 a shard
    Answers(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        world.collect(content, "cut", holdout=0.0)
    assert not is_finished(world.root / "cut")
    assert len(shards(world.root / "cut")) == stop
    second = Answers(monkeypatch)
    world.collect(content, "cut", holdout=0.0)
    assert shards(world.root / "cut") == expected
    assert len(second.asked) == 10 - 3 * stop  # the missing ones, no others
    third = Answers(monkeypatch)
    assert world.collect(content, "cut", holdout=0.0).complete
    assert third.asked == []


@pytest.mark.parametrize("number", [0, 2])
def test_b034_a_damaged_shard_is_redone(
    world: World, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    world.collect(rows(6))
    expected = shards(world.root / "records")
    path = sorted(world.root.glob("records/shard-*"))[number]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    answers = Answers(monkeypatch)
    console = Console(record=True, file=io.StringIO())
    work = world.work(rows(6))
    collect(replace(work, console=console))
    assert path.name in console.export_text()
    assert answers.calls == 1
    assert shards(world.root / "records") == expected
    assert is_finished(world.root / "records")


def test_b030_added_and_moved_prompts_ask_only_what_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    twenty = [*rows(18), {"prompt": "the same"}, {"prompt": "the same"}]  # the last is dropped
    Answers(monkeypatch, stop=4)
    with pytest.raises(KeyboardInterrupt):
        world.collect(twenty, holdout=0.0, temperatures=(0.0,))
    before = held(world)
    assert len(before) == 12
    later = [{"prompt": "new one"}, {"prompt": "new two"}, *twenty]
    random.Random(0).shuffle(later)
    second = Answers(monkeypatch)
    store = world.collect(later, holdout=0.0, temperatures=(0.0,))
    asked = {r.prompt_id for r in second.asked}
    assert len(second.asked) == len(asked) == 21 - 12
    assert not asked & {key.split("|")[0] for key in before}
    assert len(list(store.records())) == 21


def test_removed_prompts_and_other_splits_cost_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no longer asked stays on disk and is not read; a split is the plan's, not the
    record's."""
    laws = (LawSection(0.0),)
    world.collect(rows(8), holdout=0.0, temperatures=(0.0,), laws=laws)
    answers = Answers(monkeypatch)
    fewer = world.collect(rows(8)[2:], holdout=0.0, temperatures=(0.0,), laws=laws)
    assert len(list(fewer.records())) == 6
    other = world.collect(rows(8), holdout=1.0, temperatures=(0.0,), laws=laws)
    assert {r.split for r in other.records()} == {"heldout"} and len(other.index()) == 8
    assert fewer.identity != other.identity
    assert answers.asked == []


def test_a_further_temperature_asks_only_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.collect(rows(4), holdout=0.0)
    answers = Answers(monkeypatch)
    store = world.collect(rows(4), holdout=0.0, temperatures=(0.0, 0.5, 1.0))
    assert {r.law for r in answers.asked} == {Law(0.5)}
    assert len(list(store.records())) == 12


def test_a_deadline_stops_between_batches(world: World) -> None:
    work = world.work(rows(8), holdout=0.0)
    with pytest.raises(Unfinished, match=r"stopped at the time limit: \d+ of 16 conversations"):
        collect(replace(work, ends=0.0))
    assert not is_finished(work.folder)
    assert collect(work).complete


def test_a_damaged_plan_is_made_again(world: World) -> None:
    world.collect(rows(6), holdout=0.0)
    (world.root / "records" / PLAN).write_text("{", encoding="utf-8")
    assert world.collect(rows(7), holdout=0.0).complete


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_new_tokens": 6}, "max_new_tokens"),
        ({"store_dtype": "bfloat16"}, "store_dtype"),
        ({"cut": "drop"}, "cut"),
        ({"distributions": "none"}, "distributions"),
    ],
)
def test_other_settings_are_refused(world: World, change: dict[str, Any], name: str) -> None:
    world.collect(rows(4))
    with pytest.raises(UserError, match=rf"collected with {name} = "):
        world.collect(rows(4), **change)


def test_other_taps_or_template_are_refused(world: World, load_tiny: Callable[..., Target]) -> None:
    work = world.work(rows(4))
    collect(work)
    with pytest.raises(UserError, match="taps"):
        collect(replace(work, taps=(0, 1)))
    other = load_tiny()
    other.provenance["template"] = "edited"
    with pytest.raises(UserError, match=r"target = .*edited"):
        collect(replace(work, target=other))


def test_given_replies_of_which_the_last_counts_are_asked_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their one record is no first turn; and other turns of the same rows are other records."""
    talk = {
        "messages": [
            {"role": "user", "content": "Give me five simple tips."},
            {"role": "assistant", "content": "Sleep."},
            {"role": "user", "content": "Now three."},
            {"role": "assistant", "content": "Walk."},
        ]
    }
    options: dict[str, Any] = {"holdout": 0.0, "replies": "given"}
    both = world.collect([talk], **options)
    assert sorted(r.turn for r in both.records()) == [0, 1]
    last = world.collect([talk], turns="last", **options)
    assert [r.turn for r in last.records()] == [1]
    assert last.summary()["replies_left_out"] == 0
    kept = shards(world.root / "records")
    monkeypatch.setattr(collection, "recompute_states", None)  # nothing is judged again
    again = world.collect([talk], turns="last", **options)
    assert again.identity == last.identity and shards(world.root / "records") == kept


def test_two_collections_into_one_folder_do_not_meet(world: World) -> None:
    work = world.work(rows(4))
    work.folder.mkdir(parents=True)
    with FileLock(work.folder / ".lock"), pytest.raises(UserError, match="another command"):
        collect(work)
    assert collect(work).complete


def test_half_of_the_records_is_no_collection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a second machine writes into a folder of its own."""
    monkeypatch.setattr(Processes, "any", lambda self, flag: False)
    with pytest.raises(UserError, match=r"lacks 8 conversations .* every machine shares"):
        collect(replace(world.work(rows(4), holdout=0.0), ends=0.0))
    assert not is_finished(world.root / "records")
