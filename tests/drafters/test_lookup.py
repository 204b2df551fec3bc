"""Prompt lookup: what is proposed, what is forgotten, and that replies stay the target's own."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from echoes import echoing
from torch import Tensor
from torch.nn.functional import linear

from draftsmith.configs.errors import UserError
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.records import Record, States
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.batch import collate
from draftsmith.drafters.lookup import LookupConfig, LookupDrafter
from draftsmith.eval.conformance import TOLERANCE, Bench, Case, covering
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.tree import TreeShape
from draftsmith.train.score import expected, score

SIZE = 5  # words of the random texts: few, so that they repeat themselves


def searched(text: Sequence[int], longest: int) -> int | None:
    """The same by brute force: the token behind the last match of the longest suffix found."""
    for n in range(longest, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if list(text[end - n : end]) == list(text[len(text) - n :]):
                return text[end]
    return None


def said(logits: Tensor) -> list[Any]:
    """Proposed tokens of logits `[..., V]`, nested as they are."""
    if logits.dim() > 1:
        return [said(row) for row in logits]  # type: ignore[misc]
    assert set(logits.tolist()) <= {0.0, -torch.inf}
    found = (logits == 0).nonzero().flatten().tolist()
    assert len(found) <= 1
    return found[0] if found else None


def no_taps(tokens: Tensor) -> Tensor:
    return torch.zeros(*tokens.shape, 0)


class Driven:
    """Random texts in one batch; every proposal is compared with `searched`."""

    def __init__(self, seed: int, longest: int, rows: int):
        self.rng, self.longest = random.Random(seed), longest
        self.drafter = LookupDrafter(LookupConfig(longest), SIZE)
        self.texts = [self.words(self.rng.randint(1, 9)) for _ in range(rows)]
        self.state = self.drafter.start(rows, 99)
        ids = torch.tensor([t + self.words(9 - len(t)) for t in self.texts])
        self.drafter.prefill(self.state, ids, [len(t) for t in self.texts], no_taps(ids))
        self.commit([1] * rows)

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(SIZE) for _ in range(count)]

    def check(self, found: list[Any], drafted: Sequence[Sequence[int]]) -> None:
        assert found == [
            searched([*t, *d], self.longest) for t, d in zip(self.texts, drafted, strict=True)
        ]

    def commit(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        new = [self.words(4) for _ in counts]
        for text, row, count in zip(self.texts, new, counts, strict=True):
            text += row[:count]
        tokens = torch.tensor(new)
        self.drafter.commit(self.state, tokens, counts, no_taps(tokens), path)

    def chain(self, count: int) -> None:
        """A draft of random words, right ones or not."""
        drafted: list[list[int]] = [[] for _ in self.texts]
        self.check(said(self.drafter.first(self.state)), drafted)
        for _ in range(count):
            for row in drafted:
                row += self.words(1)
            fed = torch.tensor(drafted)[:, -1:]
            self.check(said(self.drafter.extend(self.state, fed)[:, 0]), drafted)

    def tree(self, levels: int) -> None:
        """Three nodes a level, behind any that were fed before."""
        self.drafter.first(self.state)
        paths: list[list[list[int]]] = [[] for _ in self.texts]
        for _ in range(levels):
            parents = [[self.rng.randrange(-1, len(p)) if p else -1 for _ in "abc"] for p in paths]
            tokens = [self.words(3) for _ in paths]
            for known, above, new in zip(paths, parents, tokens, strict=True):
                known += [
                    [*(known[a] if a >= 0 else []), t] for a, t in zip(above, new, strict=True)
                ]
            fed = torch.tensor(tokens), torch.tensor(parents)
            found = said(self.drafter.extend(self.state, *fed))
            for i in range(3):
                self.check([row[i] for row in found], [known[i - 3] for known in paths])


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_proposals_are_those_of_a_search(longest: int) -> None:
    """Over ragged rows that keep some of what was drafted, or none, and leave the batch."""
    for seed in range(6):
        run = Driven(seed, longest, rows=4)
        for turn in range(10):
            (run.chain if turn % 2 else run.tree)(turn)
            counts = [run.rng.randint(1, 4) for _ in run.texts]
            run.commit(counts, torch.zeros(len(counts), 4, dtype=torch.long))
            if turn == 6:
                run.state.select([3, 0])
                run.texts = [run.texts[3], run.texts[0]]


def test_which_match_counts() -> None:
    """The longest suffix, then the last occurrence; drafted words are text like any other."""

    def proposed(longest: int, text: list[int], *drafted: int) -> list[Any]:
        drafter = LookupDrafter(LookupConfig(longest), 10)
        state = drafter.start(1, 20)
        ids = torch.tensor([text])
        drafter.prefill(state, ids[:, :-1], [len(text) - 1], no_taps(ids))
        drafter.commit(state, ids[:, -1:], [1], no_taps(ids))
        found = said(drafter.first(state))
        if drafted:
            found += said(drafter.extend(state, torch.tensor([drafted])))[0]
        return found

    text = [1, 2, 3, 9, 2, 4, 1, 2]
    assert proposed(1, text) == [4], "the last 2"
    assert proposed(2, text) == proposed(7, text) == [3], "1 2 is longer, though before it"
    assert proposed(3, [5, 6, 7]) == [None]
    assert proposed(3, [5]) == [None]
    assert proposed(2, [1, 2, 3, 1, 2], 3, 1, 2, 3) == [3, 1, 2, 3, 1], "beyond the text's end"
    assert proposed(2, [5, 6], 7, 5, 6) == [None, None, 6, 7], "found in the draft alone"


def test_a_token_that_does_not_exist_is_not_proposed() -> None:
    """Prompts may hold ids beyond the target's head."""
    drafter = LookupDrafter(LookupConfig(2), 6)
    state = drafter.start(1, 20)
    ids = torch.tensor([[3, 8, 3]])
    drafter.prefill(state, ids, [3], no_taps(ids))
    assert said(drafter.first(state)) == [None]


def test_scores_are_those_of_decoding() -> None:
    """Wherever a round begins, which is what `one_pass` says; and through the head's rows."""
    rng = random.Random(1)
    drafter = LookupDrafter(LookupConfig(3), SIZE)
    records = []
    for number, (prompt, reply) in enumerate(((4, 9), (7, 1), (1, 12))):
        ids = torch.tensor([rng.randrange(SIZE) for _ in range(prompt + reply)])
        states = States(torch.zeros(reply, 1), torch.zeros(reply), torch.zeros(len(ids) - 1, 0))
        records.append(Record(f"p{number}", "x", "", Law(), 0, "length", ids, prompt, states))
    batch = collate(records, ["x"])
    (step,) = drafter.unroll(batch, 4)
    assert step.token.tolist() == [*range(1, 9), *range(11, 22)]
    found = said(drafter.head(step.hidden))
    weight, bias = drafter.head_rows()
    assert said(drafter.finish_logits(linear(drafter.head_inputs(step.hidden), weight, bias))) == (
        found
    )
    wanted = []
    for record in records:
        for place in range(record.prompt_len + 1, len(record.ids)):
            wanted.append(searched(record.ids[:place].tolist(), 3))
    assert found == wanted
    assert None in found and len(set(found)) > 3


def test_expected_rounds_are_those_of_decoding(tiny_target: Target) -> None:
    """At T = 0 nothing is left to chance; a round without a proposal is one that fails."""
    requests = echoing(tiny_target, LENGTHS)
    records = answer(tiny_target, requests, GatherSettings(LIMIT, 64, (), keep="hidden"))
    drafter = LookupDrafter.from_target(tiny_target, LookupConfig(2))
    outputs = decode(tiny_target, requests, DecodeSettings(LIMIT, 3), drafter)
    scores = score(tiny_target, drafter, records, Law(0.0), 3, LIMIT)
    assert expected(scores, 3, "block").rounds.tolist() == [len(o.rounds) for o in outputs]
    assert sum(d == 0 for o in outputs for d, _ in o.rounds) > len(outputs), "without proposals"


def test_silence_overlaps_with_nothing(tiny_target: Target) -> None:
    requests = echoing(tiny_target, LENGTHS, Law(1.0))
    records = answer(tiny_target, requests, GatherSettings(LIMIT, 64, (), keep="hidden"))
    drafter = LookupDrafter.from_target(tiny_target, LookupConfig(2))
    scores = score(tiny_target, drafter, records, Law(1.0), 3, LIMIT)
    for record, found in zip(records, scores, strict=True):
        assert record.states is not None
        p = tiny_target.logits(record.states.hidden[1:]).softmax(-1)  # [N, V]
        texts = [record.ids[: record.prompt_len + r].tolist() for r in range(1, len(record.reply))]
        proposed = [searched(text, 2) for text in texts]
        overlap = sum(float(row[t]) for row, t in zip(p, proposed, strict=True) if t is not None)
        assert found.overlap[0] == (pytest.approx(overlap, abs=1e-5), len(texts))
        hits = torch.tensor([t == w for t, w in zip(proposed, record.reply[1:], strict=True)])
        assert torch.equal(found.log_ratio[:, 0] > -torch.inf, hits)


# ---- the loop

LENGTHS = [1, 9, 4, 17]
LIMIT = 24
SHAPES = [None, TreeShape(2, 3, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_output_is_that_of_plain_decoding(any_target: Target, shape: Any) -> None:
    drafter = LookupDrafter.from_target(any_target, LookupConfig())
    requests = echoing(any_target, LENGTHS)
    plain = decode(any_target, requests, DecodeSettings(LIMIT, 0))
    settings = DecodeSettings(LIMIT, 3, tree=shape)
    outputs = decode(any_target, requests, settings, drafter)
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    assert [decode(any_target, [r], settings, drafter)[0] for r in requests] == outputs
    assert any(d == 0 for d, _ in outputs[0].rounds[:-1]), "nothing to look up"
    assert sum(a for o in outputs for _, a in o.rounds) > 0, "something was accepted"
    for output, request in zip(outputs, requests, strict=True):
        text, at = list(request.ids), 1
        for drafted, accepted in output.rounds:
            known = searched([*text, *output.ids[:at]], 3)
            room = min(3, LIMIT - at - 1)
            assert drafted == (room if known is not None else 0)
            at += accepted + 1


def test_a_row_that_never_matches(tiny_target: Target) -> None:
    """Beside one that always does; its rounds are those of plain decoding."""
    ids = torch.arange(400.0)

    class Counting(Target):
        """Says the next number after each it is told, whatever the model thinks."""

        def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(ids, *args, **kwargs)
            return replace(out, hidden=ids[..., None].float())

        def logits(self, hidden: Tensor) -> Tensor:
            return -(ids - hidden - 1).abs()

    target = Counting(tiny_target.model, tiny_target.tokenizer, tiny_target.provenance, (), 400)
    drafter = LookupDrafter.from_target(target, LookupConfig())
    prompts = ((3, 4), (*range(100, 130), 100))
    requests = [Request(f"p{i}", "", "", p, Law(0.0), i) for i, p in enumerate(prompts)]
    outputs = decode(target, requests, DecodeSettings(20, 3), drafter)
    assert outputs[0].ids == list(range(5, 25)) and outputs[1].ids == list(range(101, 121))
    assert outputs[0].rounds == [(0, 0)] * 19
    assert outputs[1].rounds == [(3, 3)] * 4 + [(2, 2)]


def test_never_more_than_asked_for(tiny_target: Target) -> None:
    """Field report B086: limits below the length of a draft."""
    drafter = LookupDrafter.from_target(tiny_target, LookupConfig())
    requests = echoing(tiny_target, LENGTHS)
    for limit in (1, 2, 3, 5):
        plain = decode(tiny_target, requests, DecodeSettings(limit, 0))
        outputs = decode(tiny_target, requests, DecodeSettings(limit, 5), drafter)
        assert [o.ids for o in outputs] == [o.ids for o in plain]
        assert all(d <= max(0, limit - 2) for o in outputs for d, _ in o.rounds)


def test_the_same_text_as_transformers(tiny_target: Target) -> None:
    model: Any = tiny_target.model
    drafter = LookupDrafter.from_target(tiny_target, LookupConfig(2))
    for request in echoing(tiny_target, LENGTHS):
        ids = torch.tensor([request.ids])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            prompt_lookup_num_tokens=4,
            eos_token_id=list(tiny_target.eos_ids),
            pad_token_id=0,
        )
        (ours,) = decode(tiny_target, [request], DecodeSettings(24, 4), drafter)
        assert ours.ids == theirs[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def bench() -> Bench:
    bench = Bench()
    bench.drafters["lookup"] = LookupDrafter.from_target(bench.target, LookupConfig(2))
    return bench


# Those of many branches in batches of a row or five take long.
CASES = [replace(c, drafter="lookup", rows=4096) for c in covering()]


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_replies_keep_the_law_of_the_target(bench: Bench, case: Case) -> None:
    """Every branch of the loop, in float64."""
    assert bench.distance(case) < TOLERANCE


@pytest.mark.parametrize("longest", [0, -1])
def test_an_ngram_has_a_token(longest: int) -> None:
    with pytest.raises(UserError, match=r"max_ngram is -?\d, must be 1 or more"):
        LookupConfig(longest)
