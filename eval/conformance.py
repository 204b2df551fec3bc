"""The decode loop against the target's own law: every branch of chance, on tiny models in float64.

A case is one way of decoding. Requests of different prompts share batches with all branches of each
other, so rows finish at different times beside rows that are still drafting. `covering` picks cases
in which every pair of options meets; the full cross takes long.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedTokenizerFast

from ..data.gather import Request
from ..data.rules import Rules
from ..data.target import Target
from ..data.warp import Law
from ..drafters.base import Drafter
from ..drafters.causal import CausalConfig, CausalDrafter
from ..drafters.dflash import DFlashDrafter
from ..drafters.dflash_config import DFlashConfig
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.eagle3_config import Eagle3Config
from ..drafters.jump import JumpConfig, JumpDrafter
from ..drafters.lookup import LookupConfig, LookupDrafter
from ..drafters.medusa import MedusaConfig, MedusaDrafter
from ..drafters.mlp import MLPConfig, MLPDrafter
from ..drafters.skip import SkipConfig, SkipDrafter
from .decode import DecodeSettings
from .gamma import AdaEDL, Calibration, Confidence, CostModel, Costs, Policy
from .lossless import loop_law, plain_law, total_variation
from .tree import TreeShape

SIZE = 3
"""Tokens of the tiny vocabulary."""
TOKENS = 4
"""Longest reply: a first token, a round of drafts, and what is left."""
GAMMA = 2
TOLERANCE = 1e-10
"""Of the total variation; exact up to float64 rounding."""

_CALIBRATION = Calibration(
    edges=((0.4,), (0.4,)), chances=((0.1, 0.9), (0.1, 0.9)), means=(0.5, 0.5), counts=(99, 99)
)
_COSTS = Costs(0.1, 0.1, 0.0, {1: (1.0, 1.1, 1.2), 64: (1.0, 1.2, 1.4)})

POLICIES: dict[str, Policy | None] = {
    "static": None,
    "confidence": Confidence(GAMMA, 0.4),
    "adaedl": AdaEDL(GAMMA, 0.6),
    "cost_model": CostModel(GAMMA, _CALIBRATION, _COSTS),
}
SHAPES: dict[str, TreeShape | tuple[int, ...]] = {
    "tree": TreeShape(2, 2, 4),
    "sampled tree": (2, 1),
}
METHODS = [
    *((rule, policy) for rule in ("token", "block") for policy in POLICIES),
    *((shape, "static") for shape in SHAPES),
]
OPTIONS: dict[str, Sequence[Any]] = {
    "method": METHODS,
    "drafting": ("sampled", "greedy"),
    "law": (
        Law(1.0),
        Law(0.7, top_k=2),
        Law(1.2, top_p=0.7),
        Law(1.0, min_p=0.3, typical_p=0.9),
        Law(0.0),
    ),
    "rules": (
        Rules(),
        Rules(repetition_penalty=1.5, frequency_penalty=0.4),
        Rules(no_repeat_ngram=2, logit_bias=(((1,), 0.7),)),
        Rules(bad_words=((0, 2),), min_new_tokens=2),
    ),
    "ends": ((), (0,), (1, 2)),
    "drafter": (
        *("eagle3", "eagle3 reduced", "causal", "causal reduced", "lookup", "skip"),
        *("medusa", "medusa reduced", "mlp", "mlp reduced", "dflash", "dflash reduced"),
        "dflash sequential",
        *("jump", "jump reduced", "eagle3 shaped"),
    ),
    "rows": (4096, 5, 1),
}
"""What may be combined; rows: branches that share a batch."""


@dataclass(frozen=True)
class Case:
    """One way of decoding."""

    method: tuple[str, str]
    drafting: Any
    law: Law
    rules: Rules
    ends: tuple[int, ...]
    drafter: str
    rows: int

    @property
    def settings(self) -> DecodeSettings:
        name, policy = self.method
        how = DecodeSettings(TOKENS, GAMMA, drafting=self.drafting)
        if name in SHAPES:
            return replace(how, tree=SHAPES[name])
        return replace(how, verifier=name, policy=POLICIES[policy])

    def __str__(self) -> str:
        changed = {k: v for k, v in self.rules.__dict__.items() if v != getattr(Rules(), k)}
        rules = " ".join(f"{k}={v}" for k, v in changed.items()) or "no rules"
        name = " ".join(self.method)
        return (
            f"{name}, {self.drafting} drafts of {self.drafter}, {self.law.label}, {rules}, "
            f"ends {list(self.ends)}, {self.rows} rows"
        )


def cross() -> Iterator[Case]:
    """Every combination, with as many rows in a batch as there are branches."""
    every = {**OPTIONS, "rows": (max(OPTIONS["rows"]),)}
    for values in itertools.product(*every.values()):
        yield Case(**dict(zip(every, values, strict=True)))


def covering() -> list[Case]:
    """A small set of cases in which every two values of two options meet at least once."""
    names = list(OPTIONS)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(OPTIONS[names[a]]))
        for j in range(len(OPTIONS[names[b]]))
    }
    cases = []
    while open_pairs:
        chosen: dict[int, int] = {}
        a, i, b, j = min(open_pairs)
        chosen[a], chosen[b] = i, j
        for c in range(len(names)):  # greedily, the value that closes most open pairs
            if c not in chosen:
                gains = [
                    sum(_pair(c, value, d, e) in open_pairs for d, e in chosen.items())
                    for value in range(len(OPTIONS[names[c]]))
                ]
                chosen[c] = gains.index(max(gains))
        law = names.index("law")
        greedy = OPTIONS["law"][chosen[law]].temperature == 0  # then little else has a say
        open_pairs -= {
            _pair(x, chosen[x], y, chosen[y])
            for x, y in itertools.combinations(chosen, 2)
            if not greedy or law in (x, y)
        }
        cases.append(Case(*(OPTIONS[name][chosen[c]] for c, name in enumerate(names))))
    return cases


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)


class Bench:
    """A tiny target, drafters for it, and prompts; `distance` decodes one case exactly."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.target = _tiny_target()
            self.drafters = {name: _tiny_drafter(name, self.target) for name in OPTIONS["drafter"]}
        self._plain: dict[tuple[Any, ...], list[dict[tuple[int, ...], float]]] = {}

    def distance(self, case: Case) -> float:
        """Largest total variation between the loop's outputs and the target's, over the prompts."""
        target = replace(self.target, eos_ids=case.ends)
        requests = [
            Request(f"p{i}", "", "", ids, case.law, i, rules=case.rules)
            for i, ids in enumerate(((1,), (2, 0, 1)))
        ]
        key = case.law, case.rules, case.ends
        if key not in self._plain:
            self._plain[key] = [plain_law(target, r, TOKENS) for r in requests]
        drafter = self.drafters[case.drafter]
        found = loop_law(target, requests, case.settings, drafter, case.rows)
        pairs = zip(found, self._plain[key], strict=True)
        return max(total_variation(law.outputs, plain) for law, plain in pairs)


def _tiny_target() -> Target:
    """GPT-NeoX, whose layer norms keep float64: no rounding but float64's."""
    config = GPTNeoXConfig(
        vocab_size=SIZE,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.requires_grad_(False)
    words = {f"{i}": i for i in range(SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0"))
    )
    return Target(model, tokenizer, {"name": "tiny"}, (), SIZE)


def _tiny_drafter(name: str, target: Target) -> Drafter:
    """An untrained drafter, so that everything is refused and accepted now and then."""
    family, _, kind = name.partition(" ")
    reduced = kind == "reduced"
    if family == "lookup":
        return LookupDrafter.from_target(target, LookupConfig())
    if family == "skip":
        return SkipDrafter.from_target(target, SkipConfig(layers=(0, 3)))
    ids = torch.tensor([0, 2]) if reduced else None
    if name == "eagle3 shaped":
        shape = Eagle3Config(
            init="random", hidden_size=12, layers=2, head_rank=2, norm_before_fc=True,
            norm_output=True,
        )  # fmt: skip
        return Eagle3Drafter.from_target(target, shape, None).double().eval()
    if family == "eagle3":
        full = torch.arange(SIZE) if ids is None else ids
        head = Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=SIZE), full)
        return head.double().eval()
    if family == "dflash":
        options = DFlashConfig(block_size=GAMMA + 1, sequential=kind == "sequential", init="random")
        block = DFlashDrafter.from_target(target, options, ids)
        if block.correction is not None:
            nn.init.normal_(block.correction.down_proj.weight, std=0.3)
        return block.double().eval()
    if family == "jump":
        full = torch.arange(SIZE) if ids is None else ids
        jump = JumpDrafter.from_target(target, JumpConfig(begin=1), full)
        return jump.double().eval()
    if family == "medusa":
        heads = MedusaDrafter.from_target(target, MedusaConfig(num_heads=GAMMA), ids)
        for parameter in heads.blocks.parameters():  # which begin at zero, all heads alike
            nn.init.normal_(parameter, std=0.3)
        return heads.double().eval()
    if family == "mlp":
        config = MLPConfig(n_predict=GAMMA, tie_weights=reduced)
        return MLPDrafter.from_target(target, config, ids).double().eval()
    return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), ids).double().eval()
