"""Publishing to the Hub and pushing a folder by itself, on the command line."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest
from hub_server import TOKEN, Hub

from draftsmith.scripts.cli import main

NAME = "someone/tiny-eagle3"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def evaluated(shared_recipe_file: Path) -> list[str]:
    """Arguments of `publish` for a recipe that was collected, trained and evaluated."""
    recipe, runs = shared_recipe_file, shared_recipe_file.parent / "runs"
    for command in ("collect", "train", "eval"):
        assert main([command, str(recipe), "--runs", str(runs)]) == 0, command
    (drafter,) = (runs / "tiny").glob("train-*/drafter")
    (report,) = (runs / "tiny").glob("eval-*")
    return [
        str(recipe), "--runs", str(runs), "--drafter", str(drafter), "--report", str(report),
    ]  # fmt: skip


@pytest.fixture
def folder(evaluated: list[str]) -> Iterator[Path]:
    """Where the publisher writes; nothing is there before the test."""
    place = Path(evaluated[2]) / "tiny" / "published" / "tiny-eagle3"
    shutil.rmtree(place, ignore_errors=True)
    yield place


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.running() as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr, beside progress bars."""
    said = capsys.readouterr().err
    assert TOKEN not in said
    (line,) = [line for line in said.splitlines() if line.startswith("draftsmith:")]
    return line.removeprefix("draftsmith: ")


def test_published_and_sent_at_once(
    hub: Hub, evaluated: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", *evaluated, "--to", "hub", NAME, "seed=0"]) == 0
    out = capsys.readouterr().out
    files = hub.repositories[NAME].branches["main"]
    assert set(files) == {path.name for path in folder.iterdir()}
    assert hub.repositories[NAME].private
    weights = (folder / "model.safetensors").stat().st_size
    assert f"{weights / 1000:.1f} kB" in out and f"{len(files)} files, " in out
    assert out.index("to someone/tiny-eagle3, a private model") < out.index("sent to http://127")
    card = files["README.md"].decode()
    for words in ("## Data", "| train | chat | T=1 |", "## Make it again", "family: eagle3",
                  "## Licence", f'"model": "{NAME}"'):  # fmt: skip
        assert words in card, words


def test_b135_what_failed_is_done_by_the_command_it_names(
    hub: Hub,
    evaluated: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No token at first; the folder is whole, and sending it needs nothing else."""
    monkeypatch.delenv("HF_TOKEN")
    to = ["--to", "hub", NAME, "--revision", "trial 1", "--public"]
    assert main(["publish", *evaluated, *to]) == 4
    said = complaint(capsys)
    assert said.startswith("no token for the Hub is known here") and f"{folder} is whole" in said
    assert (folder / "SHA256SUMS").exists() and hub.requests == []
    words = shlex.split(said.partition("can be sent with: ")[2])
    assert words == ["draftsmith", "push", str(folder), NAME, *to[3:]]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(words[1:]) == 0
    assert set(hub.repositories[NAME].branches["trial 1"]) == {p.name for p in folder.iterdir()}
    assert not hub.repositories[NAME].private


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (["--to", "hub", "someone/my draft"], "'someone/my draft' is no name on the Hub"),
        (["--to", "s3", NAME], "sent to 'hub' alone"),
        (["--public"], "name --to hub OWNER/NAME"),
        (["--revision", "x"], "name --to hub OWNER/NAME"),
    ],
)
def test_b135_a_wrong_place_is_told_before_the_work(
    to: list[str],
    said: str,
    evaluated: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["publish", *evaluated, *to]) == 2
    assert said in complaint(capsys)
    assert not folder.exists()


def test_b135_no_network_in_a_process_of_its_own(
    evaluated: list[str], folder: Path, tmp_path: Path
) -> None:
    """What a shell sees: the exit code, one line, no token."""
    assert main(["publish", *evaluated]) == 0
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from draftsmith.scripts.cli import main; "
         "sys.exit(main())", "push", str(folder), NAME],
        env={"PATH": "", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN,
             "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "sending to http://127.0.0.1:9 failed" in done.stderr
    assert f"draftsmith push {folder} {NAME}" in done.stderr
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_records_of_a_run(
    hub: Hub, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (records,) = (Path(evaluated[2]) / "tiny").glob("records-*")
    assert main(["push", str(records), "someone/records"]) == 0
    assert "to someone/records, a private dataset repository" in capsys.readouterr().out
    files = hub.repositories["datasets/someone/records"].branches["main"]
    assert "plan.json" not in files
    for name, content in files.items():
        assert str(records.parent.parent.parent).encode() not in content, name
    card = files["README.md"].decode()
    for words in ("| heldout | math | T=0 | 4 |", "laws: T=0, T=1", "chat template (hash)"):
        assert words in card, words


@pytest.mark.parametrize("kind", ["trained", "nothing", "run"])
def test_other_folders_are_not_pushed(
    kind: str, hub: Hub, evaluated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Path(evaluated[4])
    place = {"trained": trained, "nothing": trained / "none", "run": trained.parent}[kind]
    assert main(["push", str(place), NAME]) == 2
    said = complaint(capsys)
    assert (
        f"there is no folder {place}" in said if kind == "nothing" else "has no SHA256SUMS" in said
    )
    assert hub.requests == []
