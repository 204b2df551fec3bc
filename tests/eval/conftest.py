"""A tiny target, untrained drafters for it, and requests; replies take milliseconds."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import GAMMA, LAWS, LIMIT, World

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.recipe import (
    EvalSection,
    LawSection,
    Recipe,
    ServingSection,
    TargetSection,
)
from draftsmith.data.collection import collect_settings
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.prompts import Prompt, read_prompts
from draftsmith.data.records import Record, request_seed
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, law_of
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.dflash import DFlashDrafter
from draftsmith.drafters.dflash_config import DFlashConfig
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.jump import JumpConfig, JumpDrafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.eval.conformance import Bench
from draftsmith.eval.report import read_report

SMALL = 12  # a vocabulary whose outputs can be enumerated

DrafterFactory = Callable[[str, Target], Drafter]
RequestFactory = Callable[..., list[Request]]


@pytest.fixture
def sample() -> dict[str, Any]:
    """A report, to be changed at will."""
    return read_report(Path(__file__).resolve().parents[1] / "fixtures" / "report.json")


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Tiny models on which the decode loop is enumerated."""
    return Bench()


@pytest.fixture(scope="session")
def small_target(load_tiny: Callable[..., Target]) -> Target:
    """A target of 12 tokens without an end token."""
    target = load_tiny(vocab_size=SMALL, initializer_range=0.4)
    target.eos_ids = ()
    return target


@pytest.fixture(scope="session")
def make_drafter() -> DrafterFactory:
    """`make_drafter(kind, target)`: a poor head, a poor LM, or a copy of the target ("self").

    A name with "reduced" proposes two thirds of the vocabulary only; "dflash sequential" corrects.
    """

    def make(kind: str, target: Target) -> Drafter:
        torch.manual_seed(11)
        size = target.vocab_size
        ids = torch.tensor([i for i in range(size) if i % 3 != 1])
        family, _, reduced = kind.partition(" ")
        drafter: Eagle3Drafter | CausalDrafter | DFlashDrafter
        if family == "eagle3":
            config = Eagle3Config(draft_vocab_size=size)
            drafter = Eagle3Drafter.from_target(
                target, config, ids if reduced else torch.arange(size)
            )
        elif family == "dflash":
            block = DFlashConfig(taps=(0, 1, 2), sequential=reduced == "sequential")
            drafter = DFlashDrafter.from_target(
                target, block, ids if reduced == "reduced" else None
            )
            if drafter.correction is not None:  # which begins without a say
                torch.nn.init.normal_(drafter.correction.down_proj.weight, std=0.3)
        elif family == "medusa":
            heads = MedusaDrafter.from_target(target, MedusaConfig(), ids if reduced else None)
            for parameter in heads.blocks.parameters():  # which begin at zero, all heads alike
                torch.nn.init.normal_(parameter, std=0.1)
            return heads.eval()
        elif family == "mlp":
            mlp = MLPConfig(tie_weights=bool(reduced))
            return MLPDrafter.from_target(target, mlp, ids if reduced else None).eval()
        elif family == "jump":
            jump = JumpConfig(begin=1, draft_vocab_size=size)
            return JumpDrafter.from_target(
                target, jump, ids if reduced else torch.arange(size)
            ).eval()
        else:
            layers = (0, 1, 2, 3) if family == "self" else (0, 3)
            causal = CausalConfig(layers=layers)
            drafter = CausalDrafter.from_target(target, causal, ids if reduced else None)
        return drafter.eval()

    return make


@pytest.fixture(scope="session")
def make_requests() -> RequestFactory:
    """`make_requests(target, lengths, law)`: random prompts of these lengths, seeds 0, 1, ..."""

    def make(target: Target, lengths: Sequence[int], law: Law = Law(0.0)) -> list[Request]:  # noqa: B008
        generator = torch.Generator().manual_seed(4)
        requests = []
        for i, n in enumerate(lengths):
            ids = torch.randint(0, target.vocab_size, (n,), generator=generator)
            requests.append(Request(f"p{i}", "x", "heldout", tuple(ids.tolist()), law, i))
        return requests

    return make


@pytest.fixture(scope="session")
def answers() -> Callable[..., list[Record]]:
    """`answers(target, requests, limit, taps)`: the target's own replies with states."""

    def collect(
        target: Target, requests: Sequence[Request], limit: int, taps: tuple[int, ...] = (1, 1, 2)
    ) -> list[Record]:
        return answer(target, requests, GatherSettings(limit, 64, taps, keep="hidden"))

    return collect


@pytest.fixture(scope="session")
def with_eos() -> Callable[..., Target]:
    """`with_eos(target, *ids)`: the same model, ending at these tokens."""

    def change(target: Target, *ids: int) -> Target:
        changed = copy.copy(target)
        changed.eos_ids = ids
        return changed

    return change


@pytest.fixture(scope="module", params=["eagle3 reduced", "causal"])
def world(
    request: pytest.FixtureRequest,
    small_target: Target,
    make_drafter: Callable[[str, Target], Drafter],
    with_eos: Callable[..., Target],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    folder = tmp_path_factory.mktemp("world")
    domains = []
    for name, count in (("chat", 9), ("co/de", 6)):
        path = folder / f"{count}.jsonl"
        rows = [json.dumps({"prompt": f"{name} number {i}"}) for i in range(count)]
        path.write_text("\n".join(rows), encoding="utf-8")
        domains.append(DomainSection(name, str(path), holdout=0.7, kind="raw"))
    recipe = Recipe(
        name="tiny",
        target=TargetSection(device="cpu"),
        serving=ServingSection(LAWS, num_draft_tokens=GAMMA),
        domains=tuple(domains),
        collect=CollectSection(temperatures=(1.0,), max_new_tokens=LIMIT),
        eval=EvalSection(
            sweep=(1, 2, 3),
            timed_lengths=(1,),
            decode_batch=4,
            timing_prompts=2,
            timing_tokens=8,
            bootstrap=100,
            calibration_prompts=2,
        ),
    )
    target = with_eos(small_target, 5)
    drafter = make_drafter(request.param, target)
    settings = collect_settings(recipe, target, (1, 1, 2))
    store = RecordStore.create(folder / "records", settings)
    gather = GatherSettings(LIMIT, 32, (1, 1, 2), keep="hidden")
    store.add("all", answer(target, _asked(recipe), gather))
    saved = save_drafter(drafter, folder / "drafter", target, {})
    return World(recipe, target, store.finish({}), drafter, saved)


def _asked(recipe: Recipe) -> list[Request]:
    """The recipe's prompts in ids of the small vocabulary, which stand for their letters."""
    requests = []
    for section in recipe.domains:
        for prompt in read_prompts(section, recipe.collect):
            assert isinstance(prompt, Prompt)
            ids = tuple(ord(letter) % 12 for letter in prompt.messages[0]["content"])
            laws = recipe.serving.laws if prompt.split == "heldout" else [LawSection(1.0)]
            for law in map(law_of, laws):
                seed = request_seed(recipe.seed, prompt.id, law)
                requests.append(Request(prompt.id, section.name, prompt.split, ids, law, seed))
    return requests
