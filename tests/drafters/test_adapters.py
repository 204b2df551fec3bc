"""Adapters on a draft LM: what they train, what is written of them, and what they leave alone."""

import copy
import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import propose
from peft import PeftModel
from peft.tuners.lora import layer as peft_layer
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM

from draftsmith.configs.errors import UserError
from draftsmith.configs.load import load_recipe
from draftsmith.configs.recipe import LawSection, ObjectiveSection, PublishSection, ServingSection
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.adapters import ADAPTER, LoraSection, merged
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter, weights_hash
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter
from draftsmith.scripts.publish import publish
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens
from draftsmith.train.validate import TAU, held_out_figures

TOLERANCE = 1e-4
SOME = torch.tensor([0, 1, 2, *range(7, 400, 5)])
IDS = torch.tensor([[3, 90, 14, 260, 41, 7, 77, 8, 19, 300, 5, 64]])
GATED = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
LINEAR = {f"self_attn.{name}_proj" for name in "qkvo"} | GATED
SAMPLE = Path(__file__).resolve().parents[1] / "fixtures" / "report.json"

pytestmark = pytest.mark.usefixtures("one_thread")


def adapter_on(
    target: Target,
    ids: Tensor | None = None,
    stirred: bool = True,
    base: str = "",
    **options: Any,
) -> CausalDrafter:
    """A draft LM of two layers with an adapter that changes what it says, as if it were trained."""
    torch.manual_seed(2)
    drafter = CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), ids)
    drafter.adapt(LoraSection(**options), base)
    drafter.eval()
    if stirred:
        with torch.no_grad():
            for parameter in drafter.trainable():
                parameter += 0.1 * torch.randn_like(parameter)
    return drafter


def logits_of(model: nn.Module) -> Tensor:
    """`[T, V]` of a fixed text, without dropout."""
    training = model.training
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, use_cache=False).logits[0].float()
    model.train(training)
    return found


def changed(drafter: CausalDrafter) -> set[str]:
    """The layers' modules that an adapter was put on, counted from their layer."""
    names = [n for n, p in drafter.named_parameters() if p.requires_grad]
    assert all("lora" in name for name in names), "and nothing else is trained"
    return {re.split(r"\.\d+\.", name)[1].split(".lora")[0] for name in names}


# ---- what is trained


def test_all_linear_layers_and_no_embedding_or_head(tiny_target: Target) -> None:
    drafter = adapter_on(tiny_target, stirred=False)
    assert changed(drafter) == LINEAR
    assert len(drafter.trainable()) == 2 * 2 * len(LINEAR)  # A and B in each of two layers
    shapes = {tuple(p.shape) for p in drafter.trainable()}
    assert (8, 32) in shapes and (48, 8) in shapes  # rank 8
    whole = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), None)
    assert torch.equal(logits_of(drafter.model), logits_of(whole.model)), "it begins as no change"


def test_every_family_of_layers_can_be_adapted(any_target: Target) -> None:
    """Conv1D of GPT-2 and fused projections included; merged in each, as saving does."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft says when it has to guess how weights lie
        drafter = adapter_on(any_target)
    kind = any_target.model.config.model_type
    names = {"gpt2": 4, "gpt_neox": 4}  # fused attention, its output, two of the MLP
    assert len(changed(drafter)) == names.get(kind, 7)
    plain = merged(drafter.model)
    error = (logits_of(plain) - logits_of(drafter.model)).abs().max()
    assert error < TOLERANCE * logits_of(plain).abs().max()


@pytest.mark.parametrize("dora", [False, True])
def test_the_base_stays_and_the_adapter_learns(tiny_target: Target, dora: bool) -> None:
    drafter = adapter_on(tiny_target, stirred=False, dora=dora).train()
    before = copy.deepcopy(drafter.state_dict())
    optimizer = torch.optim.SGD(drafter.trainable(), lr=0.1)
    for _ in range(2):  # A learns from the second step on, as B begins at zero
        drafter.model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    learning = {n for n, p in drafter.named_parameters() if p.requires_grad}
    assert any("magnitude" in name for name in learning) == dora
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in learning), name


def test_modules_by_name(tiny_target: Target) -> None:
    chosen = adapter_on(tiny_target, modules=("q_proj", "mlp.up_proj"))
    assert changed(chosen) == {"self_attn.q_proj", "mlp.up_proj"}
    with pytest.raises(UserError, match=r"no linear layer 'qproj' \(did you mean 'q_proj'\?\)"):
        adapter_on(tiny_target, modules=("qproj",))
    for kept in ("lm_head", "embed_tokens"):
        with pytest.raises(UserError, match=rf"no linear layer '{kept}' \(known: down_proj, gate"):
            adapter_on(tiny_target, modules=(kept,))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, r"'drafter\.lora\.rank' in r\.yaml must be above 0, not 0"),
        ({"alpha": -1}, r"'drafter\.lora\.alpha' in r\.yaml must be above 0, not -1"),
        ({"dropout": 1.0}, r"'drafter\.lora\.dropout' in r\.yaml must be from 0 to below 1"),
        ({"modules": []}, r"'drafter\.lora\.modules' in r\.yaml must be names of linear layers"),
        ({"ranks": 4}, r"unknown key 'drafter\.lora\.ranks' in r\.yaml"),
    ],
)
def test_options_out_of_range(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        family_config({"family": "causal", "lora": lora}, "r.yaml")


@pytest.mark.parametrize("family", ["eagle3", "lookup", "skip"])
def test_other_families_take_no_adapter(family: str) -> None:
    with pytest.raises(UserError, match=r"unknown key 'drafter\.lora' in r\.yaml"):
        family_config({"family": family, "lora": {}}, "r.yaml")


def test_the_shipped_recipe(tiny_target: Target) -> None:
    _, config = family_config(load_recipe("adapter").drafter, "adapter")
    drafter = new_drafter(config, tiny_target, [])
    assert isinstance(drafter, CausalDrafter) and changed(drafter) == LINEAR


# ---- the contract


@pytest.mark.parametrize("ids", [None, SOME], ids=["full", "reduced"])
def test_decoding_equals_training(
    tiny_target: Target, records: list[Record], ids: Tensor | None
) -> None:
    drafter = adapter_on(tiny_target, ids)
    record = max(records, key=lambda r: len(r.reply))
    with torch.no_grad():
        (step,) = drafter.unroll(collate([record], ["a", "b"]), 1)
        unrolled = drafter.head(step.hidden)  # of reply tokens 1, 2, ...
        state, seen = drafter.start(1, 40), []
        none = torch.zeros(1, record.prompt_len, 0)
        drafter.prefill(state, record.ids[None, : record.prompt_len], [record.prompt_len], none)
        drafter.commit(state, record.reply[None, :1], [1], none[:, :1])

        def true(logits: Tensor, k: int) -> Tensor:
            seen.append(logits[0])
            return record.reply[k + 1 : k + 2]

        propose(drafter, state, 4, true)
    assert (torch.stack(seen) - unrolled[:4]).abs().max() < TOLERANCE
    plain = adapter_on(tiny_target, ids, stirred=False)
    with torch.no_grad():
        (other,) = plain.unroll(collate([record], ["a", "b"]), 1)
        assert (plain.head(other.hidden) - unrolled).abs().max() > 0.1


def test_layers_computed_again_give_the_same_gradients(
    tiny_target: Target, records: list[Record]
) -> None:
    found = []
    for again in (False, True):
        drafter = adapter_on(tiny_target, dropout=0.2).train()
        drafter.checkpoint(again)
        torch.manual_seed(0)
        (step,) = drafter.unroll(collate(records[:4], ["a", "b"]), 1)
        drafter.head(step.hidden).log_softmax(-1)[:, 5].sum().backward()
        found.append([p.grad for p in drafter.trainable()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_its_moving_average_is_a_drafter(tiny_target: Target, tmp_path: Path) -> None:
    """What training measures and saves with train.ema is a deep copy."""
    drafter = adapter_on(tiny_target)
    average: Any = AveragedModel(drafter)
    average.update_parameters(drafter)
    save_drafter(average.module, tmp_path / "d", tiny_target, {})
    loaded = load_drafter(tmp_path / "d", tiny_target)
    assert isinstance(loaded, CausalDrafter)
    torch.testing.assert_close(logits_of(loaded.model), logits_of(drafter.model), atol=1e-4, rtol=0)


# ---- what is written


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dora", [False, True])
def test_saved_merged_and_by_itself(
    load_tiny: Callable[..., Target], tmp_path: Path, tied: bool, dora: bool
) -> None:
    target = load_tiny("llama", tie_word_embeddings=tied)
    base = CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    base_folder = save_drafter(base, tmp_path / "base", target, {})
    drafter = adapter_on(target, base=str(base_folder), dropout=0.3, dora=dora).train()
    before, live = copy.deepcopy(drafter.state_dict()), logits_of(drafter.model)
    folder = save_drafter(drafter, tmp_path / "drafter", target, {})
    assert drafter.training, "saving leaves the live drafter as it was"
    assert all(module.training for module in drafter.modules())
    assert drafter.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in drafter.state_dict().items())
    loaded = load_drafter(folder, target)
    assert isinstance(loaded, CausalDrafter)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base_folder), str(folder / ADAPTER)
    )
    scale = live.abs().max()
    assert (live - logits_of(base.model)).abs().max() > 0.1 * scale
    for model in (loaded.model, theirs, adapted):
        assert (logits_of(model) - live).abs().max() < TOLERANCE * scale
    for model in (loaded.model, theirs):
        same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert same == tied
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != tied
    assert not any("lora" in name for name in load_file(folder / "model.safetensors"))


def test_the_folder_of_the_adapter(tiny_target: Target, tmp_path: Path) -> None:
    """peft's two files, with nothing of this machine in them."""
    drafter = adapter_on(tiny_target, base="owner/base", rank=4)
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    files = sorted(path.name for path in (folder / ADAPTER).iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    text = (folder / ADAPTER / "adapter_config.json").read_text()
    config = json.loads(text)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 16)
    assert config["base_model_name_or_path"] == "owner/base"
    assert str(tmp_path.parent.parent) not in text
    tensors = load_file(folder / ADAPTER / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * len(LINEAR)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_an_adapter_that_fits_nothing_is_not_written(tiny_target: Target, tmp_path: Path) -> None:
    """Parts of the target, as they were copied, are saved nowhere."""
    _, config = family_config({"family": "causal", "layers": [0, 3], "lora": {}}, "r.yaml")
    drafter = new_drafter(config, tiny_target, [])
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    assert (folder / "model.safetensors").exists() and not (folder / ADAPTER).exists()


def test_low_precision(tiny_target: Target, tmp_path: Path) -> None:
    drafter = adapter_on(tiny_target)
    folder = save_drafter(drafter, tmp_path / "half", tiny_target, {}, torch.bfloat16)
    loaded = load_drafter(folder, tiny_target)
    assert isinstance(loaded, CausalDrafter) and loaded.model.dtype == torch.bfloat16
    live = logits_of(drafter.model)
    assert 0 < (logits_of(loaded.model) - live).abs().max() < 0.1 * live.abs().max()


def test_a_merge_that_says_something_else_is_refused(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = adapter_on(tiny_target)
    right = peft_layer.Linear.get_delta_weight
    monkeypatch.setattr(
        peft_layer.Linear, "get_delta_weight", lambda self, name: right(self, name) * 1.1
    )
    with pytest.raises(UserError, match=r"cannot be merged: logits change by up to \d\S* where"):
        save_drafter(drafter, tmp_path / "d", tiny_target, {})
    assert not list(tmp_path.iterdir())


def test_weights_that_layers_share_are_not_merged_into_each_other(tiny_target: Target) -> None:
    """Two layers on one matrix, each with an update of its own: no merged weights say the same."""
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), None)
    first, second = drafter.model.get_decoder().layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    drafter.adapt(LoraSection(modules=("up_proj",)))
    for parameter in drafter.trainable():
        parameter.data += 0.1
    with pytest.raises(UserError, match="cannot be merged"):
        merged(drafter.model)


def test_no_number_in_an_adapter_is_refused(tiny_target: Target) -> None:
    drafter = adapter_on(tiny_target)
    drafter.trainable()[0].data[0, 0] = torch.nan
    with pytest.raises(UserError, match="cannot be merged"):
        merged(drafter.model)


def test_the_adapter_is_not_published(tiny_target: Target, tmp_path: Path) -> None:
    """What is published is whole."""
    drafter = adapter_on(tiny_target, base="owner/base")
    trained = save_drafter(drafter, tmp_path / "trained", tiny_target, {})
    report = json.loads(SAMPLE.read_text(encoding="utf-8"))
    report["provenance"]["drafter"]["weights_sha256"] = weights_hash(trained)
    console = Console(file=io.StringIO())
    out = publish(PublishSection(), tiny_target, trained, report, tmp_path / "out", console)
    assert (trained / ADAPTER).is_dir()
    assert not [path for path in out.rglob("*") if ADAPTER in path.name]


# ---- B076: one adapter for each domain, on one base

PREFIX = {"a": (30, 45, 60, 75, 90), "b": (310, 290, 270, 250, 230)}


def conversations(target: Target) -> list[Record]:
    """Replies to two kinds of prompts that have nothing in common."""
    asked = []
    for i in range(80):
        domain, split = "ab"[i % 2], "heldout" if i // 2 % 4 == 3 else "train"
        ids = (*PREFIX[domain], 3 + i // 8)
        asked.append(Request(f"p{i}", domain, split, ids, Law(1.0), i))
    return answer(target, asked, GatherSettings(12, batch_size=20, taps=(), keep="hidden"))


def bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_b076_one_adapter_for_each_domain(tiny_target: Target, tmp_path: Path) -> None:
    """Table of α on held-out rows: each adapter is best in its domain, the base stays."""
    section = ObjectiveSection(loss="nla")
    objective = bind_objective(section, ServingSection((LawSection(1.0),), num_draft_tokens=2))
    rows = conversations(tiny_target)
    held_out = [r for r in rows if r.split == "heldout"]
    base = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), None)
    base_folder = save_drafter(base, tmp_path / "base", tiny_target, {})
    before = bytes_of(base_folder)

    def figures(drafter: CausalDrafter) -> dict[str, float]:
        return held_out_figures(tiny_target, drafter.eval(), held_out, objective, 1, 12)

    table = {"base": figures(base)}
    for number, domain in enumerate("ab"):
        torch.manual_seed(number)
        config = CausalConfig(start=str(base_folder), lora=LoraSection(rank=4))
        drafter = new_drafter(config, tiny_target, [])
        assert isinstance(drafter, CausalDrafter)
        p = DraftVocabularyP(tiny_target, drafter.draft_ids, objective.law)
        scorer = Scorer(drafter, section, objective, p)
        batch = collate([r for r in rows if r.split == "train" and r.domain == domain], ("a", "b"))
        totals = scored_tokens(batch, 1).float()
        optimizer = torch.optim.AdamW(drafter.trainable(), lr=2e-2)
        for _ in range(40):
            scorer(batch, 1, totals).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        table[domain] = figures(drafter)
        folder = save_drafter(drafter, tmp_path / domain, tiny_target, {})
        loaded = load_drafter(folder, tiny_target)
        assert isinstance(loaded, CausalDrafter)
        again = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base_folder), str(folder / ADAPTER)
        )
        live = logits_of(drafter.model)
        for model in (loaded.model, again):
            assert (logits_of(model) - live).abs().max() < TOLERANCE * live.abs().max()
        assert figures(loaded)[TAU] == pytest.approx(table[domain][TAU], abs=1e-4)
    assert bytes_of(base_folder) == before
    for domain, other in ("ab", "ba"):
        own = table[domain][f"overlap/{domain}"]
        assert own > table["base"][f"overlap/{domain}"] + 0.05
        assert own > table[other][f"overlap/{domain}"] + 0.05
