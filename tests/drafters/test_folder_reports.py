"""What went wrong for others between a drafter and its folder, by their numbers."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection, TargetSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target, load_target
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens

IDS = torch.arange(0, 400, 4)
FAMILIES = ("causal", "eagle3")
WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.usefixtures("one_thread")


def built(target: Target, family: str) -> Any:
    torch.manual_seed(1)
    if family == "causal":
        return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    return Eagle3Drafter.from_target(target, Eagle3Config((0, 1, 2), len(IDS)), IDS)


# ---- B067: sampling settings of the target


@pytest.mark.parametrize("family", FAMILIES)
def test_b067_settings_without_a_sampling_flag(
    family: str, target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A target's folder that says how to sample but not that one does."""
    place = target_folder()
    said = json.loads((place / "generation_config.json").read_text(encoding="utf-8"))
    assert "do_sample" not in said
    said |= {"temperature": 0.6, "top_p": 0.9}
    (place / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
    target = load_target(TargetSection(name=str(place), device="cpu"), few_rows=False)
    settings: Any = target.model.generation_config
    assert (settings.temperature, settings.top_p) == (0.6, 0.9)
    settings.max_new_tokens = 7  # settings that are as they were loaded are only warned of
    with pytest.raises(ValueError, match="temperature"):
        target.model.save_pretrained(tmp_path / "theirs")  # what others met
    drafter = built(target, family)
    if family == "causal":
        drafter.model.generation_config = settings
    folder = save_drafter(drafter, tmp_path / "d", target, {})
    assert (folder / WEIGHTS).exists()
    load_drafter(folder, target)


# ---- B073: tied weights


class Training:
    """A draft LM, the objective's loss on a batch, and an optimiser over what is trained."""

    def __init__(self, target: Target, rows: list[Record], frozen: bool):
        self.drafter = built(target, "causal")
        if frozen:
            self.embedding.requires_grad_(False)
        section = ObjectiveSection()
        objective = bind_objective(section, ServingSection((LawSection(1.0),)))
        p = DraftVocabularyP(target, None, objective.law)
        self.scorer = Scorer(self.drafter, section, objective, p)
        self.batch = collate(rows, ("a", "b"))
        self.optimizer = torch.optim.AdamW(self.drafter.trainable(), lr=1e-2)

    @property
    def embedding(self) -> Tensor:
        return self.drafter.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        return self.drafter.model.get_output_embeddings().weight

    def loss(self) -> Tensor:
        return self.scorer(self.batch, 1, scored_tokens(self.batch, 1).float()).loss

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def assert_tied(self, tied: bool) -> None:
        assert (self.head is self.embedding) == tied
        assert (self.head.data_ptr() == self.embedding.data_ptr()) == tied


@pytest.mark.parametrize("frozen", [False, True], ids=["all-trained", "embedding-frozen"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_b073_tied_stays_tied_through_checkpoint_and_folder(
    tied: bool,
    frozen: bool,
    load_tiny: Callable[..., Target],
    records: list[Record],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target, rows = load_tiny("llama", tie_word_embeddings=tied), records[:8]
    run = Training(target, rows, frozen)
    before = [run.embedding.detach().clone(), run.head.detach().clone()]
    run.step()
    run.assert_tied(tied)
    assert torch.equal(run.embedding, before[0]) == frozen
    assert torch.equal(run.head, before[1]) == (frozen and tied)
    save_model(run.scorer, str(tmp_path / "checkpoint.safetensors"))  # as accelerate keeps it
    resumed = Training(target, rows, frozen)
    assert resumed.loss() != run.loss()
    assert load_model(resumed.scorer, tmp_path / "checkpoint.safetensors") == (set(), [])
    assert resumed.loss() == run.loss()
    resumed.step()
    resumed.assert_tied(tied)
    folder = save_drafter(resumed.drafter, tmp_path / "d", target, {})
    assert ("lm_head.weight" in load_file(folder / WEIGHTS)) != tied
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_drafter(folder, target)
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
    noise = capfd.readouterr().err.lower()
    assert not [word for word in ("missing", "unexpected", "initialized", "tied") if word in noise]
    again = Training(target, rows, frozen)
    again.drafter = again.scorer.drafter = loaded
    again.assert_tied(tied)
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) == tied
    assert again.loss().item() == pytest.approx(resumed.loss().item(), abs=1e-6)


# ---- B075: heads wider than their share of the hidden size


@pytest.mark.parametrize("family", FAMILIES)
def test_b075_the_size_of_heads_is_carried_over(
    family: str, load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """Hidden size 64, 4 heads of 32, not of 16."""
    target = load_tiny("qwen3", hidden_size=64, head_dim=32)
    drafter = built(target, family)
    prefix = "midlayer" if family == "eagle3" else "model.layers.0"
    wide = 2 * 64 if family == "eagle3" else 64  # embedding beside state
    folder = save_drafter(drafter, tmp_path / "d", target, {})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["head_dim"], config["num_attention_heads"]) == (32, 4)
    shapes = {name: list(t.shape) for name, t in load_file(folder / WEIGHTS).items()}
    assert shapes[f"{prefix}.self_attn.q_proj.weight"] == [4 * 32, wide]
    assert shapes[f"{prefix}.self_attn.k_proj.weight"] == [2 * 32, wide]
    assert shapes[f"{prefix}.self_attn.o_proj.weight"] == [64, 4 * 32]
    loaded: Any = load_drafter(folder, target)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    if family == "causal":
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
        assert theirs.config.head_dim == loaded.model.config.head_dim == 32
    else:
        assert loaded.config.head_dim == 32
        assert loaded.rotary.inv_freq.shape == (16,)


def test_b075_heads_that_share_the_hidden_size(
    load_tiny: Callable[..., Target], tmp_path: Path
) -> None:
    """SmolLM2's proportions, 576 / 9 = 64: its config names no head_dim, the export does."""
    target = load_tiny("llama", hidden_size=36, num_attention_heads=9, num_key_value_heads=3,
                       head_dim=None)  # fmt: skip
    folder = save_drafter(built(target, "eagle3"), tmp_path / "d", target, {})
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["head_dim"] == 4
    load_drafter(folder, target)
