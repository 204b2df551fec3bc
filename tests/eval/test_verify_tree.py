"""The acceptance rules on trees: exact laws of a round, planted faults, independence.

A round is the real thing: a tree is grown by a scripted drafter, verified by the rule, and every
branch of every draw is walked with its probability. Rows of one batch stand for different branches,
contexts and tree sizes, so a law comes out right only if rows do not disturb each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trees import Table, Tokens, laws_of, node_paths, reader

from draftsmith.data.warp import Law, log_probs
from draftsmith.eval import verify
from draftsmith.eval.draws import Draws, Streams
from draftsmith.eval.lossless import total_variation
from draftsmith.eval.tree import Extend, Tree, TreeShape, grow, grow_sampled
from draftsmith.eval.verify_tree import TreeRule, greedy_tree, tree

Plant = Callable[[Tensor, Extend, Tensor, Draws], Tree]
"""(first, extend, room, draws) -> a grown tree."""


pytestmark = pytest.mark.usefixtures("one_thread")


# ---- one round with a scripted target and drafter

CASES: list[tuple[Tokens, int]] = [((0,), 3), ((1,), 2), ((2,), 1), ((0, 1), 0)]
"""(context, deepest node allowed) of each row."""
LENGTH = 4


def bias(p: Table, q: Table, plant: Plant, rule: TreeRule) -> float:
    """Largest distance in any case between a round's output and the target's own.

    The output of one round is carried on to LENGTH tokens by plain sampling.
    """

    def run(cases: list[int], draws: Draws) -> list[Tokens]:
        roots, rooms = [CASES[c][0] for c in cases], [CASES[c][1] for c in cases]
        first = q.all([[root] for root in roots])[:, 0]
        grown = plant(first, reader(q, roots), torch.tensor(rooms), draws)
        count, paths = grown.tokens.shape[1], node_paths(grown)
        log_p = p.all(  # what stands behind the padding has no meaning
            [
                [root, *(root + x for x in nodes), *[(9,)] * (count - len(nodes))]
                for root, nodes in zip(roots, paths, strict=True)
            ]
        )
        laws = grown.tokens, grown.parents, grown.log_q, log_p, grown.size
        path, accepted, following = (x.tolist() for x in rule(*laws, draws))
        emitted = []
        for row, n in enumerate(accepted):
            end = paths[row][path[row][n - 1]] if n else ()
            assert len(end) == n and set(path[row][n:]) <= {-1}
            emitted.append((*end, following[row]))
        return emitted

    worst = 0.0
    for (root, room), law in zip(CASES, laws_of(run, len(CASES)), strict=True):
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
        assert max(map(len, law)) <= room + 1
        ours, want = carried_on(p, root, law), carried_on(p, root, {(): 1.0})
        worst = max(worst, total_variation(ours, want))
    return worst


def carried_on(p: Table, root: Tokens, law: dict[Tokens, float]) -> dict[Tokens, float]:
    """The law of outputs after `root`, continued to LENGTH tokens."""
    for n in range(LENGTH):
        longer: dict[Tokens, float] = {}
        for x, mass in law.items():
            ends = enumerate(p(root + x).exp().tolist()) if len(x) <= n else [(None, 1.0)]
            for token, chance in ends:
                longer_x = x if token is None else (*x, token)
                longer[longer_x] = longer.get(longer_x, 0.0) + mass * chance
        law = longer
    return law


def dynamic(width: int, depth: int, budget: int) -> Plant:
    shape = TreeShape(width, depth, budget)
    return lambda first, extend, room, draws: grow(
        first, extend, shape, lambda z: z.log_softmax(-1), room
    )


def sampled(*shape: int, law: Law = Law()) -> Plant:  # noqa: B008
    return lambda first, extend, room, draws: grow_sampled(
        first, extend, shape, lambda z: log_probs(z, law), room, draws, first.shape[1]
    )


def then(plant: Plant, change: Callable[[Tree], Tree]) -> Plant:
    return lambda *planted: change(plant(*planted))


def own_log_q(grown: Tree) -> Tensor:
    """Each node's log-probability under the law it was drawn from, `[B, N]`."""
    assert grown.log_q is not None
    return grown.log_q.gather(2, grown.tokens[..., None]).squeeze(2)


# ---- the literal rule, and faults of it

Update = Callable[[Tensor, Tensor], Tensor]
"""What a refusal leaves of p: `(p [B, V], q [B, V]) -> [B, V]`."""


def by_definition(update: Update) -> TreeRule:
    """Recursive rejection in plain words, whole laws at every step."""

    def rule(
        tokens: Tensor,
        parents: Tensor,
        log_q: Tensor | None,
        log_p: Tensor,
        size: Tensor,
        draws: Draws,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(len(tokens))
        node, path, p = torch.full_like(size, -1), torch.full_like(tokens, -1), log_p[:, 0].exp()
        accepted = torch.zeros_like(size)
        for i, x in enumerate(tokens.unbind(1)):
            tried = (parents[:, i] == node) & (i < size)
            q = torch.eye(p.shape[1]).double()[x] if log_q is None else log_q[:, i].exp()
            chance = (p[rows, x] / q[rows, x]).clamp_max(1)
            passed = draws.bernoulli(chance[:, None], tried[:, None])[:, 0]
            left = update(p, q)
            left = torch.where(left.sum(1, keepdim=True) > 0, left, p)
            p = torch.where((tried & ~passed)[:, None], left, p)
            p = torch.where(passed[:, None], log_p[:, i + 1].exp(), p)
            node = torch.where(passed, i, node)
            path[rows[passed], accepted[passed]] = i
            accepted = accepted + passed
        return path, accepted, draws.categorical(p, torch.ones_like(tried))

    return rule


def left_over(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp_min(0)
    return left / left.sum(1, keepdim=True)


PLANTS: dict[str, tuple[int, Plant]] = {  # size of the vocabulary, tree
    "wide": (4, dynamic(3, 2, 7)),
    "deep": (4, dynamic(2, 3, 6)),
    "all there is": (3, dynamic(3, 2, 20)),
    "sampled wide": (3, sampled(3, 1)),
    "sampled pairs": (3, sampled(2, 2)),
    "sampled deep": (3, sampled(2, 1, 1)),
    "sampled few": (4, sampled(3)),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_round_keeps_the_targets_law(name: str) -> None:
    size, plant = PLANTS[name]
    assert bias(Table(1, size), Table(2, size), plant, tree) <= 1e-12


@pytest.mark.parametrize("law", [Law(top_k=2), Law(0.7, top_p=0.6), Law(top_k=1)])
def test_laws_with_empty_supports(law: Law) -> None:
    """Tokens the target never says, and drafts that run out of tokens, differently by context."""
    p, q = Table(3, law=Law(top_k=2)), Table(4, law=law)
    for plant in (dynamic(3, 2, 7), sampled(3, 1, law=law), sampled(2, 1, 1, law=law)):
        assert bias(p, q, plant, tree) <= 1e-12


@pytest.mark.parametrize("name", ["deep", "sampled few"])
def test_the_definition_is_exact_too(name: str) -> None:
    """What the faults below are planted into."""
    size, plant = PLANTS[name]
    assert bias(Table(1, size), Table(2, size), plant, by_definition(left_over)) <= 1e-12


def test_deterministic_children_are_children_of_one_hot_laws() -> None:
    def one_hot(grown: Tree) -> Tree:
        return replace(grown, log_q=torch.nn.functional.one_hot(grown.tokens, 4).double().log())

    assert bias(Table(1), Table(2), then(dynamic(3, 2, 7), one_hot), tree) <= 1e-12


def unchanged(p: Tensor, q: Tensor) -> Tensor:
    """A refused child stays in p: each is tried as q = 1 without removal."""
    return p


def not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """Field report B080's early version: only the refused entry is adjusted."""
    return (p - q).clamp_min(0)


def softmaxed(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp_min(0).softmax(-1)


@pytest.mark.parametrize("update", [unchanged, not_normalised, softmaxed])
@pytest.mark.parametrize("name", ["wide", "deep", "sampled few"])
def test_a_wrong_residual_is_caught(update: Update, name: str) -> None:
    size, plant = PLANTS[name]
    assert bias(Table(1, size), Table(2, size), plant, by_definition(update)) > 0.01


def test_pruning_by_confidence_after_the_draw_is_caught() -> None:
    """What is left of a sample is no sample of its law. Passing as deterministic it does no harm:
    that rule never asks where a tree came from."""

    def pruned(grown: Tree) -> Tree:
        real = torch.arange(grown.tokens.shape[1]) < grown.size[:, None]
        keep = real & (own_log_q(grown) > math.log(0.3))
        order = (~keep).int().argsort(dim=1, stable=True)
        assert grown.log_q is not None
        log_q = grown.log_q.take_along_dim(order[..., None], 1)
        tokens = grown.tokens.gather(1, order)
        return replace(grown, tokens=tokens, size=keep.sum(1), log_q=log_q)

    plant = then(sampled(2), pruned)  # all children of the root, so no parent changes
    assert bias(Table(1), Table(2), plant, tree) > 0.01
    assert bias(Table(1), Table(2), then(plant, lambda t: replace(t, log_q=None)), tree) <= 1e-12


def test_a_law_that_is_not_the_siblings_own_is_caught() -> None:
    """Drawn without replacement, verified under the law of the first."""

    def shared(grown: Tree) -> Tree:
        assert grown.log_q is not None
        return replace(grown, log_q=grown.log_q[:, :1].expand_as(grown.log_q))

    assert bias(Table(1), Table(2), then(sampled(3), shared), tree) > 0.01


# ---- chains, rows, degenerate laws


def random_rows(count: int, nodes: int, size: int, seed: int = 0) -> tuple[Tensor, ...]:
    """(tokens, parents, log_q, log_p, size) of any trees, siblings repeating now and then."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 2 * nodes + 1, size, generator=g, dtype=torch.float64) * 1.5
    log_q, log_p = logits.log_softmax(-1).split([nodes, nodes + 1], 1)
    tokens = torch.randint(size, (count, nodes), generator=g)
    parents = [torch.randint(-1, i, (count,), generator=g) for i in range(nodes)]
    drafted = torch.randint(nodes + 1, (count,), generator=g)
    return tokens, torch.stack(parents, 1), log_q, log_p, drafted


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_chain_is_token_verification(deterministic: bool) -> None:
    count, nodes = 12, 3
    tokens, _, log_q, log_p, size = random_rows(count, nodes, 4)
    parents = torch.arange(-1, nodes - 1).expand(count, -1)
    if deterministic:
        log_q = torch.nn.functional.one_hot(tokens, 4).double().log()

    def chain(rows: list[int], draws: Draws) -> list[Tokens]:
        out = verify.token(tokens[rows], log_q[rows], log_p[rows], size[rows], draws)
        return list(zip(*(x.tolist() for x in out), strict=True))

    def tree_of_one(rows: list[int], draws: Draws) -> list[Tokens]:
        law_q = None if deterministic else log_q[rows]
        laws = tokens[rows], parents[rows], law_q, log_p[rows], size[rows]
        path, accepted, following = tree(*laws, draws)
        want = torch.arange(path.shape[1]).expand_as(path)
        assert torch.equal(path, want.masked_fill(want >= accepted[:, None], -1))
        return list(zip(accepted.tolist(), following.tolist(), strict=True))

    for ours, theirs in zip(laws_of(tree_of_one, count), laws_of(chain, count), strict=True):
        assert total_variation(ours, theirs) < 1e-12
        assert len(ours) > 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_are_independent_and_padding_is_inert(deterministic: bool) -> None:
    tokens, parents, log_q, log_p, size = random_rows(40, 7, 3)
    law_q = None if deterministic else log_q
    path, accepted, following = tree(
        tokens, parents, law_q, log_p, size, Streams(range(40), tokens.device)
    )
    assert len(set(accepted.tolist())) > 2 and path.shape[1] == accepted.max()
    padding = torch.arange(7) >= size[:, None]
    empty = padding[..., None]
    dirty_q = None if deterministic else log_q.masked_fill(empty, math.nan)
    dirty_p = torch.cat([log_p[:, :1], log_p[:, 1:].masked_fill(empty, math.nan)], 1)
    dirty = tokens.masked_fill(padding, -9), parents.masked_fill(padding, 3), dirty_q, dirty_p
    again = tree(*dirty, size, Streams(range(40), tokens.device))
    for x, y in zip(again, (path, accepted, following), strict=True):
        assert torch.equal(x, y)
    for b in range(40):
        one, n = slice(b, b + 1), int(size[b])
        q = None if deterministic else log_q[one, :n]
        laws = tokens[one, :n], parents[one, :n], q, log_p[one, : n + 1], size[one]
        alone = tree(*laws, Streams([b], tokens.device))
        assert alone[0][0].tolist() == path[b, : accepted[b]].tolist()
        assert (alone[1].item(), alone[2].item()) == (accepted[b].item(), following[b].item())


class Refuse:
    """Draws that accept nothing, whatever its probability."""

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        assert not p.isnan().any()
        return torch.zeros_like(where)

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        assert not weights.isnan().any() and (weights.sum(1) > 0).all()
        return weights.argmax(1)

    def select(self, rows: Sequence[int]) -> None:
        raise NotImplementedError


def test_a_residual_that_is_zero_still_draws_from_p() -> None:
    """Where p = q nothing is refused, rounding aside; a draft of probability 0 is refused."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    rest = torch.tensor([0.0, 0.6, 0.4, 0.0], dtype=torch.float64)
    tokens, parents = torch.tensor([[0, 1]]), torch.tensor([[-1, -1]])
    log_q = torch.stack([p, rest]).log()[None]
    log_p = p.log().expand(1, 3, -1)
    out = tree(tokens, parents, log_q, log_p, torch.tensor([2]), Refuse())
    assert [x.tolist() for x in out] == [[[]], [0], [0]]
    # The target never says token 3: refused twice, even by a draft that is sure of it.
    never = torch.tensor([[3, 3]])
    for law_q in (torch.eye(4).double()[never].log(), None):
        seeds = range(200)
        size = torch.full((200,), 2)
        rows = [x if x is None else x.expand(200, *x.shape[1:]) for x in (law_q, log_p)]
        laws = never.expand(200, -1), parents.expand(200, -1), *rows, size
        _, accepted, following = tree(*laws, Streams(seeds, never.device))
        assert (accepted == 0).all() and set(following.tolist()) == {0, 1, 2}


def walk(tokens: list[int], parents: list[int], argmax: list[int], size: int) -> list[int]:
    node, path = -1, []
    while True:
        hits = [i for i in range(size) if parents[i] == node and tokens[i] == argmax[node + 1]]
        if not hits:
            return path
        node = hits[0]
        path.append(node)


def test_greedy_is_a_walk() -> None:
    count, nodes = 300, 8
    tokens, parents, _, log_p, size = random_rows(count, nodes, 3)
    argmax = log_p.argmax(-1)
    path, accepted, following = greedy_tree(tokens, parents, argmax, size)
    for b in range(count):
        args = tokens[b].tolist(), parents[b].tolist(), argmax[b].tolist(), int(size[b])
        want = walk(*args)
        assert path[b].tolist() == want + [-1] * (path.shape[1] - len(want))
        assert int(accepted[b]) == len(want)
        assert int(following[b]) == args[2][want[-1] + 1 if want else 0]
    assert len(set(accepted.tolist())) >= 4


def test_greedy_is_the_limit_of_the_sampling_rule() -> None:
    tokens, parents, _, log_p, size = random_rows(60, 6, 3)
    sharp = log_probs(log_p, Law(0.0))
    want = greedy_tree(tokens, parents, log_p.argmax(-1), size)
    for law_q in (None, torch.nn.functional.one_hot(tokens, 3).double().log()):
        ours = tree(tokens, parents, law_q, sharp, size, Streams(range(60), tokens.device))
        for x, y in zip(ours, want, strict=True):
            assert torch.equal(x, y)


def test_no_tree_at_all() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    log_p = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    size = torch.tensor([0, 0])
    for out in (
        tree(none, none, None, log_p, size, Streams([0, 1], none.device)),
        tree(none, none, torch.zeros(2, 0, 2), log_p, size, Streams([0, 1], none.device)),
        greedy_tree(none, none, log_p.argmax(-1), size),
    ):
        assert out[0].shape == (2, 0)
        assert (out[1].tolist(), out[2].tolist()) == ([0, 0], [0, 1])
