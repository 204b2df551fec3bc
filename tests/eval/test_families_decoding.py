"""Every family's greedy reply, decoded with chains and trees, is what `generate` answers."""

from collections.abc import Callable

import pytest
from drafting import greedy_reference
from families import FAMILIES, save_tiny
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.gather import Request
from draftsmith.data.target import Target, load_target
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.tree import TreeShape

LIMIT = 22


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(
    request: pytest.FixtureRequest,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Target:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(FAMILIES[request.param](), tiny_tokenizer, folder)
    return load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)


def test_the_reply_is_that_of_generate(
    target: Target,
    make_drafter: Callable[[str, Target], Drafter],
    make_requests: Callable[..., list[Request]],
) -> None:
    requests = make_requests(target, [1, 9, 20])  # windows are crossed
    expected = [greedy_reference(target, r, LIMIT, list(target.eos_ids)) for r in requests]
    drafters = [
        CausalDrafter.from_target(target, CausalConfig(layers=(0, 1, 2)), None).eval(),
        make_drafter("eagle3 reduced", target),
        make_drafter("dflash", target),
        make_drafter("medusa reduced", target),
        make_drafter("mlp", target),
    ]
    if target.model.config.model_type not in ("gpt2", "opt"):  # whose layers cannot be run apart
        drafters.append(make_drafter("jump reduced", target))
    plain = decode(target, requests, DecodeSettings(LIMIT, 0))
    assert [o.ids for o in plain] == expected
    for drafter in drafters:
        for settings in (
            DecodeSettings(LIMIT, 3),
            DecodeSettings(LIMIT, 3, tree=TreeShape(2, 3, 6)),
        ):
            outputs = decode(target, requests, settings, drafter)
            assert [o.ids for o in outputs] == expected
            assert all(o.rounds[0][0] > 0 for o in outputs if o.rounds)
