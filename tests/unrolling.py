"""The unrolled training pass of any family beside its decode protocol, on known conversations."""

import random
from collections.abc import Callable, Sequence

import torch
from drafting import propose
from torch import Tensor

from draftsmith.data.gather import recompute_states
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter, Step, TrainBatch
from draftsmith.drafters.batch import collate

STEPS = 4
PROMPTS, REPLIES = (5, 9), (12, 7)
TOLERANCE = 1e-4


def conversations(
    target: Target,
    taps: tuple[int, ...],
    prompts: Sequence[int] = PROMPTS,
    replies: Sequence[int] = REPLIES,
) -> list[Record]:
    """Random conversations with the target's true states, computed row by row."""
    rng = random.Random(11)
    records = []
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        ids = torch.tensor([rng.randrange(3, 400) for _ in range(prompt + reply)])
        bare = Record(f"p{number}", "chat", "train", Law(), number, "length", ids, prompt, None)
        records += recompute_states(target, [bare], taps)
    return records


def taps_of(record: Record) -> Tensor:
    assert record.states is not None
    return record.states.taps


def unrolled(
    drafter: Drafter, batch: TrainBatch, steps: int = STEPS
) -> list[dict[tuple[int, int], Tensor]]:
    """Logits `[V_d]` of every step by (conversation, reply token)."""
    with torch.no_grad():
        return [
            by_token(batch, step, drafter.head(step.hidden, step.head))
            for step in drafter.unroll(batch, steps)
        ]


def by_token(batch: TrainBatch, step: Step, values: Tensor) -> dict[tuple[int, int], Tensor]:
    assert step.token.tolist() == sorted(set(step.token.tolist()))
    ends = (batch.first + batch.reply_lens).tolist()
    found = {}
    for token, value in zip(step.token.tolist(), values, strict=True):
        row = next(b for b, end in enumerate(ends) if token < end)
        found[row, token - int(batch.first[row])] = value
    return found


class Decoding:
    """Drives the decode protocol over known conversations; rows leave when they have said all."""

    def __init__(self, drafter: Drafter, records: Sequence[Record], steps: int = STEPS):
        self.drafter, self.records, self.steps = drafter, list(records), steps
        self.width = taps_of(records[0]).shape[1]
        self.said = [0 for _ in records]
        self.places = list(range(len(records)))
        lengths = [r.prompt_len for r in records]
        ids = torch.full((len(records), max(lengths)), 7)
        taps = torch.full((len(records), max(lengths), self.width), 50.0)
        for b, record in enumerate(records):
            ids[b, : lengths[b]] = record.ids[: lengths[b]]
            taps[b, : lengths[b]] = taps_of(record)[: lengths[b]]
        self.state = drafter.start(len(records), 40)
        with torch.no_grad():
            drafter.prefill(self.state, ids, lengths, taps)

    def emit(self, counts: Sequence[int]) -> None:
        """Commit the next true tokens; behind the counted ones stand others, with other states."""
        width = max(counts) + 1
        tokens = torch.full((len(counts), width), 9)
        taps = torch.full((len(counts), width, self.width), -30.0)
        for b, (record, count) in enumerate(zip(self.records, counts, strict=True)):
            at = record.prompt_len + self.said[b]
            tokens[b, :count] = record.ids[at : at + count]
            taps[b, :count] = taps_of(record)[at - 1 : at - 1 + count]
            self.said[b] += count
        self.drafter.commit(self.state, tokens, counts, taps)
        keep = [row for row in range(len(self.records)) if self.left(row)]
        self.state.select(keep)
        for name in ("records", "said", "places"):
            setattr(self, name, [getattr(self, name)[row] for row in keep])

    def draft(self, right: Sequence[int]) -> list[dict[tuple[int, int], Tensor]]:
        """Draft `steps` tokens, each row's first `right` the true ones: logits of each step by
        (row, reply token it proposes)."""
        logits: list[Tensor] = []

        def draw(step: Tensor, k: int) -> Tensor:
            assert k == len(logits)
            logits.append(step)
            tokens = []
            for b, record in enumerate(self.records):
                reply, r = record.reply.tolist(), self.said[b] + k
                tokens.append(reply[r] if k < right[b] and r < len(reply) else 11)
            return torch.tensor(tokens)

        with torch.no_grad():
            drafted = propose(self.drafter, self.state, self.steps, draw)
        assert drafted.shape == (len(self.records), self.steps)
        return [
            {(self.places[b], self.said[b] + k): row for b, row in enumerate(step)}
            for k, step in enumerate(logits)
        ]

    def left(self, row: int) -> int:
        return len(self.records[row].reply) - self.said[row]


def assert_parity(
    drafter: Drafter,
    records: Sequence[Record],
    accept: Callable[[int, int], int],
    steps: int = STEPS,
) -> None:
    """Decode with `accept(round, row)` accepted tokens a round: every right draft step's logits
    must be those of the same unrolled step."""
    expected = unrolled(drafter, collate(records, ["chat"]), steps)
    run = Decoding(drafter, records, steps)
    run.emit([1] * len(records))
    compared: set[tuple[int, int, int]] = set()
    number = 0
    while run.records:
        accepted = [accept(number, place) for place in run.places]
        for k, step in enumerate(run.draft(accepted)):
            for (place, r), logits in step.items():
                row = run.places.index(place)
                if k > accepted[row] or r >= len(run.records[row].reply):
                    continue  # behind a wrong token, or behind the end
                assert (logits - expected[k][place, r]).abs().max() < TOLERANCE, (k, place, r)
                compared.add((k, place, r))
        run.emit([min(a + 1, run.left(row)) for row, a in enumerate(accepted)])
        number += 1
    assert {(k, place) for k, place, _ in compared} >= {(0, p) for p in range(len(records))}
    if accept(0, 0) == steps:
        assert {k for k, _, _ in compared} == set(range(steps))


def assert_trees(
    drafter: Drafter, records: Sequence[Record], said: Sequence[int], reads_drafts: bool = True
) -> None:
    """Nodes of a tree, two at a time, behind `said` tokens of each reply and one after a round.

    The true tokens' say what the unrolled steps do, a wrong one's what a chain with it says; that
    is something else if the drafter reads what it drafted.
    """
    expected = unrolled(drafter, collate(records, ["chat"]))
    parents = torch.tensor([[-1, -1], [0, 1], [3, 2], [4, 0]])
    wrong = 11
    for emitted in ([list(said)], [[1] * len(said), [n - 1 for n in said]]):
        run, chain = Decoding(drafter, records), Decoding(drafter, records)
        for counts in emitted:
            for each in (run, chain):
                each.emit(counts)
                each.draft([0] * len(records))  # of which nothing stays
        for each in (run, chain):
            each.emit([1] * len(records))
        true = torch.stack([r.reply[s : s + 4] for r, s in zip(run.records, run.said, strict=True)])
        others = torch.full_like(true[:, 0], wrong)
        # A wrong token and the true one at the first three depths, each wrong one a leaf but the
        # first, whose child is true; last comes a wrong child of the first.
        fed = [
            (others, true[:, 0]), (true[:, 1], true[:, 1]), (true[:, 2], others),
            (true[:, 3], others),
        ]  # fmt: skip
        with torch.no_grad():
            first = drafter.first(run.state)
            found = []
            for tokens, above in zip(fed, parents, strict=True):
                pair = torch.stack(tokens, 1)
                found.append(drafter.extend(run.state, pair, above.expand(len(pair), -1)))
            behind = [drafter.first(chain.state)]
            for tokens in (others, true[:, 1], others):
                behind.append(drafter.extend(chain.state, tokens[:, None])[:, 0])
        for b, start in enumerate(run.said):
            right = [first[b], found[0][b, 1], found[1][b, 1], found[2][b, 0]]
            for k, logits in enumerate(right):
                assert (logits - expected[k][b, start + k]).abs().max() < TOLERANCE, (b, k)
            astray = [first[b], found[0][b, 0], found[1][b, 0], found[2][b, 1]]
            for k, logits in enumerate(astray):
                assert (logits - behind[k][b]).abs().max() < TOLERANCE, (b, k)
            apart = (right[2] - astray[2]).abs().max()
            assert apart > 100 * TOLERANCE if reads_drafts else apart < TOLERANCE


def assert_packed(drafter: Drafter, records: Sequence[Record]) -> None:
    """In packed rows, every step says of every conversation what it says in rows of one each."""
    alone = collate(records, ["chat"])
    together = collate(records, ["chat"], packed=True, width=sum(len(r.ids) for r in records))
    assert together.packed
    for one, other in zip(unrolled(drafter, alone), unrolled(drafter, together), strict=True):
        mine = {(alone.keys[c], r): logits for (c, r), logits in one.items()}
        theirs = {(together.keys[c], r): logits for (c, r), logits in other.items()}
        assert mine.keys() == theirs.keys()
        assert all((mine[at] - theirs[at]).abs().max() < TOLERANCE for at in mine)
