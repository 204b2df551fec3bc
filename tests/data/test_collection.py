"""Collecting: which conversations are asked, and what is kept of them."""

import pytest
import torch
from collecting import World, chat, rows
from stored import is_finished

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection
from draftsmith.data.account import bytes_per_token, in_words
from draftsmith.data.chat import render_prompt
from draftsmith.data.collection import collect
from draftsmith.data.plan import make_asks
from draftsmith.data.records import Record, held_out
from draftsmith.data.warp import Law

# ---- what is asked


def test_training_prompts_at_all_temperatures_held_out_ones_under_served_laws(
    world: World,
) -> None:
    laws = (LawSection(0.0, top_k=7), LawSection(0.0), LawSection(0.8, top_p=0.9))
    work = world.work(rows(12), laws=laws, temperatures=(0.0, 1.0, 1.0))
    asks = make_asks(work.recipe, work.prepared)
    # A law that truncates is answered in training too: objectives on length need its samples.
    labels = {"train": {"T=0", "T=1", "T=0.8 top_p=0.9"}, "heldout": {"T=0", "T=0.8 top_p=0.9"}}
    splits = dict(zip(work.prepared.rows["id"], work.prepared.rows["split"], strict=True))
    assert set(splits.values()) == {"train", "heldout"}
    for prompt_id, split in splits.items():
        assert {a.law.label for a in asks if a.prompt_id == prompt_id} == labels[split]
    assert len({a.seed for a in asks}) == len({a.key for a in asks}) == len(asks)
    assert [a.tokens for a in asks] == sorted(a.tokens for a in asks)


def test_a_reply_given_is_asked_once(world: World) -> None:
    content = [{"prompt": f"p{n}", "response": f"reply number {n}"} for n in range(8)]
    work = world.work(content, replies="given")
    by_split = {"train": 1, "heldout": 1}  # one served law
    assert len(make_asks(work.recipe, work.prepared)) == 8
    store = collect(work)
    for record in store.records():
        assert record.origin == ("given" if record.split == "train" else "target")
        assert record.states is not None and record.states.taps.shape[0] == len(record.ids) - 1
        if record.origin == "given":
            text = world.target.tokenizer.decode(record.reply[:-1].tolist())
            assert text.startswith("reply number ")
            assert int(record.reply[-1]) in world.target.eos_ids and record.finish == "stop"
            assert not record.drawn_from(record.law)
    assert by_split.keys() == {r.split for r in store.records()}


def test_nothing_to_collect(world: World) -> None:
    """Prompts without room for a reply are rejected, and named, before anything is asked."""
    with pytest.raises(UserError, match=r"no usable prompt.*prompts.jsonl:1: too long"):
        world.collect([{"prompt": "Maya has stickers. " * 120}])


# ---- what is kept


def test_everything_asked_is_kept(world: World) -> None:
    work = world.work(rows(12))
    store = collect(work)
    records = list(store.records())
    asks = make_asks(work.recipe, work.prepared)
    assert {r.key for r in records} == {a.key for a in asks}
    for record in records:
        (ask,) = (a for a in asks if a.key == record.key)
        assert tuple(record.ids[: record.prompt_len].tolist()) == work.prepared.ids(ask.row)
        assert (record.split, record.domain) == (ask.split, "math")
    assert store.complete and is_finished(work.folder)
    assert len(list(work.folder.glob("shard-*"))) == -(-len(asks) // 3)
    cells = {(c["split"], c["law"]): c for c in store.summary()["cells"]}
    for (split, law), c in cells.items():
        own = [r for r in records if r.split == split and r.law.label == law]
        assert c["records"] == len(own) == c["stopped"] + c["cut_by_length"] - c["dropped"]
        assert c["tokens"] == sum(len(r.reply) for r in own)
    assert {r.split for r in held_out(records, Law(1.0), "math")} == {"heldout"}
    assert held_out(records, Law(0.0), "math") == []
    assert store.summary()["prompts"]["rows"] == 12


def test_no_states_where_none_are_wanted(world: World) -> None:
    kept = {r.key: r.ids.tolist() for r in world.collect(rows(6), "a").records()}
    bare = list(world.collect(rows(6), "b", distributions="none").records())
    assert all(r.states is None and r.top is None for r in bare)
    assert {r.key: r.ids.tolist() for r in bare} == kept


def test_top_probabilities_instead_of_states(world: World) -> None:
    kept = {r.key: r for r in world.collect(rows(6), "a").records()}
    for record in world.collect(rows(6), "b", distributions="top", top=5).records():
        states = kept[record.key].states
        assert record.states is None and record.top is not None and states is not None
        best = world.target.logits(states.hidden).log_softmax(-1).topk(5)
        assert torch.equal(record.top.ids.long(), best.indices)
        assert torch.allclose(record.top.log_probs, best.values, atol=1e-5)


def test_what_is_stored_of_a_token_is_told_before(world: World) -> None:
    for kind in ("hidden", "top", "none"):
        work = world.work(rows(6), kind, distributions=kind, store_dtype="float16")
        of_prompt, of_reply = bytes_per_token(work)
        store = collect(work)
        tensors = sum(
            sum(t.nbytes for t in _tensors(r)) for r in store.records()
        )  # what is on disk, less the headers
        prompts = sum(r.prompt_len for r in store.records())
        replies = sum(len(r.reply) for r in store.records())
        last = len(list(store.records()))  # the last token of each was never fed to the target
        taps = of_prompt - 8
        assert tensors == prompts * of_prompt + replies * of_reply - last * taps


def _tensors(record: Record) -> list[torch.Tensor]:
    states, top = record.states, record.top
    return [
        record.ids,
        *([states.hidden, states.log_z, states.taps] if states else []),
        *([top.ids, top.log_probs] if top else []),
    ]


# ---- replies cut by length (B031)


def test_b031_cut_replies_are_told_apart_and_left_out_of_training_where_asked(
    world: World,
) -> None:
    kept = world.collect(rows(12), "keep")
    cut = [r for r in kept.records() if r.finish == "length"]
    assert cut and all(int(r.reply[-1]) not in world.target.eos_ids for r in cut)
    assert sum(c["cut_by_length"] for c in kept.summary()["cells"]) == len(cut)
    dropped = world.collect(rows(12), "drop", cut="drop")
    left = {r.key for r in kept.records()} - {r.key for r in dropped.records()}
    assert left == {r.key for r in cut if r.split == "train"}
    cells = dropped.summary()["cells"]
    assert sum(c["cut_by_length"] for c in cells) == len(cut), "dropped ones are counted, too"
    assert sum(c["dropped"] for c in cells) == len(left)
    assert f"{len(cut)} were cut by length, {len(left)} dropped" in in_words(dropped.summary())


# ---- conversations of several turns


def test_the_targets_own_replies_become_the_next_prompts(world: World) -> None:
    talk = chat("Give me five simple tips.", "Now three.", "And the best of them?")
    records = list(world.collect([talk], temperatures=(0.0,), holdout=0.0).records())
    records.sort(key=lambda r: r.turn)
    assert [r.turn for r in records] == [0, 1, 2]
    assert len({r.prompt_id for r in records}) == 1 and len({r.key for r in records}) == 3
    messages: list[dict[str, str]] = []
    for question, record in zip(talk["turns"], records, strict=True):
        messages.append({"role": "user", "content": question})
        expected = render_prompt(world.target.tokenizer, messages)
        assert record.ids[: record.prompt_len].tolist() == expected
        said = world.target.tokenizer.decode(record.reply.tolist(), skip_special_tokens=True)
        if record.finish == "length":  # which may be within a character
            said = said.rstrip("\ufffd")
        messages.append({"role": "assistant", "content": said})


def test_with_turns_last_only_the_last_reply_is_made(world: World) -> None:
    talk = {
        "messages": [
            {"role": "user", "content": "Give me five simple tips."},
            {"role": "assistant", "content": "Sleep."},
            {"role": "user", "content": "Now three."},
        ]
    }
    (record,) = world.collect([talk], temperatures=(0.0,), holdout=0.0, turns="last").records()
    assert record.turn == 0
    expected = render_prompt(world.target.tokenizer, talk["messages"])
    assert record.ids[: record.prompt_len].tolist() == expected


def test_a_conversation_ends_where_the_next_prompt_does_not_fit(world: World) -> None:
    talk = chat("Give me five simple tips.", "Maya has stickers. " * 3, "Now three.")
    store = world.collect([talk], temperatures=(0.0,), holdout=0.0, max_length=60)
    assert [r.turn for r in store.records()] == [0]
