"""Where a draft LM comes from: a configuration, or a published model of whatever architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import greedy_reference
from families import FAMILIES, RECURRENT, UNSUITED, save_tiny
from starting import begun
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import Recipe
from draftsmith.data.gather import Request
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.registry import family_config
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.tree import TreeShape
from draftsmith.train.blueprint import drafter_shapes

LIMIT = 12

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "narrow llama": LLAMA,
    "tied llama": {**LLAMA, "tie_word_embeddings": True},
    "wide qwen3": {
        **LLAMA,
        "model_type": "qwen3",
        "hidden_size": 48,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "gpt2 by its own names": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4},
    "gemma2": {
        **LLAMA,
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    },
}


def sized(target: Target, section: dict[str, Any], **options: Any) -> CausalDrafter:
    _, config = family_config({"family": "causal", "config": section, **options}, "r.yaml")
    assert isinstance(config, CausalConfig)
    return CausalDrafter.from_target(target, config, None)


def one_step(drafter: CausalDrafter, records: list[Record]) -> tuple[float, float]:
    """Cross-entropy on the same records before and after one step on them."""
    batch = collate(records, sorted({r.domain for r in records}))
    optimizer = torch.optim.AdamW(drafter.trainable(), lr=1e-3)
    losses = []
    for _ in range(2):
        (step,) = drafter.unroll(batch, 1)
        reply = torch.cat([r.reply for r in records])
        loss = torch.nn.functional.cross_entropy(drafter.head(step.hidden), reply[step.token])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[1]


def assert_lossless(target: Target, drafter: CausalDrafter) -> None:
    """Greedy replies by chains and trees are those of generate; windows are crossed."""
    generator = torch.Generator().manual_seed(4)
    requests = [
        Request(f"p{n}", "", "", tuple(torch.randint(3, 400, (n,), generator=generator).tolist()),
                Law(0.0), n)
        for n in (1, 13)
    ]  # fmt: skip
    expected = [greedy_reference(target, r, LIMIT, list(target.eos_ids)) for r in requests]
    for tree in (None, TreeShape(2, 3, 6)):
        outputs = decode(target, requests, DecodeSettings(LIMIT, 3, tree=tree), drafter.eval())
        assert [out.ids for out in outputs] == expected
        assert all(out.rounds[0][0] > 0 for out in outputs if out.rounds)


# ---- by a configuration


@pytest.mark.parametrize("name", CONFIGS)
def test_any_configuration_drafts(
    name: str, tiny_target: Target, records: list[Record], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    drafter = sized(tiny_target, CONFIGS[name])
    assert drafter.training and drafter.max_positions == tiny_target.max_positions
    config = drafter.model.config
    assert config.model_type == CONFIGS[name]["model_type"] and config.vocab_size == 400
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    before, after = one_step(drafter, records[:8])
    assert after < before
    assert_lossless(tiny_target, drafter)
    folder = save_drafter(drafter, tmp_path / "drafter", tiny_target, {})
    again: Any = load_drafter(folder, tiny_target)
    mine, theirs = drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def rows_of(drafter: CausalDrafter) -> tuple[Tensor, Tensor]:
    """Embedding and head `[V, h]`."""
    inputs: Any = drafter.model.get_input_embeddings()
    return inputs.weight.detach(), drafter.model.get_output_embeddings().weight.detach()


@pytest.mark.parametrize("tied", [False, True])
def test_rows_begin_as_the_targets(tied: bool, load_tiny: Callable[..., Target]) -> None:
    target = load_tiny(tie_word_embeddings=False)
    section = {**LLAMA, "hidden_size": 32, "num_attention_heads": 4, "tie_word_embeddings": tied}
    embedding, head = rows_of(sized(target, section))
    assert torch.equal(embedding, target.embedding)
    assert torch.equal(head, target.embedding if tied else target.head.weight)


def test_narrower_rows_keep_the_nearest_products(load_tiny: Callable[..., Target]) -> None:
    """Against the truncated SVD of the target's rows."""
    target = load_tiny(tie_word_embeddings=False)
    for mine, theirs in zip(
        rows_of(sized(target, LLAMA)), (target.embedding, target.head.weight), strict=True
    ):
        u, s, _ = torch.linalg.svd(theirs.double(), full_matrices=False)
        nearest = u[:, :16] * s[:16]  # [V, 16]
        assert mine.shape == nearest.shape
        assert torch.allclose((mine @ mine.T).double(), nearest @ nearest.T, atol=1e-4)


def test_wider_rows_hold_the_targets(tiny_target: Target) -> None:
    embedding, _ = rows_of(sized(tiny_target, CONFIGS["wide qwen3"]))
    assert torch.equal(embedding[:, :32], tiny_target.embedding)
    assert (embedding[:, 32:].std() > 0) and (embedding[:, 32:].abs() < 0.2).all()


def test_rows_beyond_the_tokenizer_and_a_longer_text(
    load_tiny: Callable[..., Target], tiny_target: Target
) -> None:
    target = load_tiny(vocab_size=448)
    assert sized(target, LLAMA).model.config.vocab_size == 448
    longer = sized(tiny_target, {**LLAMA, "vocab_size": 512, "max_position_embeddings": 999})
    assert longer.model.config.vocab_size == 512 and longer.max_positions == 999
    assert_lossless(tiny_target, longer)


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_known_without_weights(name: str, tiny_target: Target) -> None:
    drafter: Any = sized(tiny_target, CONFIGS[name])
    recipe = Recipe("r", drafter={"family": "causal", "config": CONFIGS[name]})
    shapes: Any = drafter_shapes(recipe, tiny_target)
    assert {p.device.type for p in shapes.parameters()} == {"meta"}
    mine, theirs = dict(drafter.named_parameters()), dict(shapes.named_parameters())
    assert {n: p.shape for n, p in mine.items()} == {n: p.shape for n, p in theirs.items()}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "drafter.config lacks model_type, such as llama"),
        ({"model_type": "lama"}, "'lama' is no language model of .*did you mean 'llama'"),
        ({"model_type": "vit"}, "'vit' is no language model of transformers"),
        ({**LLAMA, "hiden_size": 3}, r"'drafter\.config\.hiden_size' .*did you mean 'hidden_size'"),
        ({**LLAMA, "n_embd": 3}, r"unknown key 'drafter\.config\.n_embd' for model type 'llama'$"),
        (
            {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1},
            "lacks intermediate_size, num_attention_heads: without them",
        ),
        ({"model_type": "gpt2", "n_embd": 32}, "lacks num_hidden_layers, num_attention_heads"),
        ({**LLAMA, "model_type": "qwen3"}, "lacks num_key_value_heads, head_dim"),
        ({**LLAMA, "hidden_size": "wide"}, "makes no model: .*hidden_size"),
        ({**LLAMA, "num_attention_heads": 5}, "makes no model: "),
        ({**LLAMA, "vocab_size": 300}, "vocab_size 300 is less than the target's 400 tokens"),
        ({**LLAMA, "model_type": "mamba"}, "."),
    ],
    ids=str,
)
def test_what_makes_no_draft_is_refused(
    section: dict[str, Any], words: str, tiny_target: Target
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        sized(tiny_target, section)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("layers", [0]), ("start", "x"), ("lora", {"rank": 2})]
)
def test_options_of_other_sources_are_refused(
    name: str, value: object, tiny_target: Target
) -> None:
    with pytest.raises(UserError, match=rf"which drafter\.{name} is not for; leave one"):
        sized(tiny_target, LLAMA, **{name: value})


# ---- a published model


@pytest.fixture
def published(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[[str], Path]:
    def save(name: str) -> Path:
        config = {**FAMILIES, **RECURRENT, **UNSUITED}[name](num_hidden_layers=4)
        return save_tiny(config, tiny_tokenizer, tmp_path / name)

    return save


@pytest.mark.parametrize("name", FAMILIES)
def test_any_architecture_trains_and_drafts(
    name: str, published: Callable[[str], Path], tiny_target: Target, records: list[Record]
) -> None:
    drafter = begun(published(name), "causal", tiny_target)
    drafter.eval()  # without dropout, so that the step alone changes the loss
    before, after = one_step(drafter, records[:8])
    assert after < before
    assert_lossless(tiny_target, drafter)


@pytest.mark.parametrize("name", [*RECURRENT, *UNSUITED])
def test_others_are_refused_by_name(
    name: str, published: Callable[[str], Path], tiny_target: Target
) -> None:
    with pytest.raises(UserError, match=r"drafter\.start '.*' cannot draft: ") as caught:
        begun(published(name), "causal", tiny_target)
    assert "\n" not in str(caught.value) and f"/{name}'" in str(caught.value)
