"""Packed rows: conversations behind each other neither see nor predict one another (B071)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import cut
from families import FAMILIES, UNSUITED
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.data.records import Record, States, Top
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter, TrainBatch
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.distribution import DraftVocabularyP, reply_columns
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.lookup import LookupConfig, LookupDrafter
from draftsmith.drafters.packing import check_packing
from draftsmith.drafters.skip import SkipConfig, SkipDrafter
from draftsmith.train.losses import OBJECTIVES
from draftsmith.train.objective import bind_objective
from draftsmith.train.step import Scorer, scored_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
DOMAINS = ("a", "b")
IDS = torch.arange(0, 400, 3)
LENGTHS = ((9, 12), (4, 13), (1, 6))  # prompts and replies, longer than the tiny models' windows


def conversation(number: int, prompt: int, reply: int, taps: int = 0, domain: str = "a") -> Record:
    generator = torch.Generator().manual_seed(number)
    states = States(
        hidden=torch.randn(reply, 32, generator=generator),
        log_z=torch.randn(reply, generator=generator),
        taps=torch.randn(prompt + reply - 1, taps, generator=generator),
    )
    ids = torch.randint(3, 400, (prompt + reply,), generator=generator)
    return Record(f"p{number}", domain, "train", Law(), 0, "stop", ids, prompt, states)


@pytest.fixture(scope="module")
def three() -> list[Record]:
    """In the order in which they lie in one row."""
    return [conversation(n, *lengths, taps=96) for n, lengths in enumerate(LENGTHS)]


def one_row(records: list[Record]) -> TrainBatch:
    return collate(records, DOMAINS, packed=True, width=sum(len(r.ids) for r in records))


def changed(record: Record, at: int) -> Record:
    """The record with another token and other states of the target in one place."""
    assert record.states is not None
    ids, taps = record.ids.clone(), record.states.taps.clone()
    ids[at] = 3 + (ids[at] - 2) % 397
    taps[min(at, len(taps) - 1)] += 1.0
    return replace(record, ids=ids, states=replace(record.states, taps=taps))


# ---- where everything lies


@pytest.fixture(scope="module")
def mixed(records: list[Record]) -> list[Record]:
    return records[:12]


@pytest.mark.parametrize("width", [None, 40])
def test_everything_of_a_conversation_lies_in_its_place(
    mixed: list[Record], width: int | None
) -> None:
    batch = collate(mixed, DOMAINS, packed=True, width=width)
    by_key = {r.key: r for r in mixed}
    assert sorted(batch.keys) == sorted(by_key)
    longest = max(len(r.ids) for r in mixed)
    assert batch.packed and batch.ids.shape[1] <= (width or longest)
    taken = torch.zeros_like(batch.ids)
    for c, key in enumerate(batch.keys):
        record = by_key[key]
        row, begin = int(batch.row[c]), int(batch.begin[c])
        place = slice(begin, begin + len(record.ids))
        assert torch.equal(batch.ids[row, place], record.ids)
        assert batch.position[row, place].tolist() == list(range(len(record.ids)))
        assert (batch.conversation[row, place] == c).all()
        taken[row, place] += 1
        assert record.states is not None
        assert torch.equal(batch.taps[row, begin : place.stop - 1], record.states.taps.float())
        reply = slice(int(batch.first[c]), int(batch.first[c] + batch.reply_lens[c]))
        assert int(batch.reply_lens[c]) == len(record.reply)
        assert batch.hidden is not None and batch.log_z is not None
        assert torch.equal(batch.hidden[reply], record.states.hidden)
        assert torch.equal(batch.log_z[reply], record.states.log_z)
        assert {DOMAINS[d] for d in batch.domain[reply].tolist()} == {record.domain}
        assert torch.equal(reply_columns(batch, None, 400)[reply], record.reply)
    assert taken.max() == 1
    assert torch.equal(batch.conversation < 0, taken == 0)
    assert not batch.ids[taken == 0].any() and not batch.position[taken == 0].any()
    places = list(zip(batch.row.tolist(), batch.begin.tolist(), strict=True))
    assert places == sorted(places)
    assert batch.supervised == collate(mixed, DOMAINS).supervised


def test_packing_fills_rows_and_is_the_same_every_time(records: list[Record]) -> None:
    batch, padded = collate(records, DOMAINS, packed=True), collate(records, DOMAINS)
    again = collate(records, DOMAINS, packed=True)
    assert batch.keys == again.keys and torch.equal(batch.ids, again.ids)
    assert batch.ids.shape[1] == padded.ids.shape[1]
    held = [float((b.conversation >= 0).double().mean()) for b in (batch, padded)]
    assert held[0] > 0.85 > 0.7 > held[1]


def test_padded_rows_hold_one_conversation_from_their_start(mixed: list[Record]) -> None:
    batch = collate(mixed, DOMAINS)
    assert not batch.packed and batch.keys == tuple(r.key for r in mixed)
    assert batch.row.tolist() == list(range(len(mixed))) and not batch.begin.any()
    column = torch.arange(batch.ids.shape[1])
    inside = column < batch.lengths[:, None]
    assert torch.equal(batch.position, torch.where(inside, column, 0))
    own = torch.arange(len(mixed))[:, None]
    assert torch.equal(batch.conversation, torch.where(inside, own, -1))
    moved = batch.to(torch.device("meta"))  # what was derived is derived anew
    assert moved.keys == batch.keys and "position" not in vars(moved)
    assert moved.row.device.type == "meta"


# ---- what is seen


def causal(kind: str, attention: str) -> CausalDrafter:
    torch.manual_seed(3)
    config = FAMILIES[kind]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    return CausalDrafter(model, None).eval()


def eagle3(target: Target) -> Eagle3Drafter:
    torch.manual_seed(5)
    config = Eagle3Config(taps=(0, 1, 2), draft_vocab_size=len(IDS))
    return Eagle3Drafter.from_target(target, config, IDS).eval()


Found = tuple[dict[str, Tensor], dict[str, Tensor]]


def of_one(drafter: Any, batch: TrainBatch, key: str) -> Found:
    """States of the conversation's tokens by step, and gradients of what is made of them alone."""
    c = batch.keys.index(key)
    first, end = int(batch.first[c]), int(batch.first[c] + batch.reply_lens[c])
    states, loss = {}, torch.zeros(())
    for k, step in enumerate(drafter.unroll(batch, STEPS)):
        mine = (step.token >= first) & (step.token < end)
        assert (step.token[mine] - first).tolist() == list(range(1 + k, end - first))
        hidden = step.hidden[mine]
        states[f"step {k}"] = hidden.detach()
        loss = loss + hidden.log_softmax(-1)[:, ::3].sum()
    trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if trained else ()
    none = {n: torch.zeros_like(p) for n, p in trained.items()}
    return states, none | {n: g for n, g in zip(trained, grads, strict=True) if g is not None}


def assert_apart(drafter: Any, three: list[Record], gradients: bool = True) -> None:
    """No conversation of the row changes with another one, and all are as they are alone."""
    batch = one_row(three)
    assert batch.ids.shape[0] == 1 and batch.keys == tuple(r.key for r in three)
    for own, record in enumerate(three):
        states, grads = of_one(drafter, batch, record.key)
        alone, own_grads = of_one(drafter, collate([record], DOMAINS), record.key)
        for other, neighbour in enumerate(three):
            if other == own:
                continue
            for at in (0, neighbour.prompt_len - 1, len(neighbour.ids) - 2):
                rows = [changed(r, at) if n == other else r for n, r in enumerate(three)]
                found, changed_grads = of_one(drafter, one_row(rows), record.key)
                assert all(torch.equal(found[k], states[k]) for k in states)
                if gradients and at == 0:
                    assert all(torch.equal(changed_grads[n], grads[n]) for n in grads)
        for k, expected in alone.items():
            torch.testing.assert_close(states[k], expected, rtol=1e-5, atol=1e-5)
        largest = max((float(g.abs().max()) for g in own_grads.values()), default=0.0)
        for name, expected in own_grads.items():
            torch.testing.assert_close(grads[name], expected, rtol=1e-5, atol=2e-6 * largest)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *(
            (k, a)
            for k in ("llama", "mistral", "gemma3", "gpt2", "qwen3")
            for a in ("sdpa", "eager")
        ),
        ("gemma2", "eager"),  # has no other
        ("opt", "sdpa"),
    ],
)
def test_a_draft_lm_keeps_conversations_apart(
    kind: str, attention: str, three: list[Record]
) -> None:
    assert_apart(causal(kind, attention), three)


@pytest.mark.parametrize(
    "kind", ["qwen2-window", "gpt_neox", "phi", "olmo2", "mixtral", "deepseek_v3", "gpt_oss"]
)
def test_other_families_keep_conversations_apart(kind: str, three: list[Record]) -> None:
    attention = "eager" if kind == "gpt_oss" else "sdpa"
    drafter = causal(kind, attention)
    assert_apart(drafter, three, gradients=False)


def test_an_eagle_head_keeps_conversations_apart(tiny_target: Target, three: list[Record]) -> None:
    assert_apart(eagle3(tiny_target), three)


def test_the_shortened_target_keeps_conversations_apart(
    any_target: Target, three: list[Record]
) -> None:
    drafter = SkipDrafter.from_target(any_target, SkipConfig(layers=(0, 1, 3)))
    with torch.no_grad():
        assert_apart(drafter, three)


def test_lookup_keeps_conversations_apart(tiny_target: Target) -> None:
    """The second would find all its words in the first."""
    drafter = LookupDrafter.from_target(tiny_target, LookupConfig())
    text = [7, 8, 9, 7, 8, 11, 7, 8, 9, 7, 8, 12]
    first = replace(conversation(0, 5, 7), ids=torch.tensor(text))
    second = replace(conversation(1, 2, 7), ids=torch.tensor(text[3:]))
    rows = [first, second]
    (packed,) = drafter.unroll(one_row(rows), 1)
    (padded,) = drafter.unroll(collate(rows, DOMAINS), 1)
    assert torch.equal(packed.token, padded.token) and torch.equal(packed.hidden, padded.hidden)
    assert (packed.hidden >= 0).any() and (packed.hidden < 0).any()


@pytest.mark.parametrize("family", ["eagle3", "causal", "lookup", "skip"])
def test_no_label_is_a_conversations_first_token(
    family: str, tiny_target: Target, mixed: list[Record]
) -> None:
    """Labels are reply tokens behind the first, of prompts of any length (of one token, too)."""
    short = conversation(50, 1, 9, taps=96)
    rows = [*mixed, short, conversation(51, 1, 1, taps=96)]
    drafter = drafters(tiny_target)[family]()
    packed, padded = collate(rows, DOMAINS, packed=True), collate(rows, DOMAINS)
    by_key = {r.key: r for r in rows}
    whose = torch.arange(len(rows)).repeat_interleave(packed.reply_lens)  # [R]
    for k, (step, other) in enumerate(
        zip(drafter.unroll(packed, STEPS), drafter.unroll(padded, STEPS), strict=True)
    ):
        labels = [
            (packed.keys[c], int(token) - int(packed.first[c]))
            for token, c in zip(step.token, whose[step.token].tolist(), strict=True)
        ]
        assert step.token.tolist() == sorted(step.token.tolist())
        assert len(labels) == len(other.token) == int(scored_tokens(packed, STEPS)[k])
        assert labels == [
            (key, r) for key in packed.keys for r in range(1 + k, len(by_key[key].reply))
        ]
        said = reply_columns(packed, None, 400)[step.token].tolist()
        assert said == [int(by_key[key].reply[r]) for key, r in labels]


# ---- what is trained


def drafters(target: Target) -> dict[str, Callable[[], Drafter]]:
    return {
        "eagle3": lambda: eagle3(target),
        "causal": lambda: CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None),
        "lookup": lambda: LookupDrafter.from_target(target, LookupConfig()),
        "skip": lambda: SkipDrafter.from_target(target, SkipConfig(layers=(0, 3))),
    }


@pytest.mark.parametrize("family", ["eagle3", "causal"])
@pytest.mark.parametrize(
    "options",
    [
        *({"loss": name} for name in sorted(OBJECTIVES)),
        {"position_weights": "product"},
        {"then": "rounds"},
        {"then": "accepted_length"},
    ],
    ids=str,
)
def test_a_packed_batch_has_the_padded_ones_loss_and_gradient(
    options: dict[str, Any], family: str, tiny_target: Target, records: list[Record]
) -> None:
    rows = [cut(r, n) for r, n in zip(records[3:14], (1, 2, 3, *[14] * 8), strict=True)]
    section = ObjectiveSection(**options)
    bound = bind_objective(section, ServingSection((LawSection(1.0),), num_draft_tokens=STEPS))
    drafter: Any = drafters(tiny_target)[family]()
    scorer = Scorer(
        drafter, section, bound, DraftVocabularyP(tiny_target, drafter.draft_ids, bound.law)
    )
    losses, gradients = [], []
    for packed in (False, True):
        batch = collate(rows, DOMAINS, packed)
        assert batch.packed is packed
        scorer.zero_grad()
        totals = scored_tokens(batch, STEPS).float()
        loss = scorer(batch, STEPS, totals, second="then" in options).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.trainable()]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    scale = float(gradients[0].abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6 * max(1.0, scale))


# ---- what cannot


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_bodies_that_keep_conversations_apart_pass_the_check(
    kind: str, three: list[Record]
) -> None:
    drafter = causal(kind, "sdpa").train()
    check_packing(drafter, three, DOMAINS)
    assert drafter.training


def test_an_eagle_head_passes_the_check(tiny_target: Target, mixed: list[Record]) -> None:
    check_packing(drafters(tiny_target)["eagle3"](), mixed, DOMAINS)


@pytest.mark.parametrize(
    ("kind", "ignored"), [("llama", "attention_mask"), ("gpt2", "position_ids")]
)
def test_a_body_that_ignores_what_it_is_told_is_refused(
    kind: str, ignored: str, three: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = causal(kind, "sdpa")
    read = drafter.body.forward

    def deaf(**given: Any) -> Any:
        n = given["input_ids"].shape[1]
        plain = {"attention_mask": torch.ones(1, n), "position_ids": torch.arange(n)[None]}
        packed = given["attention_mask"].dim() == 4
        return read(**{**given, ignored: plain[ignored] if packed else given[ignored]})

    monkeypatch.setattr(drafter.body, "forward", deaf)
    said = f"'causal'.*'{kind}'.*see each other.*train.packing false"
    with pytest.raises(UserError, match=said):
        check_packing(drafter, three, DOMAINS)


def test_a_body_that_cannot_take_the_mask_is_refused(three: list[Record]) -> None:
    drafter = CausalDrafter(AutoModelForCausalLM.from_config(UNSUITED["bloom"]()), None)
    with pytest.raises(UserError, match=r"'bloom'.*train.packing false"):
        check_packing(drafter, three, DOMAINS)


def test_records_that_say_too_little_are_not_tried(
    three: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-token replies have nothing to score, and a single record has no neighbour."""

    def raising(batch: TrainBatch, steps: int) -> None:
        raise RuntimeError("was tried")

    drafter = causal("llama", "sdpa")
    monkeypatch.setattr(drafter, "unroll", raising)
    short = [conversation(10 + n, 2 + n, 1 + n % 2, taps=96) for n in range(4)]
    for few in ([], short, [*short, three[0]]):
        check_packing(drafter, few, DOMAINS)
    with pytest.raises(UserError, match="was tried"):
        check_packing(drafter, [*short, *three[:2]], DOMAINS)


def test_records_of_one_law_are_tried(three: list[Record]) -> None:
    """What was kept of the target's distributions may fit no common batch."""
    drafter = causal("llama", "sdpa")
    tops = []
    for record, temperature in zip([*three, *three], (0.5, 1.0) * 3, strict=True):
        n, law = len(record.reply), Law(temperature)
        top = Top(torch.zeros(n, 4, dtype=torch.int32), torch.zeros(n, 4), temperature)
        tops.append(replace(record, law=law, states=None, top=top))
    with pytest.raises(UserError):
        collate(tops, DOMAINS)
    check_packing(drafter, tops, DOMAINS)
