"""The layout of drafters that no engine reads: what is written comes back, all else is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import drafted
from safetensors.torch import load_file, save_file
from starting import SOME, WEIGHTS, begun, edit_weights
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import OWN, load_drafter, read_own, save_drafter
from draftsmith.drafters.registry import FAMILIES, family_config
from draftsmith.drafters.start import start_identity

KINDS: dict[str, dict[str, Any]] = {
    "jump": {"family": "jump", "begin": 0, "end": 2, "layers": 2, "hidden": 24},
    "jump with a head": {"family": "jump", "begin": 1, "train_head": True},
    "dflash": {"family": "dflash", "layers": 1, "sequential": True, "intermediate_size": 24},
}
SHARED = {
    "jump": {"lm_head.weight"},
    "jump with a head": set(),
    "dflash": {"embed_tokens.weight"},
}


def build(target: Target, kind: str) -> Any:
    """A drafter that is not what a new one begins as."""
    family, config = family_config({**KINDS[kind], "draft_vocab_size": len(SOME)}, "r.yaml")
    torch.manual_seed(2)
    drafter: Any = FAMILIES[family].build(target, config, SOME)
    with torch.no_grad():
        for parameter in drafter.trainable():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(
    kind: str, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A drafter of each kind with its folder; copy the folder before changing it."""
    drafter = build(tiny_target, kind)
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    return drafter, save_drafter(drafter, folder, tiny_target, {})


# ---- round trip


def test_a_loaded_drafter_drafts_the_same(saved: tuple[Any, Path], tiny_target: Target) -> None:
    drafter, folder = saved
    loaded: Any = load_drafter(folder, tiny_target)
    assert torch.equal(drafted(loaded), drafted(drafter))
    assert (loaded.taps, loaded.options) == (drafter.taps, drafter.options)
    assert torch.equal(loaded.draft_ids, drafter.draft_ids)
    assert len(loaded.trainable()) == len(drafter.trainable())
    assert not loaded.training


def test_what_is_written(saved: tuple[Any, Path], kind: str) -> None:
    """Its own weights and no others; its options as a recipe would say them."""
    drafter, folder = saved
    state = dict(drafter.named_parameters())
    assert set(drafter.shared) == SHARED[kind]
    assert set(load_file(folder / WEIGHTS)) == state.keys() - SHARED[kind]
    assert not (folder / "config.json").exists()
    own = read_own(folder)
    assert own["layout"] == "draftsmith" and own["draft_ids"] == SOME.tolist()
    assert own["options"].items() >= {k: v for k, v in KINDS[kind].items() if k != "family"}.items()


def test_an_independent_writer(
    saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path
) -> None:
    """Tensors by name and options in JSON are all there is to it."""
    drafter, _ = saved
    tensors = {
        name: p.detach().clone() for name, p in drafter.named_parameters() if p.requires_grad
    }
    save_file(tensors, tmp_path / WEIGHTS)
    said = {
        "format": 1,
        "family": drafter.family,
        "layout": "draftsmith",
        "options": drafter.options,
        "target": {"tokenizer": tiny_target.provenance["tokenizer"]},
        "draft_ids": SOME.tolist(),
    }
    (tmp_path / OWN).write_text(json.dumps(said))
    assert torch.equal(drafted(load_drafter(tmp_path, tiny_target)), drafted(drafter))


def test_in_low_precision(saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path) -> None:
    drafter, _ = saved
    folder = save_drafter(drafter, tmp_path / "half", tiny_target, {}, torch.bfloat16)
    assert {t.dtype for t in load_file(folder / WEIGHTS).values()} == {torch.bfloat16}
    loaded: Any = load_drafter(folder, tiny_target)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    error = (drafted(loaded) - drafted(drafter)).abs().max()
    assert 0 < error < 0.1 * drafted(drafter).abs().max()
    again = begun(folder, drafter.family, tiny_target)
    assert {p.dtype for p in again.parameters()} == {torch.float32} and again.training
    for name in drafter.shared:  # the target's own, not a rounded one
        assert torch.equal(again.get_parameter(name), drafter.get_parameter(name))


def test_going_on(saved: tuple[Any, Path], tiny_target: Target) -> None:
    drafter, folder = saved
    again = begun(folder, drafter.family, tiny_target)
    assert torch.equal(drafted(again), drafted(drafter)) and again.training
    assert len(again.trainable()) == len(drafter.trainable())
    for name, value in drafter.options.items():
        begun(folder, drafter.family, tiny_target, **{name: value})
        if name == "train_head":  # which may be another from here on
            continue
        if isinstance(value, tuple):  # layers that are read
            other: Any = (0,)
        else:
            other = (not value) if isinstance(value, bool) else value - 1 if value > 2 else 3
        with pytest.raises(UserError, match=f"drafter.{name} .* is another than the "):
            begun(folder, drafter.family, tiny_target, **{name: other})


def test_what_a_start_holds(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """Its identity follows weights, draft vocabulary and options."""
    drafter, folder = saved
    seen = set()
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda own: None,
        lambda own: own.update(draft_ids=[*SOME.tolist()[:-1], 399]),
        lambda own: own["options"].update(hidden=25),
    ]
    for number, change in enumerate(changes):
        place = shutil.copytree(folder, tmp_path / str(number))
        own = read_own(place)
        change(own)
        (place / OWN).write_text(json.dumps(own))
        section = {"family": drafter.family, "start": str(place)}
        seen.add(start_identity(family_config(section, "r.yaml")[1]))
    assert len(seen) == 3


# ---- what is refused


def test_any_missing_or_renamed_tensor_is_named(
    saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path
) -> None:
    drafter, folder = saved
    for number, name in enumerate(load_file(folder / WEIGHTS)):
        part = shutil.copytree(folder, tmp_path / f"missing-{number}")
        edit_weights(part, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(UserError, match=f"'{name}' is missing"):
            load_drafter(part, tiny_target)
        part = shutil.copytree(folder, tmp_path / f"renamed-{number}")
        edit_weights(part, lambda t, name=name: t.update({"other": t.pop(name)}))
        with pytest.raises(UserError, match=f"'{name}' is missing; 'other' is unexpected"):
            load_drafter(part, tiny_target)
        with pytest.raises(UserError, match=f"'{name}' is missing; 'other' is unexpected"):
            begun(part, drafter.family, tiny_target)


def test_any_tensor_of_another_shape_is_named(
    saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path
) -> None:
    _, folder = saved
    for number, (name, tensor) in enumerate(load_file(folder / WEIGHTS).items()):
        part = shutil.copytree(folder, tmp_path / str(number))
        edit_weights(part, lambda tensors, name=name: tensors.update({name: tensors[name][1:]}))
        with pytest.raises(UserError) as caught:
            load_drafter(part, tiny_target)
        shape = list(tensor.shape)
        assert f"'{name}' is {[shape[0] - 1, *shape[1:]]}, must be {shape}" in str(caught.value)


def test_tensors_that_belong_to_the_target_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    folder = save_drafter(build(tiny_target, "jump"), tmp_path / "d", tiny_target, {})
    edit_weights(folder, lambda t: t.update({"lm_head.weight": torch.zeros(len(SOME), 32)}))
    with pytest.raises(UserError, match=r"'lm_head.weight' is unexpected"):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize("keep", [0.9, 0.001])
def test_a_cut_off_file_is_refused(
    saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path, keep: float
) -> None:
    _, folder = saved
    part = shutil.copytree(folder, tmp_path / "cut")
    content = (part / WEIGHTS).read_bytes()
    (part / WEIGHTS).write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=rf"{part}.* is damaged"):
        load_drafter(part, tiny_target)
    (part / WEIGHTS).unlink()
    with pytest.raises(UserError, match=rf"{part} holds no {WEIGHTS}"):
        load_drafter(part, tiny_target)


def test_tensors_of_several_precisions(
    saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path
) -> None:
    _, folder = saved
    part = shutil.copytree(folder, tmp_path / "mixed")
    edit_weights(part, lambda t: t.update({"fc.weight": t["fc.weight"].bfloat16()}))
    with pytest.raises(UserError, match="several precisions"):
        load_drafter(part, tiny_target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": {"beginn": 1}}, "unknown .*'drafter.beginn'.*did you mean 'drafter.begin'"),
        ({"options": {"begin": "one"}}, "drafter.begin"),
        ({"family": "jumps"}, "unknown family 'jumps' .did you mean 'jump'"),
        ({"layout": "draftsmit"}, "unknown layout 'draftsmit' .did you mean 'draftsmith'"),
        ({"format": 2}, "format 2"),
        ({"target": {}}, r"draftsmith\.json is incomplete: it does not tell target\.tokenizer"),
        ({"draft_ids": None}, r"draftsmith\.json: 'draft_ids' is missing"),
    ],
)
def test_a_file_of_ours_that_says_nonsense(
    change: dict[str, Any], said: str, tiny_target: Target, tmp_path: Path
) -> None:
    folder = save_drafter(build(tiny_target, "jump"), tmp_path / "d", tiny_target, {})
    (folder / OWN).write_text(json.dumps({**read_own(folder), **change}))
    with pytest.raises(UserError, match=said):
        load_drafter(folder, tiny_target)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": 1, "target": 3}', "incomplete: it does not tell family, layout, draft_ids, t"),
        ('{"format": 1,', r"cannot read .*draftsmith\.json"),
        ("[1]", r"cannot read .*draftsmith\.json: it holds no table"),
    ],
)
def test_a_damaged_file_of_ours(text: str, said: str, tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / OWN).write_text(text)
    with pytest.raises(UserError, match=said):
        load_drafter(tmp_path, tiny_target)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 2}, "drafter.begin 0 and drafter.end 2 must be layers .* 0 to 1"),
        ({"hidden_size": 40}, r"'fc.weight' is \[32, 64\], must be \[40, 80\]"),
    ],
)
def test_a_target_of_another_shape_is_refused(
    changes: dict[str, int],
    said: str,
    tiny_target: Target,
    load_tiny: Callable[..., Target],
    tmp_path: Path,
) -> None:
    folder = save_drafter(build(tiny_target, "jump"), tmp_path / "d", tiny_target, {})
    with pytest.raises(UserError, match=f"{folder}.*{said}"):
        load_drafter(folder, load_tiny(**changes))


def test_a_target_whose_layers_cannot_be_run(
    tiny_target: Target, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    folder = save_drafter(build(tiny_target, "jump"), tmp_path / "d", tiny_target, {})
    with pytest.raises(UserError, match=r"draftsmith.json: .*\(gpt2\) cannot be run apart"):
        load_drafter(folder, load_tiny("gpt2"))


def test_draft_ids_beyond_the_target_are_refused(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_drafter(build(tiny_target, "jump"), tmp_path / "d", tiny_target, {})
    last = int(SOME.max())
    monkeypatch.setattr(tiny_target, "vocab_size", last + 1)
    load_drafter(folder, tiny_target)
    monkeypatch.setattr(tiny_target, "vocab_size", last)
    with pytest.raises(UserError, match=rf"tokens up to id {last}, those of '.*' end at"):
        load_drafter(folder, tiny_target)


def test_another_tokenizer_is_refused(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_drafter(build(tiny_target, "jump"), tmp_path / "d", tiny_target, {})
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    words = {i: word for word, i in told["model"]["vocab"].items()}
    told["model"]["vocab"] |= {words[60]: 200, words[200]: 60}
    path.write_text(json.dumps(told), encoding="utf-8")
    own = read_own(folder)
    own["target"]["tokenizer"] = "0" * 16
    (folder / OWN).write_text(json.dumps(own))
    with pytest.raises(UserError, match="id 60"):
        load_drafter(folder, tiny_target)


def kept_of(drafter: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}


def test_saving_leaves_the_drafter_alone(
    saved: tuple[Any, Path], tiny_target: Target, tmp_path: Path
) -> None:
    drafter, _ = saved
    before = kept_of(drafter)
    save_drafter(drafter, tmp_path / "half", tiny_target, {}, torch.float16)
    assert all(torch.equal(t, before[n]) for n, t in kept_of(drafter).items())
