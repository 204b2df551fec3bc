"""Batches as people look at them: what is supervised, and what made a step fail."""

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from draftsmith.data.records import Record
from draftsmith.drafters.base import TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.train.rows import describe_batch, save_fault

DOMAINS = ("a", "b")


@pytest.fixture
def chosen(records: list[Record]) -> list[Record]:
    """One long conversation and two short ones, of both domains."""
    by_length = sorted(records, key=lambda r: len(r.ids))
    short = [r for r in by_length if len(r.reply) > 1]
    return [by_length[-1], *short[:2]]


def spelt(text: str) -> str:
    """What the picture of control characters says without its line ends."""
    return text.replace("␊\n", "␊")


@pytest.mark.parametrize("packed", [False, True])
def test_the_supervised_text_of_a_batch_can_be_read(
    packed: bool, chosen: list[Record], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """B025: all but each reply's first token is supervised, and the rest is there to see."""
    batch = collate(chosen, DOMAINS, packed=packed)
    assert batch.packed == packed
    text = describe_batch(batch, tiny_tokenizer, DOMAINS)
    for record in chosen:
        count, supervised = len(record.ids), len(record.reply) - 1
        title = f"{record.key} [{record.domain}] {count} tokens, {supervised} supervised\n"
        assert text.plain.count(title) == 1
        after = text.plain.partition(title)[2]
        prompt, _, rest = after.partition("⟦")
        assert decoded(tiny_tokenizer, record.ids[: record.prompt_len + 1]) == spelt(prompt)
        assert decoded(tiny_tokenizer, record.reply[1:]) == spelt(rest.partition("⟧\n")[0])


def decoded(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor) -> str:
    """Plain decoding, special tokens apart, with pictures of control characters."""
    special = set(tokenizer.all_special_ids)
    runs: list[list[int]] = [[]]
    for token_id in ids.tolist():
        if token_id in special:
            runs += [[token_id], []]
        else:
            runs[-1].append(token_id)
    text = "".join(str(tokenizer.decode(run)) for run in runs if run)
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 else c for c in text)


def test_colour_alone_does_not_tell_what_is_supervised(
    chosen: list[Record], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = describe_batch(collate(chosen, DOMAINS), tiny_tokenizer, DOMAINS)
    green = [span for span in text.spans if "green" in str(span.style)]
    for span in green:
        assert text.plain.rfind("⟦", 0, span.start) > text.plain.rfind("⟧", 0, span.start)
    assert len({text.plain.rfind("⟦", 0, span.start) for span in green}) == len(chosen)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_failed_step_are_kept(packed: bool, chosen: list[Record], tmp_path: Path) -> None:
    good, bad = collate(chosen[:1], DOMAINS), collate(chosen, DOMAINS, packed=packed)
    assert bad.hidden is not None
    place = [record.key for record in chosen].index(bad.keys[1])  # packing may reorder
    hidden = bad.hidden.clone()
    hidden[bad.first[1] + 1] = nan  # of the second conversation
    bad = replace(bad, hidden=hidden)
    path = save_fault(tmp_path, 7, [good, bad, good], [1.5, nan], None, DOMAINS)
    assert path == tmp_path / "fault-step-7"
    assert {file.name for file in path.iterdir()} == {"rows.json", "batch-1.safetensors"}
    told = json.loads((path / "rows.json").read_text())
    (batch,) = told["batches"]
    assert (told["step"], told["gradient_norm"]) == (7, None)
    assert (batch["batch"], batch["loss"]) == (1, "nan")
    rows = {row["key"]: row for row in batch["rows"]}
    assert set(rows) == {record.key for record in chosen}
    for record in chosen:
        row = rows[record.key]
        assert row["domain"] == record.domain
        assert row["prompt"] + row["reply"] == record.ids.tolist()
        assert len(row["prompt"]) == record.prompt_len
        assert row["finite"] == (record.key != chosen[place].key)
    tensors = load_file(path / "batch-1.safetensors")
    assert torch.equal(tensors["ids"], bad.ids)
    assert torch.equal(tensors["hidden"], hidden) or tensors["hidden"].isnan().any()


def test_all_rows_are_kept_where_only_the_gradient_failed(
    chosen: list[Record], tmp_path: Path
) -> None:
    batches = [collate([record], DOMAINS) for record in chosen]
    path = save_fault(tmp_path, 3, batches, [1.0, 2.0, 3.0], inf, DOMAINS)
    told = json.loads((path / "rows.json").read_text())
    assert told["gradient_norm"] == "inf"
    assert [batch["loss"] for batch in told["batches"]] == [1.0, 2.0, 3.0]
    assert [batch["rows"][0]["key"] for batch in told["batches"]] == [r.key for r in chosen]


def test_rows_are_kept_whole_or_not_at_all(
    chosen: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("draftsmith.train.rows.save_file", full)
    batch: TrainBatch = collate(chosen, DOMAINS)
    with pytest.raises(OSError, match="no space"):
        save_fault(tmp_path, 3, [batch], [nan], None, DOMAINS)
    assert list(tmp_path.iterdir()) == []
