"""B142: any number of workers, beside a loaded model, gives the same rows and names its faults."""

import copy
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.data import workers
from draftsmith.data.duplicates import Sketch
from draftsmith.data.prompts import read_prompts
from draftsmith.data.target import Target
from draftsmith.data.workers import Renderer, processors, render_all

COUNT = 500


@pytest.fixture
def renderer(tiny_tokenizer: PreTrainedTokenizerFast) -> Renderer:
    return Renderer(tiny_tokenizer, (2,), {}, 400, 96, Sketch.of(0.8))


@pytest.fixture
def items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[workers.Item]:
    """Prompts in chunks of 20; of every tenth row a rejection, of others one that is yet to be."""
    monkeypatch.setattr(workers, "CHUNK", 20)
    rows = [{"prompt": f"Tell me of {n}, " * (n % 9 + 1)} if n % 10 else {} for n in range(COUNT)]
    rows[5::50] = [{"prompt": f"<|im_end|> {n}"} for n in range(COUNT // 50)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DomainSection("d", str(file))
    return [(3, item) for item in read_prompts(section, CollectSection())]


def rendered(
    renderer: Renderer, items: list[workers.Item], count: int | None
) -> tuple[list[dict[str, Any]], list[Any]]:
    rows, rejected = [], []
    for batch, left_out in render_all(renderer, iter(items), count):
        rows += batch.to_pylist()
        rejected += left_out
    return rows, rejected


@pytest.mark.parametrize("count", [2, 8])
def test_b142_workers_beside_a_loaded_model(
    renderer: Renderer, items: list[workers.Item], tiny_target: Target, count: int
) -> None:
    """B142: torch's threads and the tokenizer's are alive in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(400, 400) @ torch.randn(400, 400)
        tiny_target.forward(torch.arange(8)[None], tiny_target.new_cache(1, 8))
        renderer.tokenizer(["some text"] * 100)
        alone = rendered(renderer, items, 1)
        assert rendered(renderer, items, count) == alone
    finally:
        torch.set_num_threads(before)
    assert len(alone[0]) + len(alone[1]) == COUNT and len(alone[1]) == COUNT * 0.12
    assert {section for section, _ in alone[1]} == {3} == {row["section"] for row in alone[0]}
    assert [row["line"] for row in alone[0]] == sorted(row["line"] for row in alone[0])


def test_b142_the_default_starts_few_and_only_for_many_rows(
    renderer: Renderer, items: list[workers.Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B142: never more than there are processors."""
    started = []

    def pool(_: Renderer, chunks: Any, count: int) -> Any:
        started.append(count)
        return map(renderer.chunk, chunks)

    monkeypatch.setattr(workers, "_in_pool", pool)
    monkeypatch.setattr(workers, "processors", lambda: 5)
    alone = rendered(renderer, items, None)
    assert started == []
    monkeypatch.setattr(workers, "FEW", 250)
    assert rendered(renderer, items, None) == alone and started == [5]
    monkeypatch.setattr(workers, "FEW", COUNT)
    assert rendered(renderer, items, None) == alone and started == [5]
    assert rendered(renderer, items, 1) == alone and started == [5]
    assert 1 <= processors() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("count", [1, 2])
def test_b142_a_fault_names_its_row(
    renderer: Renderer,
    items: list[workers.Item],
    tiny_tokenizer: PreTrainedTokenizerFast,
    count: int,
) -> None:
    """B142: wherever it was rendered. The template divides by nothing at one prompt."""
    broken = copy.deepcopy(tiny_tokenizer)
    divides = "{{ 1 // (0 if 'Tell me of 307,' in messages[0]['content'] else 1) }}"
    broken.chat_template = divides + str(tiny_tokenizer.chat_template)
    faulty = Renderer(broken, (2,), {}, 400, 96, None)
    with pytest.raises(RuntimeError, match=r"rows\.jsonl:308: ZeroDivisionError"):
        rendered(faulty, items, count)


def test_a_setup_fault_comes_as_it_is(
    items: list[workers.Item], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        rendered(Renderer(bare, (2,), {}, 400, 96, None), items, 2)


class Fatal:
    """Ends the process that unpacks it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def test_a_killed_worker_is_told(
    items: list[workers.Item], caplog: pytest.LogCaptureFixture
) -> None:
    fatal: Any = Fatal()
    start = time.monotonic()
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(UserError, match=r"set collect\.workers below 2"),
    ):
        rendered(Renderer(fatal, (2,), {}, 400, 96, None), items, 2)
    assert time.monotonic() - start < 60
