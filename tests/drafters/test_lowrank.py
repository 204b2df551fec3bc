"""Heads over all tokens by two factors: how near they begin, and that everything takes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import drafted, greedy_reference
from torch import Tensor
from unrolling import conversations

from draftsmith.configs.errors import UserError
from draftsmith.data.gather import Request
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.lowrank import factors, second_moment
from draftsmith.drafters.start import check_start, new_drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.train.score import score

TAPS = (0, 1, 2)
RANK = 8

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def records(tiny_target: Target) -> list[Record]:
    return conversations(tiny_target, TAPS, (5, 9, 4, 6), (40, 30, 50, 40))


def low_rank(target: Target, records: list[Record], rank: int = RANK) -> Eagle3Drafter:
    torch.manual_seed(0)
    drafter = new_drafter(Eagle3Config(TAPS, head_rank=rank), target, records)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter.eval()


def apart(rows: Tensor, pair: tuple[Tensor, Tensor], x: Tensor) -> float:
    """Mean square of the logits' differences, but for what all tokens have in common."""
    wrong = x @ (rows - pair[0] @ pair[1]).T  # [n, V]
    return float((wrong - wrong.mean(1, keepdim=True)).pow(2).mean())


def test_no_other_factors_are_nearer() -> None:
    """Of rows as they stand, and of what they give on states that lie in few directions."""
    torch.manual_seed(0)
    rows = torch.randn(90, 12) + 3
    states = (torch.randn(4000, 12) * torch.logspace(0, -2, 12)) @ torch.randn(12, 12)
    centred = rows - rows.mean(0)
    up, down = factors(rows, 4)
    assert up.shape == (90, 4) and down.shape == (4, 12)
    least = torch.linalg.svdvals(centred)[4:].pow(2).sum()
    assert float((centred - up @ down).pow(2).sum()) == pytest.approx(float(least), rel=1e-4)
    moment = states.T.double() @ states.double() / len(states)
    weighted = factors(rows, 4, moment)
    seen = torch.linalg.svdvals((states @ centred.T).double())[4:].pow(2).sum() / (4000 * 90)
    assert apart(rows, weighted, states) == pytest.approx(float(seen), rel=1e-3)
    assert apart(rows, weighted, states) < 0.5 * apart(rows, (up, down), states)
    assert apart(rows, factors(rows, 12, moment), states) < 1e-6 * states.pow(2).mean()


def test_the_moment_is_of_what_the_targets_head_reads(
    tiny_target: Target, records: list[Record]
) -> None:
    x = torch.cat([r.states.hidden[1:] for r in records if r.states]).double()  # [n, h]
    found = second_moment(records)
    assert found is not None
    torch.testing.assert_close(found, x.T @ x / len(x))
    drafter = low_rank(tiny_target, records)
    rows = tiny_target.head.weight.detach()
    assert drafter.head_down is not None
    begun = (drafter.lm_head.weight.detach(), drafter.head_down.weight.detach())
    assert apart(rows, begun, x.float()) < 0.9 * apart(rows, factors(rows, RANK), x.float())
    assert second_moment([]) is None


def test_of_full_rank_it_is_the_targets_head(tiny_target: Target, records: list[Record]) -> None:
    drafter = low_rank(tiny_target, records, 32)
    x = torch.randn(6, 32)
    with torch.no_grad():
        assert drafter.head_down is not None
        mine = drafter.lm_head(drafter.head_down(x)).softmax(-1)
        theirs = tiny_target.head(x).softmax(-1)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_it_proposes_all_tokens(tiny_target: Target, records: list[Record]) -> None:
    drafter = low_rank(tiny_target, records)
    assert drafter.draft_ids is None
    assert drafter.head_rows()[0].shape == (400, RANK)
    found = score(tiny_target, drafter, records, Law(1.0), 3, 60)
    for conversation in found:
        assert conversation.mass == pytest.approx(conversation.tokens, abs=1e-3)
        assert conversation.uncaptured == 0
        assert all(total > 0 for total, _ in conversation.overlap)


def test_it_is_kept_and_gone_on_with(
    tiny_target: Target, records: list[Record], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = Eagle3Config(TAPS, head_rank=RANK, layers=2, norm_output=True, hidden_size=24)
    drafter: Any = new_drafter(config, tiny_target, records)
    assert drafter.layout == "draftsmith"
    assert drafter.unserved == "the head of two factors (drafter.head_rank)"
    folder = save_drafter(drafter, tmp_path / "d", tiny_target, {})
    loaded: Any = load_drafter(folder, tiny_target)
    assert torch.equal(drafted(loaded), drafted(drafter))
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    again: Any = new_drafter(Eagle3Config(start=str(folder)), tiny_target, records)
    assert torch.equal(again.lm_head.weight, drafter.lm_head.weight)
    assert torch.equal(drafted(again), drafted(drafter))
    with pytest.raises(UserError, match=r"drafter\.head_rank 4 is another than the 8"):
        check_start(Eagle3Config(start=str(folder), head_rank=4), tiny_target)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"vocab_size": 448}), ("gemma2", {}), ("gpt2", {})]
)
def test_decoding_is_lossless(family: str, changes: dict[str, Any], load_tiny: Any) -> None:
    """Rows beyond the tokenizer's ids are never drafted."""
    target = load_tiny(family, **changes)
    torch.manual_seed(0)
    config = Eagle3Config(TAPS, head_rank=RANK)
    drafter = Eagle3Drafter.from_target(target, config, None).eval()
    request = Request("p", "", "", (5, 80, 9, 200), Law(0.0), 0)
    expected = greedy_reference(target, request, 12, list(target.eos_ids))
    (output,) = decode(target, [request], DecodeSettings(12, 3), drafter)
    assert output.ids == expected
    sampled = Request("p", "", "", (5, 80, 9, 200), Law(1.0), 0)
    (output,) = decode(target, [sampled], DecodeSettings(12, 3), drafter)
    assert all(0 <= token < target.vocab_size for token in output.ids)
