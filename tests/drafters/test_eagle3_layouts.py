"""EAGLE-3 folders of others say what their publishers' plain torch says, or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import TAPS, TARGET, THETA, VOCAB, Published, said
from safetensors.torch import load_file
from starting import edit_weights
from torch import Tensor
from unrolling import assert_parity, conversations

from draftsmith.configs.errors import UserError
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.formats import eagle3_speculators
from draftsmith.drafters.start import check_start, new_drafter, resolved_taps

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SOME = sorted({0, 1, 2, *range(7, VOCAB, 5)})

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*has no tokenizer"),
]


NORMS = ("norm_before_residual", "norm_output")
KINDS: dict[str, dict[str, Any]] = {
    "reduced": {"ids": SOME},
    "all tokens": {},
    "midlayer": {"ids": SOME, "first": "midlayer."},
    "another embedding": {"embedding": True, "ids": SOME},
    "three layers": {"layers": 3, "ids": SOME},
    "narrow": {"h": 16, "embedding": True, "ids": SOME},
    "biased": {"bias": True},
    "EAGLE-3.1": {"norms": (*NORMS, "norm_before_fc"), "ids": SOME},
    "a norm for each layer": {"norms": ("fc_norm", "norm_output")},
    "normed residual": {"norms": ("norm_before_residual",)},
    "long texts": {"rope": LLAMA3},
}
CASES = [
    (kind, layout, old)
    for kind in KINDS
    for layout in ("flat", "speculators")
    for old in (False, True)
    if (layout, kind) != ("speculators", "midlayer")
]


@pytest.fixture(scope="module")
def text() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(8)
    return torch.randn(11, 3 * TARGET), torch.randint(3, VOCAB, (11,)), torch.tensor([12, 47, 7])


@pytest.mark.parametrize(("kind", "layout", "old"), CASES)
def test_it_says_what_its_publisher_says(
    kind: str, layout: str, old: bool, tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    head = Published(**KINDS[kind])
    folder = getattr(head, layout)(tmp_path / "head", old)
    drafter = load_drafter(folder, tiny_target)
    assert drafter.taps == TAPS
    ids = drafter.draft_ids
    assert (None if ids is None else ids.tolist()) == head.ids
    expected = head.says(tiny_target.embedding, *text)
    torch.testing.assert_close(said(drafter, *text), expected, atol=2e-4, rtol=1e-4)
    again = load_drafter(save_drafter(drafter, tmp_path / "ours", tiny_target, {}), tiny_target)
    assert torch.equal(said(again, *text), said(drafter, *text))


def test_a_pickle_of_old_is_read(tiny_target: Target, text: Any, tmp_path: Path) -> None:
    head = Published(ids=SOME, first="midlayer.")
    drafter = load_drafter(head.flat(tmp_path / "head", pickled=True), tiny_target)
    expected = head.says(tiny_target.embedding, *text)
    torch.testing.assert_close(said(drafter, *text), expected, atol=2e-4, rtol=1e-4)
    place = tmp_path / "head" / "pytorch_model.bin"
    torch.save({"fc.weight": print}, place)
    with pytest.raises(UserError, match="is damaged"):
        load_drafter(tmp_path / "head", tiny_target)
    place.write_bytes(place.read_bytes()[:40])
    with pytest.raises(UserError, match=r"pytorch_model\.bin \(40 bytes\) is damaged"):
        load_drafter(tmp_path / "head", tiny_target)


# ---- what is not read


def edited(folder: Path, inner: str | None, **changes: Any) -> Path:
    path = folder / "config.json"
    said = json.loads(path.read_text())
    (said if inner is None else said[inner]).update(changes)
    path.write_text(json.dumps(said))
    return folder


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen3"}, "layers of model type 'qwen3' are not read, those of llama are"),
    ({"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\] are not read"),
    ({"logit_scale": 0.5}, "logit_scale 0.5 is not read"),
    ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is not read"),
    ({"num_attention_heads": 5}, "'num_attention_heads' 5 must be a multiple of 'num_key_value_h"),
    ({"hidden_size": 30}, "its layers cannot be built: .*attention heads"),
    ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' is 1e-5, must be a number above 0"),
    ({"rope_parameters": {"rope_type": "su"}}, "unknown rope_type 'su'"),
    ({"rope_theta": 9.0}, "'rope_theta' is 5000.0 in rope_parameters and 9.0 outside of it"),
    ({"rope_scaling": {"type": "linear"}}, "'rope_type' is default in rope_parameters and linear"),
    ({"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_layers_of_another_kind_are_refused(
    changes: dict[str, Any], message: str, tiny_target: Target, tmp_path: Path
) -> None:
    head = Published(ids=SOME)
    with pytest.raises(UserError, match=message):
        load_drafter(edited(head.flat(tmp_path / "a"), None, **changes), tiny_target)
    nested = "transformer_layer_config"
    with pytest.raises(UserError, match=message):
        load_drafter(edited(head.speculators(tmp_path / "b"), nested, **changes), tiny_target)


@pytest.mark.parametrize("layout", ["flat", "speculators"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": THETA},
        {"rope_parameters": {"rope_theta": THETA}, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}, "rope_theta": THETA},
    ],
)
def test_rope_of_which_each_spelling_tells_a_part(
    rope: dict[str, Any], layout: str, tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    head = Published(ids=SOME)
    inner = "transformer_layer_config" if layout == "speculators" else None
    place = edited(getattr(head, layout)(tmp_path / "head"), inner, **rope)
    expected = head.says(tiny_target.embedding, *text)
    found = said(load_drafter(place, tiny_target), *text)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_head_of_fewer_tokens_than_the_target(
    tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    """What it does not know reads as its last one, in training as in decoding."""
    head = Published(ids=[i for i in SOME if i < 390])
    place = edited(head.flat(tmp_path / "head"), None, vocab_size=390)
    edit_weights(place, lambda tensors: tensors.update(t2d=tensors["t2d"][:390].clone()))
    drafter = load_drafter(place, tiny_target)
    taps, tokens, drafted = text
    tokens = tokens.clone()
    tokens[3:5] = torch.tensor([395, 399])
    known = tiny_target.embedding.clone()
    known[390:] = known[389]
    expected = head.says(known, taps, tokens, drafted)
    found = said(drafter, taps, tokens, drafted)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    records = conversations(tiny_target, drafter.taps)
    for record in records:
        record.ids[3::4] = 395
    assert_parity(drafter, records, lambda number, row: (number + row) % 3)


def test_what_else_does_not_fit(tiny_target: Target, tmp_path: Path) -> None:
    place = Published(ids=SOME).flat(tmp_path / "a")
    with pytest.raises(UserError, match="use_aux_hidden_state is false"):
        load_drafter(edited(place, None, eagle_config={"use_aux_hidden_state": False}), tiny_target)
    place = Published(h=16, ids=SOME).flat(tmp_path / "b")
    with pytest.raises(UserError, match=r"'embed_tokens\.weight' is missing"):
        load_drafter(place, tiny_target)  # the target's is of another width
    with pytest.raises(UserError, match=r"states of width 48, those of '.*' have 32"):
        load_drafter(edited(place, None, target_hidden_size=48), tiny_target)
    place = Published(ids=SOME).speculators(tmp_path / "c")
    with pytest.raises(UserError, match="'transformer_layer_config' is missing"):
        load_drafter(edited(place, None, transformer_layer_config=None), tiny_target)
    other = edited(place, None, speculators_model_type="peagle", model_type="llama")
    with pytest.raises(UserError, match=r"none of the layouts .*_model_type 'peagle' is not"):
        load_drafter(other, tiny_target)


def test_where_nvidias_heads_say_that_they_norm(
    tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    """In eagle_config, where vLLM looks first."""
    head = Published(norms=("norm_before_fc",))
    place = edited(head.flat(tmp_path / "a"), None, norm_before_fc=False)
    drafter = load_drafter(edited(place, None, eagle_config={"norm_before_fc": True}), tiny_target)
    expected = head.says(tiny_target.embedding, *text)
    torch.testing.assert_close(said(drafter, *text), expected, atol=2e-4, rtol=1e-4)


# ---- going on, and writing


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_it_is_trained_further(layout: str, tiny_target: Target, text: Any, tmp_path: Path) -> None:
    head = Published(ids=SOME, layers=2, h=16, embedding=True, norms=("fc_norm", "norm_output"))
    place = getattr(head, layout)(tmp_path / "head")
    config = Eagle3Config(start=str(place), layers=2, hidden_size=16, fc_norm=True)
    assert resolved_taps(config, 4) == TAPS
    drafter = new_drafter(config, tiny_target, [])
    assert isinstance(drafter, Eagle3Drafter) and drafter.training
    expected = head.says(tiny_target.embedding, *text)
    torch.testing.assert_close(said(drafter, *text), expected, atol=2e-4, rtol=1e-4)
    assert not drafter.embed_tokens.weight.requires_grad and drafter.lm_head.weight.requires_grad
    config = Eagle3Config(start=str(place), train_embedding=True, train_head=False)
    other: Any = new_drafter(config, tiny_target, [])
    assert other.embed_tokens.weight.requires_grad and not other.lm_head.weight.requires_grad
    for options in ({"layers": 1}, {"hidden_size": 32}, {"norm_output": False}, {"head_rank": 4}):
        (name,) = options
        with pytest.raises(UserError, match=f"drafter.{name} .* is another than the .* of"):
            check_start(Eagle3Config(start=str(place), **options), tiny_target)


@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_a_head_that_names_no_layers_needs_the_recipes(
    layout: str, tiny_target: Target, tmp_path: Path
) -> None:
    place = getattr(Published(ids=SOME), layout)(tmp_path / "head")
    edited(place, None, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(UserError, match=r"layer_ids' is missing; .* name in drafter\.taps"):
        load_drafter(place, tiny_target)
    assert load_drafter(place, tiny_target, TAPS).taps == TAPS


@pytest.mark.parametrize("kind", ["reduced", "narrow", "EAGLE-3.1", "three layers"])
def test_the_speculators_layout_is_written(
    kind: str, tiny_target: Target, text: Any, tmp_path: Path
) -> None:
    head = Published(**KINDS[kind])
    drafter: Any = load_drafter(head.flat(tmp_path / "flat"), tiny_target)
    place = tmp_path / "written"
    place.mkdir()
    eagle3_speculators.write(drafter, place, torch.float32, "owner/target", "LlamaForCausalLM", 5)
    theirs = json.loads((head.speculators(tmp_path / "theirs") / "config.json").read_text())
    config = json.loads((place / "config.json").read_text())
    theirs["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5
    inner, expected = config["transformer_layer_config"], theirs.pop("transformer_layer_config")
    assert {name: inner[name] for name in expected} == expected
    assert inner["rope_theta"] == THETA and inner["rope_scaling"] is None
    assert {name: config[name] for name in theirs} == theirs
    tensors = load_file(place / "model.safetensors")
    assert tensors.keys() == {*head.tensors, *head.maps}
    assert all(torch.equal(t, {**head.tensors, **head.maps}[n]) for n, t in tensors.items())
    again = load_drafter(place, tiny_target)
    assert torch.equal(said(again, *text), said(drafter, *text))
