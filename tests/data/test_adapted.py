"""Targets with an adapter: the merged model is the adapted one, and says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import load_target, target_info

IDS = torch.tensor([[5, 9, 17, 33, 8]])


@pytest.fixture(scope="module")
def base(target_folder: Callable[..., Path]) -> Path:
    return target_folder()


def adapter(base: Path, folder: Path, *modules: str) -> Path:
    """A random one, saved by peft."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=list(modules or ("q_proj",)))
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def section(base: Path, folder: Path | None) -> TargetSection:
    return TargetSection(str(base), device="cpu", adapter=None if folder is None else str(folder))


@torch.no_grad()
def test_a_target_is_what_its_adapter_makes_of_it(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "tuned", "q_proj", "down_proj")
    plain, target = (load_target(section(base, f)) for f in (None, folder))
    whole: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    logits = [m(input_ids=IDS, use_cache=False).logits for m in (plain.model, target.model, whole)]
    assert (logits[0] - logits[2]).abs().max() > 0.1
    assert torch.allclose(logits[1], logits[2], atol=1e-5)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.provenance["weights"] != plain.provenance["weights"]
    assert plain.provenance["adapter"] is None
    assert target.provenance["adapter"].startswith("tuned (")
    assert target_info(section(base, folder)).provenance["adapter"] == target.provenance["adapter"]


def test_other_weights_are_another_adapter(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "tuned")
    before = target_info(section(base, folder)).provenance["adapter"]
    path = folder / "adapter_model.safetensors"
    save_file({k: 2 * v for k, v in load_file(path).items()}, path)
    assert target_info(section(base, folder)).provenance["adapter"] != before


def test_what_is_no_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no adapter \(adapter_model\.safetensors or"):
        load_target(section(base, tmp_path))
    with pytest.raises(UserError, match="holds no adapter"):
        target_info(section(base, tmp_path / "nowhere"))


def test_an_adapter_for_another_model_is_refused(
    base: Path, target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    wide = adapter(target_folder(hidden_size=64), tmp_path / "wide")
    with pytest.raises(UserError, match="takes a folder that peft wrote for this very model"):
        load_target(section(base, wide))
    alien = adapter(target_folder("gpt2"), tmp_path / "alien", "c_attn")
    with pytest.raises(UserError, match="cannot put the adapter"):
        load_target(section(base, alien))
    renamed = adapter(base, tmp_path / "renamed")
    path = renamed / "adapter_model.safetensors"
    save_file({k.replace("layers.", "blocks."): v for k, v in load_file(path).items()}, path)
    with pytest.raises(UserError, match="missing adapter keys"):
        load_target(section(base, renamed))


def test_an_adapter_of_a_tied_head_is_refused(base: Path, tmp_path: Path) -> None:
    """Merged into the one weight of head and embedding it would change both."""
    folder = adapter(base, tmp_path / "tied", "lm_head")
    with pytest.raises(UserError, match="cannot be merged: logits change"):
        load_target(section(base, folder))


def test_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    folder = adapter(base, tmp_path / "tuned")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(folder)
    assert load_target(section(base, folder)).provenance["adapter"] is not None
    tokenizer.add_tokens([AddedToken("<new>")])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="brings another tokenizer"):
        load_target(section(base, folder))
