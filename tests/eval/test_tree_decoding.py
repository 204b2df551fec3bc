"""Trees in the real loop: greedy streams are the target's own, drafts see their own path only."""

from collections.abc import Callable

import pytest
import torch

from draftsmith.data.cache import Branch, ancestors
from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.tree import TreeShape

MakeDrafter = Callable[[str, Target], Drafter]
MakeRequests = Callable[..., list[Request]]
LENGTHS = [1, 9, 4, 17]
LIMIT = 20
SHAPES = [TreeShape(3, 3, 8), TreeShape(2, 4, 30, children=3), (2, 2, 1), (1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced", "causal", "self"])
def test_greedy_output_is_that_of_plain_decoding(
    kind: str,
    shape: TreeShape | tuple[int, ...],
    small_target: Target,
    make_drafter: MakeDrafter,
    make_requests: MakeRequests,
) -> None:
    requests = make_requests(small_target, LENGTHS)
    drafter = make_drafter(kind, small_target)
    settings = DecodeSettings(LIMIT, 4, tree=shape)
    plain = decode(small_target, requests, DecodeSettings(LIMIT, 0))
    together = decode(small_target, requests, settings, drafter)
    assert [o.ids for o in together] == [o.ids for o in plain]
    assert [decode(small_target, [r], settings, drafter)[0] for r in requests] == together
    depth = len(shape) if isinstance(shape, tuple) else shape.depth
    for output in together:
        at = 1
        for drafted, accepted in output.rounds:
            assert 0 <= accepted <= drafted <= min(depth, max(0, LIMIT - at - 1))
            at += accepted + 1
    if kind == "self" and isinstance(shape, tuple):  # one path, that of the argmax
        assert all(a == d for o in together for d, a in o.rounds)


def test_every_family_takes_trees(any_target: Target, make_requests: MakeRequests) -> None:
    """Sliding windows and learned positions too: texts are longer than the window."""
    from draftsmith.drafters.causal import CausalConfig, CausalDrafter

    requests = make_requests(any_target, LENGTHS)
    drafter = CausalDrafter.from_target(any_target, CausalConfig(layers=(0, 1, 3)), None).eval()
    settings = DecodeSettings(LIMIT, 4, tree=TreeShape(3, 4, 10))
    plain = decode(any_target, requests, DecodeSettings(LIMIT, 0))
    outputs = decode(any_target, requests, settings, drafter)
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    assert sum(a for o in outputs for _, a in o.rounds) > 0, "something was accepted"


@pytest.mark.parametrize("kind", ["eagle3", "causal"])
def test_a_row_does_not_feel_its_neighbours(
    kind: str, small_target: Target, make_drafter: MakeDrafter, make_requests: MakeRequests
) -> None:
    drafter = make_drafter(kind, small_target)
    requests = make_requests(small_target, [1, 9, 4, 17, 6], Law(1.0))
    for shape in SHAPES:
        settings = DecodeSettings(LIMIT, 4, tree=shape)
        together = decode(small_target, requests, settings, drafter)
        assert decode(small_target, requests[::-1], settings, drafter)[::-1] == together
        assert [decode(small_target, [r], settings, drafter)[0] for r in requests] == together


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle3", "causal", "causal reduced"])
def test_a_node_is_drafted_as_the_chain_to_it(
    kind: str, small_target: Target, make_drafter: MakeDrafter
) -> None:
    """Draft logits behind every node equal those of a chain of its ancestors; ragged prompts."""
    drafter = make_drafter(kind, small_target)
    width = 3 * 32 if drafter.taps else 0
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(12, (2, 9), generator=g)
    taps, more = torch.randn(2, 9, width, generator=g), torch.randn(2, 2, width, generator=g)
    parents = torch.tensor([[-1, -1, 0, 0, 1], [-1, -1, 1, 1, 0]])
    nodes = torch.randint(12, (2, 5), generator=g)

    def begin() -> object:
        state = drafter.start(2, 30)
        drafter.prefill(state, ids, [9, 5], taps)
        drafter.commit(state, ids[:, :2], [2, 1], more)
        return state

    state = begin()
    first = drafter.first(state)
    grown = [drafter.extend(state, nodes[:, :2], parents[:, :2])]
    grown.append(drafter.extend(state, nodes[:, 2:], parents[:, 2:]))
    tree = torch.cat(grown, 1)  # [B, 5, V_d]
    seen = ancestors(parents)
    for node in range(5):
        for row in range(2):
            chain = begin()
            assert torch.allclose(drafter.first(chain), first, atol=1e-6)
            path = seen[row, node].nonzero().flatten().tolist()
            for place in path:
                logits = drafter.extend(chain, nodes[:, place : place + 1])
            assert torch.allclose(logits[row, 0], tree[row, node], atol=1e-5)
    # Rows keep different paths; what follows is drafted as behind the same words from scratch.
    path = torch.tensor([[0, 3, -1], [1, -1, -1]])
    words = torch.cat([nodes.gather(1, path.clamp_min(0)), torch.full((2, 1), 7)], 1)[:, :3]
    words[1, 1] = 7
    taps_on = torch.randn(2, 3, width, generator=g)
    drafter.commit(state, words, [3, 2], taps_on, path)
    again = drafter.first(state)
    scratch = begin()
    drafter.first(scratch)
    drafter.commit(scratch, words, [3, 2], taps_on)
    assert torch.allclose(drafter.first(scratch), again, atol=1e-5)


def test_ancestors_by_hand() -> None:
    seen = ancestors(torch.tensor([[-1, 0, 1, 2, 3, 0, -1]]))[0]
    paths = [row.nonzero().flatten().tolist() for row in seen]
    assert paths == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 5], [6]]


@torch.inference_mode()
def test_the_target_reads_a_tree_as_its_paths(any_target: Target) -> None:
    """Ragged rows, nodes in windows, then the kept path read on as if it were a chain."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(400, (2, 12), generator=g)
    nodes, lengths = torch.randint(400, (2, 6), generator=g), [12, 5]
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 0, 3, 4]])
    cache = any_target.new_cache(2, 40)
    any_target.forward(ids, cache)
    cache.advance(lengths)
    logits = any_target.logits(
        any_target.forward(nodes, cache, branch=Branch(lengths, parents)).hidden
    )
    seen = ancestors(parents)

    def alone(row: int, words: list[int]) -> torch.Tensor:
        text = torch.tensor([[*ids[row, : lengths[row]].tolist(), *words]])
        return any_target.model(input_ids=text).logits[0, -1, : any_target.vocab_size]

    for row in range(2):
        for node in range(6):
            words = nodes[row, seen[row, node]].tolist()
            assert torch.allclose(logits[row, node], alone(row, words), atol=2e-4)
    cache.keep(lengths, torch.tensor([[0, 2, 4], [0, 3, 0]]), [3, 2])
    assert cache.lengths == [15, 7]
    following = any_target.logits(any_target.forward(torch.tensor([[9], [9]]), cache).hidden)
    for row, kept in ((0, [0, 2, 4]), (1, [0, 3])):
        words = [*nodes[row, kept].tolist(), 9]
        assert torch.allclose(following[row, 0], alone(row, words), atol=2e-4)
