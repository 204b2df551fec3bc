"""What went wrong for others while preparing and collecting. Numbers are those of the known faults.

B027 and B029: test_field_reports_states.
"""

import copy
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting import World, shards
from preparing import Load, prompts, reasons, section
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.collection import CollectSection
from draftsmith.configs.errors import UserError
from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import LawSection
from draftsmith.data import workers
from draftsmith.data.target import Target
from draftsmith.scripts.cli import main

# ---- B034: a collection that is killed

ROWS = 40
KILLED = """\
name: killed
target: {{name: {target}, device: cpu}}
serving: {{laws: [{{temperature: 1.0}}]}}
domains: [{{name: math, source: {prompts}, holdout: 0.2}}]
collect: {{temperatures: [0.0, 1.0], max_new_tokens: 24, batch_size: 2, shard_size: 2}}
drafter: {{family: eagle3, draft_vocab_size: 100}}
train: {{steps: 1, mixed_precision: "no"}}
"""
KILLS = ((2, signal.SIGKILL), (9, signal.SIGKILL), (16, signal.SIGKILL), (22, signal.SIGTERM))
"""At how many shards, and by which signal."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, target_folder: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    source = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"Solve step {n} of {n * n}."}) for n in range(ROWS)]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "killed.yaml"
    path.write_text(KILLED.format(target=target_folder(), prompts=source), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def start() -> Callable[[Path, Path], BaseProcess]:
    """`start(recipe, runs)`: `draftsmith collect` in a process of its own, begun.

    They are forks of a process that has imported it all, which takes most of the time otherwise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "draftsmith.scripts.pipeline", workers.__name__])

    def begin(recipe: Path, runs: Path) -> BaseProcess:
        child = context.Process(target=run_collect, args=(recipe, runs))
        child.start()
        return child

    return begin


def run_collect(recipe: Path, runs: Path) -> None:
    """The command line in a child, on one thread and without a word."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(main(["collect", str(recipe), "--runs", str(runs)]))


def records_of(runs: Path) -> Path:
    (folder,) = (runs / "killed").glob("records-*")
    return folder


def content(runs: Path) -> dict[str, bytes]:
    """All that a collection leaves, by name."""
    folder = records_of(runs)
    kept = {name: (folder / name).read_bytes() for name in ("manifest.json", "selection.json")}
    return kept | shards(folder)


def written(runs: Path) -> dict[str, int]:
    """The time of writing of each shard that is there."""
    found = runs.glob("killed/records-*/shard-*.safetensors")
    return {path.name: path.stat().st_mtime_ns for path in found}


def kill_at(child: BaseProcess, runs: Path, count: int, kind: signal.Signals) -> None:
    """Send the signal as soon as there are so many shards; the run must still be going on."""
    until = time.monotonic() + 120
    while len(written(runs)) < count:
        assert child.is_alive() and time.monotonic() < until, "it ended before it was killed"
        time.sleep(0.001)
    assert child.pid is not None
    os.kill(child.pid, kind)
    child.join()
    assert child.exitcode == -kind


@pytest.fixture(scope="module")
def whole(recipe: Path, one_thread: None) -> Path:
    """Runs of a collection that nobody stopped; to be left as they are."""
    runs = recipe.parent / "whole"
    assert main(["collect", str(recipe), "--runs", str(runs)]) == 0
    return runs


def test_b034_killed_again_and_again_it_ends_as_one_that_was_not(
    recipe: Path, whole: Path, start: Callable[[Path, Path], BaseProcess], tmp_path: Path
) -> None:
    """SIGKILL three times, SIGTERM once, each a little further on; then to the end."""
    expected, runs = content(whole), tmp_path / "runs"
    total = len(shards(records_of(whole)))
    assert total > 1.4 * KILLS[-1][0]
    before: dict[str, int] = {}
    for count, kind in KILLS:
        kill_at(start(recipe, runs), runs, count, kind)
        now = written(runs)
        assert count <= len(now) < total
        assert {name: now[name] for name in before} == before, "what was there is left alone"
        assert not json.loads((records_of(runs) / "manifest.json").read_bytes())["complete"]
        before = now
    last = start(recipe, runs)
    last.join()
    assert last.exitcode == 0
    assert content(runs) == expected
    now = written(runs)
    assert {name: now[name] for name in before} == before


def test_b034_a_truncated_newest_shard_is_redone_and_named(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training refuses it by name, collecting redoes it, and names it too."""
    runs = tmp_path / "runs"
    shutil.copytree(whole, runs)
    expected, folder = content(whole), records_of(runs)
    times = written(runs)
    newest = folder / max(times, key=lambda name: times[name])
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    capsys.readouterr()
    train = ["train", str(recipe), "--runs", str(runs), "--records", str(folder)]
    assert main(train) == 2
    error = capsys.readouterr().err
    assert newest.name in error and "damaged" in error and "draftsmith collect" in error
    assert not list(runs.glob("killed/train-*/drafter"))
    assert main(["collect", str(recipe), "--runs", str(runs)]) == 0
    assert f"{newest.name} was damaged and is collected again" in capsys.readouterr().out
    assert content(runs) == expected
    after = written(runs)
    assert [name for name in times if after[name] != times[name]] == [newest.name]


# ---- B142: several workers

COUNT = 500


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """500 rows in chunks of 20: of every tenth no prompt, some with a control token."""
    monkeypatch.setattr(workers, "CHUNK", 20)
    rows = [{"prompt": f"Tell me of {n}, " * (n % 9 + 1)} if n % 10 else {} for n in range(COUNT)]
    rows[5::50] = [{"prompt": f"<|im_end|> {n}"} for n in range(COUNT // 50)]
    return section(tmp_path, rows)


@pytest.fixture
def busy(tiny_target: Target) -> Iterator[Target]:
    """A model that has run on two threads of this process, and may go on."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    tiny_target.forward(torch.arange(100)[None], tiny_target.new_cache(1, 100))
    tiny_target.tokenizer(["some text"] * 100)
    yield tiny_target
    torch.set_num_threads(before)


def test_b142_any_number_of_workers_prepares_the_same_bytes(
    many: Any, busy: Target, ready: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for count in (1, 2, 8):
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / f"cache-{count}"))
        begun = time.monotonic()
        prepared = ready(many, CollectSection(workers=count))
        assert time.monotonic() - begun < 120
        assert prepared.folder.is_relative_to(tmp_path / f"cache-{count}"), "not the one before"
        names = ("rows.arrow", "rejected.jsonl")
        found[count] = {name: (prepared.folder / name).read_bytes() for name in names}
        assert len(prepared) + len(reasons(prepared)) == COUNT
        lines = [prompt.line for prompt in prompts(prepared)]
        assert len(lines) > 400 and lines == sorted(lines)
    assert found[1] == found[2] == found[8]


@pytest.mark.parametrize("count", [1, 2])
def test_b142_a_fault_in_a_worker_names_its_row_and_leaves_nothing(
    many: Any, ready: Load, tiny_tokenizer: PreTrainedTokenizerFast, count: int, tmp_path: Path
) -> None:
    broken = copy.deepcopy(tiny_tokenizer)
    divides = "{{ 1 // (0 if 'Tell me of 307,' in messages[0]['content'] else 1) }}"
    broken.chat_template = divides + str(tiny_tokenizer.chat_template)
    with pytest.raises(RuntimeError, match=r"d\.jsonl:308: ZeroDivisionError"):
        ready(many, CollectSection(workers=count), broken)
    assert not list((tmp_path / "cache").glob("prepared/*/rows.arrow"))
    assert not list((tmp_path / "cache").glob("prepared/.*.part"))


def test_b142_no_worker_is_refused() -> None:
    with pytest.raises(UserError, match=r"collect\.workers.*above 0, or null"):
        load_recipe("demo", ["collect.workers=0"])


# ---- B043: a head with rows that no token has

HOT = 1.5


@pytest.fixture
def wide(load_tiny: Callable[..., Target]) -> Target:
    """A head of 416 rows over 400 tokens, whose further rows would win often."""
    target = load_tiny("llama", vocab_size=416, tie_word_embeddings=False)
    target.model.lm_head.weight.data[400:] *= 20
    return target


def test_b043_collection_never_draws_a_token_that_does_not_exist(
    wide: Target, tmp_path: Path
) -> None:
    laws = (LawSection(HOT),)
    content = [{"prompt": f"Solve step {n}."} for n in range(10)]
    options: dict[str, Any] = {"temperatures": (0.0, HOT), "max_new_tokens": 20}
    store = World(wide, tmp_path).collect(content, laws=laws, **options)
    records = list(store.records())
    assert {r.law.temperature for r in records} == {0.0, HOT}
    assert sum(len(r.reply) for r in records) >= 200
    for record in records:
        assert int(record.ids.max()) < 400
        wide.tokenizer.decode(record.ids.tolist())
        assert record.states is not None
        everything = wide.head(record.states.hidden)  # [R, 416]
        real = wide.logits(record.states.hidden)
        assert real.shape[-1] == 400
        assert torch.allclose(record.states.log_z, real.logsumexp(-1), atol=1e-5)
        if record.law.temperature:
            beyond = everything.div(HOT).softmax(-1)[:, 400:].sum(-1)
            assert float(beyond.max()) > 0.5, "rows that would never win prove nothing"
