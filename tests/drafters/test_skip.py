"""Self-speculation: the target's own modules without some layers, and nothing changed in them."""

from dataclasses import replace

import pytest
import torch
from echoes import echoing

from draftsmith.configs.errors import UserError
from draftsmith.data.records import Record
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.skip import SkipConfig, SkipDrafter
from draftsmith.eval.conformance import TOLERANCE, Bench, Case, covering
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.tree import TreeShape
from draftsmith.train.score import score

KEPT = (0, 2, 3)  # of four; of Gemma 2 one sliding layer, then two that were the second of a pair
LENGTHS = [1, 9, 4, 17]
LIMIT = 20
CHAIN, TREE = DecodeSettings(LIMIT, 3), DecodeSettings(LIMIT, 3, tree=TreeShape(2, 3, 6))


@torch.inference_mode()
def steps(drafter: Drafter, target: Target) -> torch.Tensor:
    """Draft logits of a ragged batch over two rounds, the first one refused in part; as a tree."""
    ids = torch.randint(target.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    none = torch.zeros(2, 12, 0)
    state = drafter.start(2, 30)
    drafter.prefill(state, ids[:, :9], [9, 4], none)
    drafter.commit(state, ids[:, 9:10], [1, 1], none)
    found = [drafter.first(state), drafter.extend(state, ids[:, 10:11])[:, 0]]
    found.append(drafter.extend(state, ids[:, 11:12])[:, 0])
    drafter.commit(state, ids[:, 10:12], [2, 1], none)
    found.append(drafter.first(state))
    parents = torch.tensor([[-1, -1, 0], [-1, 0, 0]])
    return torch.cat([torch.stack(found, 1), drafter.extend(state, ids[:, :3], parents)], 1)


@pytest.mark.parametrize("layers", [KEPT, (1,)])
def test_logits_are_those_of_a_draft_lm_of_the_same_layers(
    any_target: Target, layers: tuple[int, ...]
) -> None:
    """Which holds copies, under numbers of their own."""
    copied = CausalDrafter.from_target(any_target, CausalConfig(layers=layers), None).eval()
    shared = SkipDrafter.from_target(any_target, SkipConfig(layers))
    wanted = steps(copied, any_target)
    assert (steps(shared, any_target) - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_nothing_is_copied_and_nothing_changed(any_target: Target) -> None:
    def places(target: Target) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in target.body.named_parameters()}

    before, config = places(any_target), any_target.text_config.to_dict()
    layers, modules = list(any_target.layers), list(any_target.body.modules())
    drafter = SkipDrafter.from_target(any_target, SkipConfig(KEPT))
    mine, theirs = places(drafter.part), places(any_target)
    assert len(mine) < len(theirs) and set(mine.values()) < set(theirs.values())
    assert drafter.part.head is any_target.head
    drafter.double().train()  # whatever is done to it
    assert places(any_target) == before and any_target.dtype == torch.float32
    assert any_target.text_config.to_dict() == config
    assert list(any_target.layers) == layers and list(any_target.body.modules()) == modules
    assert not any(m.training for m in modules)
    assert list(drafter.parameters()) == drafter.trainable() == []
    assert drafter.state_dict() == {}


@pytest.mark.parametrize("settings", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_output_is_that_of_plain_decoding(
    any_target: Target, settings: DecodeSettings
) -> None:
    drafter = SkipDrafter.from_target(any_target, SkipConfig(KEPT))
    requests = echoing(any_target, LENGTHS)
    plain = decode(any_target, requests, DecodeSettings(LIMIT, 0))
    outputs = decode(any_target, requests, settings, drafter)
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    assert sum(a for o in outputs for _, a in o.rounds) > 0, "something was accepted"
    assert any(a < d for o in outputs for d, a in o.rounds), "something was refused"


@pytest.mark.parametrize("law", [Law(0.0), Law(1.0), Law(0.8, top_k=5)], ids=lambda law: law.label)
def test_with_all_layers_everything_is_accepted(any_target: Target, law: Law) -> None:
    drafter = SkipDrafter.from_target(any_target, SkipConfig((0, 1, 2, 3)))
    for output in decode(any_target, echoing(any_target, LENGTHS, law), CHAIN, drafter):
        assert output.rounds and all(drafted == accepted for drafted, accepted in output.rounds)


def test_taps_of_the_target_are_not_disturbed(tiny_target: Target) -> None:
    """Layers that are tapped run in the draft too; what a pass returns is its own."""
    ids = torch.arange(8)[None]

    def tapped() -> torch.Tensor:
        return tiny_target.forward(ids, tiny_target.new_cache(1, 8), (0, 2)).taps

    before = tapped()
    drafter = SkipDrafter.from_target(tiny_target, SkipConfig((2,)))
    state = drafter.start(1, 8)
    drafter.prefill(state, ids, [8], before[..., :0])
    assert torch.equal(tapped(), before)


def test_scores_are_those_of_the_same_layers_copied(
    tiny_target: Target, records: list[Record]
) -> None:
    plain = [r for r in records if r.law == Law(1.0)]
    copied = CausalDrafter.from_target(tiny_target, CausalConfig(layers=KEPT), None).eval()
    shared = SkipDrafter.from_target(tiny_target, SkipConfig(KEPT))
    batch = collate(plain[:3], ["a", "b"])
    batch = replace(batch, taps=batch.taps[..., :0])
    (mine,), (theirs,) = shared.unroll(batch, 3), copied.unroll(batch, 3)
    assert torch.equal(mine.token, theirs.token)
    assert torch.allclose(shared.head(mine.hidden), copied.head(theirs.hidden), atol=1e-4)
    ours = score(tiny_target, shared, plain, Law(1.0), 3, 14)
    for a, b in zip(ours, score(tiny_target, copied, plain, Law(1.0), 3, 14), strict=True):
        assert torch.allclose(a.log_ratio, b.log_ratio, atol=1e-4)
    whole = SkipDrafter.from_target(tiny_target, SkipConfig((0, 1, 2, 3)))
    for c in score(tiny_target, whole, plain, Law(1.0), 3, 14):
        assert abs(c.overlap[0][0] - c.overlap[0][1]) < 1e-4


@pytest.fixture(scope="module")
def bench() -> Bench:
    bench = Bench()
    bench.drafters["skip"] = SkipDrafter.from_target(bench.target, SkipConfig((0, 3)))
    return bench


# Those of many branches in batches of a row or five take long.
CASES = [replace(c, drafter="skip", rows=4096) for c in covering()]


@pytest.mark.parametrize("case", CASES[1::4], ids=str)
def test_replies_keep_the_law_of_the_target(bench: Bench, case: Case) -> None:
    """Every branch of the loop, in float64."""
    assert bench.distance(case) < TOLERANCE


def test_which_layers() -> None:
    thirty = SkipConfig().resolved_layers(30)
    assert set(range(30)) - set(thirty) == set(range(12, 18)) and list(thirty) == sorted(thirty)
    assert SkipConfig().resolved_layers(4) == (0, 2, 3)
    assert SkipConfig().resolved_layers(2) == (1,)
    assert SkipConfig().resolved_layers(1) == (0,)
    assert SkipConfig((1, 3)).resolved_layers(4) == (1, 3)
    for wrong in ((), (0, 4), (-1,), (3, 1), (1, 1)):
        with pytest.raises(UserError, match="between 0 and 3, ascending, each once"):
            SkipConfig(wrong).resolved_layers(4)
