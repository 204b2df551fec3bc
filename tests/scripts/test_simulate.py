"""`draftsmith simulate`: tables and sentences from an evaluation's folder, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import planned
import pytest

from draftsmith.configs.errors import UserError
from draftsmith.eval.report import JSON_NAME
from draftsmith.eval.request_rows import write_requests
from draftsmith.scripts.cli import main
from draftsmith.scripts.simulate import bytes_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / JSON_NAME).write_text(json.dumps(planned.report()), encoding="utf-8")
    write_requests(tmp_path, planned.rows())
    return tmp_path


def simulated(folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "plan.json"
    command = ["simulate", str(folder), "--requests", "100", "--out", str(out), *words]
    assert main(command) == 0
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", str(folder), "--rate", "1", *words]) == 2
    return capsys.readouterr().err


def test_every_domain_both_ways_at_every_rate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(folder, "--rate", "0.1", "50")
    assert [(one["domain"], one["batch"]) for one in found["cells"]] == [("chat", 8), ("math", 8)]
    rows = found["cells"][0]["rows"]
    ways = [(row["rate"], row["num_draft_tokens"]) for row in rows]
    assert ways == [(0.1, 0), (0.1, 2), (50.0, 0), (50.0, 2)]
    assert rows[0]["latency_p50"]["value"] > rows[1]["latency_p50"]["value"], "alone it is slower"
    assert rows[2]["latency_p50"] is None and rows[2]["utilisation"]["value"] == 1.0
    said = " ".join(capsys.readouterr().out.split())
    assert "chat, T=0, up to 8 at a time: plain decoding serves at most" in said
    assert "it answers sooner up to" in said
    # 21 to 24 tokens of 0.2 seconds for eight, and prefill of 0.02 a token, 25 in the mean.
    per_request = 0.02 * 25 + 21.5 * 0.2 / 8
    assert found["cells"][0]["plain_capacity"] == pytest.approx(1 / per_request, rel=0.05)


def test_what_is_chosen(folder: Path) -> None:
    found = simulated(
        folder, "--rate", "0.2", "--domain", "math", "--law", "T=0", "--draft", "1", "--batch", "1",
        "--tokens", "10", "11",
    )  # fmt: skip
    (one,) = found["cells"]
    assert (one["domain"], one["batch"], one["num_draft_tokens"]) == ("math", 1, 1)
    # 0.02 a prompt token, 0.004 more with the drafter; rounds of 0.135, 1.8 tokens each.
    assert one["plain_capacity"] == pytest.approx(1 / (0.2 + 10 * 0.1), rel=0.01)
    assert one["speculative_capacity"] == pytest.approx(1 / (0.24 + 0.135 * 10 / 1.8), rel=0.08)
    assert one["pays_up_to"] is None


def test_another_machine(folder: Path) -> None:
    """Twice as fast in all, from changes or from a file."""
    words = ("--rate", "0.2", "--domain", "chat")
    slow = simulated(folder, *words)["cells"][0]
    fast = simulated(folder, *words, "--set", "seconds=0.05")
    assert fast["cells"][0]["plain_capacity"] == pytest.approx(2 * slow["plain_capacity"])
    own = folder / "own.json"
    own.write_text(json.dumps(fast["machines"][planned.LAW]), encoding="utf-8")
    for costs in (own, folder / "plan.json"):
        read = simulated(folder, *words, "--costs", str(costs))
        assert read["cells"][0]["rows"] == fast["cells"][0]["rows"]
    changed = simulated(folder, *words, "--set", "batches.8.v.3=9.0", "batches.8.c=0.5")
    steps = changed["machines"][planned.LAW]["batches"]["8"]
    assert steps["v"]["3"] == 9.0 and steps["c"] == 0.5
    assert changed["cells"][0]["speculative_capacity"] < slow["speculative_capacity"]


def test_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside 1 GiB of weights, and a quarter for the drafter, 1 and 1.25 MiB a token."""
    (one,) = simulated(
        folder, "--rate", "0.1", "--domain", "chat", "--tokens", "50", "50", "--memory", "1.5GiB"
    )["cells"]
    assert one["conversations"] == [5, 2]
    assert "memory holds 5 conversations plainly, 2 beside" in " ".join(
        capsys.readouterr().out.split()
    )
    assert "do not hold the weights" in refused(folder, capsys, "--memory", "0.5GiB")


def test_sizes() -> None:
    assert bytes_of("16GiB") == 2.0**34 and bytes_of("80GB") == 8e10 and bytes_of("1.5 KiB") == 1536
    with pytest.raises(UserError, match="must be a size such as 16GiB or 80GB"):
        bytes_of("16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--domain", "maths"], "no domain 'maths' (known: chat, math)"),
        (["--law", "T=1"], "no law 'T=1'"),
        (["--draft", "7"], "drafts of 7 tokens were not estimated (known: 1, 2)"),
        (["--batch", "9"], "a batch of 9 is larger than any that was measured (8)"),
        (["--batch", "0"], "--batch is 0, must be 1 or more"),
        (["--requests", "5"], "--requests is 5, must be 100 or more"),
        (["--tokens", "0", "5"], "--tokens takes the tokens of a prompt and of a reply"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--set", "second=1"], "unknown key 'second'"),
        (["--set", "seconds"], "must be written section.key=value"),
        (["--costs", "nowhere.json"], "cannot read nowhere.json as JSON"),
    ],
)
def test_what_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(folder, capsys, *words)


def test_rates_are_above_zero(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(folder), "--rate", "0"]) == 2
    assert "--rate takes requests a second" in capsys.readouterr().err


def test_a_file_that_is_no_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = folder / "own.json"
    for text, said in (
        ("[1]", "must be a mapping"),
        ('{"seconds": 1}', "missing key 'batches'"),
        ('{"machines": {}}', "has no machine under 'T=0'"),
    ):
        own.write_text(text, encoding="utf-8")
        assert said in refused(folder, capsys, "--costs", str(own))
