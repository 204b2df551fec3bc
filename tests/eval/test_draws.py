"""Chance itself: draws follow their weights, rows their own seeds; `branches` misses nothing."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftsmith.data.warp import pick
from draftsmith.eval import kernels
from draftsmith.eval.branches import Script, branches
from draftsmith.eval.conformance import Bench
from draftsmith.eval.draws import Draws, Streams
from draftsmith.eval.kernels import LEAST, bonferroni, kernel_p_values, loop_p_values, real_streams
from draftsmith.eval.lossless import total_variation

CPU = torch.device("cpu")


def everywhere(rows: int) -> Tensor:
    return torch.ones(rows, dtype=torch.bool)


# ---- the kernels follow their laws


def test_kernels_follow_their_laws() -> None:
    p_values = kernel_p_values()
    assert bonferroni(p_values) > LEAST, p_values
    assert all(0 < p <= 1 for p in p_values.values())


def test_replies_on_real_streams_follow_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SEEDS", 1500)
    p_values = loop_p_values(Bench())
    assert len(p_values) == len(kernels.LOOPS)
    assert bonferroni(p_values) > LEAST, p_values


def test_correction_for_many_tests() -> None:
    assert bonferroni({"a": 0.02, "b": 0.5}) == pytest.approx(0.04)
    assert bonferroni({"a": 0.6, "b": 0.7}) == 1.0
    assert bonferroni({"a": 0.6, "b": math.nan}) == 0.0, "what could not be tested did not pass"


@dataclass
class Faulty:
    """Real streams with one fault."""

    real: Streams
    fault: str

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        if self.fault == "coins of few bits":
            p = (p * 64).round() / 64
        coins = self.real.bernoulli(p, where)
        if self.fault == "uniforms used twice":
            self.real.used -= where.sum(1)
        return coins

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        if self.fault == "softmax of weights":
            weights = weights.softmax(-1)
        elif self.fault == "weights of 0 are possible":
            weights = weights + 1e-3 * weights.amax(1, keepdim=True)
        ids = self.real.categorical(weights, where)
        if self.fault == "uniforms used twice":
            self.real.used -= where.long()
        return ids

    def select(self, rows: Sequence[int]) -> None:
        self.real.select(rows)


FAULTS: dict[str, Callable[[Sequence[int]], Draws]] = {
    "one seed for two rows": lambda seeds: Streams([s // 2 for s in seeds], CPU),
    **{
        fault: lambda seeds, fault=fault: Faulty(Streams(seeds, CPU), fault)  # type: ignore[misc]
        for fault in (
            "uniforms used twice",
            "coins of few bits",
            "softmax of weights",
            "weights of 0 are possible",
        )
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_kernels_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p_values = kernel_p_values(FAULTS[fault])
    assert bonferroni(p_values) < LEAST, p_values


def test_pick_at_the_edges() -> None:
    """u = 0 and the largest u below 1, weights of 0 at both ends, tiny ones beside huge ones."""
    last = 1 - 2**-53
    weights = torch.tensor([0.0, 1e-30, 0.0, 1.0, 1e-8, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 1e-31, 0.5, last, 1 - 1e-9], dtype=torch.float64)
    ids = pick(weights.expand(5, -1), u)
    assert ids.tolist() == [1, 1, 3, 4, 4]
    for scale in (1e-300, 1e300):
        assert pick((weights * scale).clamp_min(0).expand(5, -1)[2:], u[2:]).tolist() == [3, 4, 4]
    one = torch.zeros(2, 1000)
    one[0, 0] = one[1, 999] = 1e-30
    for extreme in (0.0, last):
        assert pick(one, torch.full((2,), extreme, dtype=torch.float64)).tolist() == [0, 999]


def test_every_token_of_a_float32_tail_has_its_place() -> None:
    """50,000 tokens share a thousandth: their steps are below what float32 tells apart near 1."""
    weights = torch.full((50_000,), 1e-3 / 49_999)
    weights[0] = 1 - 1e-3
    first, each = float(weights[0]), float(weights[1])
    total = first + 49_999 * each
    wanted = torch.arange(10, 49_990, 1249)
    u = (first + (wanted.double() - 0.5) * each) / total  # the middle of each token's share
    assert torch.equal(pick(weights.expand(len(u), -1), u), wanted)
    single = torch.searchsorted(weights.cumsum(0), u.float(), right=True)
    assert not torch.equal(single, wanted), "float32 would not do"


# ---- rows are their own


def played(streams: Streams, row: int, steps: int) -> list[int]:
    """What one row gets when it draws at steps of its own; others only where it does not."""
    found = []
    weights, p = torch.ones(len(streams.used), 1000), torch.full((len(streams.used), 2), 0.5)
    for step in range(steps):
        where = everywhere(len(weights))
        where[row] = step % 3 > 0
        ids = streams.categorical(weights, where)
        coins = streams.bernoulli(p, where[:, None] & torch.tensor([True, step % 2 > 0]))
        if where[row]:
            found += [int(ids[row]), *coins[row].tolist()]
        else:
            assert ids[row] == 0 and not coins[row].any(), "nothing is decided off `where`"
    return found


def test_a_row_does_not_feel_its_neighbours() -> None:
    """Alone, in company, and at another place: beyond the first chunk of uniforms, too."""
    alone = played(Streams([7], CPU), 0, 300)
    assert played(Streams([1, 7, 3], CPU), 1, 300) == alone
    assert played(Streams([7, 7], CPU), 1, 300) == alone
    assert played(Streams([8], CPU), 0, 300) != alone


def test_rows_keep_their_streams_when_others_leave() -> None:
    """Rows have used unequally many uniforms, leave, and come in another order."""
    lead = [3, 0, 5, 2]
    alone = []
    for row, seed in enumerate((10, 11, 12, 13)):
        stream = Streams([seed], CPU)
        for _ in range(lead[row]):
            stream.categorical(torch.ones(1, 9), everywhere(1))
        alone.append([int(stream.categorical(torch.ones(1, 1000), everywhere(1))) for _ in "abc"])
    streams = Streams([10, 11, 12, 13], CPU)
    for step in range(max(lead)):
        streams.categorical(torch.ones(4, 9), torch.tensor(lead) > step)
    streams.select([3, 0, 2])
    after = [streams.categorical(torch.ones(3, 1000), everywhere(3)).tolist()]
    streams.select([2, 0])
    after += [streams.categorical(torch.ones(2, 1000), everywhere(2)).tolist() for _ in "bc"]
    assert after[0] == [alone[3][0], alone[0][0], alone[2][0]]
    assert after[1:] == [[alone[2][i], alone[3][i]] for i in (1, 2)]


def test_no_uniform_is_used_twice() -> None:
    """The uniforms behind all decisions of a row are those of its generator, in order."""
    own = torch.rand(700, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    streams, at = Streams([4, 5], CPU), 0
    for step in range(200):
        where = torch.tensor([[True, False, True], [True, step % 2 > 0, True]])
        coins = streams.bernoulli(torch.full((2, 3), 0.5), where)[1]
        n = int(where[1].sum())
        assert coins[where[1]].tolist() == (own[at : at + n] < 0.5).tolist()
        at += n
        drawn = streams.categorical(torch.ones(2, 1 << 12), everywhere(2))[1]
        assert int(drawn) == int(own[at] * (1 << 12))
        at += 1
    assert int(streams.used[1]) == at == len(own)


def test_coins_that_are_certain() -> None:
    coins = real_streams(range(500)).bernoulli(
        torch.tensor([[0.0, 1.0, 1.0]]).expand(500, -1),
        torch.tensor([[True, True, False]]).expand(500, -1),
    )
    assert not coins[:, 0].any() and coins[:, 1].all() and not coins[:, 2].any()


# ---- every branch

Outcome = tuple[int, ...]


def urn(draws: Draws, case: Tensor) -> list[Outcome]:
    """Case c: balls 1, 2, 3 without replacement, a coin of chance 0.3 after each whether to stop
    (never for c = 1), at most 3 balls. Rows go on for different times, and those done leave."""
    rows = list(range(len(case)))
    found: list[Outcome] = [()] * len(rows)
    left = torch.ones(len(rows), 1) * torch.tensor([1.0, 2.0, 3.0])
    for turn in range(3):
        ids = draws.categorical(left, everywhere(len(rows)))
        left.scatter_(1, ids[:, None], 0.0)
        for row, ball in zip(rows, ids.tolist(), strict=True):
            found[row] += (ball,)
        may = (case[rows] != 1) & (turn < 2)
        p = torch.full((len(rows), 1), 0.3, dtype=torch.float64)
        stop = draws.bernoulli(p, may[:, None])[:, 0]
        kept = [i for i, s in enumerate(stop.tolist()) if not s]
        if not kept:
            break
        draws.select(kept)
        rows, left = [rows[i] for i in kept], left[kept]
    return found


def urn_law(case: int) -> dict[Outcome, float]:
    """The same by hand."""
    law = {}
    for order in itertools.permutations(range(3)):
        weights = [order[0] + 1, order[1] + 1, order[2] + 1]
        chance = weights[0] / 6 * weights[1] / (6 - weights[0])
        if case == 1:
            law[order] = chance
            continue
        law[order] = chance * 0.49
        law[order[:2]] = chance * 0.7 * 0.3
        law[order[:1]] = weights[0] / 6 * 0.3
    return law


@pytest.mark.parametrize("rows", [4096, 5, 1])
def test_all_branches_of_a_known_process(rows: int) -> None:
    laws: list[dict[Outcome, float]] = [{}, {}, {}]
    leaves = 0
    for outcomes, case, chance in branches(3, urn, rows):
        assert len(outcomes) == len(case) == len(chance) <= rows
        for x, c, mass in zip(outcomes, case.tolist(), chance.tolist(), strict=True):
            assert x not in laws[c], "each branch once"
            laws[c][x] = mass
            leaves += 1
    assert leaves == 15 + 6 + 15
    for c, law in enumerate(laws):
        assert math.fsum(law.values()) == pytest.approx(1.0, abs=1e-14)
        assert law == pytest.approx(urn_law(c), abs=1e-14)


def test_what_is_certain_is_no_branch() -> None:
    def sure(draws: Draws, case: Tensor) -> list[Outcome]:
        coins = draws.bernoulli(torch.tensor([[0.0, 1.0, 2.0]]), torch.ones(1, 3) > 0)
        one = draws.categorical(torch.tensor([[0.0, 5.0, 0.0]]), everywhere(1))
        none = draws.categorical(torch.ones(1, 3), ~everywhere(1))
        return [(*coins[0].tolist(), int(one), int(none))]

    ((outcomes, _, chance),) = list(branches(1, sure))
    assert outcomes == [(False, True, True, 1, 0)] and chance.tolist() == [1.0]


def test_a_process_with_chance_of_its_own_is_caught() -> None:
    """What it decides outside of `Draws` is played once a branch. Chances still add up to 1, but
    the law is not the process's own, and another one each time."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.2, 0.3, 0.5])

    def hidden(draws: Draws, case: Tensor) -> list[Outcome]:
        first = draws.categorical(p.expand(len(case), -1), everywhere(len(case)))
        second = torch.multinomial(p, len(case), replacement=True, generator=generator)
        return list(zip(first.tolist(), second.tolist(), strict=True))

    laws = [Counter[Outcome](), Counter[Outcome]()]
    for law in laws:
        for outcomes, _, chance in branches(1, hidden):
            law.update(dict(zip(outcomes, chance.tolist(), strict=True)))
    truth = {(a, b): float(p[a] * p[b]) for a in range(3) for b in range(3)}
    assert all(sum(law.values()) == pytest.approx(1) for law in laws)
    assert all(total_variation(law, truth) > 0.1 for law in laws)
    assert laws[0] != laws[1]


def test_scripts_are_followed() -> None:
    """A script decides what it holds; where it ends, the first possible outcome is taken."""
    script = Script(
        torch.tensor([[2, 1], [0, 0]]), torch.tensor([2, 0]), torch.ones(2, dtype=torch.float64)
    )
    weights = torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, 3.0]])
    assert script.categorical(weights, everywhere(2)).tolist() == [2, 1]
    coins = script.bernoulli(torch.tensor([[0.25], [0.25]]), torch.ones(2, 1) > 0)
    assert coins.flatten().tolist() == [True, False]
    assert script.chance.tolist() == [1.0, 0.25 * 0.75], "what a script holds is in its chance"
    scripts, lengths, chances, row = script.further()
    assert row.tolist() == [1, 1] and lengths.tolist() == [1, 2]
    assert scripts[0, :1].tolist() == [2] and scripts[1, :2].tolist() == [1, 1]
    assert chances.tolist() == [0.75, 0.25 * 0.25]
