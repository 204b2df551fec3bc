"""The target's distribution on the draft vocabulary, from stored states."""

import pytest
import torch

from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs
from draftsmith.drafters.batch import collate
from draftsmith.drafters.distribution import DraftVocabularyP, reply_columns

IDS = torch.tensor([0, 2, 5, 9, 77, 131, 250, 251, 399])


def states(records: list[Record]) -> tuple[torch.Tensor, torch.Tensor]:
    kept = [r.states for r in records if r.states is not None]
    return torch.cat([s.hidden for s in kept]), torch.cat([s.log_z for s in kept])


@pytest.mark.parametrize("law", [Law(1.0), Law(0.7), Law(1.0, top_k=5), Law(0.7, top_p=0.8)])
@pytest.mark.parametrize("reduced", [True, False])
def test_p_is_the_full_softmax_gathered(
    law: Law, reduced: bool, tiny_target: Target, records: list[Record]
) -> None:
    hidden, log_z = states(records)
    full = log_probs(tiny_target.logits(hidden).double(), law)  # [R, V]
    ids = IDS if reduced else None
    found = DraftVocabularyP(tiny_target, ids, law)(hidden, log_z)
    expected = full if ids is None else full[:, ids]
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(found.exp().double(), expected.exp(), rtol=1e-5, atol=1e-7)
    mass = found.exp().sum(-1)
    assert bool((mass < 0.99).any()) if reduced else torch.allclose(mass, torch.ones_like(mass))


def test_reply_tokens_came_from_these_distributions(
    tiny_target: Target, records: list[Record]
) -> None:
    """Row j of the states predicts reply token j: shifted by one, the likelihood is far worse."""
    long = [r for r in records if len(r.reply) > 4 and r.law == Law(1.0)]
    hidden, log_z = states(long)
    table = DraftVocabularyP(tiny_target, None, Law(1.0))(hidden, log_z)
    said = torch.cat([r.reply for r in long])
    right = table.gather(1, said[:, None]).mean()
    shifted = table[:-1].gather(1, said[1:, None]).mean()
    assert right > shifted + 0.5


@pytest.mark.parametrize("reduced", [True, False])
def test_mixed_precision_leaves_p_alone(
    reduced: bool, tiny_target: Target, records: list[Record]
) -> None:
    hidden, log_z = states(records)
    p = DraftVocabularyP(tiny_target, IDS if reduced else None, Law(1.0))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = p(hidden, log_z)
    assert torch.equal(rounded, p(hidden, log_z))


def test_columns_of_the_reply_tokens(records: list[Record]) -> None:
    batch = collate(records, ("a", "b"))
    said = [int(t) for r in records for t in r.reply]
    known = torch.tensor(sorted(set(said))[::2])
    column = reply_columns(batch, known, len(known))
    place = {int(token): i for i, token in enumerate(known)}
    assert column.tolist() == [place.get(token, -1) for token in said]
    assert reply_columns(batch, None, 400).tolist() == said
    assert reply_columns(batch, None, 200).tolist() == [t if t < 200 else -1 for t in said]
