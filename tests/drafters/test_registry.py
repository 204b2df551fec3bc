"""The `drafter:` section: families by name, their options, and new drafters."""

from typing import Any

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.registry import family_config
from draftsmith.drafters.start import new_drafter, resolved_taps


def records() -> list[Record]:
    torch.manual_seed(0)
    made = []
    for number in range(3):
        states = States(torch.randn(6, 32), torch.zeros(6), torch.zeros(9, 96))
        ids = torch.arange(10) + 20 * number + 3
        made.append(Record(f"p{number}", "chat", "train", Law(), 0, "stop", ids, 4, states))
    return made


def test_sections() -> None:
    section: dict[str, Any] = {"family": "eagle3", "draft_vocab_size": 64, "taps": [0, 1, 2]}
    assert family_config(section, "r.yaml") == (
        "eagle3",
        Eagle3Config(taps=(0, 1, 2), draft_vocab_size=64),
    )
    assert section["family"] == "eagle3"  # the recipe stays whole
    assert family_config({"family": "causal", "layers": [0, 3]}, "r.yaml") == (
        "causal",
        CausalConfig(layers=(0, 3)),
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"family": "eagel3"}, r"'eagel3' in r\.yaml.*did you mean 'eagle3'"),
        ({}, "unknown drafter.family 'None'"),
        (
            {"family": "eagle3", "draft_vocabsize": 9},
            r"drafter\.draft_vocabsize.*r\.yaml.*draft_vocab_size",
        ),
        ({"family": "eagle3", "layers": [0]}, "layers"),
        (
            {"family": "causal", "head_rank": 64},
            r"'drafter\.head_rank' in r\.yaml: it is an option of eagle3, .* is 'causal'",
        ),
        ({"family": "causal", "draft_vocab_size": "many"}, "draft_vocab_size"),
    ],
)
def test_what_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        family_config(section, "r.yaml")


def test_taps_of_families() -> None:
    assert resolved_taps(Eagle3Config(), 30) == (1, 14, 28)
    assert resolved_taps(CausalConfig(), 30) == ()


def test_new_drafters(tiny_target: Target) -> None:
    head = new_drafter(Eagle3Config(taps=(0, 1, 2), draft_vocab_size=50), tiny_target, records())
    assert isinstance(head, Eagle3Drafter)
    assert head.taps == (0, 1, 2)
    assert len(head.draft_ids) == head.lm_head.out_features == 50
    assert set(head.draft_ids.tolist()) >= {0, 1, 2}
    whole = new_drafter(CausalConfig(layers=(0,)), tiny_target, [])
    assert isinstance(whole, CausalDrafter) and whole.draft_ids is None
    some = new_drafter(CausalConfig(layers=(0,), draft_vocab_size=50), tiny_target, records())
    assert some.draft_ids is not None
    assert torch.equal(some.draft_ids, head.draft_ids)  # both take the target's mass
    with pytest.raises(UserError, match="exceeds the target's 400"):
        new_drafter(Eagle3Config(taps=(0, 1, 2)), tiny_target, records())


def test_default_taps() -> None:
    assert Eagle3Config().resolved_taps(30) == (1, 14, 28)
    assert Eagle3Config(taps=(2, 15, 27)).resolved_taps(30) == (2, 15, 27)
    with pytest.raises(UserError, match="between 0 and 28"):
        Eagle3Config(taps=(2, 15, 29)).resolved_taps(30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"taps": (1, 2)}, "three layers"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"init": "zeros"}, "init"),
    ],
)
def test_options_out_of_range(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Eagle3Config(**options)  # type: ignore[arg-type]
