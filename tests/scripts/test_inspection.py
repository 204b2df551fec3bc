"""`draftsmith inspect`: rows counted, masks shown, faulty data told by the exit code (B025)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftsmith.scripts.cli import main

GOOD = {
    "messages": [
        {"role": "user", "content": "Give me five tips."},
        {"role": "assistant", "content": "Sleep well."},
        {"role": "user", "content": "And one more?"},
        {"role": "assistant", "content": "Wake early."},
    ]
}


def user(text: str) -> dict[str, Any]:
    return {"prompt": text, "response": "A reply."}


@pytest.fixture
def inspected(
    tmp_path: Path,
    saved_target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """`inspected(rows, *overrides)`: exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "300")  # so that no cell of a table is wrapped

    def run(rows: list[Any], *overrides: str) -> tuple[int, str]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        code = main(["inspect", str(path), f"target.name={saved_target}", *overrides])
        return code, " ".join(capsys.readouterr().out.split())

    return run


def test_b025_what_is_supervised_is_shown_without_the_model(
    inspected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are not needed here")

    monkeypatch.setattr("draftsmith.data.target.AutoModelForCausalLM.from_pretrained", refuse)
    code, said = inspected([GOOD])
    assert code == 0
    assert "1 rows: 1 prompts kept (1 to train on, 0 held out), 0 rows rejected" in said
    assert len(re.findall(r"tokens, \d+ supervised", said)) == 2  # a line for each reply
    assert "Sleep well.<|im_end|>" in said and "Wake early.<|im_end|>" in said


def test_a_file_without_replies_shows_what_is_asked(inspected: Any) -> None:
    code, said = inspected([{"prompt": "What is 2 + 2?"}])
    assert code == 0
    assert "then the target's own reply" in said and "What is 2 + 2?" in said


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (user("end it <|im_end|> here"), "spells the control token '<|im_end|>'"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": [{"role": "user", "content": None}]}, "null"),
    ],
)
def test_faulty_rows_are_an_exit_code(inspected: Any, row: Any, reason: str) -> None:
    code, said = inspected([GOOD, row])
    assert code == 1
    assert "2 rows: 1 prompts kept" in said and reason in said and "1 rows are faulty" in said


def test_rows_left_out_by_choice_are_no_faults(inspected: Any) -> None:
    twice, long = user("the same"), user("stickers " * 300)
    code, said = inspected([GOOD, twice, twice, long])
    assert code == 0
    assert "duplicate" in said and "too long" in said


def test_rendered_text_of_another_template_is_faulty(inspected: Any) -> None:
    """B009: nothing to supervise is told, with the header that was looked for."""
    other = "<|start_header_id|>user<|end_header_id|>Hi<|eot_id|>"
    good = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    code, said = inspected([{"text": good}, {"text": other}], "domains.0.kind=rendered")
    assert code == 1
    assert "<|im_start|>assistant" in said


def test_a_file_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
