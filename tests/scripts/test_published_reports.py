"""What went wrong for others between training and what engines load, on published folders."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from publishing import save, send
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.data.target import Target
from draftsmith.drafters.adapters import ADAPTER, LoraSection
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.start import new_drafter

IDS = torch.tensor([[3, 90, 14, 260, 41, 7, 77, 8, 19, 300, 5, 64]])
TOLERANCE = 1e-4

# A process that knows nothing of ours: transformers alone.
READER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
folders, out = json.loads(sys.argv[1]), sys.argv[2]
found = []
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(json.loads(sys.argv[3]))).logits[0]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found.append((logits, tied, model.config.tie_word_embeddings))
torch.save(found, out)
"""

pytestmark = pytest.mark.usefixtures("one_thread")


def read_afresh(out: Path, folders: list[Path]) -> list[tuple[Tensor, bool, bool]]:
    """Logits `[T, rows]`, whether both embeddings are one, and what the configuration says."""
    told = json.dumps([str(folder) for folder in folders])
    command = [sys.executable, "-c", READER, told, str(out), json.dumps(IDS.tolist())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(torch.load(out))


def trained_a_little(drafter: CausalDrafter) -> Tensor:
    """Ten steps; returns the live model's logits `[T, rows]`."""
    optimizer = torch.optim.AdamW(drafter.trainable(), lr=1e-2)
    for _ in range(10):
        drafter.model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return drafter.model.eval()(input_ids=IDS).logits[0].float()


def test_b130_a_published_draft_says_the_same_in_a_fresh_process(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """Trained whole and as an adapter, tied and not, in one file and in several."""
    live, folders = {}, {}
    for tied, kind in itertools.product((True, False), ("whole", "adapter")):
        target = load_tiny("llama", tie_word_embeddings=tied)
        torch.manual_seed(1)
        drafter = CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
        begun = drafter.model(input_ids=IDS).logits[0].detach()
        if kind == "adapter":
            drafter.adapt(LoraSection(), "owner/base")
        said = trained_a_little(drafter.train())
        assert (said - begun).abs().max() > 0.1 * begun.abs().max()
        kept = save_drafter(drafter, tmp_path / f"{kind}-{tied}", target, {})
        size = {"whole": "20KB", "adapter": "5GB"}[kind]
        out = send(target, kept, tmp_path / f"{kind}-{tied}-out", max_shard_size=size)
        assert (out / "model.safetensors").exists() == (kind == "adapter")
        names = {name for path in out.glob("*.safetensors") for name in load_file(path)}
        assert ("lm_head.weight" in names) != tied and not any("lora" in name for name in names)
        live[tied, kind], folders[tied, kind] = said, out
    found = read_afresh(tmp_path / "found", list(folders.values()))
    for (tied, kind), (logits, *one) in zip(folders, found, strict=True):
        assert one == [tied, tied]
        said = live[tied, kind]
        assert (logits - said).abs().max() < TOLERANCE * said.abs().max()


def test_b131_an_adapter_on_a_padded_vocabulary(tiny_target: Target, tmp_path: Path) -> None:
    """The base has 416 rows where the target has 400; merged and by itself, nobody resizes."""
    base = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), None)
    base_folder = save_drafter(base, tmp_path / "base", tiny_target, {})
    padded: Any = AutoModelForCausalLM.from_pretrained(base_folder)
    padded.resize_token_embeddings(416)
    padded.save_pretrained(base_folder)
    (base_folder / "draftsmith.json").unlink()
    config = CausalConfig(start=str(base_folder), lora=LoraSection(rank=4))
    drafter = new_drafter(config, tiny_target, [])
    assert isinstance(drafter, CausalDrafter) and drafter.draft_ids is None
    live = trained_a_little(drafter)
    assert live.shape == (IDS.shape[1], 416)
    kept = save_drafter(drafter, tmp_path / "kept", tiny_target, {})
    out = send(tiny_target, kept, tmp_path / "out")
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 416
    plain: Any = AutoModelForCausalLM.from_pretrained(base_folder)
    merged: Any = AutoModelForCausalLM.from_pretrained(out)
    for model in (merged, PeftModel.from_pretrained(plain, str(kept / ADAPTER))):
        with torch.no_grad():
            logits = model.eval()(input_ids=IDS).logits[0]
        assert logits.shape == live.shape
        assert (logits - live).abs().max() < TOLERANCE * live.abs().max()


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_b127_old_readers_find_what_they_look_for(
    family: str, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    target = load_tiny("llama", rope_parameters=rope)
    out = send(target, save(family, target, tmp_path / "trained"), tmp_path / "out", "bfloat16")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config.get("rope_theta", 10000) == 100000 and not config.get("rope_scaling")
    assert config["torch_dtype"] == "bfloat16"
    words = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("family", ["eagle3", "causal"])
def test_b134_a_target_in_a_local_folder_is_named_without_it(
    family: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the machine is in the folder, whatever the drafter's own file says."""
    monkeypatch.setitem(tiny_target.provenance, "source", "/home/someone/models/llm.gguf")
    kept = save(family, tiny_target, tmp_path / "kept")
    assert "/home/someone" in (kept / "draftsmith.json").read_text(encoding="utf-8")
    out = send(tiny_target, kept, tmp_path / "out", base_model="owner/llm")
    for path in out.iterdir():
        assert (
            b"/home/" not in path.read_bytes() and str(tmp_path).encode() not in path.read_bytes()
        )
    own = json.loads((out / "draftsmith.json").read_text(encoding="utf-8"))
    assert own["target"]["source"] == "llm.gguf"
    assert own["target"]["tokenizer"] == tiny_target.provenance["tokenizer"]
    assert "base_model: owner/llm" in (out / "README.md").read_text(encoding="utf-8")
