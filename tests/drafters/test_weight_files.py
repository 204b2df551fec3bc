"""Weights in one file or several: written, read, and named where they are not whole."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing import report_on, save, send
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from draftsmith.configs.errors import UserError
from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import PublishSection
from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig
from draftsmith.drafters.checkpoint import load_drafter, weights_hash
from draftsmith.drafters.checksums import read_checksums, verify_checksums, write_checksums
from draftsmith.drafters.eagle3 import Eagle3Config
from draftsmith.drafters.formats.tensors import (
    INDEX,
    read_tensors,
    split_weights,
    whole_files,
    write_tensors,
)
from draftsmith.drafters.start import started
from draftsmith.scripts.publish import publish

FAMILIES = ["eagle3", "causal"]
LAST = "model-00002-of-00002.safetensors"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def made(
    request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A trained folder whose weights are two files and an index."""
    folder = save(request.param, tiny_target, tmp_path_factory.mktemp("made") / "trained")
    size = (folder / "model.safetensors").stat().st_size
    split_weights(folder, f"{0.7 * size / 1000:.0f}KB")
    assert len(list(folder.glob("*.safetensors"))) == 2
    return request.param, folder


@pytest.fixture
def folder(made: tuple[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "d"))


# ---- several files


def test_split_by_size(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((250,), float(i)) for i in range(5)}  # 1000 bytes each
    tensors["wide"] = torch.ones(1000)
    write_tensors(tensors, tmp_path)
    split_weights(tmp_path, "2KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 5 * 1000 + 4000
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    held = [sum(t.nbytes for t in load_file(tmp_path / file).values()) for file in files]
    assert sorted(held) == [1000, 2000, 2000, 4000], "one tensor is larger than a file may be"
    assert not (tmp_path / "model.safetensors").exists()
    found = read_tensors(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_weights_that_fit_stay_one_file(tmp_path: Path) -> None:
    write_tensors({"w": torch.ones(250)}, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    split_weights(tmp_path, "1KB")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_published_in_several_files(family: str, tiny_target: Target, tmp_path: Path) -> None:
    """They load here as they were, and as transformers reads them."""
    trained = save(family, tiny_target, tmp_path / "trained")
    out = send(tiny_target, trained, tmp_path / "out", "bfloat16", max_shard_size="10KB")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and not (out / "model.safetensors").exists()
    one: Any = load_drafter(trained, tiny_target)
    other: Any = load_drafter(out, tiny_target)
    again = started(
        CausalConfig(start=str(out)) if family == "causal" else Eagle3Config(start=str(out)),
        tiny_target,
    )
    for a, b, c in zip(one.trainable(), other.trainable(), again.trainable(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b) and torch.equal(b.float(), c)
    if family == "causal":
        theirs: Any = AutoModelForCausalLM.from_pretrained(out)
        assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
        for a, b in zip(theirs.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("size", ["5 apples", "-5GB", "5gb", "GB"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(UserError, match=r"'publish\.max_shard_size' in .* must be a size such as"):
        load_recipe("demo", [f"publish.max_shard_size={size}"])


# ---- B137: files that are not whole

HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (
        lambda folder: (folder / LAST).write_bytes((folder / LAST).read_bytes()[:-1000]),
        rf"{LAST} is damaged: it has \d+ of \d+ bytes",
    ),
    "cut within its header": (
        lambda folder: (folder / LAST).write_bytes((folder / LAST).read_bytes()[:100]),
        rf"{LAST} is damaged: it ends within its header, after 100 bytes",
    ),
    "empty": (
        lambda folder: (folder / LAST).write_bytes(b""),
        rf"{LAST} is damaged: it ends within its header, after 0 bytes",
    ),
    "longer": (
        lambda folder: (folder / LAST).write_bytes((folder / LAST).read_bytes() + b"00"),
        rf"{LAST} is damaged: it has \d+ of \d+ bytes",
    ),
    "no header": (
        lambda folder: (folder / LAST).write_bytes((4).to_bytes(8, "little") + b"[[[["),
        rf"{LAST} is damaged: it has no header of tensors",
    ),
    "deleted": (
        lambda folder: (folder / LAST).unlink(),
        rf"{LAST} is missing; \d+ of \d+ bytes of the tensors in {INDEX} are there",
    ),
    "index is no JSON": (
        lambda folder: (folder / INDEX).write_text("{"),
        f"{INDEX} is no index of weight files",
    ),
    "index without a map": (
        lambda folder: (folder / INDEX).write_text('{"metadata": {}}'),
        f"{INDEX} is no index of weight files",
    ),
    "index names another file": (
        lambda folder: edit_map(folder, lambda told: {n: LAST for n in told}),
        rf"{INDEX} is wrong: tensor '[\w.]+' is not in {LAST}",
    ),
    "index leaves one out": (
        lambda folder: edit_map(folder, lambda told: dict(list(told.items())[1:])),
        rf"{INDEX} is wrong: tensor '[\w.]+' of model-0000\d-of-00002.safetensors is not told of",
    ),
    "index leads outside": (
        lambda folder: edit_map(folder, lambda told: {n: f"../{f}" for n, f in told.items()}),
        rf"{INDEX} names '\.\./model-0000\d-of-00002\.safetensors', which is no file beside it",
    ),
    "both kinds": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model.safetensors"),
        rf"holds both model\.safetensors and {INDEX}",
    ),
}


def edit_map(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    content["weight_map"] = change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("harm", HARMS)
def test_b137_what_is_not_whole_is_refused(
    harm: str, made: tuple[str, Path], folder: Path, tiny_target: Target, tmp_path: Path
) -> None:
    """Wherever a drafter is read: to evaluate it, to train it further, to publish it."""
    change, said = HARMS[harm]
    report = report_on(folder)
    change(folder)
    with pytest.raises(UserError, match=said):
        load_drafter(folder, tiny_target)
    start = {"start": str(folder)}
    config = CausalConfig(**start) if made[0] == "causal" else Eagle3Config(**start)
    with pytest.raises(UserError, match=said):
        started(config, tiny_target)
    with pytest.raises(UserError, match=said):
        publish(PublishSection(), tiny_target, folder, report, tmp_path / "out", quiet())
    assert not (tmp_path / "out").exists()


def quiet() -> Any:
    return type("Console", (), {"print": lambda *args: None})()


@pytest.mark.parametrize("family", FAMILIES)
def test_b137_one_file_that_is_cut_off(family: str, tiny_target: Target, tmp_path: Path) -> None:
    folder = save(family, tiny_target, tmp_path / "d")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    said = rf"model\.safetensors is damaged: it has {len(content) - 1000} of {len(content)} bytes"
    with pytest.raises(UserError, match=said):
        load_drafter(folder, tiny_target)


def test_an_index_need_not_tell_the_size_of_all(folder: Path, tiny_target: Target) -> None:
    content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    content["metadata"] = {}
    (folder / INDEX).write_text(json.dumps(content), encoding="utf-8")
    assert isinstance(load_drafter(folder, tiny_target), nn.Module)
    assert len(whole_files(folder)) == 2
    (folder / LAST).unlink()
    with pytest.raises(UserError, match=rf"{LAST} is missing; \d+ bytes of the tensors"):
        load_drafter(folder, tiny_target)


def test_the_hash_is_of_all_files(folder: Path) -> None:
    before, path = weights_hash(folder), folder / LAST
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)
    assert weights_hash(folder) != before


# ---- checksums


@pytest.fixture
def published(tiny_target: Target, tmp_path: Path) -> Path:
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    return send(tiny_target, trained, tmp_path / "out")


def test_all_files_but_the_card_are_listed(published: Path) -> None:
    """In the form that the system's own tool checks."""
    names = {path.name for path in published.iterdir()}
    assert set(read_checksums(published)) == names - {"README.md", "SHA256SUMS"}
    tool = shutil.which("sha256sum")
    if tool is not None:
        done = subprocess.run([tool, "--check", "--strict", "SHA256SUMS"], cwd=published, text=True,
                              capture_output=True, check=False)  # fmt: skip
        assert done.returncode == 0 and done.stdout.count(": OK\n") == len(names) - 2
    verify_checksums(published)
    (published / "README.md").write_text("edited there")
    verify_checksums(published)


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_b137_a_changed_byte_is_found(published: Path, tiny_target: Target) -> None:
    path = published / "model.safetensors"
    flip(path)
    size = path.stat().st_size
    with pytest.raises(
        UserError,
        match=rf"as its SHA256SUMS says: 'model\.safetensors' is another file \({size} bytes\)",
    ):
        load_drafter(published, tiny_target)
    flip(path)
    load_drafter(published, tiny_target)


def test_every_fault_is_named(published: Path) -> None:
    flip(published / "config.json")
    (published / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"'config\.json' is another file .*'tokenizer\.json' is m"):
        verify_checksums(published)


def test_a_cut_file_is_told_with_its_size(published: Path) -> None:
    path = published / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"it has \d+ of \d+ bytes"):
        verify_checksums(published)


def test_a_list_that_is_none(published: Path) -> None:
    (published / "SHA256SUMS").write_text("what\n")
    with pytest.raises(UserError, match=r"cannot read .*SHA256SUMS"):
        verify_checksums(published)
    write_checksums(published)
    verify_checksums(published)
