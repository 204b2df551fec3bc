"""The FLOPs of training by formula are those that are executed, and this machine's rate is real."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save_tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.recipe import ObjectiveSection, ServingSection, TargetSection
from draftsmith.data.gather import recompute_states
from draftsmith.data.records import Record, Top
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.adapters import LoraSection
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.jump import JumpConfig, JumpDrafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.train.flops import TrainingFlops, device_flops
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 320}
IDS = torch.arange(0, 400, 2)
TAPS = (1, 1, 2)
STEPS = 3


def rows(
    target: Target, extents: Sequence[tuple[int, int]], taps: tuple[int, ...] = TAPS
) -> list[Record]:
    """Conversations of so many prompt and reply tokens, with states."""
    generator = torch.Generator().manual_seed(0)
    made = [
        Record(
            f"p{i}", "a", "train", Law(1.0), i, "stop",
            torch.randint(3, target.vocab_size, (prompt + reply,), generator=generator),
            prompt, None,
        )
        for i, (prompt, reply) in enumerate(extents)
    ]  # fmt: skip
    return [next(recompute_states(target, [record], taps)) for record in made]


def drafter_of(kind: str, target: Target) -> Any:
    if kind.startswith("medusa"):
        frozen = kind == "medusa, head frozen"
        heads = MedusaConfig(num_layers=2, shared_head=frozen, train_head=not frozen)
        return MedusaDrafter.from_target(target, heads, IDS)
    if kind.startswith("mlp"):
        mlp = MLPConfig(inner_dim=96, tie_weights=kind == "mlp, tied")
        return MLPDrafter.from_target(target, mlp, IDS)
    if kind.startswith("jump"):
        config = JumpConfig(begin=1, end=2, layers=2, hidden=96, train_head=kind == "jump, head")
        return JumpDrafter.from_target(target, config, IDS)
    if kind.startswith("dflash"):
        block = DFlashConfig(taps=(0, 2), sequential=kind == "dflash, sequential")
        return DFlashDrafter.from_target(target, block)
    if kind == "eagle3, shaped":
        config = Eagle3Config(hidden_size=96, layers=3, head_rank=24)
        return Eagle3Drafter.from_target(target, config, None)
    if kind.startswith("eagle3"):
        head = Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(IDS)), IDS)
        head.lm_head.requires_grad_(kind != "eagle3, head frozen")
        return head
    lora = LoraSection(rank=4) if kind == "lora" else None
    return CausalDrafter.from_target(target, CausalConfig(layers=(0, 2, 3), lora=lora), None)


def multiply_add(result: Any, a: Any, b: Any, **options: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])


def executed(drafter: Any, p: DraftVocabularyP, records: list[Record], steps: int = STEPS) -> int:
    """What PyTorch counts of a training step, attention as matrix products."""
    batch = collate(records, ("a",))
    section = ObjectiveSection(loss="tv")
    scorer = Scorer(drafter, section, bind_objective(section, ServingSection()), p)
    own = {torch.ops.aten.addmm_: multiply_add}
    totals = scored_tokens(batch, steps).float()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=own) as count:
        scorer(batch, steps, totals).loss.backward()
    return count.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *product(["eagle3", "eagle3, head frozen", "causal", "lora"], ["llama", "gpt2"]),
        *product(["jump", "jump, head"], ["llama", "qwen3"]),
        *product(["dflash", "dflash, sequential"], ["llama", "gpt2"]),
        *product(["medusa", "medusa, head frozen", "mlp", "mlp, tied"], ["llama"]),
        ("eagle3, shaped", "llama"),
    ],
)
def test_formula_is_what_is_executed(kind: str, family: str, load_tiny: Any) -> None:
    changes = {"hidden_size": 128, "n_inner": 512} if family == "gpt2" else WIDE
    target = load_tiny(family, **changes)
    drafter = drafter_of(kind, target)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    records = rows(target, [(9, 20)] * 3, drafter.taps or TAPS)
    said = TrainingFlops.of(drafter, p, STEPS).batch(collate(records, ("a",)))
    assert said == pytest.approx(executed(drafter, p, records), rel=0.05)


@pytest.mark.parametrize("extent", [(300, 30), (20, 500)])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3, shaped"])
def test_long_conversations_of_which_earlier_layers_see_all(
    kind: str, extent: tuple[int, int], load_tiny: Any
) -> None:
    """In the first step; later ones multiply most keys in vain, which does not count.

    The last layer makes keys and values of a prompt, and no queries.
    """
    target = load_tiny("llama", **WIDE, max_position_embeddings=1024)
    drafter = drafter_of(kind, target)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    records = rows(target, [extent], drafter.taps)
    said = TrainingFlops.of(drafter, p, 1).batch(collate(records, ("a",)))
    assert said == pytest.approx(executed(drafter, p, records, 1), rel=0.05)


def test_experts_that_a_token_does_not_meet_are_left_out(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = save_tiny(FAMILIES["mixtral"](), tiny_tokenizer, tmp_path / "target")
    target = load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)
    drafter = CausalDrafter.from_target(target, CausalConfig(layers=(0,)), None)
    p = DraftVocabularyP(target, None, Law(1.0))
    experts = sum(w.numel() for w in drafter.body.parameters() if w.dim() == 3)
    two_of_four = TrainingFlops.of(drafter, p, STEPS).context
    drafter.model.config.num_experts_per_tok = 4
    assert TrainingFlops.of(drafter, p, STEPS).context - two_of_four == 6 * experts / 2


def test_padding_and_packing_add_nothing(load_tiny: Any) -> None:
    target = load_tiny("llama", **WIDE)
    drafter = drafter_of("eagle3", target)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    flops = TrainingFlops.of(drafter, p, STEPS)
    records = rows(target, [(4, 20), (9, 3), (5, 1), (3, 9)])
    alone = sum(flops.batch(collate([r], ("a",))) for r in records)
    assert flops.batch(collate(records, ("a",))) == pytest.approx(alone)
    assert flops.batch(collate(records, ("a",), True)) == pytest.approx(alone)


def test_told_distributions_need_no_head_of_the_target(load_tiny: Any) -> None:
    target = load_tiny("llama", **WIDE)
    drafter = drafter_of("eagle3", target)
    p = DraftVocabularyP(target, drafter.draft_ids, Law(1.0))
    flops = TrainingFlops.of(drafter, p, STEPS)
    batch = collate(rows(target, [(4, 20)]), ("a",))
    told = Top(torch.zeros(20, 2, dtype=torch.int32), torch.zeros(20, 2))
    saved = flops.batch(batch) - flops.batch(replace(batch, hidden=None, log_z=None, top=told))
    assert saved == 2 * 19 * 128 * len(IDS)
    full = TrainingFlops.of(drafter, DraftVocabularyP(target, drafter.draft_ids, Law(0.7)), STEPS)
    more = full.batch(batch) - flops.batch(batch)
    assert more == 2 * 19 * 128 * (target.vocab_size - len(IDS)), "another law needs all logits"


def test_rate_is_that_of_a_large_product() -> None:
    cpu = torch.device("cpu")
    device_flops.cache_clear()
    begin = time.perf_counter()
    rate = device_flops(cpu, torch.float32)
    first = time.perf_counter() - begin
    a = torch.randn(700, 700)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    assert rate == pytest.approx(2 * 700**3 / min(times), rel=0.6)
    begin = time.perf_counter()
    assert device_flops(cpu, torch.float32) == rate
    assert time.perf_counter() - begin < first / 100, "measured once"
