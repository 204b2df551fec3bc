"""A recipe: everything that defines one run, as frozen dataclasses.

`configs.load` reads them from YAML. Options are checked where they stand, so a section made
in Python is as safe as one read from a file; what is out of range raises `OptionError`.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from .collection import PACKAGED_DOMAINS, CollectSection, DomainSection, Dtype
from .errors import require
from .training import TrainSection


@dataclass(frozen=True)
class TargetSection:
    """The model that is to be served faster."""

    name: str = "smollm2-135m-instruct"
    """An embedded model, a local folder, or a Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null takes the default branch."""
    dtype: Literal["auto"] | Dtype = "auto"
    """Weights and activations; auto takes what suits the device."""
    device: str = "auto"
    """A torch device such as cpu or cuda:0; auto takes an accelerator if there is one."""
    adapter: str | None = None
    """A folder with a LoRA adapter, as peft writes it, that is merged into the model's weights."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """What the chat template is told as it will be in serving, such as enable_thinking: false."""

    def __post_init__(self) -> None:
        require(bool(self.name), "name", self.name, "a model name, folder or Hub id")


@dataclass(frozen=True)
class LawSection:
    """How the server turns logits into the distribution it samples from."""

    temperature: float
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the smallest set of tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens with at least this share of the most likely one's probability; 0 keeps all."""
    typical_p: float = 1.0
    """Keeps the most typical tokens with this probability; 1 keeps all."""

    def __post_init__(self) -> None:
        ok = self.temperature == 0 or 1e-30 <= self.temperature < math.inf
        require(ok, "temperature", self.temperature, "0 (greedy) or more (from 1e-30 up)")
        require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        require(0 < self.typical_p <= 1, "typical_p", self.typical_p, "above 0 and at most 1")


@dataclass(frozen=True)
class TreeSection:
    """Drafting trees instead of chains, no deeper than num_draft_tokens."""

    width: int = 4
    """Nodes of each depth that are drafted on from, the most probable ones."""
    budget: int = 8
    """Nodes that are verified in one pass, the most probable ones of all."""
    children: int | None = None
    """Most probable continuations of each node that is drafted on from; null takes width."""
    sampled: tuple[int, ...] = ()
    """Children by depth, drawn from the draft's law: a fixed shape instead of the above."""

    def __post_init__(self) -> None:
        require(self.width > 0, "width", self.width, "above 0")
        require(self.budget > 0, "budget", self.budget, "above 0")
        ok = self.children is None or self.children > 0
        require(ok, "children", self.children, "above 0, or null")
        require(all(n > 0 for n in self.sampled), "sampled", list(self.sampled), "numbers above 0")


@dataclass(frozen=True)
class ServingSection:
    """How the target will be served, which is how the drafter is evaluated."""

    laws: tuple[LawSection, ...] = (LawSection(temperature=0.0), LawSection(temperature=1.0))
    """The sampling settings to measure, each by itself; training takes the first that samples."""
    num_draft_tokens: int = 2
    """Tokens drafted in a round."""
    verifier: Literal["token", "block"] = "block"
    """The acceptance rule of chains above temperature 0: token by token, or the whole block."""
    drafting: Literal["sampled", "greedy"] = "sampled"
    """Whether drafts are sampled from the draft's own law, or always its most probable token."""
    policy: dict[str, Any] | None = None
    """What ends a draft early, by name with its options: confidence, adaedl or cost_model (which
    is calibrated on training prompts); null never does."""
    tree: TreeSection | None = None
    """Trees instead of chains, with a verifier of their own; null drafts chains."""

    def __post_init__(self) -> None:
        require(len(self.laws) > 0, "laws", [], "a list of at least one law")
        ok = self.policy is None or self.tree is None
        require(ok, "policy", self.policy, "null where there is a tree: it is for chains")
        ok = self.num_draft_tokens >= 1
        require(ok, "num_draft_tokens", self.num_draft_tokens, "1 or more")


@dataclass(frozen=True)
class ObjectiveSection:
    """What training minimises."""

    loss: str | dict[str, float] = "nla"
    """One of the objectives in train/losses.py, or a mix of them by weight."""
    then: str | None = None
    """What takes over, on replies of the served law alone: accepted_length (expected tokens a
    round), rounds (their number itself), or another loss."""
    switch_at: float = 0.5
    """Share of the optimiser steps after which it does."""
    switch_overlap: float | None = None
    """Held-out overlap that makes it take over earlier; null leaves it to switch_at."""
    eta: float = 3.0
    """Pace of lk_hybrid's change from one divergence to the other."""
    beta: float = 0.5
    """Share of the target in jsd's mixture."""
    sharpness: float = 1.0
    """Factor on the logits in greedy_mass: the higher, the closer to the most probable token."""
    position_weights: Literal["geometric", "product"] = "geometric"
    """Weights of the unrolled steps: fixed, or what is expected to be reached through each."""
    position_decay: float = 0.8
    """Geometric: each further unrolled step weighs this much of the one before."""
    product_floor: float = 0.5
    """Product: the chance of going on that a step counts with at least."""

    def __post_init__(self) -> None:
        mix = self.loss if isinstance(self.loss, dict) else {self.loss: 1.0}
        ok = bool(mix) and all(name and 0 < weight < math.inf for name, weight in mix.items())
        require(ok, "loss", self.loss, "the name of an objective, or names with weights above 0")
        require(0 <= self.switch_at <= 1, "switch_at", self.switch_at, "between 0 and 1")
        ok = self.switch_overlap is None or 0 < self.switch_overlap < 1
        require(ok, "switch_overlap", self.switch_overlap, "between 0 and 1, or null")
        require(0 <= self.eta < math.inf, "eta", self.eta, "0 or more")
        require(0 <= self.beta <= 1, "beta", self.beta, "between 0 (fkl) and 1 (rkl)")
        require(1 <= self.sharpness < math.inf, "sharpness", self.sharpness, "1 or more")
        ok = 0 < self.position_decay <= 1
        require(ok, "position_decay", self.position_decay, "above 0 and at most 1")
        require(0 <= self.product_floor < 1, "product_floor", self.product_floor, "0 to below 1")


@dataclass(frozen=True)
class EvalSection:
    """Measuring the drafter on the held-out prompts."""

    sweep: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Draft lengths compared with each other."""
    timed_lengths: tuple[int, ...] = ()
    """Further draft lengths of the sweep that are timed, not only predicted."""
    length_splits: tuple[int, ...] = ()
    """Prompt lengths in tokens at which every domain is split into rows of their own."""
    decode_batch: int = 16
    """Conversations decoded at a time where acceptance is counted."""
    timing_prompts: int = 6
    """Prompts of each domain that are timed, one at a time; 0 skips timing."""
    timing_tokens: int = 64
    """Tokens of each timed reply."""
    bootstrap: int = 2000
    """Resamples of the conversations behind each interval."""
    near_tie_margin: float = 1e-4
    """A greedy reply may differ only where the two best logits are this close."""
    calibration_prompts: int = 4
    """Prompts on which the cost of draft and target passes is measured."""
    parity_replies: int = 4
    """Replies of each law on which training's figures are compared with decoding's; 0 skips it."""
    batch_sizes: tuple[int, ...] = (1,)
    """Conversations decoded together whose costs and speed are measured, 1 among them."""
    shown_replies: int = 2
    """Replies of each domain and law that the page shows, coloured by what was accepted."""

    def __post_init__(self) -> None:
        ok = all(length >= 1 for length in self.sweep)
        require(ok, "sweep", list(self.sweep), "a list of draft lengths of 1 or more")
        for option in ("decode_batch", "bootstrap"):
            require(getattr(self, option) > 0, option, getattr(self, option), "above 0")
        for option in ("timing_prompts", "parity_replies", "shown_replies"):
            require(getattr(self, option) >= 0, option, getattr(self, option), "0 or more")
        ok = self.timing_tokens > 3  # half of them calibrate, and the first is never timed
        require(ok, "timing_tokens", self.timing_tokens, "4 or more")
        splits = self.length_splits
        ok = all(n > 0 for n in splits) and list(splits) == sorted(set(splits))
        require(ok, "length_splits", list(splits), "ever larger numbers above 0")
        ok = 1 in self.batch_sizes and min(self.batch_sizes) == 1
        require(ok, "batch_sizes", list(self.batch_sizes), "a list of 1 and larger batch sizes")
        ok = set(self.timed_lengths) <= set(self.sweep)
        require(ok, "timed_lengths", list(self.timed_lengths), "lengths that are in the sweep")
        ok = self.calibration_prompts > 0
        require(ok, "calibration_prompts", self.calibration_prompts, "above 0")
        ok = 0 <= self.near_tie_margin < math.inf
        require(ok, "near_tie_margin", self.near_tie_margin, "0 or more")


@dataclass(frozen=True)
class PublishSection:
    """Writing the folder that an inference engine loads."""

    dtype: Dtype = "float32"
    """Precision of the written weights."""
    licence: str = "apache-2.0"
    """The licence named on the model card, as the Hub spells it."""
    base_model: str | None = None
    """The target's name on the Hub; null takes the one it was loaded by, if that is one."""
    max_shard_size: str = "5GB"
    """Weights beyond this are written as several files."""
    speculators: bool = False
    """Writes an EAGLE-3 head in the layout of the speculators library, too, into the subfolder
    `speculators`: with it, `vllm serve` takes target and draft length from the draft."""

    def __post_init__(self) -> None:
        named = re.fullmatch(r"\d+(\.\d+)? ?[KMGT]B", self.max_shard_size)
        accepted = "a size such as 5GB (KB, MB, GB, TB)"
        require(named is not None, "max_shard_size", self.max_shard_size, accepted)


@dataclass(frozen=True)
class Recipe:
    """One whole run, from prompts to a published folder."""

    name: str
    """Names the run and its folder."""
    seed: int = 0
    """Every random choice of the run follows from it."""
    target: TargetSection = TargetSection()
    """The model to be served faster."""
    serving: ServingSection = ServingSection()
    """How it will be served."""
    domains: tuple[DomainSection, ...] = PACKAGED_DOMAINS
    """Where prompts come from."""
    collect: CollectSection = field(default_factory=CollectSection)
    """Running the target."""
    drafter: dict[str, Any] = field(default_factory=lambda: {"family": "eagle3"})
    """The family and its own options, which drafters/registry.py reads."""
    objective: ObjectiveSection = ObjectiveSection()
    """What training minimises."""
    train: TrainSection = field(default_factory=TrainSection)
    """Optimisation."""
    eval: EvalSection = EvalSection()
    """Measurement."""
    publish: PublishSection = PublishSection()
    """What is written for the engine."""

    def __post_init__(self) -> None:
        ok = bool(self.name) and not set(self.name) & set("/\\") and self.name not in (".", "..")
        require(ok, "name", self.name, "a name without slashes")
        require(0 <= self.seed < 2**63, "seed", self.seed, "a whole number of 0 or more")
        require(len(self.domains) > 0, "domains", [], "a list of at least one domain")
        family = self.drafter.get("family")
        ok = isinstance(family, str) and bool(family)
        require(ok, "drafter", self.drafter, "a mapping that names its family")
        ok = self.objective.then is None or self.train.unroll >= self.serving.num_draft_tokens
        require(ok, "train.unroll", self.train.unroll, "serving.num_draft_tokens or more")
