"""Collecting: which requests are made, and that a run stopped anywhere ends as one that was not."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import CollectSection, LawSection, Recipe, ServingSection
from draftsmith.data import collect as collect_module
from draftsmith.data.chat import render_prompt
from draftsmith.data.collect import collect, held_out, plan_requests
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.prompts import Prompt
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law

TAPS = (0, 1, 2)
COLLECT = {"temperatures": (0.0, 1.0), "max_new_tokens": 5, "batch_size": 2, "shard_size": 3}


def recipe(laws: Sequence[LawSection] = (LawSection(1.0),), **changes: Any) -> Recipe:
    section = CollectSection(**{**COLLECT, **changes})
    return Recipe(name="tiny", serving=ServingSection(tuple(laws)), collect=section)


def prompt(number: int, split: Any = "train", text: str = "") -> Prompt:
    content = text or f"Solve step {number}." + " Maya has stickers." * (number % 3)
    message = {"role": "user", "content": content}
    return Prompt(f"id{number}", "math", (message,), "here", number, split, content)


PROMPTS = [prompt(n, "heldout" if n == 2 else "train") for n in range(5)]  # 4 * 2 + 1 requests


class Answers:
    """Stands before `gather.answer`: notes what is asked, stops the run in shard `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop: int | None = None):
        self.asked: list[Request] = []
        self.calls, self.stop = 0, stop
        monkeypatch.setattr(collect_module, "answer", self)

    def __call__(
        self,
        target: Target,
        shard: Sequence[Request],
        settings: GatherSettings,
        progress: Callable[[int], None],
    ) -> list[Record]:
        self.asked += shard
        self.calls += 1

        def count(tokens: int) -> None:
            if self.calls - 1 == self.stop:
                raise KeyboardInterrupt
            progress(tokens)

        return answer(target, shard, settings, count)


def run(target: Target, folder: Path, **changes: Any) -> RecordStore:
    return collect(recipe(**changes), target, TAPS, PROMPTS, folder, Console(quiet=True))


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


# ---- what is asked


def test_training_prompts_at_all_temperatures_held_out_ones_under_served_laws(
    tiny_target: Target,
) -> None:
    laws = (LawSection(0.0, top_k=7), LawSection(0.0), LawSection(0.8, top_p=0.9))
    requests, skipped = plan_requests(
        recipe(laws, temperatures=(0.0, 1.0, 1.0)), tiny_target, PROMPTS
    )
    assert skipped == []
    asked = sorted((r.prompt_id, r.law.label) for r in requests)
    # A law that truncates is answered in training too: objectives on length need its samples.
    labels = ("T=0", "T=1", "T=0.8 top_p=0.9")
    training = [(f"id{n}", label) for n in (0, 1, 3, 4) for label in labels]
    held = [("id2", "T=0"), ("id2", "T=0.8 top_p=0.9")]  # two greedy laws are one
    assert asked == sorted(training + held)
    assert len({r.seed for r in requests}) == len(requests)
    for request in requests:
        source = PROMPTS[int(request.prompt_id[2:])]
        assert list(request.ids) == render_prompt(tiny_target.tokenizer, source.messages)
        assert request.split == source.split


def test_the_plan_does_not_depend_on_the_order_of_prompts(tiny_target: Target) -> None:
    there, _ = plan_requests(recipe(), tiny_target, PROMPTS)
    back, _ = plan_requests(recipe(), tiny_target, PROMPTS[::-1])
    assert there == back


def test_prompts_without_room_for_a_reply_are_left_out(tiny_target: Target) -> None:
    long = prompt(9, text="Maya has stickers. " * 120)
    requests, skipped = plan_requests(recipe(), tiny_target, [long, PROMPTS[0]])
    assert {r.prompt_id for r in requests} == {"id0"}
    assert len(skipped) == 1 and "here:9" in skipped[0] and "251 fit" in skipped[0]


def test_nothing_to_collect(tiny_target: Target, tmp_path: Path) -> None:
    long = prompt(9, text="Maya has stickers. " * 120)
    with pytest.raises(UserError, match=r"no prompt is left.*here:9"):
        collect(recipe(), tiny_target, TAPS, [long], tmp_path, Console(quiet=True))


# ---- what is kept


def test_everything_asked_is_kept(tiny_target: Target, tmp_path: Path) -> None:
    store = run(tiny_target, tmp_path)
    records = list(store.records())
    requests, _ = plan_requests(recipe(), tiny_target, PROMPTS)
    assert [r.prompt_id for r in records] == [r.prompt_id for r in requests]
    assert [r.ids[: r.prompt_len].tolist() for r in records] == [list(r.ids) for r in requests]
    assert store.complete and RecordStore.open(tmp_path).complete
    assert len(store.shards()) == 3
    cells = {(c["split"], c["law"]): c for c in store.summary()["cells"]}
    assert {key: c["records"] for key, c in cells.items()} == {
        ("train", "T=0"): 4,
        ("train", "T=1"): 4,
        ("heldout", "T=1"): 1,
    }
    assert sum(c["tokens"] for c in cells.values()) == sum(len(r.reply) for r in records)
    for c in cells.values():
        assert c["stopped"] + c["cut_by_length"] == c["records"]
    assert [r.prompt_id for r in held_out(records, Law(1.0), "math")] == ["id2"]
    assert held_out(records, Law(0.0), "math") == []


def test_no_states_where_none_are_wanted(tiny_target: Target, tmp_path: Path) -> None:
    kept = list(run(tiny_target, tmp_path / "a").records())
    bare = list(run(tiny_target, tmp_path / "b", distributions="none").records())
    assert all(r.states is None for r in bare)
    assert [r.ids.tolist() for r in bare] == [r.ids.tolist() for r in kept]


# ---- stopped and resumed


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_stopped_run_ends_as_one_that_was_not(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    run(tiny_target, tmp_path / "whole")
    expected = shards(tmp_path / "whole")
    first = Answers(monkeypatch, stop)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_target, tmp_path / "cut")
    assert not RecordStore.open(tmp_path / "cut").complete
    assert len(shards(tmp_path / "cut")) == stop
    second = Answers(monkeypatch)
    run(tiny_target, tmp_path / "cut")
    assert shards(tmp_path / "cut") == expected
    assert len(second.asked) == 9 - 3 * stop  # the missing ones, no others
    assert not {r.seed for r in second.asked} & {r.seed for r in first.asked[: 3 * stop]}
    third = Answers(monkeypatch)
    assert run(tiny_target, tmp_path / "cut").complete
    assert third.asked == []


@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_shard_is_redone(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = run(tiny_target, tmp_path)
    expected = shards(tmp_path)
    path = store.shards()[number]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    answers = Answers(monkeypatch)
    console = Console(record=True, file=io.StringIO())
    collect(recipe(), tiny_target, TAPS, PROMPTS, tmp_path, console)
    assert path.name in console.export_text()
    assert len(answers.asked) == 3
    assert shards(tmp_path) == expected
    assert RecordStore.open(tmp_path).complete


def test_records_are_found_by_content_not_by_place(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompts in another order are the same collection."""
    run(tiny_target, tmp_path)
    answers = Answers(monkeypatch)
    collect(recipe(), tiny_target, TAPS, PROMPTS[::-1], tmp_path, Console(quiet=True))
    assert answers.asked == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_new_tokens": 6}, "max_new_tokens"),
        ({"temperatures": (0.0,)}, "temperatures"),
        ({"store_dtype": "bfloat16"}, "store_dtype"),
        ({"laws": (LawSection(0.3),)}, "laws"),
    ],
)
def test_other_settings_are_refused(
    tiny_target: Target, tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    run(tiny_target, tmp_path)
    with pytest.raises(UserError, match=rf"collected with {name} = "):
        run(tiny_target, tmp_path, **change)


def test_other_prompts_taps_or_template_are_refused(
    tiny_target: Target, tmp_path: Path, load_tiny: Callable[..., Target]
) -> None:
    run(tiny_target, tmp_path)
    quiet = Console(quiet=True)
    with pytest.raises(UserError, match="prompts"):
        collect(recipe(), tiny_target, TAPS, PROMPTS[1:], tmp_path, quiet)
    with pytest.raises(UserError, match="taps"):
        collect(recipe(), tiny_target, (0, 1), PROMPTS, tmp_path, quiet)
    other = load_tiny()
    other.provenance["template"] = "edited"
    with pytest.raises(UserError, match=r"target = .*edited"):
        collect(recipe(), other, TAPS, PROMPTS, tmp_path, quiet)
