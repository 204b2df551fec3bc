"""Publishing: a whole folder that loads back equal, or nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing import report_on, save, send
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import PublishSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.drafters.card_commands import SERVING
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.layouts import LAYOUTS as WRITTEN
from draftsmith.drafters.push import pack
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.scripts import publish as module
from draftsmith.scripts.publish import publish

FAMILIES = ["eagle3", "causal", "medusa", "mlp"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_is_whole_and_loads_back(
    family: str, dtype: str, tiny_target: Target, tmp_path: Path
) -> None:
    trained = save(family, tiny_target, tmp_path / "trained")
    out = send(tiny_target, trained, tmp_path / "out" / "published", dtype)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        path.name for path in out.iterdir()
    }
    assert [path.name for path in out.parent.iterdir()] == ["published"]
    floats = [t for t in load_file(out / "model.safetensors").values() if t.is_floating_point()]
    assert {t.dtype for t in floats} == {getattr(torch, dtype)}
    one, other = (load_drafter(folder, tiny_target) for folder in (trained, out))
    for a, b in zip(one.trainable(), other.trainable(), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-2 if dtype == "bfloat16" else 0, atol=0)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "α overlap" in card


@pytest.mark.parametrize("layout", sorted(SERVING))
def test_every_engine_layout_can_be_published_and_sent(
    layout: str, tiny_target: Target, records: list[Record], tmp_path: Path
) -> None:
    """In several files, too, of which all are known to be meant."""
    family = WRITTEN[layout].family
    more = {"eagle3": {"draft_vocab_size": 200, "taps": [0, 1, 2]}, "dflash": {"block_size": 5}}
    _, config = family_config({"family": family, **more.get(str(family), {})}, "r.yaml")
    torch.manual_seed(0)
    drafter = new_drafter(config, tiny_target, records)
    trained = save_drafter(drafter, tmp_path / "trained", tiny_target, {})
    out = send(tiny_target, trained, tmp_path / "out", max_shard_size="30KB")
    assert len(list(out.glob("*.safetensors"))) > 1
    assert pack(out, "someone/draft").kind == "model"
    one, other = (load_drafter(folder, tiny_target) for folder in (trained, out))
    for a, b in zip(one.trainable(), other.trainable(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_vocabulary_can_be_published(
    family: str, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    target = load_tiny(vocab_size=40)
    trained = save(family, target, tmp_path / "trained")
    assert send(target, trained, tmp_path / "out").is_dir()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_blocks_are_published_as_they_were_measured(
    kind: str, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """Engines let a block see as many places as they draft: the report's rounds are of four."""
    target = load_tiny(kind)
    for size in (5, 4):
        drafter = DFlashDrafter.from_target(target, DFlashConfig(block_size=size))
        save_drafter(drafter, tmp_path / f"{size}", target, {})
    with pytest.raises(
        UserError, match=r"rounds of 4 tokens, .* set serving.num_draft_tokens to 3"
    ):
        send(target, tmp_path / "4", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    card = (send(target, tmp_path / "5", tmp_path / "out") / "README.md").read_text()
    assert '"num_speculative_tokens": 4' in card
    assert ("leaves out the soft cap of the target's logits (3)" in card) == (kind == "gemma2")


def test_a_reduced_draft_lm_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("causal", tiny_target, tmp_path / "trained", reduced=True)
    with pytest.raises(UserError, match=r"200 tokens \(.*draft_vocab_size\), which no engine"):
        send(tiny_target, trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reduced_heads_that_no_engine_loads_are_refused(
    tiny_target: Target, tmp_path: Path
) -> None:
    trained = save("medusa", tiny_target, tmp_path / "trained", reduced=True)
    with pytest.raises(UserError, match=r"by no engine .*: vLLM does not read heads of a reduced"):
        send(tiny_target, trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_card_names_no_engine_that_serves_another_drafter(
    tiny_target: Target, tmp_path: Path
) -> None:
    """SGLang reads one layer; layers out of order are read by nobody as they were trained."""
    for taps, layers in (((0, 1, 2), 2), ((1, 0, 2), 1)):
        config = Eagle3Config(taps, 200, init="random", layers=layers)
        drafter = Eagle3Drafter.from_target(tiny_target, config, torch.arange(0, 400, 2))
        save_drafter(drafter, tmp_path / f"{layers}", tiny_target, {})
    card = (send(tiny_target, tmp_path / "2", tmp_path / "out") / "README.md").read_text()
    assert "Not SGLang, which does not read more layers than one." in card
    assert "vllm serve" in card and "sglang.launch_server" not in card
    with pytest.raises(
        UserError, match=r"by no engine .*: vLLM does not read layers that are named"
    ):
        send(tiny_target, tmp_path / "1", tmp_path / "other")


def test_the_report_of_another_drafter_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    report = report_on(save("causal", tiny_target, tmp_path / "other"))
    with pytest.raises(UserError, match="the report measured another drafter"):
        publish(PublishSection(), tiny_target, trained, report, tmp_path / "out", Console())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_loads_back_otherwise_is_not_published(
    family: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight a little off in the written file."""
    trained = save(family, tiny_target, tmp_path / "trained")

    def spoiled(drafter: Any, folder: Path, *args: Any) -> Path:
        save_drafter(drafter, folder, *args)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = next(
            n
            for n in tensors
            if n.endswith(("down_proj.weight", "heads.2.weight", "proj.1.weight"))
        )
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, path, metadata={"format": "pt"})
        return folder

    monkeypatch.setattr(module, "save_drafter", spoiled)
    with pytest.raises(UserError, match="loads back with other logits"):
        send(tiny_target, trained, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trained"]


def test_the_speculators_layout_goes_along(tiny_target: Target, tmp_path: Path) -> None:
    """The same head, which names the target and the draft length that was measured."""
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    options: dict[str, Any] = {"speculators": True, "base_model": "owner/target"}
    out = send(tiny_target, trained, tmp_path / "out", "bfloat16", **options)
    config = json.loads((out / "speculators" / "config.json").read_text(encoding="utf-8"))
    told = config["speculators_config"]
    assert "vllm serve draft/speculators" in (out / "README.md").read_text(encoding="utf-8")
    verifier = {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    assert told["verifier"] == verifier
    gamma = report_on(trained)["settings"]["num_draft_tokens"]
    assert told["proposal_methods"][0]["speculative_tokens"] == gamma
    with pytest.warns(UserWarning, match="has no tokenizer"):
        one, other = (load_drafter(folder, tiny_target) for folder in (out, out / "speculators"))
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    parcel = pack(out, "someone/draft")
    assert {"speculators/config.json", "speculators/model.safetensors"} <= parcel.files.keys()
    place = tmp_path / "laid out"
    place.mkdir()
    parcel.lay_out(place)
    assert load_drafter(place, tiny_target).family == "eagle3"
    (out / "speculators" / "more.txt").write_text("")
    with pytest.raises(UserError, match=r"no part of a published drafter: speculators/more\.txt"):
        pack(out, "someone/draft")


def test_a_speculators_layout_that_cannot_be(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("causal", tiny_target, tmp_path / "lm")
    with pytest.raises(UserError, match="for EAGLE-3 heads, not for drafters of layout 'transfor"):
        send(tiny_target, trained, tmp_path / "out", speculators=True)
    trained = save("eagle3", tiny_target, tmp_path / "head")
    with pytest.raises(UserError, match=r"its Hub id, publish\.base_model: '.*' is no name on the"):
        send(tiny_target, trained, tmp_path / "out", speculators=True)
    assert not (tmp_path / "out").exists()


def test_a_published_folder_is_replaced_whole(tiny_target: Target, tmp_path: Path) -> None:
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    out = send(tiny_target, trained, tmp_path / "out")
    (out / "stale.txt").write_text("from before")
    assert send(tiny_target, trained, tmp_path / "out") == out
    assert not (out / "stale.txt").exists()
