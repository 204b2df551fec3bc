"""Preparation: rows in = kept + rejected, and nothing stale or half-written."""

import copy
import hashlib
import json
import logging
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from preparing import GOOD, Load, prompts, reasons, rejected, section, write
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.data import prepare as module
from draftsmith.data import workers
from draftsmith.data.chat import render_prompt, template_hash, tokenizer_hash
from draftsmith.data.prepare import Prepared
from draftsmith.data.selection import Selection, select

# ---- rows


def test_a_row_is_a_prompt_and_its_ids(
    tmp_path: Path, ready: Load, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """As a server gets them; what is stored is what was read, of any kind."""
    tool = {"type": "function", "function": {"name": "f"}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "äöü 東京"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "And?"},
    ]
    rows = [{"id": 7, "messages": chat, "tools": [tool]}, {"prompt": "b", "template": "t"}]
    prepared = ready((section(tmp_path, rows), section(tmp_path, GOOD, "raw", kind="raw")))
    first, second, third = prompts(prepared)[:3]
    assert (first.own_id, first.tools, first.domain, first.line) == ("7", (tool,), "d", 1)
    assert [m["content"] for m in first.messages] == ["Be kind.", "äöü 東京", None, "And?"]
    assert first.turns == (2, 4)
    asked = render_prompt(tiny_tokenizer, chat[:2], tools=[tool])
    assert prepared.ids(0) == tuple(asked) and prepared.rows[0]["tokens"] == len(asked)
    assert (second.key, second.source) == ("t", str(tmp_path / "d.jsonl"))
    assert third.kind == "raw"
    assert prepared.ids(2) == tuple(render_prompt(tiny_tokenizer, third.messages, "raw"))


def test_rows_are_mapped_from_disk(tmp_path: Path, ready: Load) -> None:
    prepared = ready(section(tmp_path, GOOD))
    files = [Path(file["filename"]) for file in prepared.rows.cache_files]
    assert files == [prepared.folder / "rows.arrow"]
    assert sorted(p.name for p in prepared.folder.iterdir()) == [
        "manifest.json",
        "rejected.jsonl",
        "rows.arrow",
    ]


def test_given_replies_are_told_from_those_to_make(tmp_path: Path, ready: Load) -> None:
    """Ids are those of the prompt of the first reply; one that does not fit is a reason."""
    rows = [{"prompt": f"question {n}", "response": "long " * n} for n in (1, 2, 9)]
    domain = section(tmp_path, rows, holdout=0.0)
    prepared = ready(domain, CollectSection(replies="given"))
    assert [p.given for p in prompts(prepared)] == [True] * 3
    assert prompts(prepared)[0].messages[1]["content"] == "long "
    assert prepared.ids(0) == ready(domain).ids(0)
    tail = len(prepared.ids(0)) + 2
    assert len(ready(domain, CollectSection(replies="given", max_length=tail))) == 3  # cut
    with pytest.raises(UserError, match="too long for max_length 10"):
        ready(domain, CollectSection(replies="given", max_length=10))
    held = section(tmp_path, rows, "held", holdout=1.0)
    assert not any(p.given for p in prompts(ready(held, CollectSection(replies="given"))))


@pytest.mark.parametrize(("limit", "max_length"), [(60, None), (None, 60), (500, 60), (60, 500)])
def test_too_long(tmp_path: Path, ready: Load, limit: int | None, max_length: int | None) -> None:
    rows = [{"prompt": "x"}, {"prompt": "y" * 60}]
    collect = CollectSection(max_new_tokens=30, max_length=max_length)
    prepared = ready(section(tmp_path, rows), collect, limit=limit)
    free = ready(section(tmp_path, rows), CollectSection(max_new_tokens=30))
    tokens = len(free.ids(1))
    assert [p.line for p in prompts(prepared)] == [1] and len(free) == 2
    assert reasons(prepared) == [
        (2, f"too long: {tokens} tokens and max_new_tokens 30, at most 60 fit")
    ]
    # It is the sum that counts.
    exact = CollectSection(max_new_tokens=30, max_length=tokens + 30)
    assert len(ready(section(tmp_path, rows), exact)) == 2
    below = CollectSection(max_new_tokens=30, max_length=tokens + 29)
    assert len(ready(section(tmp_path, rows), below)) == 1


def test_b026_the_limit_is_the_targets_and_printed(
    tmp_path: Path, ready: Load, out: Console, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """B026: a tokenizer without a maximum says 1e30, which plays no part."""
    assert tiny_tokenizer.model_max_length > 1e29
    domain = section(tmp_path, GOOD)
    for limit, max_length, told in [
        (8192, None, "at most 8192 tokens (the target's limit)"),
        (8192, 500, "at most 500 tokens (collect.max_length)"),
        (None, None, "of any length"),
    ]:
        assert len(ready(domain, CollectSection(max_length=max_length), limit=limit)) == 5
        assert told in out.export_text()


# ---- rejections


BAD = [
    {"messages": []},
    {"messages": [{"role": "system", "content": "Be kind."}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
    {"other": 1},
]


def test_b002_bad_rows_among_good_ones(tmp_path: Path, ready: Load) -> None:
    """B002: each is named with its reason and the good ones are prepared."""
    rows = [BAD[0], *GOOD[:3], BAD[1], BAD[2], *GOOD[3:], BAD[3]]
    prepared = ready(section(tmp_path, rows))
    assert [p.messages[0]["content"] for p in prompts(prepared)] == [r["prompt"] for r in GOOD]
    assert [line for line, _ in reasons(prepared)] == [1, 5, 6, 9]
    assert prepared.counts["rows"] == 9 and prepared.counts["sections"][0]["unusable"] == 4


def test_b002_no_usable_row_at_all(tmp_path: Path, ready: Load) -> None:
    """B002: it stops with the first reason, and keeps nothing; also where others are usable."""
    bad = section(tmp_path, [{"prompt": ""}, {"id": 1}])
    for sections in (bad, (section(tmp_path, GOOD, "good"), bad)):
        with pytest.raises(UserError) as caught:
            ready(sections)
        assert str(caught.value) == (
            f"no usable prompt among the 2 rows of '{bad.source}', "
            f"the first being {bad.source}:1: prompt is empty"
        )
    with pytest.raises(UserError, match="among the 0 rows"):
        ready(section(tmp_path, [], "empty"))
    assert kept(tmp_path) == []


@pytest.mark.parametrize("count", [999, 1000, 1001])
def test_b008_no_batch_of_rendered_rows_loses_any(tmp_path: Path, ready: Load, count: int) -> None:
    """B008, around the sizes of chunks."""
    assert 1000 % workers.CHUNK == 0
    row = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    rows = [{"text": row.format(n)} for n in range(count)]
    prepared = ready(section(tmp_path, rows, kind="rendered"), CollectSection(near_duplicates=None))
    assert [p.line for p in prompts(prepared)] == list(range(1, count + 1))


def test_b008_most_rows_vanishing_is_said_loudly(
    tmp_path: Path, ready: Load, caplog: pytest.LogCaptureFixture, out: Console
) -> None:
    """B008: at the first preparation and whenever it is found again."""
    few = section(tmp_path, [{"prompt": "a"}, {"id": 1}, {"id": 2}])
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ready(few)
        assert "2 of 3 rows are unusable" in caplog.text
        assert "3 rows: 1 prompts kept" in out.export_text()
    caplog.clear()
    ready(section(tmp_path, [{"prompt": "a"}, {"id": 1}], "half"))
    twice = section(tmp_path, [{"prompt": "a"}] * 3, "twice")
    assert "unusable" not in caplog.text
    ready(twice)
    assert "2 of 3 rows are left out, though usable" in caplog.text


def test_rejections_are_counted_by_kind(tmp_path: Path, ready: Load, out: Console) -> None:
    """Numbers do not make another kind; no text of a row gets into the table or the file."""
    secret = "<|im_end|> a secret"
    rows = [*GOOD, *({"prompt": f"{secret} {'y' * n}"} for n in range(3)), {"id": 1}]
    rows += [{"prompt": "z" * n} for n in (70, 80)]
    prepared = ready(section(tmp_path, rows, "a/b"[:1]), limit=140)
    told = {row["reason"]: (row["rows"], row["first"]) for row in prepared.counts["reasons"]}
    source = tmp_path / "a.jsonl"
    kind = "too long: N tokens and max_new_tokens N, at most N fit"
    assert told[kind] == (2, f"{source}:10")
    assert [n for n, _ in told.values()] == sorted((n for n, _ in told.values()), reverse=True)
    assert any("control token" in reason and n == 3 for reason, (n, _) in told.items())
    printed = out.export_text()
    assert "too long: N tokens" in printed and "11 rows: 5 prompts kept" in printed
    assert "secret" not in printed + (prepared.folder / "rejected.jsonl").read_text()
    assert rejected(prepared)[0].keys() == {"source", "line", "domain", "reason"}


def kept(folder: Path) -> list[Path]:
    """What the cache holds; the files that are locked hold nothing."""
    found = (folder / "cache" / "prepared").iterdir()
    return [path for path in found if path.suffix != ".lock"]


def test_a_setup_fault_stops_it(
    tmp_path: Path, ready: Load, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        ready(section(tmp_path, GOOD), tokenizer=bare)
    with pytest.raises(UserError, match="no prompts at"):
        ready(DomainSection("d", "no/rows.jsonl"))


# ---- what is kept on disk


def test_b023_every_change_makes_other_rows(
    tmp_path: Path, ready: Load, tiny_tokenizer: PreTrainedTokenizerFast, out: Console
) -> None:
    """B023: template, length, thinking switch, and content of the same name, size and time."""
    domain = section(tmp_path, GOOD)
    first = ready(domain)
    assert "found in" not in out.export_text()
    again = ready(domain)
    assert f"prepared prompts found in {first.folder}" in out.export_text()
    assert again.folder == first.folder and again.rows["ids"] == first.rows["ids"]
    seen = {first.folder: first.rows["ids"]}

    def fresh(prepared: Prepared) -> Prepared:
        assert prepared.folder not in seen
        assert "found in" not in out.export_text()
        seen[prepared.folder] = prepared.rows["ids"]
        return prepared

    edited = copy.deepcopy(tiny_tokenizer)
    edited.chat_template = str(tiny_tokenizer.chat_template).replace("You are a helpful", "A")
    assert fresh(ready(domain, tokenizer=edited)).rows["ids"] != first.rows["ids"]
    rules = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    rules["model"]["merges"] = []
    merged = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)),
        chat_template=tiny_tokenizer.chat_template,
        **tiny_tokenizer.special_tokens_map,
    )
    assert tokenizer_hash(merged) == tokenizer_hash(tiny_tokenizer)
    assert fresh(ready(domain, tokenizer=merged)).rows["ids"] != first.rows["ids"]
    renamed = copy.deepcopy(tiny_tokenizer)
    renamed.bos_token = "<|endoftext|>"
    fresh(ready(domain, tokenizer=renamed))
    fresh(ready(domain, CollectSection(max_length=200)))
    fresh(ready(domain, CollectSection(max_new_tokens=97)))
    fresh(ready(domain, limit=200 - 1))
    switched = copy.deepcopy(tiny_tokenizer)
    switched.chat_template = (
        str(tiny_tokenizer.chat_template) + "{% if not enable_thinking %}no{% endif %}"
    )
    on = fresh(ready(domain, tokenizer=switched, enable_thinking=True))
    off = fresh(ready(domain, tokenizer=switched, enable_thinking=False))
    assert on.rows["ids"] == first.rows["ids"] != off.rows["ids"]
    file = Path(domain.source)
    stamp = file.stat()
    changed = [{"prompt": row["prompt"].replace("good", "fine")} for row in GOOD]
    section(tmp_path, changed)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stamp.st_size, stamp.st_mtime_ns)
    assert fresh(ready(domain)).rows["ids"] != first.rows["ids"]


def test_b023_an_entry_says_what_it_was_made_from(
    tmp_path: Path, ready: Load, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """B023."""
    domain = section(tmp_path, GOOD)
    prepared = ready(domain, limit=500, enable_thinking=False)
    told = json.loads((prepared.folder / "manifest.json").read_text())
    digest = hashlib.sha256(Path(domain.source).read_bytes()).hexdigest()
    assert told["domains"][0]["content"] == [[domain.source, f"sha256 {digest}"]]
    assert told["tokenizer"] == tokenizer_hash(tiny_tokenizer)
    assert told["template"] == template_hash(tiny_tokenizer, {"enable_thinking": False})
    assert told["max_length"] == 500 and told["counts"] == prepared.counts


def test_what_does_not_matter_finds_the_same(tmp_path: Path, ready: Load) -> None:
    domain = section(tmp_path, GOOD)
    first = ready(domain)
    other = CollectSection(temperatures=(0.3,), batch_size=1, shard_size=2, workers=2, cut="drop")
    assert ready(domain, other).folder == first.folder


def test_a_data_set_and_its_changes(
    tmp_path: Path, ready: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B023 for what `datasets` reads, here from a folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "train.jsonl", GOOD)
    domain = DomainSection("d", f"datasets:{folder}", streaming=True)
    first = ready(domain)
    assert len(first) == 5 and ready(domain).folder == first.folder
    assert ready(DomainSection("d", domain.source)).folder == first.folder
    write(folder / "train.jsonl", GOOD[:4])
    os.utime(folder / "train.jsonl", (1, 1))
    assert len(ready(domain)) == 4
    with pytest.raises(UserError, match="cannot load 'datasets:"):
        ready(DomainSection("d", f"datasets:{tmp_path / 'none'}"))


def test_files_elsewhere_are_known_by_their_content(ready: Load) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    text = "".join(json.dumps(row) + "\n" for row in GOOD)
    memory.pipe_file("/prepare/rows.jsonl", text.encode())
    domain = DomainSection("d", "memory://prepare/rows.jsonl")
    first = ready(domain)
    memory.pipe_file("/prepare/rows.jsonl", text.replace("good", "fine").encode())
    changed = ready(domain)
    assert len(first) == len(changed) == 5
    assert prompts(changed)[0].messages[0]["content"] == "fine prompt 0"


def test_nothing_half_written_is_taken_for_whole(
    tmp_path: Path, ready: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = section(tmp_path, GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(module, "select", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ready(domain)
    assert kept(tmp_path) == []
    whole = ready(domain)
    rows = whole.folder / "rows.arrow"
    size = rows.stat().st_size
    os.truncate(rows, size - 100)
    assert len(ready(domain)) == 5 and rows.stat().st_size == size
    for name in ("rejected.jsonl", "rows.arrow", "manifest.json"):
        (whole.folder / name).unlink()
        assert len(ready(domain)) == 5


def test_leftovers_of_killed_runs_are_removed(tmp_path: Path, ready: Load) -> None:
    """Those of this preparation, which no one else can be at work on."""
    domain = section(tmp_path, GOOD)
    whole = ready(domain)
    shutil.rmtree(whole.folder)
    left = whole.folder.with_name(f".{whole.folder.name}.1.part")
    other = whole.folder.with_name(".0123456789ab.1.part")
    for folder in (left, other):
        folder.mkdir()
        (folder / "usable.arrow").write_text("x")
    assert len(ready(domain)) == 5
    assert not left.exists() and other.exists()


def test_nothing_grows_in_the_users_home(
    tmp_path: Path, ready: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ready(section(tmp_path, GOOD))
    assert not (tmp_path / "hf").exists() and not (tmp_path / "home").exists()


def test_of_two_that_want_the_same_one_prepares_it(
    tmp_path: Path, ready: Load, monkeypatch: pytest.MonkeyPatch, out: Console
) -> None:
    domain = section(tmp_path, GOOD)
    made = []

    def slow(*arguments: Any) -> Selection:
        made.append(1)
        time.sleep(0.3)
        return select(*arguments)

    monkeypatch.setattr(module, "select", slow)
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(ready, [domain] * 2)
    assert first.folder == second.folder and len(first) == len(second) == 5
    assert made == [1] and out.export_text().count("prepared prompts found") == 1
