"""What went wrong in decoding for others, as tests here: caches, positions, vocabularies, ties.

Numbers are those of the field reports. Also there: B092, B093 and B099 in data/test_families and
test_tree_decoding (the target's states against its own uncached ones), B101 in test_requests, B105
in data/test_vocabulary and drafters/test_checkpoint, B118 in data/test_chat and data/test_replies.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, WINDOWED
from rich.console import Console
from scripted import (
    Scripted,
    Watched,
    Words,
    ask,
    choices,
    copy_of,
    head_of,
    new_target,
    tiny_llama,
)
from tokenizers import processors
from torch import Tensor
from transformers import GPT2Config, PreTrainedTokenizerFast

from draftsmith.configs.collection import DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, Recipe, ServingSection
from draftsmith.data.cache import Branch
from draftsmith.data.chat import render_prompt
from draftsmith.data.gather import GatherSettings, Request, answer, request_of
from draftsmith.data.linear import speed_up_few_rows
from draftsmith.data.plan import make_asks
from draftsmith.data.target import Target
from draftsmith.data.turns import opening_requests
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.causal import CausalDrafter
from draftsmith.eval import verify
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.eval.lossless import greedy_equality
from draftsmith.eval.rows import Output
from draftsmith.eval.tree import TreeShape
from draftsmith.scripts.pipeline import prepare_recipe

V = 60
TREE = TreeShape(3, 4, 9)
EAGER = (*WINDOWED, "llama", "gpt2")
WAYS: list[dict[str, Any]] = [{}, {"tree": TREE}]


pytestmark = pytest.mark.usefixtures("one_thread")


def words(count: int, seed: int, size: int = V) -> Words:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(size, (count,), generator=generator).tolist())


def check_greedy(target: Target, asked: Sequence[Request], outputs: Sequence[Output]) -> None:
    """Every reply is what one uncached pass of the model prefers, whatever any loop says."""
    for request, output in zip(asked, outputs, strict=True):
        assert output.ids == choices(target, request, output.ids)


def accepted(outputs: Sequence[Output]) -> int:
    return sum(a for o in outputs for _, a in o.rounds)


# ---- caches and positions


def test_b092_prompts_of_one_token() -> None:
    """B092: 50 pairs of tiny models, drafts of three tokens; the first pairs reply with 64."""
    total = 0
    asked = [ask((10,)), ask((1,), seed=1)]
    for seed in range(50):
        target = new_target(tiny_llama(V, num_hidden_layers=1), seed)
        draft, limit = copy_of(target, 0.05), 64 if seed < 2 else 8
        outputs = decode(target, asked, DecodeSettings(limit, 3), draft)
        assert {len(o.ids) for o in outputs} == {limit}
        check_greedy(target, asked, outputs)
        total += accepted(outputs)
    assert total > 100, "the pairs agree now and then"
    with pytest.raises(UserError, match="without any token"):
        decode(target, [ask(())], DecodeSettings(4, 3), draft)


@pytest.mark.parametrize(
    ("family", "attention"),
    [  # transformers itself refuses sdpa for gemma2
        ("mistral", "eager"),
        ("mistral", "sdpa"),
        ("gemma2", "eager"),
        ("gemma3", "eager"),
        ("gemma3", "sdpa"),
    ],
)
def test_b093_a_sequence_reaches_the_window(family: str, attention: str) -> None:
    """B093: windows in the target, in the draft, in both; prompts below and beyond 16 tokens."""
    asked = [ask(words(n, n, VOCAB), seed=n) for n in (12, 40)]
    narrow, wide = (
        new_target(FAMILIES[family](sliding_window=size, attn_implementation=attention))
        for size in (16, 512)
    )
    texts, refused = set(), 0
    for target, other in ((narrow, wide), (wide, narrow), (narrow, narrow)):
        assert target.model.config._attn_implementation == attention
        drafts: list[tuple[Drafter, dict[str, Any]]] = [
            (copy_of(other, 0.01 if family == "mistral" else 0.04), {})
        ]
        if target is other:
            drafts += [(drafts[0][0], {"tree": TREE}), (head_of(target), {})]
        for draft, how in drafts:
            outputs = decode(target, asked, DecodeSettings(40, 5, **how), draft)
            check_greedy(target, asked, outputs)
            texts.add(tuple(outputs[1].ids))
            assert accepted(outputs) > 0 or draft.family == "eagle3"
            refused += sum(a < d for o in outputs for d, a in o.rounds)
    assert refused > 10
    assert len(texts) == 2, "the window changes what is said"


@torch.inference_mode()
def scratch(drafter: Drafter, target: Target, text: Words, path: Words) -> Tensor:
    """Draft logits [V_d] behind `text` and `path` from an empty state, with true features."""
    if isinstance(drafter, CausalDrafter):
        ids = torch.tensor([[*text, *path]])
        logits: Tensor = drafter.model(input_ids=ids, use_cache=False).logits[0, -1]
        return logits
    ids = torch.tensor([text])
    out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    taps = torch.cat([out[i + 1] for i in drafter.taps], -1)  # [1, n, L*h]
    state = drafter.start(1, len(text) + len(path))
    drafter.prefill(state, ids[:, :-1], [len(text) - 1], taps[:, :-1])
    drafter.commit(state, ids[:, -1:], [1], taps[:, -2:-1])
    logits = drafter.first(state)
    for token in path:
        logits = drafter.extend(state, torch.tensor([[token]]))[:, 0]
    return logits[0]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("itself", {}),
        ("weak", {}),
        ("weak", {"tree": (2, 2, 1)}),
        ("windows", {}),
        ("windows", {"tree": TREE}),
        ("eagle3", {}),
        ("eagle3", {"tree": TREE}),
    ],
    ids=str,
)
def test_b095_every_round_drafts_as_if_from_scratch(kind: str, how: dict[str, Any]) -> None:
    """B095: after full, partial and no acceptance; four rows of different lengths."""
    size = 12 if kind == "eagle3" else V  # an untrained head must be right sometimes
    config: Any = tiny_llama(size, num_hidden_layers=3)
    if kind == "windows":
        config = FAMILIES["gemma2"](vocab_size=size, sliding_window=8)
    target = new_target(config)
    drafter = head_of(target) if kind == "eagle3" else copy_of(target, 0.02 * (kind != "itself"))
    watched: Any = Watched(drafter)
    asked = [ask(words(n, n, size), Law(1.0), n) for n in (1, 9, 4, 15)]
    outputs = decode(target, asked, DecodeSettings(20, 4, **how), watched)
    rounds = [r for o in outputs for r in o.rounds if r[0]]
    if kind == "itself":
        assert all(a == d for d, a in rounds)
    else:
        assert {min(a, 2) for _, a in rounds} == {0, 1, 2} and len(rounds) > 15
    firsts = {text for text, path, _ in watched.said if not path}
    for request, output in zip(asked, outputs, strict=True):
        at = 1
        for drafted, count in output.rounds:
            assert not drafted or (*request.ids, *output.ids[:at]) in firsts
            at += count + 1
    for text, path, logits in watched.said[:: 3 if how else 1]:
        assert torch.allclose(logits, scratch(drafter, target, text, path), atol=1e-4), (text, path)


def test_b098_rows_that_accept_nothing_everything_and_end_at_once() -> None:
    """B098: five prompts, one of a single token and one of 400; each as if it were alone."""
    target = new_target(tiny_llama(V, max_position_embeddings=512))
    asked = [ask(words(n, 5 + n), seed=i) for i, n in enumerate((6, 9, 14, 1, 400))]
    free = [o.ids for o in decode(target, asked, DecodeSettings(16, 0))]
    target.eos_ids = (free[0][1],)
    want = [o.ids for o in decode(target, asked, DecodeSettings(16, 0))]
    assert len(want[0]) == 2 and all(len(ids) > 10 for ids in want[1:3])

    def say(text: Words, drafted: Words) -> Tensor:
        row = next(i for i, r in enumerate(asked) if text[: len(r.ids)] == r.ids)
        place = len(text) + len(drafted) - len(asked[row].ids)
        right = free[row][min(place, len(free[row]) - 1)]
        wrong = row == 1 or (row > 2 and place % (row + 1) == 0)
        return 9.0 * torch.nn.functional.one_hot(torch.tensor((right + wrong) % V), V)

    scripted: Any = Scripted(say)
    for drafter in (scripted, copy_of(target, 0.06)):
        for how in WAYS:
            settings = DecodeSettings(16, 4, **how)
            together = decode(target, asked, settings, drafter)
            assert [o.ids for o in together] == want
            assert together == [decode(target, [r], settings, drafter)[0] for r in asked]
            if drafter is scripted and "tree" not in how:
                never, always = together[1:3]
                assert accepted([never]) == 0 and len(never.rounds) == len(never.ids) - 1
                assert all(d == a for d, a in always.rounds[:-1]) and len(always.rounds) < 5
                assert together[0].rounds == [(4, 1)], "it ends with its first drafted token"


# ---- trees


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.inference_mode()
def test_b099_every_node_is_its_own_path(attention: str) -> None:
    """B099: the tree 1-3-2 of every family, as target and as draft; rows of 12, 5 and 1 tokens.

    Slots are positions here, so rows of other lengths are what left padding is elsewhere. Windows
    are of 8 tokens.
    """
    lengths = [12, 5, 1]
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (3, 12), generator=g)
    nodes = torch.randint(VOCAB, (3, 6), generator=g)
    parents = torch.tensor([[-1, 0, 0, 0, 1, 3]] * 3)
    paths = [0, 2], [0, 1, 4], [0, 3, 5]  # to the leaves
    own_only = "gemma2", "gpt_oss"  # refuse sdpa
    names = [n for n in FAMILIES if n not in own_only] if attention == "sdpa" else EAGER
    for name in names:
        target = new_target(FAMILIES[name](attn_implementation=attention))
        cache = target.new_cache(3, 20)
        target.forward(ids, cache)
        cache.advance(lengths)
        wide = target.logits(target.forward(nodes, cache, branch=Branch(lengths, parents)).hidden)

        draft = CausalDrafter(target.model, None)
        state = draft.start(3, 20)
        draft.prefill(state, ids, [n - 1 if n > 1 else 1 for n in lengths], ids[..., None])
        again = [ids[b, n - 1 : n] if n > 1 else nodes[b, :1] for b, n in enumerate(lengths)]
        draft.commit(state, torch.stack(again), [1, 1, 1], ids[..., None])
        draft.first(state)
        levels = ((0, 1), (1, 4), (4, 6))
        deep = torch.cat(
            [draft.extend(state, nodes[:, a:b], parents[:, a:b]) for a, b in levels], 1
        )
        for row, n in enumerate(lengths):
            for path in paths:
                for logits, text in (
                    (wide, ids[row, :n]),
                    (deep, torch.cat([ids[row, : max(1, n - 1)], again[row]])),
                ):
                    whole = torch.cat([text, nodes[row, path]])[None]
                    own = target.model(input_ids=whole, use_cache=False).logits[0, len(text) :]
                    allowed = 1e-4 * float(own.abs().max())
                    assert (logits[row, path] - own).abs().max() < allowed, (name, row, path)


def test_b101_a_draft_of_a_shorter_context() -> None:
    """B101: nothing is drafted past its positions, and the reply goes on as the target's own."""
    target = new_target(tiny_llama(V, num_hidden_layers=3))
    gpt2 = new_target(GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=32))
    llama, head = copy_of(target, 0.02), head_of(target)
    llama.model.config.max_position_embeddings = 64
    head.config.max_position_embeddings = 48
    asked = [ask(words(n, n), seed=n) for n in (20, 31, 32, 33, 100)]
    drafts: list[tuple[Drafter, int]] = [(CausalDrafter(gpt2.model, None), 32), (llama, 64)]
    for drafter, most in (*drafts, (head, 48)):
        assert drafter.max_positions == most
        for how in WAYS if drafter is llama else WAYS[:1]:
            outputs = decode(target, asked, DecodeSettings(40, 5, **how), drafter)
            assert {len(o.ids) for o in outputs} == {40}
            check_greedy(target, asked, outputs)
            for request, output in zip(asked, outputs, strict=True):
                at = len(request.ids) + 1
                for drafted, count in output.rounds:
                    assert drafted <= max(0, most - at)
                    assert drafted > 0 or at >= most or at + 1 >= len(request.ids) + 40
                    at += count + 1
            assert any(d > 0 for d, _ in outputs[0].rounds)
            assert {d for d, _ in outputs[4].rounds} == {0}


# ---- ties


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("size", [61, 400])
def test_b107_exact_ties_go_to_the_lowest_id(size: int, few_rows: bool) -> None:
    """B107: every output row has a twin, so that each choice is a tie; on all paths alike."""
    target = new_target(tiny_llama(size, tie_word_embeddings=False))
    half = size // 2
    target.head.weight[half : 2 * half] = target.head.weight[:half]
    if few_rows:
        speed_up_few_rows(target.model)
    asked = [ask(words(n, n, size), seed=n) for n in (1, 9, 4)]
    plain = decode(target, asked, DecodeSettings(24, 0))
    assert all(i < half or i == 2 * half for o in plain for i in o.ids)
    for noise, gamma, how in ((0.0, 8, {}), (0.05, 1, {}), (0.05, 3, {}), (0.05, 4, WAYS[1])):
        settings = DecodeSettings(24, gamma, **how)
        outputs = decode(target, asked, settings, copy_of(target, noise))
        assert [o.ids for o in outputs] == [o.ids for o in plain]


@torch.inference_mode()
def test_b107_differences_in_bfloat16_are_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """B107: 30 prompts; what differs is classified by the margin there, and a real fault is not."""
    target = new_target(tiny_llama(400, num_hidden_layers=4), dtype=torch.bfloat16)
    draft = copy_of(target, 0.02)
    asked = [ask(words(3 + i % 7, i, 400), seed=i) for i in range(30)]
    plain = decode(target, asked, DecodeSettings(32, 0))
    references = {r.prompt_id: o.ids for r, o in zip(asked, plain, strict=True)}
    margins = {}
    largest = 0.0
    for request in asked:
        text = torch.tensor([[*request.ids, *references[request.prompt_id]]])
        logits = target.model(input_ids=text).logits[0, len(request.ids) - 1 : -1].float()
        top = logits.topk(2).values
        margins[request.prompt_id] = (top[:, 0] - top[:, 1]).tolist()
        largest = max(largest, float(logits.abs().max()))
    near = 8 * torch.finfo(torch.bfloat16).eps * largest

    def classified() -> dict[str, Any]:
        outputs = decode(target, asked, DecodeSettings(32, 5), draft)
        ours = {r.prompt_id: o.ids for r, o in zip(asked, outputs, strict=True)}
        return greedy_equality(ours, references, margins, near)

    found = classified()
    assert found["different"] == [] and found["prompts"] == 30
    assert len(found["near_ties"]) < 20, "most are equal"
    monkeypatch.setattr(verify, "greedy", believing)
    wrong = classified()
    assert wrong["verdict"] == "different" and wrong["different"]


def believing(draft: Tensor, target_argmax: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    return drafted, target_argmax.gather(1, drafted[:, None]).squeeze(1)


# ---- prompts


def test_b118_plain_and_speculative_runs_read_the_same_prompt(
    tiny_target: Target,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B118: chat markers, and raw text under a tokenizer that adds a start token by itself."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    target = replace(tiny_target, tokenizer=tokenizer, eos_ids=())
    path = tmp_path / "prompts.jsonl"
    texts = "Give me five tips.", "Maya has 24 stickers."
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    domains = [DomainSection(kind, str(path), kind=kind, holdout=1.0) for kind in ("chat", "raw")]
    recipe = Recipe("tiny", serving=ServingSection((LawSection(0.0),)), domains=tuple(domains))
    prepared = prepare_recipe(recipe, target, Console(quiet=True))
    asked = opening_requests(prepared, make_asks(recipe, prepared))
    assert len(asked) == 4
    prompts = [prepared.prompt(row) for row in range(4)]
    wanted = {p.id: render_prompt(tokenizer, p.messages, p.kind) for p in prompts}
    assert {r.prompt_id: list(r.ids) for r in asked} == wanted
    for p in prompts:
        assert (wanted[p.id][0] == 1) and wanted[p.id][:2] != [1, 1]

    read: list[list[int]] = []
    inner = target.forward
    monkeypatch.setattr(
        target, "forward", lambda ids, *rest: (read.append(ids[0].tolist()), inner(ids, *rest))[1]
    )
    for request in asked:
        firsts = []
        for run in (
            lambda r: answer(target, [r], GatherSettings(3, 1, (), keep="none")),
            lambda r: decode(target, [r], DecodeSettings(3, 0)),
            lambda r: decode(target, [r], DecodeSettings(3, 2), copy_of(target)),
        ):
            read.clear()
            (found,) = run(request)
            firsts.append(read[0])
            if len(firsts) == 1:
                assert request_of(found) == request  # type: ignore[arg-type]
        assert firsts == [wanted[request.prompt_id]] * 3
