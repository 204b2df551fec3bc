"""What parity says it has compared is what it has compared."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from echoes import echoing
from torch import nn

from draftsmith.configs.recipe import LawSection, ServingSection
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.adapters import LoraSection
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.lookup import LookupConfig
from draftsmith.drafters.registry import untrained_drafter
from draftsmith.eval.parity import Parity, parity

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 14
SERVING = ServingSection((LawSection(0.0), LawSection(1.0)), num_draft_tokens=3)

MakeDrafter = Callable[[str, Target], Drafter]


@pytest.fixture(scope="module")
def rows(tiny_target: Target, answers: Callable[..., list[Record]]) -> list[Record]:
    requests = [
        *echoing(tiny_target, [3, 4, 5, 6], Law(0.0)),
        *echoing(tiny_target, [3, 4, 5, 6], Law(1.0)),
    ]
    return answers(tiny_target, requests, LIMIT)


def verdicts(found: Parity) -> dict[str, str]:
    return {part.name: part.verdict for part in found.parts}


def faults(found: Parity, name: str) -> tuple[str, ...]:
    (part,) = [p for p in found.parts if p.name == name]
    return part.lines if part.verdict == "different" else ()


def test_replies_without_room_to_draft_check_nothing(
    make_drafter: MakeDrafter, tiny_target: Target, rows: list[Record]
) -> None:
    two = [replace(r, ids=r.ids[: r.prompt_len + 2], states=None) for r in rows]
    drafters = [make_drafter(kind, tiny_target) for kind in ("eagle3", "causal")]
    for drafter in (*drafters, untrained_drafter(LookupConfig(), tiny_target)):
        found = parity(tiny_target, drafter, two, SERVING, limit=2)
        assert set(verdicts(found).values()) == {"not checked"}, found.lines
        assert "no reply leaves room to draft" in found.lines[3]


def adapted(target: Target) -> CausalDrafter:
    """A draft LM with an adapter that changes what it says."""
    torch.manual_seed(2)
    config = CausalConfig(layers=(0, 3), lora=LoraSection())
    drafter = CausalDrafter.from_target(target, config, None)
    for parameter in drafter.trainable():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


def test_an_adapter_is_compared_as_it_is_merged(
    tiny_target: Target, rows: list[Record], tmp_path: Path
) -> None:
    trained = adapted(tiny_target)
    folder = save_drafter(trained, tmp_path / "d", tiny_target, {})
    served = load_drafter(folder, tiny_target)
    found = parity(tiny_target, served, rows, SERVING, LIMIT, trained)
    assert found.ok, found.lines
    assert verdicts(found)["drafter"] == "equal" and found.lines[1].strip().startswith("21 tensors")
    base = CausalDrafter.from_target(tiny_target, CausalConfig(layers=(0, 3)), None)
    found = parity(tiny_target, base, rows, SERVING, LIMIT, trained)
    assert "tensor 'model.model.layers.0.mlp" in faults(found, "drafter")[0]


def test_a_tensor_that_one_side_lacks_is_a_fault(
    make_drafter: MakeDrafter, tiny_target: Target, rows: list[Record]
) -> None:
    trained = make_drafter("eagle3", tiny_target)
    more = copy.deepcopy(trained)
    assert isinstance(more, nn.Module)
    more.register_buffer("scale", torch.ones(1))
    for one, other, said in (
        (trained, more, "tensor 'scale' is served, and was not trained"),
        (more, trained, "tensor 'scale' was trained, and is not served"),
    ):
        assert (
            faults(parity(tiny_target, other, rows[:2], SERVING, LIMIT, one), "drafter")[0] == said
        )
