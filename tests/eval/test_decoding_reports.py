"""What went wrong in decoding for others, as tests here: ends, temperatures, rules, self-drafts.

Numbers are those of the field reports. Also there: B082, B083 and B086 in test_decode, B087 in
test_requests, B089 and B090 against `generate` in data/test_rules, B119 in data/test_target. Laws:
test_decoding_reports_laws; caches and positions: test_decoding_reports_state.
"""

import copy
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, Words, ask, choices, copy_of, new_target, tiny_llama
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.load import parse
from draftsmith.configs.recipe import LawSection, TargetSection
from draftsmith.data.gather import Request
from draftsmith.data.rules import Rules
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.causal import CausalDrafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.rows import Output
from draftsmith.eval.tree import TreeShape

V = 60
PROMPTS: list[Words] = [(10, 7, 31, 5, 5, 40), (1,), (3, 59, 22), tuple(range(20, 33))]
WAYS: list[dict[str, Any]] = [
    {},
    {"verifier": "token", "drafting": "greedy"},
    {"tree": TreeShape(3, 4, 9)},
    {"tree": (2, 2, 1)},
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama() -> Target:
    """Two layers, 60 tokens, no end token. Shared: `replace` its end tokens, change no weight."""
    return new_target(tiny_llama(V))


@pytest.fixture(scope="module")
def itself(llama: Target) -> CausalDrafter:
    return copy_of(llama)


@pytest.fixture(scope="module")
def weak(llama: Target) -> CausalDrafter:
    """Accepted now and then, by a greedy law too."""
    return copy_of(llama, 0.06)


def requests(law: Law = Law(0.0), **more: Any) -> list[Request]:  # noqa: B008
    return [ask(ids, law, i, **more) for i, ids in enumerate(PROMPTS)]


def ids_of(outputs: Sequence[Output]) -> list[list[int]]:
    return [o.ids for o in outputs]


def plain(target: Target, asked: Sequence[Request], limit: int) -> list[list[int]]:
    return ids_of(decode(target, asked, DecodeSettings(limit, 0)))


def cut(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end token."""
    at = next((i for i, t in enumerate(ids) if t in ends), len(ids))
    return ids[: at + 1]


def bigrams(text: Words, drafted: Words) -> Tensor:
    """An n-gram drafter: what followed the last token before; often nothing."""
    said, logits = text + drafted, torch.full((V,), -math.inf)
    for before, after in pairwise(said):
        if before == said[-1]:
            logits[after] = 0.0
    return logits


# ---- ends


@pytest.mark.parametrize("how", [{}, {"tree": (1,) * 20}, {"tree": TreeShape(2, 20, 60)}], ids=str)
def test_b082_b083_an_end_inside_of_the_first_block(
    how: dict[str, Any], llama: Target, itself: CausalDrafter
) -> None:
    """B082, B083: four rows end at other places of one block, and at limits around them."""
    free = plain(llama, requests(), 24)
    ends = [free[0][6], free[1][2], free[2][11], free[3][15]]
    target = replace(llama, eos_ids=tuple(ends))
    want = [cut(ids, ends) for ids in free]
    assert len({len(ids) for ids in want}) > 2 and max(map(len, want)) < 20
    outputs = decode(target, requests(), DecodeSettings(40, 20, **how), itself)
    assert ids_of(outputs) == want
    for output in outputs:
        assert output.finish == "stop"
        emitted = 1 + sum(accepted + 1 for _, accepted in output.rounds)
        assert emitted - len(output.ids) in (0, 1), "an accepted end has no bonus token behind it"
        if not isinstance(how.get("tree"), TreeShape):  # one path, as deep as the block
            assert [accepted for _, accepted in output.rounds] == [len(output.ids) - 1]
    place = len(want[0])
    assert place > 2
    for limit in (place - 1, place, place + 1):
        (output,) = decode(target, requests()[:1], DecodeSettings(limit, 20, **how), itself)
        assert output.ids == want[0][:limit]
        assert output.finish == ("length" if limit < place else "stop")


def test_b082_finished_rows_stop_consuming(
    llama: Target, weak: CausalDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B082: the target reads a row exactly once for its prompt and once for each of its rounds."""
    free = plain(llama, requests(), 24)
    target = replace(llama, eos_ids=(free[0][6], free[1][2], free[2][20]))
    rows: list[int] = []
    inner = target.forward

    def counted(ids: Tensor, *rest: Any) -> Any:
        rows.append(len(ids))
        return inner(ids, *rest)

    monkeypatch.setattr(target, "forward", counted)
    for how in WAYS:
        rows.clear()
        outputs = decode(target, requests(), DecodeSettings(24, 2, **how), weak)
        assert sum(rows) == len(outputs) + sum(len(o.rounds) for o in outputs)
        assert rows == sorted(rows, reverse=True) and len(set(rows)) > 2


def test_b086_never_more_than_asked_for_and_nothing_drafted_in_vain(
    llama: Target, itself: CausalDrafter, weak: CausalDrafter
) -> None:
    """B086: limits below the block, with a draft that is right, one that is not, and n-grams."""
    prompts = [*PROMPTS, (4, 9, 4, 9, 4)]
    asked = [ask(ids, seed=i) for i, ids in enumerate(prompts)]
    free = plain(llama, asked, 16)
    drafters: list[Any] = [itself, weak, Scripted(bigrams, may_abstain=True)]
    for drafter in drafters:
        for how in WAYS:
            for limit in (1, 2, 3, 5, 16):
                outputs = decode(llama, asked, DecodeSettings(limit, 5, **how), drafter)
                assert ids_of(outputs) == [ids[:limit] for ids in free]
                for output in outputs:
                    have = 1
                    for drafted, accepted in output.rounds:
                        assert accepted <= drafted <= max(0, limit - have - 1)
                        have += accepted + 1
                    assert have == limit
            if drafter is drafters[-1]:
                depths = [d for o in outputs for d, _ in o.rounds[:-2]]
                assert 0 in depths and max(depths) > 1, "n-grams have something to say or nothing"


def test_b119_end_tokens_and_cache_settings_of_the_generation_config(
    target_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """B119: a list of ends of which the first wins, a fixed cache that is not used, no end."""
    base = target_folder()

    def load(name: str, **settings: Any) -> Target:
        folder = shutil.copytree(base, tmp_path / name)
        (folder / "generation_config.json").write_text(json.dumps(settings))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        if "eos_token_id" in settings and settings["eos_token_id"] is None:
            for file in ("tokenizer_config.json", "special_tokens_map.json"):
                if (folder / file).exists():
                    known = json.loads((folder / file).read_text())
                    known.pop("eos_token", None)
                    (folder / file).write_text(json.dumps(known))
        return load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)

    endless = load("none", eos_token_id=None)
    assert endless.eos_ids == ()
    request = ask((7, 300, 21, 5, 64, 64, 9))
    draft = copy_of(endless)

    def both(target: Target) -> Output:
        outputs = [
            decode(target, [request], DecodeSettings(20, 0))[0],
            decode(target, [request], DecodeSettings(20, 8), draft)[0],
        ]
        assert outputs[0].ids == outputs[1].ids and outputs[0].finish == outputs[1].finish
        return outputs[1]

    free = both(endless)
    assert (len(free.ids), free.finish) == (20, "length")
    late, early = free.ids[11], next(t for i, t in enumerate(free.ids) if i > 3)
    several = load("several", eos_token_id=[late, early])
    assert several.eos_ids == (late, early)
    found = both(several)
    place = min(free.ids.index(late), free.ids.index(early))
    assert (found.ids, found.finish) == (free.ids[: place + 1], "stop")
    static = load("static", eos_token_id=[late], cache_implementation="static")
    found = both(static)
    assert (found.ids, found.finish) == (free.ids[: free.ids.index(late) + 1], "stop")


# ---- temperatures and seeds


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_b087_temperatures_near_zero(
    how: dict[str, Any], llama: Target, weak: CausalDrafter
) -> None:
    """B087: argmax, not a division, whatever else the law says; large logits do not overflow."""
    large = copy.deepcopy(llama)
    large.head.weight.mul_(2e3)
    near = [Law(0.0, top_p=0.9), Law(0.0, top_k=1), Law(1e-6), Law(0.01, top_k=1)]
    for target, drafter, laws in ((llama, weak, near), (large, copy_of(large, 0.06), near[2:])):
        greedy = plain(target, requests(), 10)
        for law in laws:
            asked = [replace(r, seed=77 + i) for i, r in enumerate(requests(law))]
            outputs = decode(target, asked, DecodeSettings(10, 4, **how), drafter)
            assert ids_of(outputs) == greedy
            assert all(0 <= a <= d for o in outputs for d, a in o.rounds)
    mixed = [replace(r, law=Law(i % 2)) for i, r in enumerate(requests())]
    together = decode(llama, mixed, DecodeSettings(10, 4, **how), weak)
    assert together == [decode(llama, [r], DecodeSettings(10, 4, **how), weak)[0] for r in mixed]
    assert ids_of(together)[::2] == plain(llama, requests(), 10)[::2]


def test_b087_no_temperature_is_refused() -> None:
    with pytest.raises(UserError, match="temperature"):
        parse(LawSection, {"temperature": None}, "a.yaml", "serving.laws[0]")


def test_b088_seeds_decide_and_nothing_else(llama: Target, weak: CausalDrafter) -> None:
    """B088: the same seed says the same in any order; another says something else, above T = 0."""
    for drafter, gamma, how in ((None, 0, {}), (weak, 4, WAYS[0]), (weak, 4, WAYS[3])):
        settings = DecodeSettings(12, gamma, **how)
        for law in (Law(0.8), Law(0.0)):
            asked = requests(law)[:3]
            first = decode(llama, asked, settings, drafter)
            assert decode(llama, asked, settings, drafter) == first
            turned = decode(llama, asked[::-1], settings, drafter)
            assert turned[::-1] == first
            other = [replace(r, seed=r.seed + 10) for r in asked]
            pairs = zip(decode(llama, other, settings, drafter), first, strict=True)
            assert all((a.ids == b.ids) == (law == Law(0.0)) for a, b in pairs)


# ---- filters and rules


def test_b089_a_banned_token_appears_nowhere(llama: Target) -> None:
    """B089: fifty prompts; the draft loves what is banned, and what min-p cuts off."""
    loved = 11

    def say(text: Words, drafted: Words) -> Tensor:
        logits = torch.zeros(V)
        logits[loved], logits[(text + drafted)[-1]] = 4.0, 3.0
        return logits

    def answers(law: Law, rules: Rules, how: dict[str, Any]) -> list[tuple[Request, list[int]]]:
        asked = [ask((3 * i % V, i * i % V), law, i, rules=rules) for i in range(50)]
        drafter: Any = Scripted(say)
        outputs = decode(llama, asked, DecodeSettings(9, 3, **how), drafter)
        return [(r, o.ids) for r, o in zip(asked, outputs, strict=True)]

    for how in WAYS[0], WAYS[3]:
        assert any(loved in ids[1:] for _, ids in answers(Law(1.5), Rules(), how))
        for rules in (
            Rules(logit_bias=(((loved,), -math.inf),)),
            Rules(bad_words=((loved,), (7, 8))),
        ):
            assert not any(loved in ids for _, ids in answers(Law(1.5), rules, how))
        for request, ids in answers(Law(1.0, min_p=0.2), Rules(), how):
            with torch.inference_mode():
                text = torch.tensor([[*request.ids, *ids]])
                logits = llama.model(input_ids=text).logits[0, len(request.ids) - 1 : -1]
            own = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]  # [R]
            assert (own - logits.amax(1) > math.log(0.2) - 1e-4).all()
    with pytest.raises(UserError, match="eta_cutoff"):
        parse(LawSection, {"temperature": 1.0, "eta_cutoff": 0.1}, "a.yaml", "serving.laws[0]")


HISTORY = [
    Rules(repetition_penalty=1.3),
    Rules(no_repeat_ngram=2),
    Rules(presence_penalty=1.5, frequency_penalty=0.7),
    Rules(1.3, 0.4, 0.8, 2, ((5, 6), (40,)), (((9,), 1.0),)),
]


def test_b090_rules_see_the_candidates_before_each_position(
    llama: Target, itself: CausalDrafter, weak: CausalDrafter
) -> None:
    """B090: greedy with any block and any tree; a perfect draft stays one under rules."""
    limit = 16
    asked = [replace(r, rules=rules) for rules in HISTORY for r in requests()[:2]]
    want = plain(llama, asked, limit)
    assert want == [choices(llama, r, ids) for r, ids in zip(asked, want, strict=True)]
    free = plain(llama, requests(), limit)
    changed = [ids != free[i % 2] for i, ids in enumerate(want)]
    assert all(changed[i] or changed[i + 1] for i in range(0, len(asked), 2))
    for gamma in (1, 3, 9):
        assert ids_of(decode(llama, asked, DecodeSettings(limit, gamma), weak)) == want
        outputs = decode(llama, asked, DecodeSettings(limit, gamma), itself)
        assert ids_of(outputs) == want
        assert all(d == a for o in outputs for d, a in o.rounds)
    for shape in (TreeShape(3, 4, 9), (2, 2, 1), (1, 1, 1, 1)):
        settings = DecodeSettings(limit, 6, tree=shape)  # type: ignore[arg-type]
        assert ids_of(decode(llama, asked, settings, weak)) == want
    sampled = [replace(r, law=Law(1.0)) for r in asked]
    for verifier in ("token", "block"):
        outputs = decode(llama, sampled, DecodeSettings(limit, 4, verifier), itself)
        assert all(d == a for o in outputs for d, a in o.rounds), "q is processed as p is"


# ---- a draft that is the target


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_b091_a_copy_is_accepted_whole_and_the_minimum_length_kept(
    gamma: int, llama: Target, itself: CausalDrafter
) -> None:
    """B091: greedy, with top-k 1, and sampled; end tokens that come early and are put off."""
    limit, least = 40, 32
    free = plain(llama, requests(), limit)
    target = replace(llama, eos_ids=tuple({ids[i] for ids in free for i in (1, 3)}))
    assert max(map(len, plain(target, requests(), limit))) < least
    for law in (Law(0.0), Law(1.0, top_k=1), Law(1.0), Law(0.7, top_p=0.9)):
        asked = requests(law, rules=Rules(min_new_tokens=least))
        outputs = decode(target, asked, DecodeSettings(limit, gamma), itself)
        if law.temperature == 0 or law.top_k == 1:
            assert ids_of(outputs) == plain(target, asked, limit)
        for output in outputs:
            assert len(output.ids) >= least
            whole = output.rounds if output.finish == "length" else output.rounds[:-1]
            assert all(d == a for d, a in whole), law
            assert all(a == gamma for _, a in output.rounds[:-1])
