"""Reduced draft vocabularies hold the tokens of largest target mass, and every special one."""

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters import vocab
from draftsmith.drafters.vocab import captured_mass, choose_draft_ids, special_ids


def record(words: list[int], hidden: torch.Tensor | None, domain: str = "chat") -> Record:
    states = None
    if hidden is not None:
        states = States(hidden, torch.zeros(len(hidden)), torch.zeros(len(words) + 1, 0))
    ids = torch.tensor([5, 6, *words])
    return Record("p", domain, "train", Law(), 0, "stop", ids, 2, states)


def test_the_largest_and_the_special_in_ascending_order() -> None:
    mass = torch.tensor([[0.0, 5.0, 1.0, 9.0, 0.0, 7.0, 0.5]]).double()
    assert choose_draft_ids(mass, 4, [4, 0], 0.5).tolist() == [0, 3, 4, 5]
    assert choose_draft_ids(mass, 2, [4, 0], 0.5).tolist() == [0, 4]
    assert choose_draft_ids(mass, 3, [], 0.5).tolist() == [1, 3, 5]
    assert choose_draft_ids(mass, 7, [0], 0.5).tolist() == list(range(7))
    assert mass.isfinite().all()  # left as it was


def test_every_domain_has_its_share() -> None:
    """A small domain's words would lose to a large one's tail (B125)."""
    mass = torch.tensor([[90.0, 80.0, 70.0, 60.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 2.0, 1.0]])
    assert choose_draft_ids(mass, 4, [], 0.0).tolist() == [0, 1, 2, 3]
    assert choose_draft_ids(mass, 4, [], 0.5).tolist() == [0, 1, 2, 4]
    assert choose_draft_ids(mass, 4, [], 1.0).tolist() == [0, 1, 4, 5]
    assert choose_draft_ids(mass, 5, [3], 1.0).tolist() == [0, 1, 3, 4, 5]


def test_places_a_domain_cannot_fill_are_not_wasted_on_tokens_it_never_says() -> None:
    mass = torch.tensor([[0.0, 5.0, 4.0, 3.0], [1.0, 0.0, 0.0, 0.0]])
    assert choose_draft_ids(mass, 4 - 1, [], 1.0).tolist() == [0, 1, 2]


def test_sizes_out_of_range() -> None:
    with pytest.raises(UserError, match="8 exceeds the target's 7"):
        choose_draft_ids(torch.ones(1, 7), 8, [], 0.5)
    with pytest.raises(UserError, match="1 cannot hold the 2 special"):
        choose_draft_ids(torch.ones(1, 7), 1, [0, 4], 0.5)


def test_mass_is_what_the_target_would_say(tiny_target: Target) -> None:
    hidden = torch.randn(5, 32)
    records = [
        record([9, 10, 11], hidden[:3]),
        record([12, 12], hidden[3:]),
        record([9, 9], None, "b"),
    ]
    with torch.no_grad():
        logits = tiny_target.model.lm_head(hidden).double()
    expected = torch.zeros(2, 400).double()
    expected[1] = logits.softmax(-1)[[1, 2, 4]].sum(0)  # a reply's first token is never drafted
    expected[0, 9] = 1  # without states the words themselves count
    mass = captured_mass(tiny_target, records)
    assert mass.shape == (2, 400), "a row a domain, by name"
    assert mass.dtype == torch.float64
    assert torch.allclose(mass, expected, atol=1e-5)
    assert float(mass.sum()) == pytest.approx(4, abs=1e-4)


def test_parts_and_strides(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(list(range(10, 31)), torch.randn(21, 32)) for _ in range(2)]
    whole = captured_mass(tiny_target, records)
    monkeypatch.setattr(vocab, "_ROWS", 3)
    assert torch.allclose(captured_mass(tiny_target, records), whole)
    monkeypatch.setattr(vocab, "_POSITIONS", 10)  # every fourth of forty
    thinned = captured_mass(tiny_target, records)
    assert float(thinned.sum()) == pytest.approx(10, abs=1e-4)


def test_the_stride_runs_on_over_records(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short replies and a long stride: not always the same place of a reply."""
    hidden = torch.zeros(12, 4, 32)
    hidden[:, 1], hidden[:, 2], hidden[:, 3] = torch.randn(3, 32).unbind()
    records = [record([9, 9, 9, 9], h) for h in hidden]
    monkeypatch.setattr(vocab, "_POSITIONS", 9)  # every fourth of 36
    with torch.no_grad():
        each = tiny_target.model.lm_head(hidden[0, 1:]).double().softmax(-1)
    assert torch.allclose(captured_mass(tiny_target, records), 3 * each.sum(0)[None], atol=1e-5)


def test_end_tokens_are_special(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert special_ids(tiny_target) == [0, 1, 2]
    monkeypatch.setattr(tiny_target, "eos_ids", (7, 2, 4000))  # 4000 is no token
    assert special_ids(tiny_target) == [0, 1, 2, 7]
