"""What went wrong in decoding for others, as tests here: laws, exactly where they are small.

Numbers are those of the field reports. Also there: B077 and B080 in test_verify and
test_verify_tree, B078 in test_lossless, B097 in test_decode, B104 in train/test_step and
data/test_vocabulary; all ways of decoding together in the loop's conformance.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted import Words, ask, choices, head_of, new_target, tiny_llama
from torch import Tensor
from transformers import GPTNeoXConfig
from trees import Table, laws_of

from draftsmith.data.rules import Rules
from draftsmith.data.target import Target
from draftsmith.data.warp import Law, log_probs
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalDrafter
from draftsmith.eval import verify
from draftsmith.eval.conformance import TOLERANCE, Bench
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.draws import Draws
from draftsmith.eval.lossless import chi_square, loop_law, plain_law, total_variation
from draftsmith.eval.tree import Tree, TreeShape, grow, grow_sampled
from draftsmith.eval.verify_tree import tree

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- laws


@pytest.mark.parametrize("rule", ["token", "block", "tree", "tree of two"])
def test_b077_what_a_refusal_leaves_is_exactly_the_positive_part(rule: str) -> None:
    """B077: p of one step, over every branch; no token that p excludes, no NaN."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    far = torch.tensor([0.0, 0.0, 0.0, 0.4, 0.6], dtype=torch.float64)
    for q in (torch.tensor([0.1, 0.1, 0.1, 0.35, 0.35], dtype=torch.float64), p, far):

        def run(cases: list[int], draws: Draws, q: Tensor = q) -> list[Words]:
            n = len(cases)
            everywhere, one = torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.long)
            width = 2 if rule == "tree of two" else 1  # two draws from the same law
            drafts = [draws.categorical(q.expand(n, -1), everywhere) for _ in range(width)]
            draft = torch.stack(drafts, 1)  # [n, w]
            log_q, log_p = q.log().expand(n, width, -1), p.log().expand(n, width + 1, -1)
            if rule.startswith("tree"):
                root = torch.full_like(draft, -1)
                path, count, following = tree(draft, root, log_q, log_p, width * one, draws)
                draft = draft.gather(1, path.clamp_min(0)) if path.shape[1] else draft
            else:
                chosen = {"token": verify.token, "block": verify.block}[rule]
                count, following = chosen(draft, log_q, log_p, one, draws)
            first = torch.where(count > 0, draft[:, 0], following)
            return [(token,) for token in first.tolist()]

        (law,) = laws_of(run, 1)
        assert law.keys() == {(0,), (1,), (2,)}
        assert [law[(i,)] for i in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)


def test_b078_acceptance_is_the_overlap_of_the_processed_laws(bench: Bench) -> None:
    """B078: draws and ratios are of one law, in the loop; with other laws on the two sides too."""
    drafter = bench.drafters["causal"]
    assert isinstance(drafter, CausalDrafter)

    @torch.inference_mode()
    def after(model: Any, ids: Words, law: Law) -> Tensor:
        return log_probs(model(input_ids=torch.tensor([ids])).logits[0, -1], law).exp()

    between = []
    for law in (Law(0.7), Law(top_k=2), Law(0.7, top_p=0.8), Law(1.0, min_p=0.3), Law(1.3)):
        request = ask((1, 0), law)
        for drafting, rule in (("sampled", "token"), ("sampled", "block"), ("greedy", "token")):
            how = DecodeSettings(3, 1, rule, drafting)  # type: ignore[arg-type]
            (found,) = loop_law(bench.target, [request], how, drafter)
            want = plain_law(bench.target, request, 3)
            assert total_variation(found.outputs, want) < TOLERANCE
            overlap, q_law = 0.0, law if drafting == "sampled" else Law(0.0)
            for x, chance in enumerate(after(bench.target.model, request.ids, law)):
                text = (*request.ids, x)
                p, q = after(bench.target.model, text, law), after(drafter.model, text, q_law)
                overlap += float(chance * torch.minimum(p, q).sum())
            assert found.attempts == pytest.approx((1.0,), abs=1e-12)
            assert found.accepted == pytest.approx((overlap,), abs=1e-12)
            between.append(0.2 < overlap < 0.99)
    assert sum(between) > 10, "neither nothing nor everything is accepted"


class OneStream:
    """Chance for very many rows, from one generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def bernoulli(self, p: Tensor, where: Tensor) -> Tensor:
        return (torch.rand(p.shape, generator=self.generator, dtype=torch.float64) < p) & where

    def categorical(self, weights: Tensor, where: Tensor) -> Tensor:
        chosen = torch.multinomial(weights, 1, generator=self.generator).squeeze(1)
        return chosen.masked_fill(~where, 0)

    def select(self, rows: Sequence[int]) -> None: ...


def repeated(q: Tensor, draws: Draws) -> Tree:
    """Three children drawn independently, `q [B, 6]`: often the same token twice."""
    everywhere = torch.ones(len(q), dtype=torch.bool)
    tokens = torch.stack([draws.categorical(q.exp(), everywhere) for _ in range(3)], 1)
    size, root = torch.full((len(q),), 3), torch.full_like(tokens, -1)
    return Tree(tokens, root, size, root, q[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize("mode", ["most probable", "sampled", "repeated"])
def test_b080_first_and_second_token_of_a_tree_follow_the_target(mode: str) -> None:
    """B080: three children of the root, more below, over six symbols; 60,000 samples."""
    count, size, draws = 60_000, 6, OneStream()
    tables = Table(1, size), Table(2, size)
    p, q = (torch.stack([t((i,)) for i in range(size + 1)]) for t in tables)  # [7, 6], root last
    start = torch.full((count,), size)

    def extend(tokens: Tensor, parents: Tensor) -> Tensor:
        return q[tokens]

    first, room = q[start], torch.full((count,), 2)
    if mode == "most probable":
        grown = grow(first, extend, TreeShape(3, 2, 12), lambda z: z.log_softmax(-1), room)
        tops = first[0].topk(3).indices.tolist()
        assert set(grown.tokens[0][grown.parents[0] < 0].tolist()) == set(tops)
    elif mode == "sampled":
        grown = grow_sampled(
            first, extend, (3, 2), lambda z: log_probs(z, Law()), room, draws, size
        )
        assert grown.size.unique().tolist() == [9]
    else:
        grown = repeated(first, draws)
        assert (grown.tokens[:, 0] == grown.tokens[:, 1]).any()
    log_p = torch.cat([p[start][:, None], p[grown.tokens]], 1)  # [B, N+1, 6]
    path, accepted, following = tree(
        grown.tokens, grown.parents, grown.log_q, log_p, grown.size, draws
    )
    emitted = torch.cat([grown.tokens.gather(1, path.clamp_min(0)), following[:, None]], 1)
    emitted.scatter_(1, accepted[:, None], following[:, None])
    everywhere = torch.ones(count, dtype=torch.bool)
    later = draws.categorical(p[emitted[:, 0]].exp(), everywhere)  # of the round after, if alone
    second = torch.where(accepted > 0, emitted[:, 1], later)
    pairs = (size * emitted[:, 0] + second).bincount(minlength=size * size)
    joint = p[size].exp()[:, None] * p[:size].exp()  # [6, 6]
    assert chi_square(pairs, joint.flatten()) > 0.001
    assert chi_square(pairs.view(size, size).sum(1), joint.sum(1)) > 0.001
    assert set(accepted.tolist()) == ({0, 1} if mode == "repeated" else {0, 1, 2})


# ---- filters


def test_b089_the_law_is_that_of_plain_sampling_under_the_same_filters(bench: Bench) -> None:
    """B089, exactly: every branch, of what the draft likes best being banned."""
    rules = Rules(logit_bias=(((2,), -math.inf),)), Rules(bad_words=((1,), (0, 2)))
    asked = [ask(ids, Law(1.0, min_p=0.2), rules=r) for r in rules for ids in ((1,), (2, 0, 1))]
    for how in ({}, {"tree": (2, 1)}, {"tree": TreeShape(2, 2, 4)}):
        settings = DecodeSettings(4, 2, **how)  # type: ignore[arg-type]
        laws = loop_law(bench.target, asked, settings, bench.drafters["causal reduced"])
        for request, law in zip(asked, laws, strict=True):
            assert total_variation(law.outputs, plain_law(bench.target, request, 4)) < TOLERANCE
            banned = 2 if request.rules.logit_bias else 1
            assert not any(banned in ids for ids in law.outputs)


# ---- batches


def test_b097_a_row_has_the_law_it_has_alone(bench: Bench) -> None:
    """B097, exactly: five contexts in batches of 2, 3 and 5 rows, in two orders."""
    prompts: list[Words] = [(1,), (2, 0, 1), (0, 0), (2, 2, 2, 1), (0, 1)]
    asked = [ask(ids, Law(1.0), i) for i, ids in enumerate(prompts)]
    want = [plain_law(bench.target, r, 3) for r in asked]
    apart = [total_variation(want[0], other) for other in want[1:]]
    assert min(apart) > 0.1, "a mixture of rows would be seen"
    cases: list[tuple[dict[str, Any], int, int]]
    cases = [({}, 2, 1), ({}, 3, -1), ({"tree": (2,)}, 5, 1)]
    for how, rows, turn in cases:
        settings, drafter = DecodeSettings(3, 1, **how), bench.drafters["eagle3"]
        laws = loop_law(bench.target, asked[::turn], settings, drafter, rows)
        for law, right in zip(laws, want[::turn], strict=True):
            assert total_variation(law.outputs, right) < TOLERANCE


# ---- vocabularies


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("causal", (5, 3)), ("causal", (3, 5)), ("causal", (4, 7)), ("eagle3", (5, 5))],
    ids=str,
)
def test_b104_rows_beyond_the_tokenizer_are_no_tokens(kind: str, rows: tuple[int, int]) -> None:
    """B104, exactly: heads padded on either side, to other sizes; three tokens, T = 1."""

    def model(size: int, seed: int) -> Target:
        config = GPTNeoXConfig(
            vocab_size=size,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=64,
            initializer_range=0.5,
        )
        return new_target(config, seed, words=3, dtype=torch.float64)

    target = model(rows[0], 5)
    drafter: Drafter
    if kind == "eagle3":
        drafter = head_of(target)
    else:
        drafter = CausalDrafter(model(rows[1], 6).model, None).eval()
    assert target.vocab_size == 3
    asked = [ask((1,), Law(1.0)), ask((2, 0), Law(0.8, top_k=2))]
    for how in ({}, {"tree": (2, 1)}, {"tree": TreeShape(3, 2, 5)}):
        settings = DecodeSettings(4, 2, **how)  # type: ignore[arg-type]
        for request, law in zip(asked, loop_law(target, asked, settings, drafter), strict=True):
            assert sum(law.outputs.values()) == pytest.approx(1.0, abs=1e-12)
            assert {i for ids in law.outputs for i in ids} <= {0, 1, 2}
            assert total_variation(law.outputs, plain_law(target, request, 4)) < 1e-10
            assert law.accepted[0] > 0.05


def test_b104_a_token_that_only_the_target_knows() -> None:
    """B104: the draft has fewer rows, of which none is missing as padding; the pair works."""
    target = new_target(tiny_llama(12))
    draft = CausalDrafter(new_target(tiny_llama(9), 4).model, None)
    asked = [ask((11, 4), Law(1.0), seed) for seed in range(4)] + [ask((3,))]
    for how in ({}, {"tree": (2, 1)}, {"tree": TreeShape(2, 2, 4)}):
        settings = DecodeSettings(20, 3, **how)  # type: ignore[arg-type]
        outputs = decode(target, asked, settings, draft)
        assert any(i > 8 for o in outputs for i in o.ids)
        assert outputs[4].ids == choices(target, asked[4], outputs[4].ids)
        assert any(a for o in outputs for _, a in o.rounds)
