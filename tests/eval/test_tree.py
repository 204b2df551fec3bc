"""Growing draft trees: EAGLE-2 by brute force, sampling without replacement, room, masks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from trees import Table, Tokens, laws_of, node_paths, reader

from draftsmith.configs.errors import UserError
from draftsmith.data.cache import ancestors
from draftsmith.data.warp import Law, log_probs
from draftsmith.eval.draws import Draws, Streams
from draftsmith.eval.tree import Extend, Tree, TreeShape, grow, grow_sampled

CPU = torch.device("cpu")


def same(logits: Tensor) -> Tensor:
    """Scripted drafters answer with log-probabilities."""
    return logits


def watched(extend: Extend) -> tuple[Extend, list[tuple[Tensor, Tensor]]]:
    """The same drafter, and what it was given."""
    calls: list[tuple[Tensor, Tensor]] = []

    def note(tokens: Tensor, parents: Tensor) -> Tensor:
        calls.append((tokens, parents))
        return extend(tokens, parents)

    return note, calls


# ---- EAGLE-2


@dataclass(eq=False)
class Node:
    path: Tokens
    parent: "Node | None"
    score: float
    read: bool = False


def brute_force(q: Table, root: Tokens, shape: TreeShape, room: int) -> list[Node]:
    """EAGLE-2 in plain Python: the nodes that stay, in the order they came up."""
    pool: list[Node] = []
    expanded: list[Node | None] = [None]
    for depth in range(1, min(shape.depth, room) + 1):
        level = []
        for node in expanded:
            path, score = ((), 0.0) if node is None else (node.path, node.score)
            law = q(root + path).tolist()
            best = sorted(range(len(law)), key=lambda t, law=law: (-law[t], t))[: shape.fan]
            level += [Node((*path, t), node, score + law[t]) for t in best if law[t] > -math.inf]
        pool += level
        if depth < min(shape.depth, room):
            expanded = sorted(level, key=lambda n: -n.score)[: shape.width]  # type: ignore[assignment]
            for node in expanded:
                assert node is not None
                node.read = True
    kept = sorted(pool, key=lambda n: -n.score)[: shape.budget]
    assert all(n.parent is None or n.parent in kept for n in kept)
    return [n for n in pool if n in kept]


SHAPES = [
    TreeShape(1, 4, 4),
    TreeShape(1, 1, 1),
    TreeShape(3, 3, 8),
    TreeShape(2, 3, 100, children=4),
    TreeShape(4, 2, 5, children=2),
    TreeShape(2, 4, 14, children=3),
    TreeShape(9, 2, 30),  # more children than there are tokens
]
ROOTS: list[Tokens] = [(0,), (1,), (2, 3), (), (4,)]


def check_rows(tree: Tree, q: Table, shape: TreeShape, rooms: Sequence[int]) -> None:
    for row, (root, room, paths) in enumerate(zip(ROOTS, rooms, node_paths(tree), strict=True)):
        want = brute_force(q, root, shape, room)
        assert paths == [n.path for n in want]
        n = len(want)
        assert tree.size[row] == n
        index = {id(node): i for i, node in enumerate(want)}
        parents = [-1 if node.parent is None else index[id(node.parent)] for node in want]
        assert tree.parents[row].tolist() == parents + [-1] * (tree.parents.shape[1] - n)
        assert (tree.tokens[row, n:] == 0).all() and (tree.fed[row, n:] == -1).all()
    assert tree.tokens.shape[1] == tree.size.max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("law", [Law(), Law(top_k=2)])
def test_growing_is_eagle_2(shape: TreeShape, law: Law) -> None:
    q = Table(7, size=6, law=law)
    first = q.all([[root] for root in ROOTS])[:, 0]
    extend, calls = watched(reader(q, ROOTS))
    rooms = [9] * len(ROOTS)
    tree = grow(first, extend, shape, same, torch.tensor(rooms))
    check_rows(tree, q, shape, rooms)
    assert len(calls) == shape.depth - 1
    for row, root in enumerate(ROOTS):
        read: list[Tokens] = []
        for tokens, parents in calls:
            above = [read[i] if i >= 0 else () for i in parents[row].tolist()]
            read += [(*x, t) for x, t in zip(above, tokens[row].tolist(), strict=True)]
        for node, fed in zip(brute_force(q, root, shape, 9), tree.fed[row].tolist(), strict=False):
            assert (fed >= 0) == node.read
            assert fed < 0 or read[fed] == node.path


def test_rooms_cut_each_row_for_itself() -> None:
    q, shape, rooms = Table(7, size=6), TreeShape(3, 4, 9), [0, 1, 2, 3, 2]
    first = q.all([[root] for root in ROOTS])[:, 0]
    extend, calls = watched(reader(q, ROOTS))
    tree = grow(first, extend, shape, same, torch.tensor(rooms))
    check_rows(tree, q, shape, rooms)
    assert len(calls) == 2  # nobody has room for a child of a third level of reading
    depth = ancestors(tree.parents).sum(2)
    real = torch.arange(tree.tokens.shape[1]) < tree.size[:, None]
    assert (depth * real).amax(1).tolist() == rooms
    extend, calls = watched(reader(q, ROOTS))
    for none in (
        grow(first, extend, shape, same, torch.zeros(5, dtype=torch.long)),
        grow_sampled(first, extend, (2, 2), same, torch.zeros(5).long(), Streams([0] * 5, CPU), 6),
    ):
        assert none.tokens.shape == none.parents.shape == none.fed.shape == (5, 0)
        assert none.size.tolist() == [0] * 5 and calls == []
    assert none.log_q is not None and none.log_q.shape == (5, 0, 6)


def test_equal_scores_keep_ancestors_and_order() -> None:
    """A sure child scores as much as its parent; half of a half ties with a quarter."""
    half, sure, nil = math.log(0.5), 0.0, -math.inf
    quarter, eighth = 2 * half, 3 * half
    laws = {
        (): [half, quarter, eighth, nil],
        (0,): [half, nil, nil, quarter],
        (1,): [nil, nil, nil, sure],
        (0, 0): [sure, nil, nil, nil],
    }

    def law(path: Tokens) -> Tensor:
        return torch.tensor(laws.get(path, [quarter] * 4))

    paths: list[Tokens] = []

    def extend(tokens: Tensor, parents: Tensor) -> Tensor:
        above = [paths[i] if i >= 0 else () for i in parents[0].tolist()]
        paths.extend((*p, t) for p, t in zip(above, tokens[0].tolist(), strict=True))
        return torch.stack([law(p) for p in paths[-tokens.shape[1] :]])[None]

    # Half: 0. Quarters in the order they come up: 1, 00, 13, 000. Eighths: 2, 03.
    want = [(0,), (1,), (0, 0), (1, 3), (0, 0, 0), (2,), (0, 3)]
    for budget in range(1, 8):
        paths.clear()
        shape = TreeShape(2, 3, budget, children=3)
        tree = grow(law(())[None], extend, shape, same, torch.tensor([3]))
        assert set(node_paths(tree)[0]) == set(want[:budget])


def test_children_are_target_ids_of_a_reduced_vocabulary() -> None:
    ids = torch.tensor([2, 5, 7, 11])
    q, shape = Table(5), TreeShape(2, 3, 6)
    room = torch.tensor([3, 3])
    roots: list[Tokens] = [(0,), (1,)]
    back = {t: i for i, t in enumerate(ids.tolist())}

    class Renamed(Table):
        def place(self, history: Tokens) -> int:
            return super().place((history[0], *(back[t] for t in history[1:])))

    first = q.all([[root] for root in roots])[:, 0]
    plain = grow(first, reader(q, roots), shape, same, room)
    ours = grow(first, reader(Renamed(5), roots), shape, same, room, ids)
    assert torch.equal(ours.tokens, ids[plain.tokens])
    assert torch.equal(ours.parents, plain.parents) and torch.equal(ours.fed, plain.fed)
    drawn = [
        grow_sampled(first, reader(*x), (2, 2), same, room, Streams([3, 4], CPU), 12, y)
        for x, y in (((q, roots), None), ((Renamed(5), roots), ids))
    ]
    a, b = (tree.log_q for tree in drawn)
    assert a is not None and b is not None
    assert torch.equal(ids[drawn[0].tokens], drawn[1].tokens)
    assert torch.equal(a[..., :4], b[..., ids]) and (a[..., 4:] == -math.inf).all()
    assert b.exp().sum(2) == pytest.approx(torch.ones(2, 6).double(), abs=1e-12)


# ---- sampled children


def test_siblings_are_drawn_without_replacement() -> None:
    """The joint law of three siblings and a child of each, and the laws that are handed on."""
    q, root = Table(2, size=3), (1,)

    def run(cases: list[int], draws: Draws) -> list[Tokens]:
        roots = [root for _ in cases]
        first = q.all([[root]] * len(cases))[:, 0]
        room = torch.full((len(cases),), 2)
        tree = grow_sampled(first, reader(q, roots), (2, 1), same, room, draws, 3)
        assert tree.parents.tolist() == [[-1, -1, 0, 1]] * len(cases)
        assert tree.fed.tolist() == [[0, 1, -1, -1]] * len(cases)
        assert tree.log_q is not None
        for ids, laws in zip(tree.tokens.tolist(), tree.log_q.exp(), strict=True):
            p = q(root).exp()
            assert torch.allclose(laws[0], p, atol=1e-15)
            p[ids[0]] = 0
            assert torch.allclose(laws[1], p / p.sum(), atol=1e-15)
            for i in (0, 1):
                assert torch.allclose(laws[2 + i], q((*root, ids[i])).exp(), atol=1e-15)
        return [tuple(ids) for ids in tree.tokens.tolist()]

    law = laws_of(run, 1)[0]
    p = q(root).exp()
    for (a, b, c, d), mass in law.items():
        after = float(q((*root, a)).exp()[c] * q((*root, b)).exp()[d])
        assert a != b and mass == pytest.approx(float(p[a] * p[b] / (1 - p[a])) * after, abs=1e-14)
    assert len(law) == 54 and sum(law.values()) == pytest.approx(1, abs=1e-13)


def test_a_law_may_run_out_of_tokens() -> None:
    """Rows with 1, 2 or 3 possible tokens ask for 3 children each; those missing have no heirs."""
    nil = -math.inf
    first = torch.tensor([[0.0, nil, nil], [0.0, 0.0, nil], [0.0, 0.0, 0.0]]).log_softmax(-1)
    extend, calls = watched(lambda tokens, parents: first[:, None].expand(-1, tokens.shape[1], -1))
    draws = Streams([0, 1, 2], CPU)
    tree = grow_sampled(first, extend, (3, 2), same, torch.tensor([2, 2, 1]), draws, 3)
    assert tree.size.tolist() == [2, 6, 3]
    assert tree.parents.tolist() == [
        [-1, 0, -1, -1, -1, -1],
        [-1, -1, 0, 0, 1, 1],
        [-1, -1, -1, -1, -1, -1],
    ]
    assert tree.tokens[0, :2].tolist() == [0, 0] and sorted(tree.tokens[2, :3].tolist()) == [
        0,
        1,
        2,
    ]
    assert tree.log_q is not None
    own = tree.log_q.gather(2, tree.tokens[..., None]).squeeze(2).exp()  # [B, N]
    assert own[0, :2].tolist() == [1, 1]
    assert own[1].tolist() == pytest.approx([0.5, 1, 0.5, 1, 0.5, 1])
    assert own[2, :3].tolist() == pytest.approx([1 / 3, 0.5, 1])
    assert [tuple(tokens.shape) for tokens, _ in calls] == [(3, 3)]
    assert draws.used.tolist() == [2, 6, 3]  # chance is used for nodes that are


def test_rows_grow_alone_as_together() -> None:
    q, rooms = Table(8, size=6), [3, 1, 2, 0, 3]
    first = q.all([[root] for root in ROOTS])[:, 0]

    def warp(logits: Tensor) -> Tensor:
        return log_probs(logits, Law(0.8, top_k=4))

    room = torch.tensor(rooms)
    shape, fixed = TreeShape(3, 3, 7), (3, 2, 1)
    dynamic = grow(first, reader(q, ROOTS), shape, warp, room)
    drawn = grow_sampled(first, reader(q, ROOTS), fixed, warp, room, Streams(range(5), CPU), 6)
    for b in range(5):
        one = slice(b, b + 1)
        alone = grow(first[one], reader(q, ROOTS[one]), shape, warp, room[one])
        streams = Streams([b], CPU)
        again = grow_sampled(first[one], reader(q, ROOTS[one]), fixed, warp, room[one], streams, 6)
        for ours, whole in ((alone, dynamic), (again, drawn)):
            n = int(whole.size[b])
            assert int(ours.size) == n
            for name in ("tokens", "parents", "log_q"):
                x, y = getattr(ours, name), getattr(whole, name)
                assert x is y or torch.equal(x[0, :n], y[b, :n])
            # Rows without room are read on for the others' sake.
            assert rooms[b] < 3 or torch.equal(ours.fed[0, :n], whole.fed[b, :n])


# ---- shapes and masks


def test_ancestors_are_the_way_to_the_root() -> None:
    g = torch.Generator().manual_seed(0)
    columns = [torch.randint(-1, i, (50,), generator=g) for i in range(9)]
    parents = torch.stack(columns, 1)
    visible = ancestors(parents)
    depth = visible.sum(2)
    for b in range(50):
        for i in range(9):
            path, at = set(), i
            while at >= 0:
                path.add(at)
                at = int(parents[b, at])
            assert set(visible[b, i].nonzero().flatten().tolist()) == path
            assert int(depth[b, i]) == len(path)
    # Field report B099's tree 1-3-2: siblings do not see each other.
    visible = ancestors(torch.tensor([[-1, 0, 0, 0, 1, 1]]))
    depth = visible.sum(2)
    assert depth.tolist() == [[1, 2, 2, 2, 3, 3]]
    assert visible[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    empty = ancestors(torch.zeros(2, 0, dtype=torch.long))
    assert empty.shape == (2, 0, 0)


@pytest.mark.parametrize("name", ["width", "depth", "budget", "children"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_shapes_are_refused(name: str, value: object) -> None:
    good: dict[str, object] = {"width": 2, "depth": 3, "budget": 6}
    with pytest.raises(UserError, match=f"{name} of a draft tree must be .* not {value}"):
        TreeShape(**{**good, name: value})  # type: ignore[arg-type]
    assert TreeShape(**good).fan == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (2, 0), (2, 1.5)])
def test_bad_sampled_shapes_are_refused(shape: tuple[int, ...]) -> None:
    first, draws = torch.zeros(1, 3), Streams([0], CPU)
    extend: Extend = lambda tokens, parents: first[:, None]  # noqa: E731
    with pytest.raises(UserError, match="draft tree"):
        grow_sampled(first, extend, shape, same, torch.tensor([2]), draws, 3)
