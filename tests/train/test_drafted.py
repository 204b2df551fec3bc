"""What a drafter writes when all of its guesses are taken, against its training forward.

The token at place k of a round must be the one that step k of the unrolled drafter gives there,
with the row's own uniforms.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from renewing import DRAFTERS, copy_of, drafter_of, requests_of, serving
from scipy.stats import chisquare

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.records import Record, row_uniforms
from draftsmith.data.target import Target
from draftsmith.data.warp import log_probs, sample
from draftsmith.drafters.batch import collate
from draftsmith.train.drafted import draft_replies

LIMIT = 11

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_copy_of_the_target_writes_its_greedy_replies(
    tiny_target: Target, records: list[Record]
) -> None:
    objective = serving(LawSection(0.0))
    asked = requests_of(records, objective.law)
    made = draft_replies(tiny_target, copy_of(tiny_target), asked, [LIMIT] * len(asked), objective)
    greedy = answer(tiny_target, asked, GatherSettings(LIMIT, 8, (), "none"))
    assert len({len(r.ids) for r in greedy}) > 5
    for mine, theirs in zip(made, greedy, strict=True):
        assert torch.equal(mine.ids, theirs.ids) and mine.finish == theirs.finish
        assert (mine.prompt_len, mine.name) == (theirs.prompt_len, theirs.name)
        assert mine.origin == "drafted"


def test_a_copy_of_the_target_writes_samples_of_its_law(tiny_target: Target) -> None:
    """All 27 texts of three tokens, by their exact probabilities."""
    law, prompt, count = LawSection(1.0, top_k=3), (5, 6, 7), 3000
    objective = serving(law, num_draft_tokens=2)
    requests = [Request("p", "a", "train", prompt, objective.law, i) for i in range(count)]
    found = draft_replies(tiny_target, copy_of(tiny_target), requests, [3] * count, objective)
    texts = Counter(tuple(r.reply.tolist()) for r in found)
    assert all(len(text) == 3 for text in texts)  # no end token among them
    expected = {}

    def following(text: tuple[int, ...]) -> list[tuple[int, float]]:
        ids = torch.tensor([[*prompt, *text]])
        logits = tiny_target.model(ids).logits[0, -1:, : tiny_target.vocab_size]
        p = log_probs(logits.double(), objective.law)[0].exp()
        return [(int(t), float(p[t])) for t in p.nonzero()[:, 0]]

    for a, p_a in following(()):
        for b, p_b in following((a,)):
            for c, p_c in following((a, b)):
                expected[a, b, c] = count * p_a * p_b * p_c
    assert texts.keys() <= expected.keys() and len(expected) == 27
    assert chisquare([texts[t] for t in expected], list(expected.values())).pvalue > 1e-3


@pytest.mark.parametrize("family", DRAFTERS)
@pytest.mark.parametrize("law", [LawSection(0.0), LawSection(0.7, top_p=0.95)])
def test_each_token_is_the_one_that_the_training_forward_gives_there(
    family: str, law: LawSection, tiny_target: Target, records: list[Record]
) -> None:
    drafter, n = drafter_of(family, tiny_target, records), 3
    objective = serving(law, n)
    requests = requests_of(records[:12], objective.law)
    limits = [1 + i % 11 for i in range(12)]
    made = draft_replies(tiny_target, drafter, requests, limits, objective)
    assert [len(r.reply) for r in made] == limits or any(r.finish == "stop" for r in made)
    checked = 0
    for record in made:
        if len(record.reply) < 2:
            continue
        batch = collate([record], [record.domain])
        u = row_uniforms(record.seed, len(record.reply))
        with torch.no_grad():
            steps = drafter.unroll(batch, 1 if drafter.one_pass else n)
        for r in range(1, len(record.reply)):
            step = steps[0 if drafter.one_pass else (r - 1) % n]
            logits = drafter.head(step.hidden[step.token == r])[:, : tiny_target.vocab_size]
            column = sample(log_probs(logits, objective.law), u[r : r + 1])
            token = column if drafter.draft_ids is None else drafter.draft_ids[column]
            assert int(token) == int(record.reply[r])
            checked += 1
    assert checked > 30


def test_greedy_drafts_behind_a_sampled_first_token(
    tiny_target: Target, records: list[Record]
) -> None:
    """Where drafts are served greedy, the drafter writes what it would then propose."""
    causal = drafter_of("causal", tiny_target, records)
    objective = serving(LawSection(1.0), 3, "greedy")
    asked = [replace(r, seed=i) for i, r in enumerate(requests_of(records[:1] * 6, objective.law))]
    made = draft_replies(tiny_target, causal, asked, [8] * 6, objective)
    assert len({int(r.reply[0]) for r in made}) > 1
    for record in made:
        batch = collate([record], [record.domain])
        with torch.no_grad():
            (step,) = causal.unroll(batch, 1)
        assert causal.head(step.hidden).argmax(-1).tolist() == record.reply[1:].tolist()


def test_a_drafter_that_has_diverged_is_named(tiny_target: Target, records: list[Record]) -> None:
    objective, drafter = serving(LawSection(1.0)), drafter_of("causal", tiny_target, records)
    drafter.trainable()[-1].data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"draft's logits are not finite.*train\.lr"):
        asked = requests_of(records[:2], objective.law)
        draft_replies(tiny_target, drafter, asked, [5, 5], objective)
