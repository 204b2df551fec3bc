"""EAGLE-1 and EAGLE-2 heads of others: read, measured, and not trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import greedy_reference
from eagle_heads import VOCAB, H, PublishedEagle, said
from safetensors.torch import load_file
from torch import Tensor
from unrolling import assert_packed, assert_parity, assert_trees, conversations

from draftsmith.configs.errors import UserError
from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.eagle import EagleDrafter
from draftsmith.drafters.eagle3 import Eagle3Config
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import check_start
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.tree import TreeShape
from draftsmith.train.score import score

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(8)
    return torch.randn(11, H), torch.randint(3, VOCAB, (11,)), torch.tensor([12, 47, 7])


@pytest.fixture(scope="module")
def head(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> EagleDrafter:
    folder = PublishedEagle(fused_bias=True).write(tmp_path_factory.mktemp("head") / "head")
    drafter = load_drafter(folder, tiny_target)
    assert isinstance(drafter, EagleDrafter)
    return drafter


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ({}, {}),
        ({"fused_bias": True}, {}),
        ({"fused_bias": True, "embedding": True}, {"bias": True}),
        ({"layers": 2}, {"bias": False, "architectures": ["LlamaForCausalLMEagle"]}),
    ],
)
def test_it_says_what_its_publisher_says(
    kind: Any, told: Any, pickled: bool, tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    published = PublishedEagle(**kind)
    drafter = load_drafter(published.write(tmp_path / "head", pickled, **told), tiny_target)
    assert isinstance(drafter, EagleDrafter) and drafter.taps == (4,)
    assert drafter.trainable() == []
    with torch.no_grad():
        expected = tiny_target.head(published.outputs(tiny_target.embedding, *text))
    torch.testing.assert_close(said(drafter, *text), expected, atol=3e-4, rtol=1e-4)


def test_a_head_of_fewer_tokens_than_the_target(
    tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    """What it does not know reads as its last one."""
    published = PublishedEagle()
    drafter = load_drafter(published.write(tmp_path / "head", vocab_size=390), tiny_target)
    taps, tokens, drafted = text[0], text[1].index_fill(0, torch.tensor([3, 4]), 395), text[2]
    known = tiny_target.embedding.detach().clone()
    known[390:] = known[389]
    with torch.no_grad():
        expected = tiny_target.head(published.outputs(known, taps, tokens, drafted))
    torch.testing.assert_close(said(drafter, taps, tokens, drafted), expected, atol=3e-4, rtol=1e-4)


def test_parity(head: EagleDrafter, tiny_target: Target) -> None:
    records = conversations(tiny_target, head.taps)
    assert_parity(head, records, lambda number, row: (3 * number + 2 * row + 2) % 5)
    assert_trees(head, records, (3, 2))
    assert_packed(head, records)
    found = score(tiny_target, head, records, Law(1.0), 3, 20)
    assert all(0 < total / count < 1 for c in found for total, count in c.overlap)


def test_decoding_is_lossless(any_target: Target, tmp_path: Path) -> None:
    told = {"vocab_size": any_target.embedding.shape[0]}
    drafter = load_drafter(PublishedEagle().write(tmp_path / "head", **told), any_target)
    request = Request("p", "", "", (5, 80, 9, 200), Law(0.0), 0)
    expected = greedy_reference(any_target, request, 12, list(any_target.eos_ids))
    for settings in (DecodeSettings(12, 3), DecodeSettings(12, 3, tree=TreeShape(2, 2, 4))):
        (output,) = decode(any_target, [request], settings, drafter)
        assert output.ids == expected


def test_it_is_not_trained(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"family 'eagle' in r\.yaml cannot be trained: heads of"):
        family_config({"family": "eagle"}, "r.yaml")
    place = PublishedEagle().write(tmp_path / "head")
    said = r"is a drafter of family 'eagle', and drafter\.family is 'eagle3'"
    with pytest.raises(UserError, match=said):
        check_start(Eagle3Config(start=str(place)), tiny_target)


def test_an_ordinary_llama_of_one_layer_is_none(
    load_tiny: Any, tiny_target: Target, tmp_path: Path
) -> None:
    one = load_tiny("llama", num_hidden_layers=1)
    one.model.save_pretrained(tmp_path / "lm")
    one.tokenizer.save_pretrained(tmp_path / "lm")
    assert load_drafter(tmp_path / "lm", tiny_target).family == "causal"
    assert "fc.weight" not in load_file(tmp_path / "lm" / "model.safetensors")
    assert json.loads((tmp_path / "lm" / "config.json").read_text())["model_type"] == "llama"
