"""Benchmarks that cannot be run: one sentence, before anything is measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarking import loaded

from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.scripts import pipeline
from draftsmith.scripts.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["drafters.0.folder=/no/such"], ("drafter 'head'", "no folder /no/such")),
        (
            ["drafters.1.options={family: eagle3}"],
            ("drafter 'lookup'", "'eagle3' has to be trained", "folder of a trained one"),
        ),
        (
            ["drafters.1.options={family: lokup}"],
            ("'lokup'", "drafter 'lookup'", "did you mean 'lookup'"),
        ),
        (
            ["drafters.1.options={family: lookup, ngram: 2}"],
            ("unknown key 'drafter.ngram'", "drafter 'lookup'"),
        ),
        (
            ["servings.0.policy={name: adaedle, threshold: 0.5}"],
            ("serving 'block'", "serving.policy", "'adaedle'", "adaedl"),
        ),
        (["drafters.0.servings=[nothing]"], ("names of servings", "block, greedy drafts")),
        (["drafters.0.options={family: lookup}"], ("drafters.0.folder", "null beside options")),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_mistake_is_one_sentence_and_costs_nothing(
    changes: list[str],
    words: tuple[str, ...],
    spec_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = tmp_path / "runs"
    assert main(["bench", str(spec_file), *changes, "--runs", str(runs)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "draftsmith:" in line]
    assert len(said) == 1, said
    for word in words:
        assert word in said[0], said
    assert not runs.exists()


def test_a_draft_that_is_too_long_is_told_before_anything_is_measured(
    spec_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make_medusa: Callable[[Path], Path],
) -> None:
    monkeypatch.setattr(pipeline, "evaluate", lambda *args: pytest.fail("measured something"))
    changes = [
        f"drafters.1={{name: medusa, folder: {make_medusa(tmp_path / 'medusa')}}}",
        "servings.0.num_draft_tokens=9",
    ]
    assert main(["bench", str(spec_file), *changes, "--runs", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    for word in ("medusa, block: ", "num_draft_tokens is 9", "family 'medusa' drafts"):
        assert word in said, said
    assert not list((tmp_path / "runs").rglob("records-*")), "and before anything is collected"


@pytest.fixture
def make_medusa(saved_target: Path) -> Callable[[Path], Path]:
    """Heads for a few tokens a round."""

    def make(folder: Path) -> Path:
        target = loaded(saved_target)
        heads = MedusaDrafter.from_target(target, MedusaConfig(), None)
        return save_drafter(heads, folder, target, {})

    return make


def test_a_folder_that_is_no_drafter_is_one_sentence(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    changes = [f"drafters.0.folder={tmp_path / 'empty'}"]
    assert main(["bench", str(spec_file), *changes, "--runs", str(tmp_path / "runs")]) == 2
    assert "is no drafter folder" in capsys.readouterr().err
