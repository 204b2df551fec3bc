"""What steps cost before training: the overlap needed by hand, planted delays by the clock."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.configs.errors import UserError
from draftsmith.data import linear
from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup import LookupConfig, LookupDrafter
from draftsmith.drafters.skip import SkipConfig, SkipDrafter
from draftsmith.eval import sizing
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.sizing import evenly, needed, step_cost, step_costs
from draftsmith.eval.speed import Cost, limit_of

MakeDrafter = Callable[[str, Target], Drafter]
V = {n: 1.0 + 0.05 * (n - 1) for n in range(1, 10)}

pytestmark = pytest.mark.usefixtures("one_thread")


def cost(c_first: float, c: float) -> Cost:
    return Cost(seconds=0.01, v=V, c_first=c_first, c=c, o=0.04, o_plain=0.02)


# ---- the overlap that is needed


def test_survival_is_a_power() -> None:
    assert evenly(0.5, 3) == [0.5, 0.25, 0.125]


def test_one_token_by_hand() -> None:
    """(1 + α)(1 + o_plain) = x (c_first + v(2) + o)."""
    found = needed(cost(0.3, 0.3), 1.0, 1)
    assert found is not None and found.num_draft_tokens == 1
    assert found.overlap == pytest.approx((0.3 + 1.05 + 0.04) / 1.02 - 1)


@pytest.mark.parametrize("wanted", [1.0, 1.5, 2.0])
def test_no_length_does_with_less(wanted: float) -> None:
    known = cost(0.1, 0.05)
    found = needed(known, wanted, 8)
    assert found is not None
    best = known.speedup(evenly(found.overlap, found.num_draft_tokens))
    assert best == pytest.approx(wanted, abs=1e-6)
    for gamma in range(1, 9):
        assert known.speedup(evenly(found.overlap - 1e-4, gamma)) < wanted


def test_cheap_steps_make_longer_drafts_best() -> None:
    dear, cheap = needed(cost(0.4, 0.4), 1.5, 8), needed(cost(0.05, 0.01), 1.5, 8)
    assert dear is not None and cheap is not None
    assert cheap.overlap < dear.overlap
    assert needed(cost(0.05, 0.01), 1.5, 1) != cheap


def test_what_cannot_win_is_said() -> None:
    assert needed(cost(0.3, 0.3), 2.0, 1) is None, "two tokens a round at most, for more than 1"
    assert needed(cost(1.2, 1.1), 1.0, 8) is None, "a draft as dear as the target"
    assert needed(cost(0.0, 0.0), 1.0, 8) is not None


# ---- rounds of a fixed pattern


def drafter_of(kind: str, target: Target, make_drafter: MakeDrafter) -> Drafter:
    if kind == "lookup":
        return LookupDrafter.from_target(target, LookupConfig())
    if kind == "skip":
        return SkipDrafter.from_target(target, SkipConfig(layers=(0, 3)))
    return make_drafter(kind, target)


KINDS = ("eagle3", "eagle3 reduced", "causal", "causal reduced", "lookup", "skip")


@pytest.mark.parametrize("kind", KINDS)
def test_none_some_and_all_are_kept_in_turn(
    kind: str, tiny_target: Target, make_drafter: MakeDrafter
) -> None:
    """Whatever the laws say, a vocabulary is reduced, or a drafter may abstain."""
    text = [5, 9, 200, 17, 33, 8]
    request = Request("p", "", "", tuple(text * 3), Law(1.0), 0)
    drafter = drafter_of(kind, tiny_target, make_drafter)
    draws = sizing._Pattern(text, 3)
    (out,) = decode(tiny_target, [request], DecodeSettings(22, 3, "token"), drafter, draws=draws)
    whole = out.rounds[:7]
    assert [drafted for drafted, _ in whole] == [3] * 7
    assert [accepted for _, accepted in whole] == [0, 1, 2, 3, 0, 1, 2]
    if kind == "lookup":  # only it drafts what the text goes on with
        assert out.ids[:18] == text * 3


def test_plain_decoding_repeats_the_text(tiny_target: Target) -> None:
    request = Request("p", "", "", (5, 9), Law(1.0), 0)
    draws = sizing._Pattern([5, 9], 0)
    (out,) = decode(tiny_target, [request], DecodeSettings(6, 0), draws=draws)
    assert out.ids == [5, 9] * 3


# ---- products alone


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.silu(self.up(x)))
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return (x @ x.transpose(1, 2)).softmax(-1)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_products_are_noted_and_called_again(mode: Callable[[], Any]) -> None:
    layer, x = _Layer(), torch.randn(1, 5, 8)
    with mode():
        with sizing.Products() as products:
            layer(x)
        assert len(products.calls) == 4
        func, args, options = products.calls[0]
        assert torch.allclose(func(*args, **options).flatten(), layer.up(x).flatten())


@pytest.mark.parametrize("form", linear.FORMS)
def test_products_are_noted_in_whichever_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "measured_forms", lambda *size: [(form, n) for n in linear.COUNTS])
    layer, x = _Layer(), torch.randn(1, 5, 8)
    linear.speed_up_few_rows(layer)
    with torch.inference_mode(), sizing.Products() as products:
        layer(x)
    assert len(products.calls) == 4


class _Delayed:
    """A drafter that sleeps beside what it computes."""

    def __init__(self, drafter: Drafter, first: float, later: float):
        self.drafter, self.waits = drafter, (first, later)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def first(self, state: Any) -> Tensor:
        time.sleep(self.waits[0])
        return self.drafter.first(state)

    def extend(self, state: Any, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        time.sleep(self.waits[1])
        return self.drafter.extend(state, tokens, parents)


ROWS = {n: 1.0 for n in range(1, 6)}
QUICK: dict[str, Any] = {"context": 12, "tokens": 14, "turns": 2}


def test_a_delay_outside_of_products_is_found_there(
    tiny_target: Target, make_drafter: MakeDrafter
) -> None:
    drafter = make_drafter("eagle3", tiny_target)
    slow: Any = _Delayed(drafter, 0.05, 0.02)
    found = step_costs(tiny_target, {"quick": drafter, "slow": slow}, ROWS, **QUICK)
    quick, slowed = found["quick"], found["slow"]
    assert 0 < quick.floor < quick.c and 0 < quick.floor_first < quick.c_first
    seconds = slowed.cost.seconds
    assert slowed.outside_first * seconds > 0.049, "a busy machine makes it longer, never shorter"
    assert slowed.outside * seconds > 0.019
    assert slowed.floor < slowed.outside / 2 and slowed.floor_first < slowed.outside_first / 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_cost_is_given(kind: str, tiny_target: Target, make_drafter: MakeDrafter) -> None:
    found = step_cost(tiny_target, drafter_of(kind, tiny_target, make_drafter), ROWS, **QUICK)
    known = found.cost
    assert known.v[1] == 1.0 and set(known.v) == set(ROWS)
    for value in (known.seconds, known.c_first, known.c, known.o, known.o_plain):
        assert value > 0
    assert (found.floor > 0) == (kind != "lookup"), "looking up multiplies nothing"


def test_targets_that_end_do_not_end_here(
    tiny_target: Target, make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if every token is an end token."""
    monkeypatch.setattr(tiny_target, "eos_ids", tuple(range(400)))
    lengths: list[int] = []
    honest = sizing.decode

    def noted(target: Target, requests: Sequence[Request], *args: Any, **options: Any) -> Any:
        outputs = honest(target, requests, *args, **options)
        lengths.append(len(outputs[0].ids))
        return outputs

    monkeypatch.setattr(sizing, "decode", noted)
    step_cost(tiny_target, make_drafter("causal", tiny_target), ROWS, **QUICK)
    assert set(lengths) == {14}


class _Short(_Delayed):
    max_positions = 10
    max_draft_tokens = 2


def test_a_drafter_without_room_is_refused(tiny_target: Target, make_drafter: MakeDrafter) -> None:
    short: Any = _Short(make_drafter("causal", tiny_target), 0, 0)
    assert limit_of(short, 5) == 2 and limit_of(short, 1) == 1
    with pytest.raises(UserError, match="family 'causal' for texts of 10 tokens drafts nothing"):
        step_costs(tiny_target, {"short": short}, ROWS, **QUICK)


@pytest.mark.parametrize("most", [13, 14])
def test_room_for_a_draft_is_what_decoding_finds(
    most: int, tiny_target: Target, make_drafter: MakeDrafter
) -> None:
    drafter: Any = _Delayed(make_drafter("causal", tiny_target), 0, 0)
    drafter.max_positions = most
    request = Request("p", "", "", tuple(range(5, 17)), Law(1.0), 0)
    (out,) = decode(tiny_target, [request], DecodeSettings(6, 2), drafter)
    if most == 14:
        sizing.check_room(drafter, 12)
        assert out.rounds[0][0] > 0
    else:
        with pytest.raises(UserError, match="drafts nothing behind 12"):
            sizing.check_room(drafter, 12)
        assert not any(drafted for drafted, _ in out.rounds)
