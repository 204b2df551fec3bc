"""A benchmark's specification: which drafters are measured, served how, on which prompts."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .collection import PACKAGED_DOMAINS, CollectSection, DomainSection
from .errors import require
from .recipe import EvalSection, LawSection, TargetSection, TreeSection


def _named(name: str) -> None:
    """Entries are called "drafter, serving", and each by a name of its own."""
    ok = bool(name.strip()) and "," not in name
    require(ok, "name", name, "a label that is not empty, without commas")


@dataclass(frozen=True)
class ContestantSection:
    """One drafter of a benchmark."""

    name: str
    """Names it in every table."""
    folder: str | None = None
    """Where it lies, trained here or published by others; null for what has nothing to train."""
    options: dict[str, Any] | None = None
    """Family and options of a drafter that has nothing to train, such as {family: lookup}."""
    servings: tuple[str, ...] | None = None
    """Names of the ways that it is served in; null takes all."""

    def __post_init__(self) -> None:
        _named(self.name)
        ok = (self.folder is None) != (self.options is None)
        require(ok, "folder", self.folder, "a drafter's folder, or null beside options")
        ok = self.options is None or isinstance(self.options.get("family"), str)
        require(ok, "options", self.options, "a mapping that names its family")


@dataclass(frozen=True)
class WaySection:
    """One way of drafting and verifying."""

    name: str
    """Names it in every table."""
    num_draft_tokens: int = 3
    """Longest draft of a round."""
    verifier: Literal["token", "block"] = "block"
    """Accepts token by token, or blocks as a whole."""
    drafting: Literal["sampled", "greedy"] = "sampled"
    """Draws drafts from the draft's law, or always takes its most probable token."""
    policy: dict[str, Any] | None = None
    """What ends drafts early, and its options; null drafts to the full length."""
    tree: TreeSection | None = None
    """Trees instead of chains."""

    def __post_init__(self) -> None:
        _named(self.name)
        ok = self.num_draft_tokens >= 1
        require(ok, "num_draft_tokens", self.num_draft_tokens, "1 or more")
        ok = self.policy is None or self.tree is None
        require(ok, "policy", self.policy, "null where there is a tree: it is for chains")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: every drafter is served in every way, on the target's replies to the same
    prompts, all of which are held out."""

    name: str
    """Names the run and its folder."""
    drafters: tuple[ContestantSection, ...]
    """Who is compared; the first is what the others are compared with."""
    servings: tuple[WaySection, ...] = (WaySection("block"),)
    """How they are served."""
    laws: tuple[LawSection, ...] = (LawSection(0.0), LawSection(1.0))
    """Distributions that the server samples from."""
    seeds: tuple[int, ...] = (0,)
    """Every random choice follows from one of them; above T = 0, each has a reply of its own to
    every prompt."""
    target: TargetSection = field(default_factory=TargetSection)
    """The model to be served faster."""
    domains: tuple[DomainSection, ...] = PACKAGED_DOMAINS
    """Where prompts come from; `holdout` does not matter."""
    collect: CollectSection = field(default_factory=CollectSection)
    """Running the target."""
    eval: EvalSection = field(default_factory=EvalSection)
    """Measurement."""

    def __post_init__(self) -> None:
        ok = bool(self.name) and not set(self.name) & set("/\\") and self.name not in (".", "..")
        require(ok, "name", self.name, "a name without slashes")
        ok = all(0 <= s < 2**63 for s in self.seeds) and len(set(self.seeds)) == len(self.seeds)
        require(ok, "seeds", list(self.seeds), "whole numbers of 0 or more, none twice")
        for option in ("drafters", "servings", "laws", "seeds", "domains"):
            require(len(getattr(self, option)) > 0, option, [], "a list of at least one")
        for option in ("drafters", "servings"):
            names = [part.name for part in getattr(self, option)]
            ok = len(set(names)) == len(names)
            require(ok, option, names, "a list of parts with names of their own")
        known = {way.name for way in self.servings}
        for drafter in self.drafters:
            own = drafter.servings
            ok = own is None or (len(own) > 0 and set(own) <= known)
            require(ok, "drafters", own, f"names of servings ({', '.join(sorted(known))})")
