"""What went wrong for others when runs were stopped and taken up again (B059 to B066, B146).

Numbers are those of the known faults. B058: test_loop (rates at each optimiser step, resumed at 7)
and test_processes (two processes).
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher, environment
from safetensors.torch import load_file
from torch import Tensor
from watching import PowerCut, answered, cut_at, lines, quiet, said, watch

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import Recipe
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.train.checkpoints import checkpoints
from draftsmith.train.distill import main as distill
from draftsmith.train.loop import train

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def steps_of(folder: Path) -> list[int]:
    return [int(path.name[-6:]) for path in checkpoints(folder)]


# ---- B059: accumulation beyond the data, accumulation changed


def test_b059_more_accumulation_than_batches_makes_steps(
    make_recipe: RecipeFactory,
    tiny_target: Target,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows go on into the next epoch: 3 batches, accumulation 8 and 3 epochs are two steps."""
    store = answered(tiny_target, tmp_path / "records", 3)
    seen = watch(monkeypatch)
    recipe = make_recipe(steps=None, epochs=3.0, accumulation=8, tokens_per_batch=1)
    train(recipe, tiny_target, store, run_folder, quiet())
    assert [row["step"] for row in lines(run_folder, "train")] == [1, 2]
    assert len(seen.keys) == 16
    epochs = [set().union(*seen.keys[i : i + 3]) for i in (0, 3, 6, 9)]
    assert all(len(epoch) == 3 and epoch == epochs[0] for epoch in epochs)


def test_b059_another_accumulation_is_refused_at_resume(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        watch(patch, cut_at(4 * 8))
        with pytest.raises(PowerCut):
            fit(make_recipe(accumulation=4, save_every=7), run_folder)
    assert steps_of(run_folder) == [7]
    with pytest.raises(UserError, match=r"run of other settings \(train differ\)"):
        fit(make_recipe(accumulation=3, save_every=7), run_folder)
    assert steps_of(run_folder) == [7]


# ---- B061: everything that a step depends on


@pytest.fixture(scope="module")
def dropping(load_tiny: Callable[..., Target]) -> Target:
    """A target whose copies drop a tenth of their residual states while they are trained."""
    return load_tiny("gpt2", resid_pdrop=0.1)


@pytest.fixture(scope="module")
def few(dropping: Target, tmp_path_factory: pytest.TempPathFactory) -> RecordStore:
    return answered(dropping, tmp_path_factory.mktemp("dropping"), 24)


@pytest.mark.parametrize("family", ["causal", "lora", "eagle3"])
def test_b061_a_run_resumed_at_step_7_is_the_uninterrupted_one(
    family: str,
    make_recipe: RecipeFactory,
    dropping: Target,
    few: RecordStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two epochs over 24 shuffled rows, two batches a step, dropout: rows, losses and weights."""
    options = {"steps": None, "epochs": 2.0, "accumulation": 2, "tokens_per_batch": 26}
    recipe = make_recipe(
        "causal" if family == "lora" else family, **options, save_every=7, eval_every=6
    )
    if family == "lora":
        lora = {"rank": 4, "dropout": 0.1}
        recipe = replace(recipe, drafter={**recipe.drafter, "lora": lora})

    def run(name: str, cut: int | None = None) -> tuple[list[tuple[str, ...]], str]:
        console = quiet()
        with monkeypatch.context() as patch:
            seen = watch(patch, cut_at(-1 if cut is None else cut))
            if cut is None:
                train(recipe, dropping, few, tmp_path / name, console)
            else:
                with pytest.raises(PowerCut):
                    train(recipe, dropping, few, tmp_path / name, console)
        if family != "eagle3":
            chances = {m.p for m in seen.drafter.modules() if isinstance(m, torch.nn.Dropout)}
            assert 0.1 in chances and seen.drafter.training
        return seen.keys, said(console)

    whole, _ = run("whole")
    before, _ = run("cut", cut=17)  # within the second batch of step 9
    after, told = run("cut")
    total = len(whole) // 2
    assert f"going on from step 7 of {total}" in told and total > 9
    assert whole[:17] == before and whole[14:] == after, "the order of rows goes on"
    half = len(whole) // 2
    assert whole[:half] != whole[half : 2 * half], "the second epoch is shuffled differently"
    assert len(set().union(*whole)) == len([r for r in few.index() if r.split == "train"])
    assert lines(tmp_path / "cut", "train") == lines(tmp_path / "whole", "train")
    assert lines(tmp_path / "cut", "heldout") == lines(tmp_path / "whole", "heldout")
    files = [tmp_path / name / "drafter" / "model.safetensors" for name in ("whole", "cut")]
    assert same(*map(load_file, files))


def test_b061_dropout_is_really_at_work(
    make_recipe: RecipeFactory,
    dropping: Target,
    few: RecordStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the same run has other losses, so equal ones above mean equal random states."""
    recipe = make_recipe("causal", steps=2)
    train(recipe, dropping, few, tmp_path / "with", quiet())

    def still(number: int, drafter: Any, batch: Any) -> None:
        drafter.eval()

    watch(monkeypatch, still)
    train(recipe, dropping, few, tmp_path / "without", quiet())
    pairs = zip(
        lines(tmp_path / "with", "train"), lines(tmp_path / "without", "train"), strict=True
    )
    assert all(a["loss"] != b["loss"] for a, b in pairs)


# ---- B063: half-written checkpoints


def test_b063_whatever_part_of_the_newest_checkpoint_is_damaged(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file missing, each cut in half, all gone: the one before is taken, and it is named."""
    recipe = make_recipe(steps=6, save_every=2, eval_every=6)
    straight = fit(recipe, tmp_path / "straight")
    with monkeypatch.context() as patch:
        watch(patch, cut_at(5))
        with pytest.raises(PowerCut):
            fit(recipe, tmp_path / "cut")
    assert steps_of(tmp_path / "cut") == [2, 4]
    newest = checkpoints(tmp_path / "cut")[-1]
    files = sorted(p.relative_to(newest) for p in newest.rglob("*") if p.is_file())
    assert len(files) >= 4, "weights, optimiser, schedule, progress"
    harms: list[tuple[str, Path | None]] = [(how, f) for f in files for how in ("drop", "halve")]
    for how, file in [*harms, ("empty", None)]:
        folder = tmp_path / f"{how}-{file}".replace("/", "_")
        shutil.copytree(tmp_path / "cut", folder)
        damage(folder / newest.name, how, file)
        console = quiet()
        resumed = fit(recipe, folder, console=console)
        told = said(console)
        assert f"{newest.name} is damaged" in told, (how, file)
        assert "going on from step 2 of 6" in told, (how, file)
        assert same(resumed, straight), (how, file)
        assert steps_of(folder)[-2:] == [4, 6], "saved again in its place"


def damage(checkpoint: Path, how: str, file: Path | None) -> None:
    if file is None:
        shutil.rmtree(checkpoint)
        checkpoint.mkdir()
    elif how == "drop":
        (checkpoint / file).unlink()
    else:
        data = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(data[: len(data) // 2])


KILLED = """
import os, signal, sys
from accelerate import Accelerator
from draftsmith.train.distill import main

save, saved = Accelerator.save_state, []

def killed(self, *args, **options):
    saved.append(1)
    if len(saved) == {number}:
        # Part of the files are there, the end is not.
        save(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, *args, **options)

Accelerator.save_state = killed
sys.exit(main(sys.argv[1:]))
"""


def test_b063_a_process_killed_while_saving(
    target_folder: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL in the middle of the second checkpoint: the first one is taken up."""
    launcher = Launcher.prepared(tmp_path, target_folder())
    recipe = str(launcher.recipe("causal"))

    def arguments(out: Path) -> list[str]:
        return ["--config", recipe, "--records", str(launcher.records), "--out", str(out)]

    out = tmp_path / "cut"
    script = [sys.executable, "-c", KILLED.format(number=2), *arguments(out)]
    done = subprocess.run(script, env=environment(), capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps_of(out) == [2]
    assert len(list(out.glob(".*step*"))) == 1, "what was being written"
    assert distill(arguments(out)) == 0
    assert "going on from step 2 of 6" in " ".join(capfd.readouterr().err.split())
    assert distill(arguments(tmp_path / "whole")) == 0
    files = [folder / "drafter" / "model.safetensors" for folder in (out, tmp_path / "whole")]
    assert same(*map(load_file, files))
    assert list(out.glob(".*step*")) == []


# ---- B066: the end of a run, and a longer one


@pytest.mark.parametrize(
    "options",
    [{"steps": 17}, {"steps": None, "epochs": 17 / 30, "tokens_per_batch": 1}],
    ids=["steps", "epochs"],
)
def test_b066_a_longer_run_goes_on_behind_the_last_row(
    options: dict[str, Any],
    make_recipe: RecipeFactory,
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """17 steps saved every 10 and at the end, then 25: as if 25 had been asked for at once.

    At a constant rate, because the course of any other depends on the length of the run.
    """
    store = answered(tiny_target, tmp_path / "records", 30)
    count = len([r for r in store.index() if r.split == "train" and len(r.reply) > 1])
    options = {k: 17 / count if k == "epochs" else v for k, v in options.items()}
    fixed = {"schedule": "constant", "save_every": 10, "eval_every": 100, "tokens_per_batch": 1}
    longer = {"steps": 25} if options["steps"] else {"steps": None, "epochs": 25 / count}
    short, long = make_recipe(**{**fixed, **options}), make_recipe(**{**fixed, **longer})
    with monkeypatch.context() as patch:
        straight = watch(patch)
        train(long, tiny_target, store, tmp_path / "straight", quiet())
    assert steps_of(tmp_path / "straight")[-1] == 25
    with monkeypatch.context() as patch:
        seen = watch(patch)
        train(short, tiny_target, store, tmp_path / "run", quiet())
        assert steps_of(tmp_path / "run") == [10, 17]
        assert (tmp_path / "run" / "drafter").is_dir()
        console = quiet()
        train(long, tiny_target, store, tmp_path / "run", console)
    assert "going on from step 17 of 25" in said(console)
    assert seen.keys == straight.keys and len(seen.keys) == 25, "it goes on with row 18"
    assert steps_of(tmp_path / "run")[-1] == 25
    files = [tmp_path / n / "drafter" / "model.safetensors" for n in ("run", "straight")]
    assert same(*map(load_file, files))
    assert [row["step"] for row in lines(tmp_path / "run", "train")] == list(range(1, 26))


def test_b066_a_stopped_run_saves_where_it_stopped(
    fit: Trainer, make_recipe: RecipeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM, as of a cluster that wants its machine back; no checkpoint was due for long."""
    recipe = make_recipe(save_every=1000, eval_every=6)
    straight = fit(recipe, tmp_path / "straight")

    def ask(number: int, drafter: Any, batch: Any) -> None:
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        watch(patch, ask)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, tmp_path / "cut")
    (step,) = steps_of(tmp_path / "cut")
    assert step in (5, 6) and not (tmp_path / "cut" / "drafter").exists()
    assert same(fit(recipe, tmp_path / "cut"), straight)


# ---- B146: what is evaluated is what was trained


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_b146_every_evaluation_is_of_new_weights(
    ema: float, fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    fit(make_recipe("causal", steps=20, eval_every=10, ema=ema), run_folder)
    rows = lines(run_folder, "heldout")
    assert [row["step"] for row in rows][-2:] == [10, 20]
    hashes = [row["weights"] for row in rows]
    assert len(set(hashes)) == len(hashes) and all(hashes)


def test_b146_weights_that_never_arrive_are_an_error(
    fit: Trainer, make_recipe: RecipeFactory, run_folder: Path
) -> None:
    """A moving average so slow that it stays what it was: the evaluator would keep an old draft."""
    with pytest.raises(UserError, match="evaluated at step 20 are those of the evaluation before"):
        fit(make_recipe("causal", steps=20, eval_every=10, ema=1 - 1e-12), run_folder)
