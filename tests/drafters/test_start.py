"""Going on from a published drafter: it is that drafter, wherever it lies."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import drafted
from safetensors.torch import load_file, save_file
from starting import KINDS, SOME, TAPS, WEIGHTS, bare, begun, build, config_for, edit_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target, load_target
from draftsmith.drafters import start
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig
from draftsmith.drafters.checkpoint import OWN, load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.lookup import LookupConfig
from draftsmith.drafters.start import resolved_taps, start_identity

TOLERANCE = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=KINDS)
def saved(
    request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A drafter of each kind with its folder; copy the folder before changing it."""
    drafter = build(tiny_target, request.param)
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    return drafter, save_drafter(drafter, folder, tiny_target, {})


@pytest.fixture(scope="module")
def head(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "drafter"
    return save_drafter(build(tiny_target, "eagle3"), folder, tiny_target, {})


@pytest.fixture(scope="module")
def lm(target_folder: Callable[..., Path]) -> Path:
    """A causal LM that others published: another family, padded, with the target's tokenizer."""
    return target_folder("gpt_neox", num_hidden_layers=2, vocab_size=448)


def unrolled(drafter: Any, record: Record) -> list[Tensor]:
    """Draft logits of each unrolled step on one record."""
    batch = collate([record], ["a", "b"])
    width = len(drafter.taps) * 32 or batch.taps.shape[-1]
    batch = replace(batch, taps=batch.taps[..., :width])  # of as many layers as it reads
    with torch.no_grad():
        return [drafter.head(s.hidden, s.head) for s in drafter.unroll(batch, 2)]


@pytest.fixture
def record(records: list[Record]) -> Record:
    return max((r for r in records if r.domain == "a"), key=lambda r: len(r.reply))


def assert_same(one: Any, other: Any, record: Record, tolerance: float = 0.0) -> None:
    assert one.taps == other.taps
    for a, b in zip(unrolled(one, record), unrolled(other, record), strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= tolerance


# ---- it is that drafter


def test_a_folder_of_our_own(saved: tuple[Any, Path], tiny_target: Target, record: Record) -> None:
    drafter, folder = saved
    again = begun(folder, drafter.family, tiny_target)
    assert_same(again, drafter, record)
    assert again.training and {p.dtype for p in again.parameters()} == {torch.float32}
    assert len(again.trainable()) == len(drafter.trainable())
    if drafter.draft_ids is not None:
        assert torch.equal(again.draft_ids, drafter.draft_ids)
    config = config_for(folder, drafter.family)
    assert resolved_taps(config, 4) == drafter.taps


def test_trained_in_half_precision_it_goes_on_in_full(
    saved: tuple[Any, Path], tiny_target: Target, record: Record, tmp_path: Path
) -> None:
    drafter, _ = saved
    folder = save_drafter(drafter, tmp_path / "half", tiny_target, {}, torch.bfloat16)
    again = begun(folder, drafter.family, tiny_target)
    assert all(p.dtype == torch.float32 for p in again.parameters())
    assert all(m.training for m in again.modules())
    assert_same(again, drafter, record, 0.2)
    if "embed_tokens.weight" in getattr(again, "shared", ()):  # the target's own, unrounded
        assert torch.equal(again.embed_tokens.weight, tiny_target.embedding)
        assert not again.embed_tokens.weight.requires_grad


def test_a_bare_head(head: Path, tiny_target: Target, record: Record, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no tokenizer: its ids are taken as the target's"):
        again = begun(bare(head, tmp_path / "bare"), "eagle3", tiny_target)
    assert_same(again, load_drafter(head, tiny_target), record)
    assert again.taps == TAPS and torch.equal(again.draft_ids, SOME)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_a_bare_head_of_all_tokens(tiny_target: Target, record: Record, tmp_path: Path) -> None:
    """Without a map from its tokens to the target's, as they are the same."""
    every = torch.arange(400)
    drafter = Eagle3Drafter.from_target(tiny_target, Eagle3Config(TAPS, 400), every)
    place = bare(save_drafter(drafter, tmp_path / "d", tiny_target, {}), tmp_path / "bare")
    edit_weights(place, lambda tensors: [tensors.pop(name) for name in ("d2t", "t2d")])
    said = json.loads((place / "config.json").read_text())
    del said["draft_vocab_size"]
    (place / "config.json").write_text(json.dumps(said))
    again = begun(place, "eagle3", tiny_target)
    assert again.draft_ids is None
    assert_same(again, drafter, record)


def rename_layer(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_a_head_with_the_other_name_of_its_layer(
    head: Path, tiny_target: Target, record: Record, tmp_path: Path
) -> None:
    place = edit_weights(bare(head, tmp_path / "bare"), rename_layer)
    assert_same(begun(place, "eagle3", tiny_target), load_drafter(head, tiny_target), record)
    norm = "layers.0.hidden_norm.weight"
    edit_weights(place, lambda t: t.update({norm.replace("layers.0", "midlayer"): t[norm] + 1}))
    with pytest.raises(UserError, match=f"'{norm}' is unexpected"):
        begun(place, "eagle3", tiny_target)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_a_head_that_names_no_layers(
    head: Path, tiny_target: Target, record: Record, tmp_path: Path
) -> None:
    """Those that the recipe names are taken, and checked as if the head named them."""
    place = bare(head, tmp_path / "bare")
    said = json.loads((place / "config.json").read_text())
    for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del said[name]
    (place / "config.json").write_text(json.dumps(said))
    again = begun(place, "eagle3", tiny_target, taps=list(TAPS))
    assert_same(again, load_drafter(head, tiny_target), record)
    assert resolved_taps(config_for(place, "eagle3", taps=list(TAPS)), 4) == TAPS
    with pytest.raises(UserError, match=r"layer_ids' is missing; .*name in drafter\.taps the"):
        begun(place, "eagle3", tiny_target)
    with pytest.raises(UserError, match=r"reads the layers \[0, 1, 9\], those of '.*' are 0 to 3"):
        begun(place, "eagle3", tiny_target, taps=[0, 1, 9])


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_a_head_with_an_embedding_of_its_own(
    head: Path, tiny_target: Target, record: Record, tmp_path: Path
) -> None:
    """A rounded copy of the target's is the target's; another one stays the head's, and is kept."""
    place, rounded = bare(head, tmp_path / "bare"), tiny_target.embedding.bfloat16()
    edit_weights(place, lambda tensors: tensors.update({"embed_tokens.weight": rounded}))
    assert_same(
        begun(place, "eagle3", tiny_target), load_drafter(head, tiny_target), record, TOLERANCE
    )
    noise = 1 + 0.05 * torch.randn_like(tiny_target.embedding)
    for other in (tiny_target.embedding.roll(1, 0).contiguous(), tiny_target.embedding * noise):
        edit_weights(place, lambda tensors: tensors.update({"embed_tokens.weight": other}))  # noqa: B023
        again = begun(place, "eagle3", tiny_target)
        assert again.shared == () and torch.equal(again.embed_tokens.weight, other)
        saved = load_drafter(save_drafter(again, tmp_path / "again", tiny_target, {}), tiny_target)
        assert_same(saved, again, record)
        assert (saved.embed_tokens.weight - other).abs().max() == 0


def test_a_language_model_that_others_made(
    lm: Path, tiny_target: Target, record: Record, tmp_path: Path
) -> None:
    drafter = begun(lm, "causal", tiny_target)
    assert drafter.draft_ids is None and drafter.model.config.model_type == "gpt_neox"
    theirs: Any = AutoModelForCausalLM.from_pretrained(lm).eval()
    (logits,) = unrolled(drafter.eval(), record)
    with torch.no_grad():
        expected = theirs(record.ids[None]).logits[0, record.prompt_len : -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    folder = save_drafter(drafter, tmp_path / "ours", tiny_target, {})
    assert_same(load_drafter(folder, tiny_target), drafter, record)


def test_tokens_that_only_the_target_knows_are_never_drafted(
    lm: Path, target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = shutil.copytree(target_folder("llama", vocab_size=448), tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.save_pretrained(place)
    target = load_target(TargetSection(name=str(place), device="cpu"), few_rows=False)
    with pytest.warns(UserWarning, match="only the target knows the last 2 tokens"):
        drafter = begun(lm, "causal", target)
    assert drafter.draft_ids.tolist() == list(range(400))


def test_rows_that_a_head_lacks_are_never_drafted(
    target_folder: Callable[..., Path], tiny_target: Target, record: Record
) -> None:
    drafter = begun(target_folder("llama", vocab_size=390), "causal", tiny_target)
    assert drafter.draft_ids.tolist() == list(range(390))
    texts = [
        replace(record, ids=record.ids.index_fill(0, torch.tensor([1]), n)) for n in (389, 395)
    ]
    (known,), (unknown,) = (unrolled(drafter, text) for text in texts)
    assert torch.equal(known, unknown), "what it does not know reads as its last one"


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_maps_of_all_tokens_say_nothing(load_tiny: Callable[..., Target], tmp_path: Path) -> None:
    """SpecForge writes them of full vocabularies, too, with the rows that pad the target."""
    target = load_tiny("llama", vocab_size=448)
    drafter = Eagle3Drafter.from_target(target, Eagle3Config(TAPS), None)
    place = bare(save_drafter(drafter, tmp_path / "d", target, {}), tmp_path / "bare")
    maps = {"d2t": torch.zeros(448, dtype=torch.long), "t2d": torch.ones(448, dtype=torch.bool)}
    edit_weights(place, lambda tensors: tensors.update(maps))
    again = load_drafter(place, target)
    assert again.draft_ids is None
    assert torch.equal(drafted(again), drafted(drafter))


def test_an_adapter_goes_on_a_start(lm: Path, tiny_target: Target, record: Record) -> None:
    drafter = begun(lm, "causal", tiny_target, lora={"rank": 2})
    assert drafter.training
    assert_same(drafter.eval(), begun(lm, "causal", tiny_target).eval(), record)
    assert {p.shape[0] for p in drafter.trainable()} >= {2}
    assert drafter.model.peft_config["default"].base_model_name_or_path == str(lm)


def test_options_that_agree_are_taken(saved: tuple[Any, Path], tiny_target: Target) -> None:
    """Such as those of the recipe that it was trained by."""
    drafter, folder = saved
    options: dict[str, Any] = {
        "causal": {"layers": [0, 1, 3]},
        "medusa": {"num_heads": 3, "num_layers": 2},
        "mlp": {"n_predict": 3, "scale_input": True},
        "jump": {"begin": 1, "end": 3},
    }.get(drafter.family, {"taps": list(TAPS)})
    size = None if drafter.draft_ids is None else len(SOME)
    begun(folder, drafter.family, tiny_target, draft_vocab_size=size, **options)


def test_a_step_further_changes_it(saved: tuple[Any, Path], tiny_target: Target) -> None:
    drafter, folder = saved
    again = begun(folder, drafter.family, tiny_target)
    before = copy.deepcopy(again.state_dict())
    optimizer = torch.optim.SGD(again.trainable(), lr=0.1)
    again.head(torch.randn(5, 32)).log_softmax(-1)[:, 3].sum().backward()
    optimizer.step()
    assert any(not torch.equal(t, before[name]) for name, t in again.state_dict().items())


@pytest.mark.parametrize("kind", ["medusa", "jump"])
@pytest.mark.parametrize("was", [True, False])
def test_the_recipe_says_whether_the_head_learns(
    kind: str, was: bool, tiny_target: Target, record: Record, tmp_path: Path
) -> None:
    """Whatever it did before; rows that once were the drafter's own are kept if they are frozen."""
    drafter = build(tiny_target, kind)
    drafter.learn(was)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if was and name.startswith("lm_head"):
                parameter += 0.05
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    for now in (True, False, None):
        again = begun(folder, kind, tiny_target, train_head=now)
        heads = {n: p for n, p in again.named_parameters() if n.startswith("lm_head")}
        assert {p.requires_grad for p in heads.values()} == {was if now is None else now}
        kept = save_drafter(again, tmp_path / f"{now}", tiny_target, {})
        assert_same(load_drafter(kept, tiny_target), drafter, record)


# ---- the Hub


@pytest.fixture(autouse=True)
def nothing_fetched() -> None:
    start._fetched.cache_clear()


def test_a_hub_id_is_fetched(
    saved: tuple[Any, Path], tiny_target: Target, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, folder = saved
    asked = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "medusa_lm_head.*" in allow_patterns and "*.bin" not in allow_patterns
        return str(folder)

    monkeypatch.setattr(start, "snapshot_download", fetch)
    assert_same(begun("owner/draft", drafter.family, tiny_target), drafter, record)
    config = config_for("owner/draft", drafter.family)
    assert start_identity(config) == start_identity(config_for(folder, drafter.family))
    assert asked == ["owner/draft"], "once in a process"


def test_a_start_that_is_nowhere(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, allow_patterns: list[str]) -> str:
        raise FileNotFoundError("no such repository\nand more")

    monkeypatch.setattr(start, "snapshot_download", fetch)
    said = r"cannot find drafter\.start 'owner/none': no such repository; it takes"
    with pytest.raises(UserError, match=said):
        begun("owner/none", "causal", tiny_target)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"cannot find drafter\.start '.*none'"):
        begun(tmp_path / "none", "causal", tiny_target)


# ---- its identity


def test_the_identity_is_of_what_is_gone_on_with(saved: tuple[Any, Path], tmp_path: Path) -> None:
    drafter, folder = saved
    assert start_identity(Eagle3Config()) is None and start_identity(CausalConfig()) is None
    assert start_identity(LookupConfig()) is None
    known = start_identity(config_for(folder, drafter.family))
    place = shutil.copytree(folder, tmp_path / "copy")
    config = config_for(place, drafter.family)
    assert start_identity(config) == known, "wherever it lies"
    own = json.loads((place / OWN).read_text())
    (place / OWN).write_text(json.dumps({**own, "trained": {"steps": 9}}))
    assert start_identity(config) == known, "whoever trained it"
    name = next(n for n, t in load_file(place / WEIGHTS).items() if t.is_floating_point())
    edit_weights(place, lambda tensors: tensors[name].add_(1e-3))
    changed = start_identity(config)
    assert changed != known
    if (place / "config.json").exists():
        said = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**said, "rope_theta": 5.0}))
    else:
        (place / OWN).write_text(json.dumps({**own, "options": {**own["options"], "end": 2}}))
    assert start_identity(config) not in (changed, known)


def test_weights_in_several_files_have_one(lm: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(lm)
    model.save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert not (tmp_path / "split" / WEIGHTS).exists()
    config = config_for(tmp_path / "split", "causal")
    known = start_identity(config)
    last = sorted((tmp_path / "split").glob("*.safetensors"))[-1]
    tensors = load_file(last)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, last, metadata={"format": "pt"})
    assert known is not None and start_identity(config) != known
